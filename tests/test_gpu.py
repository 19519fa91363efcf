"""Tests that need a GPU. Nearly all of them need only one."""

import os
import socket
import subprocess
import sys

import pytest

IMPORTS = "from multigpu_ft import *\n"
pytestmark = pytest.mark.gpu


def test_launch_after_cuda_was_initialised_in_the_kernel(kernel, run_root):
    k = kernel()
    k.run(
        "import torch; torch.ones(8, device='cuda').sum().item(); assert torch.cuda.is_initialized()"
    )
    for _ in range(2):
        assert "done" in k.run(
            IMPORTS
            + f"print(launch(RunConfig(run_root={str(run_root)!r}, end_idx=64, resume_file='none')).state)"
        )


def test_launch_leaves_cuda_alone(kernel, run_root):
    k = kernel()
    k.run(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}, end_idx=64))")
    assert k.run("import sys; print('torch' in sys.modules)").strip() == "False"
    assert k.run("print(run.status['device'])").strip() == "cuda"


@pytest.mark.parametrize(
    "strategy", ["single", "ddp", "fsdp", "accelerate", "zero1", "zero2", "zero3"]
)
@pytest.mark.parametrize("dtype", ["auto", "fp16", "bf16", "fp32"])
def test_trains_saves_and_resumes(run_root, strategy, dtype):
    import torch

    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")

    from multigpu_ft import RunConfig, launch

    cfg = RunConfig(
        run_root=str(run_root),
        strategy=strategy,
        nproc=1,
        dtype=dtype,
        packing="padded",
        batch_size=8,
        end_idx=160,
    )
    first = launch(cfg.replace(max_steps=10))
    second = launch(cfg)
    if dtype == "auto":
        assert first.status["dtype"] == (
            "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
        )
    assert (
        second.metrics[0]["step"] == 11
        and second.metrics[-1]["loss"] < first.metrics[0]["loss"] - 0.5
    )
    # a save is always in progress
    whole = launch(cfg.replace(resume_file="none", save_every=1))
    assert all(
        abs(a["loss"] - b["loss"]) < 1e-3 * b["loss"]
        for a, b in zip(first.metrics + second.metrics, whole.metrics, strict=True)
    )


@pytest.mark.parametrize("packing", ["packed", "bucketed"])
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_a_step_never_waits_for_the_gpu(tmp_path, packing, strategy, dtype):
    """A process of its own lets CUDA raise where the host would wait for it.

    `padded` waits, since transformers reads its mask. So does `bucketed` for models that read
    packing from their position ids (Llama, Qwen3)."""
    code = f"""
import torch
from multigpu_ft import RunConfig
from multigpu_ft.data.batches import Order, epoch_steps
from multigpu_ft.training.setup import make_strategy
from multigpu_ft.data.examples import load_texts
from multigpu_ft.models.loss import LossModel
from multigpu_ft.models.loading import load_model, load_tokenizer
from multigpu_ft.training.step import make_optimizer
from multigpu_ft.distributed.world import join_world
from multigpu_ft.data.tokenization import tokenize_texts
from multigpu_ft.tracking.metrics import Stopwatch
from multigpu_ft.training.step import train_step

cfg = RunConfig(strategy={strategy!r}, dtype={dtype!r}, end_idx=400, batch_size=2, accum_steps=2)
world, tokenizer = join_world(cfg), load_tokenizer(cfg)
texts = tokenize_texts(load_texts(cfg).texts, tokenizer, cfg.max_length)
strategy, _ = make_strategy(cfg, world, 0)
strategy.prepare(LossModel(load_model(cfg, tokenizer)), lambda model: make_optimizer(cfg, model))
watch, steps = Stopwatch(world.device), epoch_steps(texts, Order.of(cfg, {packing!r}, len(texts), 1), cfg, 1, 0, 0, 1)
for number in range(5):
    torch.cuda.set_sync_debug_mode("error" if number > 1 else "default")  # the first steps set up streams and states
    loss, norm = train_step(strategy, next(steps), 1e-3, 1.0, watch)
torch.cuda.set_sync_debug_mode("default")
assert norm.isfinite() and watch.read()["forward_backward"] > 0
"""
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=env,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adamw_8bit"},
        {"compile": True},
        {"activation_checkpointing": 2},
        {"activation_checkpointing": "auto"},
    ],
)
def test_settings_that_save_memory_or_time_still_learn(run_root, settings):
    from multigpu_ft import RunConfig, launch

    run = launch(
        RunConfig(
            run_root=str(run_root),
            nproc=1,
            strategy="single",
            packing="padded",
            batch_size=8,
            end_idx=160,
            **settings,
        )
    )
    assert (
        run.metrics[-1]["loss"] < run.metrics[0]["loss"] - 0.5
        and run.metrics[-1]["peak_memory_gib"][0] < 16
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "communication": "micro_batch"},
    ],
)
def test_two_gpus_have_the_curve_of_one(run_root, dtype, settings):
    import torch

    from multigpu_ft import RunConfig, launch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs a CUDA GPU more")
    cfg = RunConfig(
        run_root=str(run_root),
        dtype=dtype,
        packing="packed",
        max_steps=20,
        resume_file="none",
        batch_size=2,
        accum_steps=2,
    )
    two, one = (
        launch(cfg.replace(nproc=2, **settings)),
        launch(cfg.replace(nproc=1, strategy="single", accum_steps=4)),
    )
    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    assert all(
        abs(a["loss"] - b["loss"]) < tolerance * b["loss"]
        for a, b in zip(two.metrics, one.metrics, strict=True)
    )


def test_answers_of_cuda_graphs_match_transformers(tmp_path):
    import json

    import torch

    from multigpu_ft import RunConfig, generate
    from multigpu_ft.models.loading import load_model, load_tokenizer

    questions = tmp_path / "q.jsonl"
    questions.write_text(
        "".join(json.dumps({"question": "why " * (1 + i % 40)}) + "\n" for i in range(60))
    )
    asked = {
        "model": "builtin:opt-tiny",
        "dataset": questions,
        "nproc": 1,
        "batch_size": 16,
        "max_new_tokens": 90,
    }
    answers = generate(**asked, output=tmp_path / "a.jsonl", temperature=0, dtype="fp32")
    assert "CUDA graphs are not used" not in answers.run.logs(0)
    cfg = RunConfig(task="chat")
    tokenizer, model = load_tokenizer(cfg), load_model(cfg, load_tokenizer(cfg)).eval().cuda()
    same = 0
    for record in answers:
        text = tokenizer.apply_chat_template(
            record["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device="cuda")
        made = model.generate(
            ids,
            max_new_tokens=90,
            do_sample=False,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
        )[0, ids.shape[1] :]
        same += (
            record["messages"][-1]["content"]
            == tokenizer.decode(made, skip_special_tokens=True).strip()
        )
    assert same >= 57  # rounding may decide between two tokens that are alike
    halves = [
        generate(**asked, output=tmp_path / f"{dtype}.jsonl", dtype=dtype)
        for dtype in ("fp16", "auto")
    ]
    assert all(len(found) == 60 for found in halves)

"""Tests that need a GPU: `pytest -m gpu`. Nearly all of them need only one.

Their settings are made by functions without a GPU, so that `tests/test_bench.py` can make them all on
a CPU, too, and finds names that have vanished."""

import json

import pytest
from harness import waits
from harness.runs import processes, ranks, running

IMPORTS = "from multigpu_ft import *\n"
STRATEGIES = ("single", "ddp", "fsdp", "accelerate", "zero1", "zero2", "zero3")
DTYPES = ("auto", "fp16", "bf16", "fp32")
WAYS = [(strategy, dtype) for dtype in DTYPES for strategy in STRATEGIES]
STEPS = [
    (strategy, dtype, packing)
    for strategy in ("single", "ddp", "fsdp")
    for dtype in ("fp32", "fp16", "bf16")
    for packing in ("packed", "bucketed")
]
SAVING = [
    {"optimizer": "adamw_8bit"},
    {"compile": True},
    {"activation_checkpointing": 2},
    {"activation_checkpointing": "auto"},
]
SHARED = [
    {"strategy": "ddp"},
    {"strategy": "fsdp"},
    {"strategy": "fsdp", "communication": "micro_batch"},
]
pytestmark = pytest.mark.gpu


def of_a_way(root, strategy, dtype):
    from multigpu_ft import RunConfig

    return RunConfig(
        run_root=str(root),
        strategy=strategy,
        nproc=1,
        dtype=dtype,
        packing="padded",
        batch_size=8,
        end_idx=160,
    )


def of_a_step(strategy, dtype, packing):
    "Return settings, without the folders."
    return {
        "strategy": strategy,
        "dtype": dtype,
        "packing": packing,
        "end_idx": 400,
        "batch_size": 2,
        "accum_steps": 2,
    }


def that_saves(root, settings):
    return of_a_way(root, "single", "auto").replace(**settings)


def on_several(root, dtype, **settings):
    from multigpu_ft import RunConfig

    return RunConfig(
        run_root=str(root),
        dtype=dtype,
        packing="packed",
        max_steps=20,
        resume_file="none",
        batch_size=2,
        **settings,
    )


def too_large(root):
    "Return a run whose activations need gigabytes: 131,072 tokens a step, none recomputed."
    from multigpu_ft import RunConfig

    return RunConfig(
        run_root=str(root),
        strategy="single",
        nproc=1,
        dtype="fp32",
        packing="packed",
        batch_size=256,
        end_idx=4000,
        max_steps=2,
        activation_checkpointing="none",
    )


def stopping(root):
    from multigpu_ft import RunConfig

    return RunConfig(
        run_root=str(root), strategy="ddp", nproc=2, num_epochs=200, timeout_s=20, max_restarts=0
    )


def every_config(root):
    "Yield each `RunConfig` that a test here launches."
    from multigpu_ft import RunConfig

    yield from (of_a_way(root, *way) for way in WAYS)
    yield from (that_saves(root, settings) for settings in SAVING)
    yield from (RunConfig(run_root=str(root), **of_a_step(*step)) for step in STEPS)
    for settings in SHARED:
        yield on_several(root, "fp32", accum_steps=2, nproc=2, **settings)
    yield on_several(root, "fp32", accum_steps=4, nproc=1, strategy="single")
    yield too_large(root)
    yield stopping(root)


def need_gpus(number):
    import torch

    if torch.cuda.device_count() < number:
        pytest.skip(f"needs a CUDA GPU more: {number}")


# -- one GPU ----------------------------------------------------------------------------------------


def test_launch_leaves_cuda_alone(kernel, run_root):
    k = kernel()
    k.run(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}, end_idx=64))")
    assert k.run("import sys; print('torch' in sys.modules)").strip() == "False"
    assert k.run("print(run.status['device'])").strip() == "cuda"


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


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    "Return a folder for the runs of several tests, which must leave no process behind."
    root = tmp_path_factory.mktemp("gpu")
    yield root
    assert not processes(root)


@pytest.fixture(scope="module", params=WAYS, ids="-".join)
def way(request, roots):
    "Return the settings of a run; the tests that get the same ones follow each other, and share runs."
    strategy, dtype = request.param
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    if strategy == "accelerate":
        pytest.importorskip("accelerate")
    return of_a_way(roots / f"{strategy}-{dtype}", strategy, dtype)


@pytest.fixture(scope="module")
def first_half(way):
    from multigpu_ft import launch

    return launch(way.replace(max_steps=10))


@pytest.fixture(scope="module")
def both_halves(way, first_half):
    "Return the metrics of the first half, and the run that resumed it."
    from multigpu_ft import launch

    metrics = list(first_half.metrics)[:10]
    return metrics, launch(way)


@pytest.fixture(scope="module")
def whole(way):
    "Return a run that was never interrupted, and always has a save in progress."
    from multigpu_ft import launch

    root = f"{way.run_root}-whole"
    return launch(way.replace(run_root=root, resume_file="none", save_every=1))


def test_a_run_trains_on_the_gpu(way, first_half):
    assert first_half.state == "done" and len(first_half.metrics) == 10
    assert first_half.status["device"] == "cuda"


def test_the_dtype_is_what_was_asked_for(way, first_half):
    import torch

    half = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    asked = {"auto": half, "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
    assert first_half.status["dtype"] == asked[way.dtype]


def test_a_resumed_run_learns(both_halves):
    first, second = both_halves
    assert second.state == "done"
    resumed = [m for m in second.metrics if m["step"] > 10]
    assert resumed[0]["step"] == 11
    assert resumed[-1]["loss"] < first[0]["loss"] - 0.5


def test_an_uninterrupted_run_that_always_saves(whole):
    assert whole.state == "done" and whole.metrics[0]["step"] == 1


def test_resumed_and_uninterrupted_have_the_same_losses(both_halves, whole):
    first, second = both_halves
    resumed = [m for m in second.metrics if m["step"] > 10]
    assert all(
        abs(a["loss"] - b["loss"]) < 1e-3 * b["loss"]
        for a, b in zip([*first, *resumed], whole.metrics, strict=True)
    )


@pytest.mark.parametrize(("strategy", "dtype", "packing"), STEPS)
def test_a_step_never_waits_for_the_gpu(strategy, dtype, packing):
    """`padded` waits, since transformers reads its mask. So does `bucketed` for models that read
    packing from their position ids (Llama, Qwen3)."""
    from multigpu_ft import launch

    found = launch(waits.count, of_a_step(strategy, dtype, packing), nproc=1)
    assert found["device"] == "cuda" and found["packing"] == packing
    assert found["waits"] == 0, found["at"]
    assert found["finite"] and found["phases"]["forward_backward"] > 0


@pytest.mark.parametrize("settings", SAVING, ids=str)
def test_settings_that_save_memory_or_time_still_learn(run_root, settings):
    from multigpu_ft import launch

    run = launch(that_saves(run_root, settings))
    assert (
        run.metrics[-1]["loss"] < run.metrics[0]["loss"] - 0.5
        and run.metrics[-1]["peak_memory_gib"][0] < 16
    )


def test_out_of_memory_halves_the_micro_batch(run_root):
    "This process holds all of the GPU except 1.5 GiB, of which CUDA's context takes a part."
    import torch

    from multigpu_ft import launch

    torch.cuda.init()
    held = torch.empty(torch.cuda.mem_get_info()[0] - 3 * 2**29, dtype=torch.uint8, device="cuda")
    cfg = too_large(run_root)
    try:
        run = launch(cfg, force=True)
    finally:
        del held
        torch.cuda.empty_cache()
    found = run.dir.config()
    assert run.state == "done" and found.batch_size < cfg.batch_size
    assert found.batch_size * found.accum_steps == cfg.batch_size
    assert any("ran out of memory" in remark for remark in run.status["remarks"])


def ask(folder, **settings):
    "Have the tiny model answer 60 questions of many lengths."
    from multigpu_ft import generate

    questions = folder / "q.jsonl"
    questions.write_text(
        "".join(json.dumps({"question": "why " * (1 + i % 40)}) + "\n" for i in range(60))
    )
    return generate(
        model="builtin:opt-tiny",
        dataset=str(questions),
        nproc=1,
        batch_size=16,
        max_new_tokens=90,
        **settings,
    )


def answered_alone(records, device):
    "Return how many of the greedy answers in `records` transformers gives as well, one question at a time."
    import torch

    from multigpu_ft import RunConfig
    from multigpu_ft.models.loading import load_model, load_tokenizer

    cfg = RunConfig(task="chat")
    tokenizer = load_tokenizer(cfg)
    model, same = load_model(cfg, tokenizer).eval().to(device), 0
    for record in records:
        text = tokenizer.apply_chat_template(
            record["messages"][:1], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]], device=device)
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
    return same


def test_answers_of_cuda_graphs_match_transformers(tmp_path):
    answers = ask(tmp_path, output=tmp_path / "a.jsonl", temperature=0, dtype="fp32")
    assert "CUDA graphs are not used" not in answers.run.logs(0)
    # rounding may decide between two tokens that are alike
    assert len(answers) == 60 and answered_alone(answers, "cuda") >= 57


@pytest.mark.parametrize("dtype", ["fp16", "auto"])
def test_half_precision_answers_every_question(tmp_path, dtype):
    assert len(ask(tmp_path, output=tmp_path / "a.jsonl", dtype=dtype)) == 60


# -- two GPUs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("settings", SHARED, ids=str)
def test_two_gpus_have_the_curve_of_one(run_root, dtype, settings):
    from multigpu_ft import launch

    need_gpus(2)
    two = launch(on_several(run_root, dtype, accum_steps=2, nproc=2, **settings))
    one = launch(on_several(run_root, dtype, accum_steps=4, nproc=1, strategy="single"))
    tolerance = 1e-4 if dtype == "fp32" else 2e-2
    assert all(
        abs(a["loss"] - b["loss"]) < tolerance * b["loss"]
        for a, b in zip(two.metrics, one.metrics, strict=True)
    )


def test_a_rank_that_hangs_is_found_before_nccl_gives_up(run_root):
    "A collective of NCCL waits in a kernel, which no error ends: the watchdog has to."
    import os
    import signal

    from multigpu_ft import RunFailed, launch

    need_gpus(2)
    run = launch(stopping(run_root), wait=False)
    os.kill(ranks(running(run_root))[1], signal.SIGSTOP)
    with pytest.raises(RunFailed, match="rank 1 hangs"):
        run.wait()

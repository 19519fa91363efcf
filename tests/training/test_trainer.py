"""Two real ranks: the strategies give one loss curve, a run goes on where another stopped, and
the export is the trained model."""

import json
import os
import subprocess
import sys

import pytest
from harness.runs import slow

from multigpu_ft import Run, RunConfig, launch

STEPS = 20


def assert_same_curve(metrics, reference):
    """Losses within 1e-5; OPT's gradient jumps where rounding moves an activation across the
    kink of its ReLU (test_exactness.py has smooth ones)."""
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 5e-4)):
        worst = max(
            abs(a[name] - b[name]) / b[name] for a, b in zip(metrics, reference, strict=True)
        )
        assert worst < tolerance, (name, worst)


@pytest.fixture(scope="module")
def single(train, tmp_path_factory):
    "20 steps of 16 rows on one process: what every other way to share the work is compared with."
    root = tmp_path_factory.mktemp("single")
    return train(
        RunConfig(
            run_root=str(root),
            strategy="single",
            batch_size=16,
            packing="padded",
            max_length=128,
            end_idx=16 * STEPS,
            lr_scheduler="cosine",
            warmup_steps=3,
        )
    )


def test_a_line_waits_for_the_next_step_and_nothing_else_for_a_line(run_root, monkeypatch):
    """While a step is prepared, the line of the one before is not written yet, so a GPU has work.

    Saves, evaluations and histograms find all lines up to their step."""
    import torch.distributed as dist

    from multigpu_ft.checkpoints.writer import CheckpointWriter
    from multigpu_ft.run.run_dir import RunDir
    from multigpu_ft.tracking.trackers import Trackers
    from multigpu_ft.training import trainer
    from multigpu_ft.training.validation import Evaluations

    class NeverStop:
        requested = False

    found = {}

    def note(owner, name):
        called = getattr(owner, name)

        def noting(*arguments, **named):
            found.setdefault(name, []).append(len(run_dir.metrics()))
            return called(*arguments, **named)

        monkeypatch.setattr(owner, name, noting)

    note(trainer, "train_step")
    note(CheckpointWriter, "start")
    note(Evaluations, "judge")
    note(Trackers, "log_histograms")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    cfg = RunConfig(
        **{"run_root": str(run_root), "strategy": "single", "packing": "padded"},
        **{"batch_size": 8, "end_idx": 72, "eval_start_idx": 100, "eval_end_idx": 108},
        **{"save_every": 3, "eval_every": 5, "histogram_every": 8, "tracker": "tensorboard"},
    )
    run_dir = RunDir.create(cfg)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        training = trainer.open_training(run_dir, NeverStop())
        trainer.finish(training, trainer.train(training))
    finally:
        dist.destroy_process_group()
    assert found == {
        # the lines of steps 3 and 6, before saves, of 5, at an evaluation, and of 7, before histograms
        "train_step": [0, 0, 1, 3, 3, 5, 6, 7, 7],
        "start": [3, 6, 9],
        "judge": [4, 8],  # the line of the step has the scores
        "log_histograms": [7],
    }
    assert [m["step"] for m in run_dir.metrics()] == list(range(1, 10))
    assert all(m["step_s"] > 0 and m["grad_norm"] > 0 for m in run_dir.metrics())


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": "ddp", "batch_size": 8},
        {"strategy": "ddp", "batch_size": 2, "accum_steps": 4},
        {"strategy": "fsdp", "batch_size": 4, "accum_steps": 2},
        slow({"strategy": "fsdp", "batch_size": 4, "accum_steps": 2, "sharding": "shard_grad_op"}),
        slow({"strategy": "fsdp", "batch_size": 8, "activation_checkpointing": "full"}),
        slow({"strategy": "fsdp", "nproc": 1, "batch_size": 16}),
    ],
    ids=lambda c: "-".join(str(v) for v in c.values()),
)
def test_same_curve_however_the_work_is_shared(single, train, run_root, change):
    run = train(
        single.config.replace(
            **{"run_root": str(run_root), "run_name": None, "nproc": None, **change}
        )
    )
    assert run.status["strategy"] == change["strategy"] and len(run.metrics) == STEPS
    assert_same_curve(run.metrics, single.metrics)


@pytest.mark.parametrize(
    "strategy, dtype",
    [("ddp", "fp16"), ("fsdp", "bf16"), slow("ddp", "bf16"), slow("fsdp", "fp16")],
)
def test_half_precision_stays_close_to_fp32(single, train, run_root, strategy, dtype):
    run = train(
        single.config.replace(
            run_root=str(run_root),
            run_name=None,
            nproc=None,
            strategy=strategy,
            batch_size=8,
            dtype=dtype,
            max_steps=3,
        )
    )
    taken = run.metrics
    assert run.status["dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert (
        abs(run.metrics[0]["loss"] - single.metrics[0]["loss"]) < 0.02 and taken[-1]["loss"] < 8.4
    )


def test_goes_on_under_another_strategy_and_world_size(single, train, run_root):
    plain = single.config.replace(
        run_root=str(run_root), run_name=None, nproc=None, lr_scheduler="constant", warmup_steps=0
    )
    whole = train(plain)
    first = train(plain.replace(strategy="ddp", batch_size=8, max_steps=7, resume_file="none"))
    assert first.status["checkpoint"] == f"opt-tiny_0-{16 * STEPS}-step-7"
    second = train(
        plain.replace(strategy="fsdp", batch_size=8, resume_file=first.status["checkpoint"])
    )
    assert_same_curve(first.metrics + second.metrics, whole.metrics)
    assert second.metrics[-1]["samples_seen"] == 16 * STEPS


def test_next_slice_continues_and_a_finished_one_is_not_repeated(train, run_root):
    cfg = RunConfig(
        run_root=str(run_root), batch_size=8, packing="padded", end_idx=48, num_epochs=2
    )
    first = train(cfg)
    assert [p.name for p in first.dir.checkpoints()] == [
        "opt-tiny_0-48-epoch-1",
        "opt-tiny_0-48-epoch-2",
    ]
    second = train(cfg.replace(start_idx=48, end_idx=80, num_epochs=1))
    assert second.status["resumed_from"].endswith("opt-tiny_0-48-epoch-2")
    assert [m["step"] for m in second.metrics] == [7, 8] and second.metrics[-1][
        "samples_seen"
    ] == 128
    again = train(cfg.replace(start_idx=48, end_idx=80, num_epochs=1))
    assert again.state == "nothing to do" and not again.metrics
    more = train(cfg.replace(start_idx=48, end_idx=80, initial_epoch=2, num_epochs=1))
    assert [(m["step"], m["epoch"]) for m in more.metrics] == [(9, 2), (10, 2)]


RELOAD = """
import json, sys, torch, torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, texts = sys.argv[1], json.load(open(sys.argv[2]))
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
total = targets = 0
for text in texts:
    ids = torch.tensor([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]])[:, :512]
    with torch.no_grad():
        total += F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
    targets += ids.shape[1] - 1
print(total / targets, type(model).__name__, model.generate(ids[:, :4], max_new_tokens=4, do_sample=False).shape[1])
"""


@pytest.mark.parametrize("strategy", [slow("single"), slow("ddp"), "fsdp"])
def test_export_is_the_trained_model(train, run_root, tmp_path, strategy):
    from multigpu_ft.data.builtin import builtin_rows
    from multigpu_ft.data.order import epoch_order

    run = train(
        RunConfig(
            run_root=str(run_root), strategy=strategy, batch_size=8, packing="padded", end_idx=160
        )
    )
    rows = 8 * run.status["world_size"]
    first_rows = epoch_order(160, seed=0, epoch=1)[:rows]
    texts = [builtin_rows("builtin:python-docs")[i]["text"] for i in first_rows]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    shown = subprocess.run(
        [sys.executable, "-c", RELOAD, run.status["export"], tmp_path / "texts.json"],
        capture_output=True,
        text=True,
        check=True,
    )
    loss, name, length = shown.stdout.split()
    assert (
        abs(float(loss) - run.status["loss_after"]) < 1e-4
        and run.status["loss_after"] < run.status["loss_before"] - 0.5
    )
    assert name == "OPTForCausalLM" and length == "8"


def test_a_run_can_be_read_by_its_path(run_root):
    launch(RunConfig(run_root=str(run_root), batch_size=8, packing="padded", end_idx=32))
    run = Run(next(run_root.iterdir()))
    assert (
        run.state == "done"
        and len(run.metrics) == 2
        and sorted(os.listdir(run.dir.path / "logs")) == ["agent.log", "rank0.log", "rank1.log"]
    )
    assert run.plot().axes[0].get_xlabel() == "optimizer step"
    with pytest.raises(ValueError, match="no log of rank 7; there are: agent, rank0, rank1"):
        run.logs(7)
    run.dir.update_status(state="running")  # as if its processes had vanished without a word
    assert run.state == "failed"


@pytest.mark.slow
def test_real_abstracts(shared_data, run_root):
    run = launch(
        RunConfig(
            run_root=str(run_root),
            dataset=str(shared_data / "abstracts.jsonl"),
            strategy="fsdp",
            end_idx=160,
            batch_size=4,
        )
    )
    assert run.status["num_rows"] == 2000 and run.status["loss_after"] < run.status["loss_before"]


def test_too_small_a_budget_is_told_before_training(run_root):
    "No step is trained for nothing."
    from multigpu_ft import CheckpointError

    with pytest.raises(
        CheckpointError,
        match=r"a checkpoint needs [\d.]+ GB and the export [\d.]+ GB, but disk_budget_gb=0.001 already holds 0.0 GB",
    ):
        launch(RunConfig(run_root=str(run_root), disk_budget_gb=0.001, end_idx=32))
    assert not list(run_root.glob("*/metrics.jsonl"))


def test_half_precision_export_is_half_the_size_and_loads(train, run_root):
    import torch
    from transformers import AutoModelForCausalLM

    run = train(RunConfig(run_root=str(run_root), strategy="fsdp", dtype="bf16", end_idx=32))
    model = AutoModelForCausalLM.from_pretrained(run.status["export"])
    assert model.dtype == torch.bfloat16 and type(model).__name__ == "OPTForCausalLM"

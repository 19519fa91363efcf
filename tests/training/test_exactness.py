"""The numbers: however work is shared, packed, chunked or interrupted by infinities, they are
those of the plain way."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from harness import forks
from harness.exactness import ARCHITECTURES, build
from harness.runs import BIN, REPO, slow

from multigpu_ft import ConfigError, RunConfig, launch
from multigpu_ft.checkpoints.discovery import find_checkpoints
from multigpu_ft.checkpoints.manifest import verify_checkpoint
from multigpu_ft.models.blocks import transformer_blocks


@pytest.fixture(scope="module")
def ranks(request, tmp_path_factory):
    "What two ranks found, in one process pair for all tests below, and no more than those that run ask for."
    items = [item for item in request.session.items if "ranks" in item.fixturenames]
    curves = [item for item in items if item.originalname.startswith("test_one_curve_for_all_ways")]
    asked = [item.callspec.params["name"] for item in curves]
    asked += ["others"] if len(items) > len(curves) else []
    report = tmp_path_factory.mktemp("exactness") / "report.json"
    done = subprocess.run(
        [
            BIN / "torchrun",
            "--standalone",
            "--nproc-per-node",
            "2",
            REPO / "tests" / "harness" / "exactness.py",
            report,
            *asked,
        ],
        capture_output=True,
        text=True,
        timeout=390,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=REPO,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(report.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_curve_for_all_ways_to_share_a_step_and_to_lay_it_out(ranks, name):
    """20 steps of 8 texts: loss and gradient norm within 1e-5 of those of one process that packs them.

    OPT's ReLU has a kink: an activation that rounding moves across it switches its gradient on
    or off, so there the norm is held to 5e-4, and the same model with a smooth activation to
    1e-5."""
    curves = {way: worst for way, worst in ranks["curves"].items() if way.startswith(f"{name} ")}
    assert len(curves) == (33 if name in ("llama", "qwen3") else 11)
    for way, (loss, norm) in curves.items():
        assert loss < 1e-5 and norm < (5e-4 if name == "opt" else 1e-5), (way, loss, norm)


def test_a_rank_without_a_single_target_changes_nothing(ranks):
    assert all(max(worst) < 1e-5 for worst in ranks["uneven"].values())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_text_has_the_same_losses_in_any_company(ranks, name):
    assert (
        set(ranks["texts"][name]) == {"packed", "bucketed", "padded"}
        and max(ranks["texts"][name].values()) < 1e-5
    )


@pytest.mark.parametrize(
    "strategy, dtype",
    [
        *itertools.product(("ddp", "fsdp", "zero1", "zero2", "zero3"), ("fp32", "bf16", "fp16")),
        ("zero1 offload", "fp16"),
        ("zero2 offload", "fp16"),
        ("zero3 offload", "fp16"),
    ],
)
def test_an_infinity_on_one_rank_is_skipped_on_both(ranks, strategy, dtype):
    for rank in ranks["infinity"][f"{strategy} {dtype}"]:
        assert rank == {
            "norm_finite": False,
            "unchanged": True,
            "skipped": 1,
            "in_a_row": 0,
            "scale": 32768.0 if dtype == "fp16" else 1.0,
            "goes_on": True,
        }


@pytest.mark.parametrize(
    "strategy, dtype",
    [
        *itertools.product(("ddp", "fsdp", "zero1", "zero2", "zero3"), ("fp32", "fp16")),
        *itertools.product(["accelerate"], ("fp32", "bf16")),
    ],
)
def test_the_self_check_works_under_every_strategy_and_changes_nothing(ranks, strategy, dtype):
    assert ranks["checks"][f"{strategy} {dtype}"] == {
        "found": ["packed", "as configured", True],
        "same": True,
    }


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_the_loss_scale_is_read_once_a_step(ranks, strategy):
    "A read in a micro-batch would wait for all that is queued."
    assert ranks["scale reads"][strategy] == 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_ddp_ranks_hold_the_same_bits_after_50_steps(ranks, dtype):
    assert len(set(ranks["bits"][dtype])) == 1


def test_zero_halves_what_it_says_on_two_ranks(ranks):
    "Bytes an element. (What is not cut are biases and norms, a hundredth of this model.)"
    bytes_of = ranks["bytes"]
    assert bytes_of["ddp"] == {"parameters": 4, "fp32 copies": 0, "gradients": 4, "moments": 8}
    for strategy in ("zero1", "zero2", "zero3"):
        kept = bytes_of[strategy]
        assert kept["moments"] == pytest.approx(4, rel=0.01) and kept[
            "fp32 copies"
        ] == pytest.approx(2, rel=0.01), (
            strategy,
            kept,
        )
        assert (
            kept["gradients"] >= 4
            if strategy == "zero1"
            else kept["gradients"] == pytest.approx(2, rel=0.05)
        ), (
            strategy,
            kept,
        )
        assert kept["parameters"] == (pytest.approx(2, rel=0.05) if strategy == "zero3" else 4), (
            strategy,
            kept,
        )


NAN = """
import os, sys, threading, time
def poison():
    while True:
        time.sleep(0.02)
        try:
            if open(os.path.join(sys.argv[1], 'metrics.jsonl')).read().count(chr(10)) >= STEPS: break
        except (OSError, AttributeError, IndexError): pass
    import gc, torch
    for thing in gc.get_objects():
        if type(thing).__name__ == 'OPTLearnedPositionalEmbedding':
            with torch.no_grad(): thing.weight.fill_(float('nan'))
if os.environ.get('RANK') == '1':
    threading.Thread(target=poison, daemon=True).start()
"""


@pytest.mark.parametrize(
    "end_idx, reason",
    [
        slow(
            400, "the gradient was not finite for 25 steps in a row, up to step"
        ),  # within an epoch
        (
            80,
            r"not finite \(NaN or infinity\) at step 20, so no checkpoint was saved",
        ),  # at its end
    ],
)
def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_good_checkpoint(
    run_root, tmp_path, monkeypatch, train, end_idx, reason
):
    "Parameters turn into NaN on one rank, in the second epoch; the checkpoint of the first is whole and trains on."
    ((name, value),) = forks.at_start(tmp_path, NAN.replace("STEPS", str(end_idx // 8 + 3))).items()
    cfg = RunConfig(
        run_root=str(run_root), strategy="ddp", packing="padded", end_idx=end_idx, num_epochs=20
    )
    monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=reason):
        launch(cfg)
    monkeypatch.delenv(name)
    checkpoint = find_checkpoints(cfg)[0]
    verify_checkpoint(checkpoint)
    metrics = [
        json.loads(line) for line in next(run_root.glob("*/metrics.jsonl")).read_text().splitlines()
    ]
    assert checkpoint.name.endswith("epoch-1") and metrics[-1]["loss"] is None
    assert 0 < metrics[-1]["skipped_steps"] == sum(m["loss"] is None for m in metrics) <= 25
    assert metrics[-1]["step"] < 3 * (end_idx // 8), (
        "training goes on while a checkpoint is written, not beyond the next one"
    )
    again = train(cfg.replace(max_steps=3))
    assert again.status["resumed_from"].endswith(checkpoint.name) and all(
        m["loss"] for m in again.metrics
    )


@pytest.mark.parametrize(
    "setting, recomputed", [("none", []), slow("full", [0, 1, 2, 3]), (2, [1, 3]), slow("auto", [])]
)
def test_activation_checkpointing_changes_no_number(run_root, train, setting, recomputed):
    run = train(
        RunConfig(run_root=str(run_root), nproc=1, end_idx=60, activation_checkpointing=setting)
    )
    assert (
        run.status["checkpointed_blocks"] == {0: "none", 4: "all", 2: "every 2nd"}[len(recomputed)]
    )
    assert abs(run.metrics[-1]["loss"] - 7.026) < 0.01


@pytest.mark.slow
def test_compiled_blocks_draw_the_same_curve(run_root):
    cfg = RunConfig(
        run_root=str(run_root),
        nproc=1,
        packing="packed",
        end_idx=200,
        max_steps=4,
        resume_file="none",
    )
    plain, compiled = launch(cfg), launch(cfg.replace(compile=True))
    assert all(
        abs(a["loss"] - b["loss"]) < 1e-4
        for a, b in zip(plain.metrics, compiled.metrics, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy, dtype", [("single", "fp32"), ("ddp", "bf16")])
def test_8_bit_adam_learns_and_goes_on(run_root, train, strategy, dtype):
    cfg = RunConfig(
        run_root=str(run_root),
        strategy=strategy,
        dtype=dtype,
        optimizer="adamw_8bit",
        packing="padded",
        end_idx=160,
    )
    first = train(cfg.replace(max_steps=10))
    second = train(cfg)
    assert (
        second.metrics[0]["step"] == 11
        and second.metrics[-1]["loss"] < first.metrics[0]["loss"] - 0.5
    )


def test_8_bit_adam_says_where_it_cannot_go():
    with pytest.raises(ConfigError, match="adamw_8bit.*sharded"):
        RunConfig(strategy="fsdp", optimizer="adamw_8bit")
    code = (
        "import sys; sys.modules['bitsandbytes'] = None\nimport torch\nfrom multigpu_ft import RunConfig\n"
        "from multigpu_ft.training.step import "
        "make_optimizer\nmake_optimizer(RunConfig(optimizer='adamw_8bit'), torch.nn.Linear(2, "
        "2))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install 'multigpu_ft[quantization]'" in done.stderr


def test_every_kth_block_is_recomputed():
    from multigpu_ft.models.blocks import checkpoint_activations

    model = build("qwen3")
    checkpoint_activations(model, 2)
    assert [block.gradient_checkpointing for block in transformer_blocks(model)] == [False, True]


def test_a_line_of_metrics_tells_where_the_time_went(run_root, train):
    run = train(RunConfig(run_root=str(run_root), strategy="ddp", end_idx=400, log_every=2))
    for line in run.metrics[1:]:
        phases = sum(
            line[f"{phase}_s"]
            for phase in ("data", "forward_backward", "communication", "optimizer")
        )
        assert (
            0.5 * line["step_s"] < phases <= 1.05 * line["step_s"]
            and 0 <= line["padding"] < 0.5
            and line["mfu"] is None
        )
        assert (
            len(line["peak_memory_gib"]) == 2
            and min(line["peak_memory_gib"]) > 0.1
            and line["skipped_steps"] == 0
        )
    assert [m["step"] for m in run.metrics][:3] == [1, 2, 4]

"""Accelerate and ZeRO: everything around a strategy is as with the others; contradicting settings
are refused."""

import importlib.util
import itertools
import json

import pytest
from harness import adapters, faults
from harness.runs import error_of, slow

from multigpu_ft import ConfigError, Run, RunConfig, RunFailed, launch, load_export
from multigpu_ft.memory.fit import simulations
from multigpu_ft.run.environment import find_gpu

WAYS = [{"strategy": name} for name in ("accelerate", "zero1", "zero2", "zero3")]
STRATEGIES = ("ddp", "fsdp", *(way["strategy"] for way in WAYS))


@pytest.fixture(scope="module")
def server(material):
    started = faults.Server(
        material / "model",
        "accelerate",
        "deepspeed",
        "peft",
        "transformers.models.bert.modeling_bert",
    )
    yield started
    started.close()


@pytest.fixture(scope="module")
def undisturbed(material, server, tmp_path_factory):
    return faults.Kills(tmp_path_factory.mktemp("kills"), server, material, WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WAYS)), ids=[way["strategy"] for way in WAYS])
def test_a_killed_run_ends_with_the_same_bits(undisturbed, number):
    """SIGKILL of a rank or the agent at random moments, with dropout: parameters, moments,
    losses and texts are those of the undisturbed run."""
    for seed in range(3):
        undisturbed.trial(seed, number)


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[way["strategy"] for way in WAYS])
def test_a_stopped_run_resumes_at_the_next_step(undisturbed, number):
    kind, state, seconds = undisturbed.stop_trial(7, number)
    assert seconds < 30, (kind, state)


@pytest.fixture(scope="module")
def first_halves(tmp_path_factory, server):
    "A run of one epoch under each strategy, without dropout, and an uninterrupted one of two epochs."
    models = adapters.make_models(tmp_path_factory.mktemp("models"))
    root = tmp_path_factory.mktemp("halves")

    def run(name, **settings):
        cfg = faults.config(
            models, root / name, **{"model": str(models / "opt"), "save_every": None, **settings}
        )
        return Run(server.finish(cfg))

    whole = run("whole", strategy="ddp")
    return (
        run,
        [m["loss"] for m in whole.metrics],
        {strategy: run(strategy, strategy=strategy, num_epochs=1) for strategy in STRATEGIES},
    )


@pytest.mark.parametrize(
    "one, other",
    [
        pair
        if pair in (("ddp", "zero1"), ("fsdp", "zero3"), ("zero3", "fsdp"), ("zero2", "ddp"))
        else slow(*pair)
        for pair in itertools.permutations(STRATEGIES, 2)
        if "zero" in "".join(pair)
    ],
)
def test_a_checkpoint_of_one_strategy_resumes_under_another(first_halves, one, other):
    run, expected, halves = first_halves
    second = run(
        f"{one}-{other}", strategy=other, resume_file=str(halves[one].dir.checkpoints()[-1])
    )
    losses = [m["loss"] for m in (*halves[one].metrics, *second.metrics)]
    assert second.state == "done" and losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_run_on_two_ranks_resumes_on_one(first_halves, stage):
    run, expected, halves = first_halves
    second = run(
        f"one-{stage}",
        strategy=f"zero{stage}",
        nproc=1,
        resume_file=str(halves[f"zero{stage}"].dir.checkpoints()[-1]),
    )
    assert [m["loss"] for m in second.metrics] == pytest.approx(
        expected[len(expected) // 2 :], rel=1e-5
    )


def test_moments_in_8_bit_are_refused(first_halves, server):
    run, _, _ = first_halves
    eight = run("eight", strategy="ddp", num_epochs=1, optimizer="adamw_8bit")
    refused = run("refused", strategy="zero2", resume_file=str(eight.dir.checkpoints()[-1]))
    assert refused.status["state"] != "done" and "use resume_scope='weights'" in error_of(
        refused.dir
    )


def test_exports_are_the_trained_model(first_halves):
    "`load_export` compares its loss with that of the trained one, and all strategies trained the same."
    losses = {}
    for strategy, half in first_halves[2].items():
        load_export(half.status["export"])
        losses[strategy] = json.loads((half.dir.path / "export" / "check.json").read_text())["loss"]
    assert all(loss == pytest.approx(losses["ddp"], rel=1e-5) for loss in losses.values()), losses


@pytest.mark.parametrize(
    "architecture, tuning",
    [("opt", "lora"), slow("opt", "qlora"), ("bert", "full"), slow("bert", "lora")],
)
def test_adapters_and_labels_are_trained_as_under_ddp(
    first_halves, server, tmp_path, architecture, tuning
):
    models = adapters.Path(first_halves[2]["ddp"].config.model).parent
    found = {}
    for strategy in ("ddp", "zero2", "zero3"):
        if (strategy, tuning) == ("zero3", "qlora"):
            continue
        evaluated = (
            {"eval_dataset": str(models / "texts.jsonl"), "eval_every": 4}
            if architecture == "bert"
            else {}
        )
        run = Run(
            server.finish(
                adapters.config(
                    models, tmp_path / strategy, architecture, tuning, strategy, **evaluated
                )
            )
        )
        assert run.state == "done", run.logs(0)[-2000:]
        load_export(run.status["export"])
        found[strategy] = [m["loss"] for m in run.metrics] + [
            m["eval_loss"] for m in run.metrics if "eval_loss" in m
        ]
    for losses in found.values():
        assert losses == pytest.approx(found["ddp"], rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "zero2", "offload": "optimizer"},
        {"strategy": "zero3", "offload": "all"},
        {"strategy": "zero3", "activation_checkpointing": "full"},
        {"strategy": "zero1", "max_grad_norm": None},
        {"strategy": "zero2", "tracker": "tensorboard", "histogram_every": 3},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_other_settings(first_halves, settings):
    run, expected, _ = first_halves
    found = run("-".join(map(str, settings.values())), **settings)
    assert found.state == "done", found.logs(0)[-2000:]
    if "max_grad_norm" not in settings:
        assert [m["loss"] for m in found.metrics] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [("bf16", 2e-3), ("fp16", 1e-3)])
@pytest.mark.parametrize("stage", [slow(1), slow(2), 3])
def test_half_precision_trains_as_under_ddp(first_halves, stage, dtype, tolerance):
    run, expected, _ = first_halves
    found = run(f"{dtype}-{stage}", strategy=f"zero{stage}", dtype=dtype)
    assert [m["loss"] for m in found.metrics] == pytest.approx(
        expected, rel=tolerance
    ) and found.status["skipped_steps"] == 0


def test_a_users_deepspeed_json(first_halves, tmp_path):
    run, expected, _ = first_halves
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps(
            {
                "train_batch_size": "auto",
                "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5000},
            }
        )
    )
    found = run("own", strategy="zero2", deepspeed_config=str(path))
    assert [m["loss"] for m in found.metrics] == pytest.approx(expected, rel=1e-5)
    path.write_text(
        json.dumps(
            {
                "zero_optimization": {
                    "stage3_max_live_parameters": 1000,
                    "stage3_max_reuse_distance": 1000,
                    "sub_group_size": 999,
                }
            }
        )
    )
    found = run("lean", strategy="zero3", deepspeed_config=str(path))
    assert [m["loss"] for m in found.metrics] == pytest.approx(expected, rel=1e-5)
    path.write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": "large"}}))
    failed = run("wrong", strategy="zero2", deepspeed_config=str(path))
    assert failed.status[
        "state"
    ] != "done" and "zero_optimization.reduce_bucket_size='large'" in error_of(failed.dir)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"zero_optimization": {"stage": 3}}, "strategy='zero2' means 2"),
        ({"gradient_accumulation_steps": 8}, "accum_steps=1 means 1"),
        ({"gradient_clipping": 5.0}, "max_grad_norm=1.0 means 1.0"),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"zero_optimization": {"reduce_bucket": 1}}, "did you mean 'reduce_bucket_size'"),
        ({"fp16": True}, "no object"),
        ([], "holds a list"),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            "round_robin_gradients is not used by this package",
        ),
        ({"zero_optimization": {"cpu_offload": True}}, "remove it"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "summed in fp32"),
        ({"train_batch_size": 7}, "= 8"),
        ({"scheduler": {"type": "WarmupLR"}}, "lr_scheduler"),
        ({"bf16": {"enabled": True}}, "dtype='fp32' means false"),
        ("{", "not valid JSON"),
    ],
)
def test_a_json_that_contradicts_is_refused_before_anything_starts(tmp_path, settings, said):
    path = tmp_path / "ds.json"
    path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    with pytest.raises(ConfigError, match="deepspeed_config") as error:
        launch(
            RunConfig(
                strategy="zero2",
                dtype="fp32",
                nproc=2,
                deepspeed_config=str(path),
                run_root=str(tmp_path / "runs"),
            )
        )
    assert said in str(error.value) and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_json_travels_with_the_run(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"overlap_comm": false}}')
    run = launch(
        RunConfig(
            strategy="zero1",
            deepspeed_config=str(path),
            run_root=str(tmp_path / "runs"),
            end_idx=60,
            max_steps=2,
        ),
        wait=False,
    )
    path.unlink()
    assert run.wait().state == "done" and json.loads(run.config.deepspeed_config)[
        "zero_optimization"
    ] == {"overlap_comm": False}


@pytest.mark.parametrize("package", ["deepspeed", "accelerate"])
def test_a_missing_package_is_reported_before_anything_starts(tmp_path, monkeypatch, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == package else find(name, *rest),
    )
    with pytest.raises(
        ConfigError,
        match=rf"needs {package}, which is not installed: pip install 'multigpu_ft\[deepspeed\]'",
    ):
        launch(RunConfig(strategy="zero2", run_root=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "zero3", "tuning": "qlora"},
        {"strategy": "zero3", "tuning": "lora8bit"},
        {"strategy": "zero2", "optimizer": "adamw_8bit"},
        {"strategy": "zero2", "offload": "all"},
        {"strategy": "fsdp", "offload": "optimizer"},
        {"strategy": "ddp", "deepspeed_config": "ds.json"},
        {"strategy": "zero3", "compile": True},
        {"strategy": "zero4"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_settings_that_contradict_are_refused(settings):
    with pytest.raises(ConfigError, match="use|zero3"):
        RunConfig(**settings)


@pytest.mark.slow
def test_the_estimate_has_the_shares_that_were_measured():
    """Bytes an element, as `test_zero_halves_what_it_says_on_two_ranks` measures them; the
    optimizer's are moments and copies in fp32."""
    held = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        cfg = RunConfig(
            strategy=strategy,
            dtype="fp32",
            model="facebook/opt-125m",
            dataset="none/none",
            batch_size=1,
            max_length=64,
            accum_steps=2,
        )
        with simulations() as ask:
            found = ask(cfg.replace(activation_checkpointing="none"), find_gpu("T4"), 2)
        most = {}
        for peak in found["peaks"]:
            for name in ("parameters", "gradients", "optimizer"):
                most[name] = max(most.get(name, 0), peak["categories"][name] / found["parameters"])
        held[strategy] = most
    assert (
        held["zero1"]["optimizer"] == held["zero2"]["optimizer"] == pytest.approx(4 + 2, rel=0.01)
    )
    assert held["zero3"]["optimizer"] == pytest.approx(4, rel=0.01) and held["zero3"][
        "parameters"
    ] == pytest.approx(2 + 2, rel=0.01)
    assert held["zero1"]["gradients"] >= 4 and held["zero2"]["gradients"] == held["zero3"][
        "gradients"
    ] == pytest.approx(2, rel=0.01)


SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
inputs = torch.randn(64, 4)
data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
model = torch.nn.Linear(4, 1)
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=float(sys.argv[1])), data)
for epoch in range(20):
    for batch, wanted in data:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    losses = accelerator.gather_for_metrics(loss.detach()[None])
accelerator.print(f"loss {losses.mean():.4f} of {len(losses)} ranks")
if "fail" in sys.argv and accelerator.process_index == 1:
    raise RuntimeError("planted")
accelerator.end_training()
"""


@pytest.mark.slow
def test_a_script_of_plain_accelerate_code_runs_unchanged(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert launch(script, 0.1, nproc=2) is None
    said = capfd.readouterr().out
    assert "[0] loss 0.0" in said and "of 2 ranks" in said and "[1] loss" not in said
    with pytest.raises(RunFailed, match="rank 1 raised RuntimeError: planted") as error:
        launch(str(script), 0.1, "fail", nproc=2)
    assert "script.py, line 2" in str(error.value) and "runpy" not in str(error.value)
    with pytest.raises(ConfigError, match="there is no script"):
        launch("no_such_script.py")

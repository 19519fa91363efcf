"""Whole runs on the second device: what is trained, saved, killed, resumed, exported, evaluated and generated there."""

import json

import pytest
from harness import faults
from harness.runs import slow
from harness.word_models import asked, make_models

from multigpu_ft import evaluate, generate, launch, load_export

# the gate has each strategy, dtype and kind of tuning once or more, `make test-slow` all combinations
IN_GATE = {
    ("single", "fp16", "full"),
    ("ddp", "fp32", "qlora"),
    ("ddp", "fp16", "lora"),
    ("fsdp", "fp32", "full"),
    ("fsdp", "fp16", "qlora"),
}
WAYS = [
    (way if way in IN_GATE else slow(*way))
    for way in (
        (strategy, dtype, tuning)
        for strategy in ("single", "ddp", "fsdp")
        for dtype in ("fp32", "fp16")
        for tuning in ("full", "lora", "qlora")
    )
]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return faults.make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def server(material):
    server = faults.Server(material / "model", "peft", "bitsandbytes")
    yield server
    server.close()


@pytest.fixture(scope="module")
def smooth(material):
    "Return a model without dropout: what it computes doesn't depend on how rows are dealt out."
    folder = material / "smooth"
    folder.mkdir()
    for path in (material / "model").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**settings, "dropout": 0.0, "activation_function": "gelu"})
    )
    return folder


def five_steps(run_dir):
    return len(run_dir.metrics()) >= 5


@pytest.mark.parametrize(("strategy", "dtype", "tuning"), WAYS)
def test_a_killed_run_goes_on_as_if_undisturbed(
    material, server, tmp_path, strategy, dtype, tuning
):
    "The model has dropout, so the device's generator is resumed as well."
    nproc = 1 if strategy == "single" else 2
    way = {
        **{"strategy": strategy, "dtype": dtype, "tuning": tuning, "nproc": nproc},
        "batch_size": 4 // nproc,
    }
    cfg = faults.config(material, tmp_path / "plain", **way)
    plain = faults.done(server.finish(cfg))
    assert plain.status()["device"] == "second"
    expected = faults.outcome(tmp_path / "plain", [plain])
    assert expected["losses"][-1] < expected["losses"][0]

    cfg = cfg.replace(run_root=str(tmp_path / "killed"))
    runs = [faults.kill_when(server, cfg, five_steps), faults.done(server.finish(cfg))]
    faults.assert_exact(faults.outcome(tmp_path / "killed", runs), expected)

    load_export(runs[-1].path / "export")  # compares its loss on the CPU with the trained model's


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("packing", ["packed", slow("bucketed"), slow("padded")])
def test_a_step_never_waits_for_the_device(material, server, tmp_path, strategy, dtype, packing):
    """In steady state: the first step also prepares, and DDP lays out its buckets in the second.

    With `padded`, transformers asks in each forward pass whether there is padding, which is a wait."""
    way = {"strategy": strategy, "dtype": dtype, "packing": packing, "max_steps": 5}
    way |= {"nproc": 1 if strategy == "single" else 2, "batch_size": 1, "accum_steps": 2}
    run_dir = faults.done(
        server.finish(faults.config(material, tmp_path, **way, max_grad_norm=1.0))
    )
    counts = [[int(n) for n in path.read_text().split()] for path in run_dir.path.glob("waits*")]
    assert len(counts) == way["nproc"]
    for waits in counts:
        assert len(waits) == 5 and waits[2:] == [2 if packing == "padded" else 0] * 3


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp")])
def test_a_run_goes_on_with_another_number_of_devices(material, server, smooth, tmp_path, strategy):
    way = {"model": str(smooth), "strategy": strategy, "dtype": "fp32"}
    plain = faults.done(server.finish(faults.config(material, tmp_path / "plain", **way)))
    expected, expected_texts = faults.lineage([plain])
    cfg = faults.config(material, tmp_path / "killed", **way)
    killed = faults.kill_when(server, cfg, five_steps)
    found, texts = faults.lineage([killed, faults.done(server.finish(cfg.replace(nproc=1)))])
    assert texts == expected_texts, "the same texts in the same steps"
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", slow("ddp"), slow("fsdp")])
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_the_device_draws_the_curve_of_the_cpu(
    material, server, smooth, tmp_path, strategy, packing
):
    nproc = 1 if strategy == "single" else 2
    found = {}
    for kind, devices in (("second", "2"), ("cpu", "0")):
        cfg = faults.config(
            material,
            tmp_path / kind,
            **{"model": str(smooth), "strategy": strategy, "nproc": nproc, "dtype": "fp32"},
            packing=packing,
        )
        run_dir = faults.done(server.finish(cfg, SECOND_DEVICES=devices))
        assert run_dir.status()["device"] == kind
        found[kind], _ = faults.lineage([run_dir])
    assert found["second"] == pytest.approx(found["cpu"], rel=1e-5)


@pytest.fixture
def wide(smooth, tmp_path):
    "Return a model whose activations need more memory than its weights."
    from transformers import AutoModelForCausalLM, OPTConfig

    folder = tmp_path / "wide"
    folder.mkdir()
    for path in smooth.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = OPTConfig.from_pretrained(smooth, ffn_dim=8192, num_hidden_layers=1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_out_of_memory_halves_the_micro_batch_of_all(material, wide, run_root, monkeypatch):
    way = {"model": str(wide), "strategy": "ddp", "activation_checkpointing": "none"}
    cfg = faults.config(material, run_root, **way, batch_size=8, max_steps=4)
    plain = launch(cfg.replace(run_root=str(run_root / "plain"), batch_size=2, accum_steps=4))
    peak = max(max(m["peak_memory_gib"]) for m in plain.metrics) * 2**10
    monkeypatch.setenv("SECOND_MEMORY_MIB", f"{peak * 1.25:.2f}")
    run = launch(cfg)
    assert run.state == "done" and run.dir.config().batch_size < 8
    assert any("ran out of memory in step" in r for r in run.dir.status()["remarks"])
    assert [m["loss"] for m in run.metrics] == pytest.approx(
        [m["loss"] for m in plain.metrics], rel=1e-5
    )


def scores_on_both(run, tmp_path, monkeypatch, **rows):
    "Return the scores of `run` and its base on the device and on the CPU."
    found = {}
    for kind, devices in (("second", "2"), ("cpu", "0")):
        monkeypatch.setenv("SECOND_DEVICES", devices)
        measured = evaluate(
            run, **rows, nproc=2, dtype="fp32", samples=0, folder=tmp_path / f"evaluation-{kind}"
        )
        about = json.loads((measured.folder / "evaluation.json").read_text())
        assert kind in json.dumps(about)
        found[kind] = measured
    return found["second"], found["cpu"]


def assert_same_scores(here, there):
    for model, losses in here.measured.target.losses.items():
        assert losses.tolist() == pytest.approx(
            there.measured.target.losses[model].tolist(), rel=1e-4
        )


def test_chat_is_trained_evaluated_and_generated_from(run_root, tmp_path, monkeypatch):
    models = make_models(tmp_path)
    rows = [json.loads(line) for line in (models / "questions.jsonl").read_text().splitlines()]
    chats = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": f"w{row['answer']} w1 w2"},
            ]
        }
        for row in rows
    ]
    (models / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    cfg = faults.config(
        models,
        run_root,
        **{"model": str(models / "qwen3"), "dataset": str(models / "chats.jsonl"), "task": "chat"},
        **{"max_length": 64, "end_idx": 32, "dtype": "fp16", "learning_rate": 3e-3},
    )
    run = launch(cfg)
    assert run.state == "done" and run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    here, there = scores_on_both(run, tmp_path, monkeypatch, start_idx=32, end_idx=40)
    assert_same_scores(here, there)

    answers = {}
    for devices in ("2", "0"):
        monkeypatch.setenv("SECOND_DEVICES", devices)
        settings = asked(models, "qwen3", temperature=0, dtype="fp32", nproc=2)
        answers[devices] = generate(
            **settings, output=tmp_path / f"{devices}.jsonl"
        ).path.read_bytes()
    assert answers["2"] == answers["0"]


def test_a_classifier_is_trained_and_evaluated(material, run_root, tmp_path, monkeypatch):
    way = {"task": "classification", "tuning": "lora", "dtype": "fp16", "end_idx": 32}
    run = launch(faults.config(material, run_root, **way))
    assert run.state == "done" and run.dir.status()["device"] == "second"
    here, there = scores_on_both(run, tmp_path, monkeypatch, start_idx=32, end_idx=48)
    assert_same_scores(here, there)

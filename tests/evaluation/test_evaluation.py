"""Evaluation: every loss equals that of a plain loop over transformers, on any number of ranks.
Models that can't be compared are refused with the reason."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import faults
from harness.notebooks import outputs, papermill
from harness.runs import NBS
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from multigpu_ft import (
    CheckpointError,
    ConfigError,
    DataError,
    Evaluation,
    RunConfig,
    evaluate,
    load_export,
)
from multigpu_ft.data.tokenization import tokenize_chats
from multigpu_ft.evaluation.plan import Plan, held_out_rows, named_rows
from multigpu_ft.evaluation.scoring import score
from multigpu_ft.generation.fine_tuned import find_fine_tuned, find_runs, fine_tuned_export
from multigpu_ft.models.lora import add_adapter

TRAINED, HELD_OUT = 32, 16  # of the 48 texts


@pytest.fixture(scope="module")
def alone():
    with faults.world_of_one() as world:
        yield world


@pytest.fixture(scope="module")
def trained(material, server, tmp_path_factory):
    "Return directories of runs that were trained on the first texts, by the kind of training."
    root = tmp_path_factory.mktemp("evaluated")
    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    shutil.copytree(material / "model", root / "talker")
    tokenizer.save_pretrained(root / "talker")
    lines = [
        json.loads(line)["text"].split()
        for line in (material / "texts.jsonl").read_text().splitlines()
    ]
    chats = [
        {
            "messages": [
                {"role": "user", "content": " ".join(w[:4])},
                {"role": "assistant", "content": " ".join(w[4:] or w)},
            ]
        }
        for w in lines
    ]
    (root / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    adapter = {"tuning": "lora", "lora_r": 4, "lora_dropout": 0.0, "strategy": "single", "nproc": 1}
    settings = {
        "full": {"save_every": 4},
        "lora": {**adapter, "merge_adapter": True},
        "labels": {**adapter, "task": "classification"},
        "chat": {
            **adapter,
            "task": "chat",
            "model": str(root / "talker"),
            "dataset": str(root / "chats.jsonl"),
        },
    }
    runs = {}
    for name, changes in settings.items():
        common = {
            "end_idx": TRAINED,
            "num_epochs": 1,
            "learning_rate": 1e-2,
            "keep": 3,
            "run_name": name,
        }
        runs[name] = server.finish(faults.config(material, root / "runs", **{**common, **changes}))
        assert runs[name].status()["state"] == "done", runs[name].log_file(0).read_text()[-2000:]
    return runs


def plan(run, checkpoint=None, **settings):
    models = find_fine_tuned([run], checkpoint, None)
    newest = models[-1]
    return Plan(
        newest.config,
        models,
        held_out_rows(models)[0],
        label_names=newest.label_names,
        **settings,
    )


def by_hand(model, tokenizer, cfg, rows, label_names=None):
    "Return the summed losses of `rows`, one at a time without padding, with transformers alone."
    model.eval()
    found, predicted = [], []
    for row in rows:
        with torch.no_grad():
            if cfg.task == "classification":
                made = tokenizer(
                    row["text"], truncation=True, max_length=cfg.max_length, return_tensors="pt"
                )
                logits = model(
                    **{k: v for k, v in made.items() if k in ("input_ids", "attention_mask")}
                ).logits
                found.append(
                    F.cross_entropy(
                        logits, torch.tensor([label_names.index(str(row["label"]))])
                    ).item()
                )
                predicted.append(logits.argmax().item())
                continue
            if cfg.task == "chat":
                text = tokenize_chats([row["messages"]], tokenizer, cfg.max_length)[0]
                ids, learnt = (
                    torch.from_numpy(text.ids.astype(np.int64)),
                    torch.from_numpy(text.loss_mask),
                )
            else:
                ids = tokenizer(row["text"])["input_ids"]
                ids = torch.tensor([*ids, tokenizer.eos_token_id][: cfg.max_length])
                learnt = torch.ones(len(ids), dtype=torch.bool)
            losses = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
            found.append(losses[learnt[1:]].double().sum().item())
    return np.array(found), predicted


def rows_of(cfg, start=TRAINED):
    return [json.loads(line) for line in open(cfg.dataset)][start:]


@pytest.mark.parametrize("kind", ["full", "lora", "labels", "chat"])
def test_losses_are_those_of_plain_transformers(trained, kind, alone):
    run, made = trained[kind], plan(trained[kind], samples=1, max_new_tokens=2)
    cfg, measured = run.config(), score(made)
    tuned, tokenizer = load_export(run.path / "export")
    names = measured.label_names
    if kind == "labels":
        # training began with this new head
        torch.manual_seed(cfg.seed)
        base = AutoModelForSequenceClassification.from_pretrained(
            cfg.model, num_labels=len(names), pad_token_id=tokenizer.pad_token_id
        )
    else:
        base = AutoModelForCausalLM.from_pretrained(cfg.model)
    assert measured.target.rows.tolist() == list(range(TRAINED, TRAINED + HELD_OUT)), (
        "each example once"
    )
    newest = made.models[0].name
    for name, model in (("base", base), (newest, tuned)):
        expected, predicted = by_hand(model, tokenizer, cfg, rows_of(cfg), names)
        assert np.abs(measured.target.losses[name] - expected).max() < 1e-4, name
        assert kind != "labels" or measured.target.predicted[name].tolist() == predicted
    assert measured.about["activity"][newest]["differing_examples"] > 0.9
    assert measured.about["adapter_active"] is (None if kind == "full" else True)
    assert len(measured.samples) == (kind != "labels") and all(
        len(sample["texts"]) == 2 for sample in measured.samples
    )
    if kind == "chat":
        asked = {row["messages"][0]["content"] for row in rows_of(cfg)}
        assert any(measured.samples[0]["prompt"].endswith(words) for words in asked), (
            "the conversation up to the assistant's turn"
        )
    if kind == "labels":
        assert (
            "classification head" in measured.about["remarks"][0]
            and measured.target.targets.tolist() == [1] * HELD_OUT
        )


@pytest.mark.parametrize("kind", ["full", "labels", "chat"])
def test_the_examples_that_changed_most_can_be_read(trained, kind, alone, tmp_path):
    found = Evaluation(score(plan(trained[kind])), tmp_path)
    record = found.save()
    page, text = (tmp_path / "evaluation.html").read_text(), str(found)
    told = {row["row"]: row for row in record["most_changed"]}
    assert (
        told
        and len(told) == len(record["most_changed"])
        and record["most_changed"][0]["change"] == min(row["change"] for row in told.values())
    )
    for number, row in enumerate(rows_of(trained[kind].config()), TRAINED):
        if number not in told:
            continue
        if kind == "chat":
            shown = {"question": row["messages"][0]["content"]}
            shown["answer"] = row["messages"][1]["content"]
        else:
            shown = {"text": row["text"]}
        if kind == "labels":
            shown["label"] = str(row["label"])
            names, scored = found.measured.label_names, found.measured.target
            at = scored.rows.tolist().index(number)
            for side, model in (("base", "base"), ("newest", found.compared.target.names[-1])):
                shown[f"predicted_{side}"] = names[scored.predicted[model][at]]
        assert {name: told[number][name] for name in shown} == shown
        assert f'title="{shown.get("text") or shown["question"]}"' in page, "whole, on hover"
    best = record["most_changed"][0]
    words = (best.get("text") or best["question"]).split()
    assert f"{best['base']:.3f}" in text and " ".join(words[:3]) in text
    assert "Most improved" in text and "Most improved" in page


def test_several_checkpoints_and_the_export(trained, alone):
    run = trained["full"]
    measured = score(plan(run, "all"))
    names = [model["name"] for model in measured.models]
    assert names == ["base", *(c.name for c in run.checkpoints())] and len(names) > 2
    assert measured.models[-1]["trained"][0]["end_idx"] == TRAINED
    export = score(plan(run))
    newest = measured.target.losses[names[-1]]
    assert np.array_equal(export.target.losses[names[-1]], newest), (
        "it has the newest checkpoint's weights"
    )
    means = [measured.target.losses[name].sum() for name in names]
    assert means[-1] < means[1] < means[0]


def test_the_likeliest_continuations_are_those_of_transformers(trained, alone):
    run, made = trained["full"], plan(trained["full"], samples=3, max_new_tokens=8, temperature=0)
    measured = score(made)
    assert measured.about["sampling"]["temperature"] == 0
    model, tokenizer = load_export(run.path / "export")
    for sample in measured.samples:
        ids = tokenizer(sample["prompt"], return_tensors="pt")["input_ids"]
        ids = ids[:, :-1] if ids[0, -1] == tokenizer.eos_token_id else ids
        greedy = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(greedy, skip_special_tokens=True)
        assert sample["texts"][made.models[0].name] == text


@pytest.mark.slow
def test_ranks_agree_and_share_the_work(trained, alone, tmp_path):
    run, settings = trained["full"], {"samples": 3, "max_new_tokens": 6, "folder": tmp_path}
    here = score(
        plan(
            run,
            "all",
            samples=3,
            max_new_tokens=6,
            forgetting=named_rows(run.config(), dataset="builtin:python-docs", end_idx=15),
        )
    )
    assert {sample["texts"].keys() == here.target.losses.keys() for sample in here.samples} == {
        True
    } and len(here.samples) == 3
    for strategy in ("auto", "fsdp"):
        there = evaluate(
            run,
            checkpoint="all",
            strategy=strategy,
            nproc=2,
            forgetting_dataset="builtin:python-docs",
            forgetting_end_idx=15,
            batch_size=3,
            **settings,
        ).measured
        assert there.about["world_size"] == 2 and there.about["strategy"] == (
            "fsdp" if strategy == "fsdp" else "whole"
        )
        for mine, theirs in ((here.target, there.target), (here.forgetting, there.forgetting)):
            assert np.array_equal(mine.rows, theirs.rows) and np.array_equal(
                mine.targets, theirs.targets
            )
            for name, losses in mine.losses.items():
                assert np.abs(losses - theirs.losses[name]).max() < 1e-5 * max(1, losses.max()), (
                    strategy,
                    name,
                )
        if strategy == "auto":
            assert there.samples == here.samples, "the same random numbers, whoever draws them"
        else:
            assert there.samples == [] and "no samples" in there.about["remarks"][-1]


def test_a_model_is_no_better_than_itself(trained, alone, tmp_path):
    cfg = trained["full"].config()
    shutil.copytree(cfg.model, tmp_path / "twin")
    fine_tuned = fine_tuned_export(tmp_path / "twin", base=cfg.model)
    measured = score(Plan(cfg, [fine_tuned], named_rows(cfg, start_idx=TRAINED)))
    assert np.array_equal(measured.target.losses["base"], measured.target.losses["twin"])
    assert "The model twin changes nothing" in measured.about["remarks"][0]


def test_an_adapter_in_the_weights_is_the_same_model(trained, alone):
    beside, merged = (score(plan(trained["lora"], name)) for name in ("export", "merged"))
    assert beside.about["adapter_active"] is True and merged.about["adapter_active"] is None
    (_, one), (_, other) = beside.target.losses.items(), merged.target.losses.items()
    assert np.abs(one[1] - other[1]).max() < 1e-4


def test_an_adapter_that_does_nothing_is_found(trained, alone, tmp_path):
    cfg = trained["lora"].config()
    add_adapter(cfg, AutoModelForCausalLM.from_pretrained(cfg.model)).save_pretrained(
        tmp_path / "idle"
    )
    fine_tuned = fine_tuned_export(tmp_path / "idle")
    assert fine_tuned.config.model == cfg.model, "its own configuration tells the base"
    both = [*find_fine_tuned([trained["lora"]], None, None), fine_tuned]
    measured = score(Plan(cfg, both, named_rows(cfg, start_idx=TRAINED)))
    assert (
        measured.about["adapter_active"] is False
        and "every B is zero" in measured.about["remarks"][0]
    )
    assert [said["active"] for said in measured.about["activity"].values()] == [True, False]


def test_an_export_without_its_run_knows_base_and_data(trained, alone, tmp_path, monkeypatch):
    "An export made on another machine has only the names of its files and folders."
    for kind in ("lora", "labels", "chat", "full"):
        shutil.copytree(trained[kind].path / "export", tmp_path / kind)
        monkeypatch.chdir(Path(trained[kind].config().dataset).parent)
        if kind == "full":
            with pytest.raises(ConfigError, match="base="):
                fine_tuned_export(tmp_path / kind)
        fine_tuned = fine_tuned_export(
            tmp_path / kind, base=trained[kind].config().model if kind == "full" else None
        )
        rows, why = held_out_rows([fine_tuned])
        inside = plan(trained[kind])
        assert (
            fine_tuned.run is None
            and (rows.start_idx, rows.end_idx) == (TRAINED, TRAINED + HELD_OUT)
            and "after all trained" in why
        )
        here, there = (
            score(Plan(fine_tuned.config, [fine_tuned], rows, label_names=fine_tuned.label_names)),
            score(inside),
        )
        for found, expected in zip(
            here.target.losses.values(), there.target.losses.values(), strict=True
        ):
            assert np.abs(found - expected).max() < 1e-5


def test_a_checkpoint_without_its_run(trained, alone, tmp_path, monkeypatch):
    run = trained["lora"]
    moved = shutil.copytree(run.checkpoints()[-1], tmp_path / run.checkpoints()[-1].name)
    with pytest.raises(ConfigError, match="base="):
        find_fine_tuned([], str(moved), None)
    monkeypatch.chdir(Path(run.config().dataset).parent)
    models = find_fine_tuned([], str(moved), run.config().model)
    assert models[0].run is None
    measured, inside = (
        score(
            Plan(
                models[0].config.replace(max_length=32),
                models,
                held_out_rows(models)[0].replace(max_length=32),
            )
        ),
        score(plan(run)),
    )
    assert (
        np.abs(measured.target.losses[moved.name] - inside.target.losses[moved.name]).max() < 1e-5
    )


@pytest.mark.parametrize(
    "kind, wanted, words",
    [
        (ConfigError, {"run": "runs/nothing"}, "no run directory or folder of runs"),
        (ConfigError, {}, "nothing to evaluate"),
        (CheckpointError, {"checkpoint": "model_0-99"}, "available: model_0-32"),
        (DataError, {"start_idx": 48}, "highest start_idx is 47"),
        (DataError, {"start_idx": 40, "end_idx": 40}, "the slice is empty"),
        (ConfigError, {"batch_size": 0}, "greater than or equal to 1"),
        (ConfigError, {"samples": -1}, "samples=-1"),
        (ConfigError, {"temperature": "warm"}, "temperature='warm': expected a number from 0"),
        (ConfigError, {"hf_repo": "no name"}, "user/name@revision"),
        (ConfigError, {"hf_repo": "user/name"}, "only one of them"),
        (ConfigError, {"folder": "hf_" + "a" * 30}, "HF_TOKEN"),
        (ConfigError, {"strategy": "single"}, "nproc=1"),
    ],
)
def test_impossible_requests_are_refused_before_a_process_starts(
    trained, tmp_path, kind, wanted, words
):
    run = None if wanted in ({}, {"hf_repo": "no name"}) else wanted.get("run", trained["full"])
    with pytest.raises(kind, match=words):
        evaluate(run, run_root=str(tmp_path), **{k: v for k, v in wanted.items() if k != "run"})


def test_unfit_models_and_rows_are_refused(trained, alone, tmp_path):
    models = find_fine_tuned([trained["full"]], None, None)
    rows = named_rows(trained["full"].config(), start_idx=TRAINED)
    with pytest.raises(
        CheckpointError,
        match="another tokenizer than that of builtin:opt-tiny",
    ):
        score(Plan(RunConfig(max_length=32), models, rows))
    (tmp_path / "plain.jsonl").write_text('{"text": "w1 w2"}\n' * 4)
    labelled = find_fine_tuned([trained["labels"]], None, None)
    with pytest.raises(DataError, match="has no field 'label'"):
        score(
            Plan(
                labelled[0].config,
                labelled,
                named_rows(labelled[0].config, dataset=str(tmp_path / "plain.jsonl")),
                label_names=["0", "1"],
            )
        )
    damaged = tmp_path / "damaged"
    shutil.copytree(trained["full"].checkpoints()[-1], damaged)
    shard = next(damaged.glob("rank*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="bytes instead of"):
        score(Plan(models[0].config, find_fine_tuned([], str(damaged), "x"), rows))


@pytest.mark.slow
def test_the_recipe_under_papermill(trained, tmp_path):
    few = ("-p", "samples", 1, "-p", "max_new_tokens", 4)
    done = papermill(
        NBS / "evaluate.ipynb",
        tmp_path / "out.ipynb",
        "-p",
        "run",
        trained["lora"].path,
        *few,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = trained["lora"].path / "report"
    assert json.loads((report / "evaluation.json").read_text())["verdict"] in (
        "better",
        "worse",
        "no difference shown",
    )
    assert (report / "evaluation.html").exists() and list(report.glob("*.png"))
    wrong = papermill(
        NBS / "evaluate.ipynb", tmp_path / "wrong.ipynb", "-p", "run", "runs/nothing", cwd=tmp_path
    )
    assert wrong.returncode != 0 and "no run directory or folder of runs" in outputs(
        tmp_path / "wrong.ipynb"
    )


def test_the_command(trained, tmp_path, monkeypatch, capsys):
    from multigpu_ft.cli import main

    monkeypatch.chdir(tmp_path)
    common = ["--samples", "0", "--nproc", "1", "--json", "--folder", str(tmp_path / "report")]
    monkeypatch.setattr(
        sys, "argv", ["multigpu-ft", "evaluate", str(trained["labels"].path), *common]
    )
    main()
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["verdict"] and said["folder"] == str(tmp_path / "report")
    monkeypatch.setattr(sys, "argv", ["multigpu-ft", "evaluate", "--run", "runs/nothing"])
    with pytest.raises(SystemExit, match="ConfigError: run='runs/nothing': no run directory"):
        main()


def test_several_runs_are_a_series(trained):
    folder = trained["full"].path.parent
    assert {run.name for run in find_runs(f"{folder / 'full'},{folder / 'lora'}")} == {
        "full",
        "lora",
    }
    with pytest.raises(ConfigError, match="common base"):
        evaluate([trained["full"], trained["labels"]])


@pytest.mark.gpu
@pytest.mark.parametrize("tuning", ["full", "qlora", "lora8bit"])
def test_on_a_gpu_in_half_precision(material, tuning, run_root):
    from multigpu_ft import launch

    run = launch(
        faults.config(
            material,
            run_root,
            end_idx=TRAINED,
            tuning=tuning,
            nproc=1,
            strategy="single",
            learning_rate=1e-2,
            dtype="bf16",
        )
    )
    measured = evaluate(run, nproc=1, samples=1, max_new_tokens=4).measured
    assert measured.about["dtype"] == "bfloat16" and measured.about["quantization"] == {
        "qlora": "4bit",
        "lora8bit": "8bit",
    }.get(tuning, "none")
    assert (
        measured.target.losses[measured.models[1]["name"]].sum()
        < measured.target.losses["base"].sum()
    )

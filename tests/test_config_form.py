"""The form, driven from Python: its inputs are widgets, and tests set their values as a browser does."""

import json
import re
import shlex
import subprocess
import sys
import threading
import time
from html import unescape
from types import SimpleNamespace

import ipywidgets
import pytest
import requests
from harness.browser import make_notebook
from harness.runs import until
from nbconvert import HTMLExporter
from papermill.cli import _resolve_type

import multigpu_ft
from multigpu_ft import ConfigError, DataError, RunConfig, config_form, form
from multigpu_ft.run.config import PRESET_NEEDS, PRESETS


@pytest.fixture(autouse=True)
def no_estimates(monkeypatch):
    """Delay estimates beyond the test, since each takes a core for seconds.

    Cancel the pending ones: ten minutes of other tests may follow in the same process."""
    monkeypatch.setattr(config_form, "_ESTIMATE_AFTER_S", 600)
    monkeypatch.setattr(config_form, "_CHECK_AFTER_S", 0.05)
    yield
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()


TINY = {"end_idx": 64, "batch_size": 8, "packing": "padded", "nproc": 1, "max_steps": 3}


def note(f, name):
    "Return the note beside a field."
    html = next(field.note.value for field in f._widgets.fields.fields if field.name == name)
    return unescape(re.sub(r"<[^>]*>", " ", html))


def shown(widget):
    return unescape(re.sub(r"<[^>]*>", "\n", widget.value))


def tab(f, group):
    return f._widgets.fields.tabs.titles[f._widgets.fields.groups.index(group)]


def called(f):
    "Return the configuration that the Python call launches."
    return eval(f.call, {"launch": lambda cfg: cfg, "RunConfig": RunConfig})


def commanded(f):
    "Return the configuration that the papermill command launches, read as papermill reads it."
    program, notebook, out, *words = shlex.split(f.command)
    assert (program, notebook.endswith("train.ipynb"), out) == (
        "papermill",
        True,
        "out.ipynb",
    ) and len(words) % 3 == 0
    triples = [words[i : i + 3] for i in range(0, len(words), 3)]
    assert {how for how, _, _ in triples} <= {"-p", "-r"}
    return RunConfig.from_namespace(
        {name: _resolve_type(value) if how == "-p" else value for how, name, value in triples}
    )


def agrees(f):
    assert called(f) == commanded(f) == f.config
    return True


def test_every_field_has_an_input_a_label_and_help_under_its_group():
    f = form()
    assert list(f.inputs) == list(RunConfig.model_fields)
    for name, info in RunConfig.model_fields.items():
        assert f.inputs[name].description == name and info.description in note(f, name)
        page = f._widgets.fields.tabs.children[
            f._widgets.fields.groups.index(info.json_schema_extra["group"])
        ]
        assert any(
            f.inputs[name] in (child, *getattr(child, "children", ())) for child in page.children
        )
    assert f.config == RunConfig() and agrees(f)


def test_an_input_is_of_its_fields_type_and_bounds():
    f, w = form(), ipywidgets
    types = {
        "strategy": w.Dropdown,
        "merge_adapter": w.Checkbox,
        "weight_decay": w.Text,
        "activation_checkpointing": w.Combobox,
        "batch_size": w.Text,
        "nproc": w.Text,
        "learning_rate": w.Text,
        "model": w.Text,
        "lora_r": w.Text,
    }
    assert {name: type(f.inputs[name]) for name in types} == types
    sliders = {
        field.name: (type(field.slider), field.slider.min, field.slider.max)
        for field in f._widgets.fields.fields
        if field.slider
    }
    assert sliders == {
        "lora_dropout": (w.FloatSlider, 0, 0.9),
        "weight_decay": (w.FloatSlider, 0, 1),
    }
    assert f.inputs["strategy"].options == tuple(
        (s, s) for s in ("auto", "single", "ddp", "fsdp", "accelerate", "zero1", "zero2", "zero3")
    )
    assert f.inputs["activation_checkpointing"].options == ("auto", "none", "full")
    assert f.inputs[
        "end_idx"
    ].placeholder == "empty: start_idx + slice_size or the end of the data" and "1 to 1024" in note(
        f, "lora_r"
    )


def test_a_new_field_appears_by_itself():
    from typing import Literal

    from pydantic import Field

    def made(annotation, default, **bounds):
        namespace = {
            "__annotations__": {"x": annotation},
            "x": Field(
                default,
                description="new; empty: nothing",
                json_schema_extra={"group": "new"},
                **bounds,
            ),
        }
        info = type("M", (multigpu_ft.run.config.BaseModel,), namespace).model_fields["x"]
        return config_form._Field("x", info, ipywidgets.Layout())

    number = made(int, 3, ge=1, le=8)
    assert isinstance(number.slider, ipywidgets.IntSlider) and not made(int, 3, ge=1, le=100).slider
    for text in ("5", "5.5", "50", ""):
        number.input.value = text
        assert number.input.value == text and number.slider.value == 5
    assert isinstance(made(bool | None, None).input, ipywidgets.Text)
    optional = made(Literal["a", "b"] | None, None)
    assert optional.input.options[0] == ("(empty)", None) and optional.read() == {"x": None}
    text = made(str | None, None)
    assert text.read() == {"x": None} and text.input.placeholder == "empty: nothing"


def test_an_error_is_shown_beside_its_field_until_it_is_fixed():
    f = form()
    f.inputs["batch_size"].value = "0"
    assert "✗ input should be greater than or equal to 1" in note(
        f, "batch_size"
    ) and "✗" not in note(f, "accum_steps")
    assert "✗" in tab(f, "training") and "✗" not in tab(f, "data")
    assert (
        f._widgets.run_button.disabled
        and "batch_size: input should be" in shown(f._widgets.message)
        and "launch(" not in f._widgets.code.value
    )
    assert "multigpu-wrong" in f.inputs["batch_size"]._dom_classes and "batch_size" in repr(f)
    for ask in (lambda: f.config, lambda: f.call, lambda: f.command):
        with pytest.raises(ConfigError, match="batch_size='0': input should be"):
            ask()
    f.inputs["batch_size"].value = "16"
    assert (
        "✗"
        not in note(f, "batch_size")
        + "".join(f._widgets.fields.tabs.titles)
        + f._widgets.message.value
    )
    assert (
        f.config.batch_size == 16
        and not f._widgets.run_button.disabled
        and "multigpu-wrong" not in f.inputs["batch_size"]._dom_classes
    )


def test_half_typed_input_is_kept():
    f = form()
    for text in ("1", "1e", "1e-", "1e-4", " 1e-4", "", "-"):
        f.inputs["learning_rate"].value = text
        assert f.inputs["learning_rate"].value == text
    assert "unable to parse" in note(f, "learning_rate")


def test_a_slider_and_its_number_move_together():
    f = form()
    number = f.inputs["weight_decay"]
    slider = next(
        field.slider for field in f._widgets.fields.fields if field.name == "weight_decay"
    )
    assert (slider.value, number.value) == (0.01, "0.01")
    slider.value = 0.25
    assert number.value == "0.25" and f.config.weight_decay == 0.25
    for text in ("0.", "0.0001", "2", "-", ".3"):
        number.value = text
        assert number.value == text, "typed text was rounded to the slider's step"
    assert slider.value == 0.3 and f.config.weight_decay == 0.3
    number.value = "0.0001"
    # the browser rounds the value it gets, and reports the rounded one
    slider.value = 0.0
    assert number.value == "0.0001" and f.config.weight_decay == 1e-4
    f._widgets.back.click()
    assert slider.value == 0.01


def test_fields_that_contradict_each_other():
    f = form()
    f.inputs["strategy"].value = "single"
    f.inputs["nproc"].value = "2"
    assert "use strategy='ddp'" in shown(f._widgets.message) and f._widgets.run_button.disabled
    assert (
        "✗" in note(f, "strategy")
        and "✗" in note(f, "nproc")
        and tab(f, "parallelism") == "parallelism •2 ✗"
    )
    f.inputs["nproc"].value = ""
    assert (
        "✗" not in f._widgets.message.value + note(f, "strategy") and f.config.strategy == "single"
    )
    f.inputs["hf_repo"].value = "no name"
    assert "user/name" in note(f, "hf_repo"), (
        "only one field is to blame, so the note belongs beside it"
    )


def test_a_secret_is_refused_and_not_shown():
    f, secret = form(), "hf_" + "a" * 34
    f.inputs["hf_repo"].value = secret
    assert "access token" in note(f, "hf_repo") and f._widgets.run_button.disabled
    assert all(
        secret not in widget.value for widget in (f._widgets.message, f._widgets.code)
    ) and secret not in note(f, "hf_repo") + repr(f)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_all_fields_and_changed_fields_are_marked(preset):
    f = form()
    f._build()
    f._widgets.picker.value = preset
    assert (
        f.config == RunConfig.preset(preset)
        and f.call == f"launch(RunConfig.preset({preset!r}))"
        and agrees(f)
    )
    assert (
        PRESET_NEEDS[preset] in shown(f._widgets.needs)
        and f._widgets.back.disabled
        and "•" not in "".join(f._widgets.fields.tabs.titles)
    )
    f.inputs["batch_size"].value, f.inputs["end_idx"].value = "3", "900"
    values = RunConfig.preset(preset)
    assert f"• preset: {values.batch_size}" in note(f, "batch_size")
    assert f"• preset: {values.end_idx or 'empty'}" in note(f, "end_idx")
    assert (tab(f, "training"), tab(f, "data")) == (
        "training •1",
        "data •1",
    ) and "multigpu-changed" in f.inputs["batch_size"]._dom_classes
    assert agrees(f) and f.call.endswith("end_idx=900, batch_size=3))")
    f.inputs["nproc"].value = "many"
    assert "•" in note(f, "batch_size") and tab(f, "parallelism") == "parallelism •1 ✗", (
        "an error elsewhere hides the changed fields"
    )
    f._widgets.back.click()
    assert f.config == RunConfig.preset(preset) and f._widgets.back.disabled
    f._widgets.picker.value = ""
    assert f.config == RunConfig() and f.call == "launch(RunConfig())"


def test_what_was_typed_is_kept_when_a_preset_is_chosen():
    f = form(RunConfig(run_root="mine"))
    f.inputs["batch_size"].value, f.inputs["learning_rate"].value = "3", "1e-3"
    f._widgets.picker.value = "opt-1.3b-arxiv"
    kept = {"run_root": "mine", "batch_size": 3, "learning_rate": 1e-3}
    assert f.config == RunConfig.preset("opt-1.3b-arxiv", **kept) and agrees(f)
    said = shown(f._widgets.needs)
    assert "kept as typed: run_root, batch_size, learning_rate" in said, said
    assert "Back to the preset resets them" in said
    f._widgets.picker.value = "distilbert-sst2"
    assert f.config == RunConfig.preset("distilbert-sst2", **kept)
    f._widgets.back.click()
    assert f.config == RunConfig.preset("distilbert-sst2")
    assert "kept" not in shown(f._widgets.needs)
    f._widgets.picker.value = "tiny"
    assert f.config == RunConfig(), "what was reset comes back"


def test_it_begins_with_a_dozen_fields_model_and_data_first():
    f = form()
    f._build()
    first = [name for name in config_form._BASIC if name not in f._widgets.view.idle]
    assert first[:3] == ["model", "tuning", "dataset"] and 10 <= len(first) <= 14
    pages = f._widgets.pages
    assert not pages.shows_all and f.inputs["model"] in pages.widget.children[0].children
    assert pages.button.description == f"All {len(RunConfig.model_fields)} settings"
    f.inputs["strategy"].value = "single"
    f.inputs["nproc"].value = "2"
    assert pages.button.description.endswith("settings •2 ✗"), "an error on another page is silent"
    pages.button.click()
    assert pages.shows_all and pages.widget.children[0].titles[:2] == ("model", "data")
    pages.button.click()
    assert not pages.shows_all


def hidden(f):
    return {
        field.name
        for field in f._widgets.fields.fields
        if all("multigpu-hidden" in part._dom_classes for part in field.parts)
    }


def test_fields_without_effect_are_hidden_until_they_have_one():
    f = form()
    f._build()
    assert {"lora_r", "label_field", "messages_field", "offload", "eval_every"} <= hidden(f)
    f.inputs["tuning"].value = "lora"
    assert "lora_r" not in hidden(f)
    f.inputs["lora_r"].value = "16"
    f.inputs["tuning"].value = "full"
    assert "lora_r" not in hidden(f), "a changed field can't be changed back"
    f.inputs["lora_r"].value = "8"
    assert "lora_r" in hidden(f)
    f.inputs["task"].value = "chat"
    assert "messages_field" not in hidden(f) and {"text_field", "label_field"} <= hidden(f)
    f.inputs["eval_start_idx"].value = "100"
    assert not {"eval_end_idx", "eval_every", "keep_best"} & hidden(f)
    f.inputs["max_length"].value = "x"
    assert "text_field" in hidden(f), "fields come and go while a number is typed"


REFUSED = {
    "merge_adapter": True,
    "offload": "optimizer",
    "deepspeed_config": "{}",
    "eval_every": 5,
    "patience": 2,
    "keep_best": True,
    "eval_end_idx": 50,
    "log_artifacts": True,
    "histogram_every": 5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_configuration_refuses_by_default_is_not_offered(name):
    with pytest.raises(ConfigError):
        RunConfig(**{name: REFUSED[name]})
    assert name in config_form._idle(RunConfig())


@pytest.fixture
def misnamed(tmp_path):
    "Return a form whose data set is misspelt, which it says, and the path that is meant."
    path = tmp_path / "reviews.csv"
    path.write_text("text,stars\n" + "good,1\nbad,0\n" * 10)
    f = form()
    f.inputs["dataset"].value = str(tmp_path / "review.csv")
    until(lambda: "✗ dataset" in note(f, "dataset"), 5, "a missing file")
    return f, path


def test_files_columns_and_rows_are_checked_beside_their_fields(misnamed):
    f, path = misnamed
    assert "reviews.csv" in note(f, "dataset")
    # a thread writes it after the note
    until(lambda: "file not found" in shown(f._widgets.message), 5, "the message")
    f.inputs["dataset"].value = str(path)
    f.inputs["text_field"].value, f.inputs["end_idx"].value = "txt", "50"
    until(lambda: "✗" in note(f, "end_idx"), 5, "rows beyond the end")
    assert "20 rows" in note(f, "end_idx") and "✗" not in note(f, "dataset")
    assert "did you mean 'text'" in note(f, "text_field")
    assert f.config.end_idx == 50, "the configuration itself is valid"
    f.inputs["text_field"].value, f.inputs["end_idx"].value = "text", "12"
    f.inputs["eval_start_idx"].value, f.inputs["eval_end_idx"].value = "12", "30"
    until(lambda: "eval_end_idx=20" in note(f, "eval_end_idx"), 5, "evaluation rows")
    f.inputs["eval_start_idx"].value = "5"
    assert "overlap" in note(f, "eval_start_idx")
    f.inputs["eval_start_idx"].value = f.inputs["eval_end_idx"].value = ""
    until(lambda: "✗" not in f._widgets.message.value, 5, "no errors")


def test_data_are_checked_while_another_field_is_wrong(misnamed):
    f, path = misnamed
    f.inputs["batch_size"].value = "0"
    f.inputs["dataset"].value, f.inputs["text_field"].value = str(path), "txt"
    until(lambda: "✗" not in note(f, "dataset"), 5, "the corrected file")
    assert "✗" in note(f, "batch_size") and "did you mean 'text'" in note(f, "text_field")


def test_run_looks_at_the_data_again_and_starts_nothing_that_must_fail(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n' * 8)
    f = form(RunConfig(run_root=str(tmp_path / "runs"), dataset=str(path)))
    f._build()
    path.unlink()
    f._widgets.run_button.click()
    said = shown(f._widgets.message)
    assert "not started:" in said and "file not found" in said
    assert f.run is None and not (tmp_path / "runs").exists()
    f.inputs["dataset"].value = "builtin:python-docs"
    assert "not started" not in shown(f._widgets.message)


def test_three_examples_are_shown_as_the_model_reads_them(tmp_path):
    path = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(5)))
    f = form(RunConfig(dataset=str(path), task="chat"))
    f._build()
    preview = f._widgets.preview
    preview.button.click()
    until(lambda: not preview.button.disabled, 90, "the examples")
    said = preview.html.value
    assert said.count('role="region"') == 3 and "as the model will read them" in said
    learnt = re.search(r"background[^>]*>([^<]*)", said.split('role="region"')[1])[1]
    assert learnt == "Hello.", said
    f.inputs["max_length"].value = "16"
    assert "of earlier settings" in preview.html.value
    assert preview.button.description == "Preview"
    f.inputs["max_length"].value = "512"
    assert preview.button.description == "Hide preview"
    preview.button.click()
    assert not preview.html.value and preview.button.description == "Preview"


def test_a_kernel_that_previews_and_checks_has_no_torch(tmp_path):
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    code = """import sys
from multigpu_ft import RunConfig, form
from multigpu_ft.config_form import _errors_of_data, _preview_words
f = form(RunConfig(dataset="a.csv"))
f._build()
assert not _errors_of_data(f.config) and "row 1" in _preview_words(f.config)
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=120)


def test_a_preview_that_fails_says_why(tmp_path, monkeypatch):
    f = form(RunConfig(dataset=str(tmp_path / "none.csv")))
    f._build()

    def fail(cfg):
        raise DataError("no <such> file")

    monkeypatch.setattr(config_form, "preview_html", fail)
    f._widgets.preview.button.click()
    until(lambda: not f._widgets.preview.button.disabled, 5, "an answer")
    assert "✗ no preview: no &lt;such&gt; file" in f._widgets.preview.html.value


def test_a_model_too_large_for_this_machine_needs_a_second_press(monkeypatch):
    started = []
    monkeypatch.setattr(config_form, "too_slow_here", lambda cfg: "no GPU here: days a step.")

    def launch(cfg, output):
        started.append(cfg)
        raise ConfigError("started")

    monkeypatch.setattr(config_form, "_launch", launch)
    f = form()
    f._build()
    button = f._widgets.run_button
    button.click()
    assert not started and button.description == "Run anyway" and not button.disabled
    assert "no GPU here: days a step." in shown(f._widgets.message)
    f.inputs["batch_size"].value = "2"
    assert button.description == "Run" and "no GPU" not in shown(f._widgets.message)
    button.click()
    assert not started
    button.click()
    assert [cfg.batch_size for cfg in started] == [2] and button.description == "Run"


def test_the_record_names_each_run_its_code_and_its_end(run_root):
    f = form(RunConfig(run_root=str(run_root), run_name="first", **TINY))
    f._build()
    f._record = SimpleNamespace(show=lambda record: said.append(record))
    said = []
    f._widgets.run_button.click()
    f.run.wait(timeout=120)
    until(lambda: not f._widgets.run_button.disabled, 10, "the end")
    record = said[-1]
    assert "first: done" in record["text/plain"] and f.call in record["text/plain"]
    assert "<pre" in record["text/html"] and "run_name=&#x27;first&#x27;" in record["text/html"]
    f.inputs["seed"].value = "5"
    assert said[-1] == record, "the record is of what was run, not of what is typed"


@pytest.mark.parametrize(
    "values",
    [
        {"model": "facebook/opt-125m"},
        {"tuning": "lora"},
        {"tuning": "lora", "learning_rate": 1e-3},
        {"learning_rate": 3.0000000000000004e-4},
        {"max_grad_norm": None, "save_minutes": None},
        {"run_name": "007", "revision": "1234567", "text_field": "True"},
        {"activation_checkpointing": 3},
        {"max_hours": float("inf")},
        {"run_root": "a folder/it's $HOME", "dataset": "a b.jsonl"},
        {"start_idx": -1},
        {"compile": True, "weight_decay": 1e-4},
        {**PRESETS["bert-sst2-lora"], "start_idx": 9, "eval_split": None},
        {**PRESETS["opt-1.3b-arxiv"], "learning_rate": 2e-5, "max_grad_norm": None},
    ],
)
def test_all_three_outputs_mean_the_same(values):
    cfg = RunConfig(**values)
    f = form(cfg)
    assert f.config == cfg and agrees(f)
    # from here on the configuration comes from the inputs
    f._build()
    f._update()
    assert f.config == cfg and agrees(f)
    assert not f._draft.preset or len(f.call) < len(repr(cfg)), (
        "a call that starts from a preset is shorter"
    )


def test_papermill_can_clear_the_fields_of_a_preset():
    "In the command, only `none` clears a field, and only some fields accept it."
    for preset in PRESETS:
        for name in PRESETS[preset]:
            if type(None) in config_form._kinds(RunConfig.model_fields[name]):
                # a last row needs a first one
                ends = {"eval_end_idx": "none"} if name == "eval_start_idx" else {}
                RunConfig.preset(preset, **{name: "none", **ends})


def test_the_learning_rate_follows_model_and_tuning_while_it_is_empty():
    f = form()
    rate = f.inputs["learning_rate"]
    assert rate.value == "" and rate.placeholder == "empty: 0.001"
    f.inputs["model"].value = "facebook/opt-125m"
    assert rate.placeholder == "empty: 2e-05" and f.config.learning_rate == 2e-5 and agrees(f)
    f.inputs["tuning"].value = "lora"
    assert (
        rate.placeholder == "empty: 0.0002"
        and f.call == "launch(RunConfig(model='facebook/opt-125m', tuning='lora'))"
    )
    f._widgets.picker.value = "opt-1.3b-arxiv"
    assert f.config.tuning == "lora" and rate.value == "5e-06"
    f._widgets.back.click()
    assert rate.value == "5e-06"
    rate.value = ""
    assert (
        f.config.learning_rate == 2e-5
        and "• preset: 5e-06" in note(f, "learning_rate")
        and agrees(f)
    )


def test_run_starts_a_run_and_waits_for_its_end(run_root):
    f = form(RunConfig(run_root=str(run_root), **TINY))
    f.inputs["seed"].value = "1"
    assert f.run is None
    f._widgets.run_button.click()
    assert f.run.config.seed == 1 and f.run.config.max_steps == 3
    assert (
        f._widgets.run_button.disabled
        and f"running: {f.run.name}" in shown(f._widgets.message)
        and "starts from the base model" in shown(f._widgets.message)
    )
    first = f.run
    # a second click that arrives late
    f._on_run(None)
    assert f.run is first
    f.run.wait(timeout=120)
    until(lambda: not f._widgets.run_button.disabled, 10, "Run can be pressed again")
    assert f"{f.run.name}: done" in shown(f._widgets.message) and len(f.run.metrics) == 3


def test_the_form_shows_what_launch_refuses(tmp_path):
    f = form(RunConfig(run_root=str(tmp_path / "runs"), dataset="no<such>.jsonl"))
    f._build()
    f._widgets.run_button.click()
    assert (
        "✗ dataset 'no<such>.jsonl'" in shown(f._widgets.message).replace("\n", "")
        and "multigpu-bad" in f._widgets.message.value
    )
    assert f.run is None and not f._widgets.run_button.disabled and not (tmp_path / "runs").exists()
    f.inputs["dataset"].value, f.inputs["resume_file"].value = "builtin:python-docs", "no<such>"
    f._widgets.run_button.click()
    assert "✗ CheckpointError:" in shown(f._widgets.message).replace("\n", "")
    assert f.run is None and not f._widgets.run_button.disabled and not (tmp_path / "runs").exists()


def test_the_form_shows_only_what_the_button_prints(capsys):
    import threading

    heard = config_form._Heard(sys.stdout)
    other = threading.Thread(target=lambda: heard.write("of a cell\n"))
    other.start()
    other.join()
    heard.write("of launch\n")
    assert heard.getvalue() == "of launch\n" and capsys.readouterr().out == "of a cell\n"


def test_an_estimate_appears_when_typing_pauses(monkeypatch):
    f = form()
    f._build()
    asked = []

    def estimate(ask, cfg):
        asked.append(cfg.batch_size)
        if cfg.batch_size == 99:
            raise ValueError("no such model")
        return SimpleNamespace(
            line=f"{cfg.batch_size} GB <each>.", remedies=["batch_size=1: 2.0 GiB"]
        )

    monkeypatch.setattr(config_form, "_ESTIMATE_AFTER_S", 0.6)
    monkeypatch.setattr(config_form, "estimate_with", estimate)
    for text in ("1", "12", "123"):
        f.inputs["batch_size"].value = text
    assert "estimating" in shown(f._widgets.memory.html) and not asked
    until(
        lambda: (
            "memory: 123 GB <each>. Nearest: batch_size=1: 2.0 GiB."
            in shown(f._widgets.memory.html)
        ),
        5,
        "an estimate",
    )
    f.inputs["batch_size"].value = "x"
    f.inputs["batch_size"].value = "99"
    until(
        lambda: "no estimate: no such model" in shown(f._widgets.memory.html),
        5,
        "why there is none",
    )
    assert asked == [123, 99], "estimated while the user was typing"


def test_several_forms_estimate_one_after_the_other(monkeypatch):
    running, at_once = [], []

    def estimate(ask, cfg):
        running.append(cfg)
        time.sleep(1)
        at_once.append(len(running))
        running.remove(cfg)
        return SimpleNamespace(line=f"{cfg.batch_size} GB.", remedies=[])

    monkeypatch.setattr(config_form, "_ESTIMATE_AFTER_S", 0)
    monkeypatch.setattr(config_form, "estimate_with", estimate)
    forms = [form(RunConfig(batch_size=size)) for size in (1, 2, 3)]
    for f in forms:
        f._build()
    until(
        lambda: all(
            f"memory: {size} GB." in shown(f._widgets.memory.html)
            for size, f in enumerate(forms, 1)
        ),
        10,
        "all estimates",
    )
    assert at_once == [1, 1, 1]


def test_an_estimate_is_dropped_when_a_field_changes(monkeypatch):
    dropped = []

    def estimate(ask, cfg):
        if cfg.batch_size == 1:
            until(lambda: ask._is_stopped, 10, "the end of what is out of date")
            dropped.append(cfg.batch_size)
            raise ValueError("it was stopped")
        return SimpleNamespace(line=f"{cfg.batch_size} GB.", remedies=[])

    monkeypatch.setattr(config_form, "_ESTIMATE_AFTER_S", 0)
    monkeypatch.setattr(config_form, "estimate_with", estimate)
    f = form(RunConfig(batch_size=1))
    f._build()
    until(lambda: f._widgets.memory._asked, 5, "an estimate of the first")
    f.inputs["batch_size"].value = "2"
    until(lambda: "memory: 2 GB." in shown(f._widgets.memory.html), 5, "that of the second")
    assert dropped == [1]


def test_outside_a_notebook_the_form_is_text_without_widgets(capsys):
    f = form(RunConfig(**TINY))
    f._ipython_display_()
    out = capsys.readouterr().out
    assert "launch(RunConfig(end_idx=64" in out and "papermill" in out and f._widgets is None


def test_the_form_is_quick():
    "The best of three, because other tests run beside this one."
    # fills imports and caches
    form()._build()
    built, typed = [], []
    for _ in range(3):
        start = time.perf_counter()
        f = form()
        f._build()
        built.append(time.perf_counter() - start)
        start = time.perf_counter()
        for i in range(20):
            f.inputs["batch_size"].value = str(i + 1)
            f.inputs["text_field"].value = f"t{i}"
        typed.append((time.perf_counter() - start) / 40)
    print(f"built in {min(built):.3f} s, a keystroke takes {1000 * min(typed):.2f} ms")
    assert min(built) < 0.5 and min(typed) < 0.02


FORM = "from multigpu_ft import RunConfig, form\nf = form(RunConfig(run_root='runs', nproc=1))\nf"


def top(page, label):
    "Return the distance of a button from the top of the form."
    button = page.page.get_by_role("button", name=label, exact=True).bounding_box()
    return round(button["y"] - page.output(0).bounding_box()["y"])


@pytest.mark.parametrize("width", [1280, pytest.param(900, marks=pytest.mark.slow)])
def test_nothing_moves_or_overflows_while_one_types(lab, shots, width):
    here = lab(size=(width, 1000), env={"OMP_NUM_THREADS": "1"})
    (here.folder / "reviews.csv").write_text("text,stars\n" + "good,1\nbad,0\n" * 20)
    page = here.open(make_notebook(here.folder / "a.ipynb", FORM))
    page.run_cell(0)
    page.wait_for_text("multigpu-ft train", 30, 0)
    place = top(page, "Run")
    page.type("dataset", "review.csv")
    page.wait_for_text("file not found", 20, 0)
    page.type("dataset", "reviews.csv")
    page.type("text_field", "txt")
    page.type("end_idx", "99")
    page.wait_for_text("did you mean 'text'", 20, 0)
    page.wait_for_text("which has 40 rows", 20, 0)
    assert top(page, "Run") == place, "an error moved the button"
    root = page.output(0).locator(".multigpu-form").first
    assert root.evaluate("e => e.scrollWidth <= e.clientWidth + 1"), "it is wider than its cell"
    page.screenshots(shots, f"form-{width}", page.output(0))
    page.field("model").focus()
    order = []
    for _ in range(5):
        order.append(page.page.evaluate("() => document.activeElement.labels[0].textContent"))
        page.page.keyboard.press("Tab")
    assert order == ["model", "tuning", "dataset", "task", "text_field"]


def test_the_saved_notebook_shows_what_was_run_without_a_kernel(lab, shots):
    here = lab(size=(1280, 1000), env={"OMP_NUM_THREADS": "1"})
    notebook = make_notebook(here.folder / "a.ipynb", FORM)
    page = here.open(notebook)
    page.run_cell(0)
    page.wait_for_text("multigpu-ft train", 30, 0)
    assert not page.page.get_by_text("not run; in the form:").is_visible()
    for name, value in {
        "run_name": "mine",
        "end_idx": 32,
        "batch_size": 8,
        "max_length": 64,
    }.items():
        page.type(name, value)
    page.wait_for_text("max_length=64", 20, 0)
    code = "launch(RunConfig(run_name='mine', end_idx=32, max_length=64, batch_size=8, nproc=1))"
    here.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("Copy Python")
    page.page.get_by_role("button", name="Copied").wait_for()
    assert page.page.evaluate("navigator.clipboard.readText()") == code
    page.click("Run")
    page.wait_for_text("mine: done · started", 120, 0)
    page.save()
    page.page.close()
    saved = json.loads(notebook.read_text())["cells"][0]["outputs"]
    texts = ["".join(output["data"]["text/plain"]) for output in saved]
    assert any(text.startswith("mine: done") and code in text for text in texts)
    converted = unescape(HTMLExporter().from_filename(str(notebook))[0])
    assert "mine: done" in converted and code in converted
    headers = {"Authorization": f"token {here.token}"}
    for session in requests.get(f"{here.url}api/sessions", headers=headers).json():
        requests.delete(f"{here.url}api/sessions/{session['id']}", headers=headers)
    page = here.open(notebook)
    page.wait_for_text("mine: done", 20, 0)
    time.sleep(3)  # JupyterLab looks for a missing widget for two seconds
    shown = page.output(0).inner_text()
    assert code in shown and "Error displaying widget" not in shown
    page.screenshots(shots, "form-reopened")

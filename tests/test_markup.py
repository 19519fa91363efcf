"""Texts from outside stay texts: no name, log, exception, row or answer becomes an element of a page.

A marker that begins an element wherever it isn't escaped stands in every place a text can come from.
"""

import json
import threading
from html.parser import HTMLParser
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
import yaml
from harness import fuzz
from markdown_it import MarkdownIt

from multigpu_ft import ConfigError, RunConfig, RunDir, config_form, form
from multigpu_ft.deploy import kubernetes
from multigpu_ft.deploy.sagemaker import SageMakerJob
from multigpu_ft.deploy.skypilot import SkyPilotTask
from multigpu_ft.diagnostics import Checkup, Row
from multigpu_ft.display import panel, preview
from multigpu_ft.display.plots import Curve, curve_svg
from multigpu_ft.display.tables import html_table, short_html, text_table
from multigpu_ft.evaluation.comparison import Measured, Scores
from multigpu_ft.evaluation.report import Evaluation, _clean
from multigpu_ft.generation.api import Answers
from multigpu_ft.hub.model_card import MARK, model_card
from multigpu_ft.launcher.api import runs
from multigpu_ft.launcher.run import Run
from multigpu_ft.launcher.slices import Slices
from multigpu_ft.memory import api as memory
from multigpu_ft.memory import scaling
from multigpu_ft.run.errors import printable
from multigpu_ft.run.failures import tail
from multigpu_ft.run.numbers import one_line
from multigpu_ft.run.run_dir import NOTHING_TO_DO

# in a text, in an attribute with either kind of quotes, and decoded once too often
NAME = "p\" onplanted=\"1' onplanted='1'><planted onplanted=1>&lt;planted2>"
MARKER = f"{NAME}</pre></title></style></svg><planted>"
# a refusal, which is what damaged files deserve
REFUSED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class Page(HTMLParser):
    "Reads a page and fails on anything that the marker made of it."

    _SAID = ("title", "alt", "aria-label")

    def __init__(self, html):
        super().__init__()
        self.texts, self.tags = [], set()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        assert "planted" not in tag, f"an element: {self.get_starttag_text()}"
        for name, value in attributes:
            assert "planted" not in name, f"an attribute: {self.get_starttag_text()}"
            assert "planted" not in (value or "") or name in self._SAID, (name, value)
            if name in self._SAID:
                self.texts.append(value)

    def handle_data(self, text):
        assert not (self.cdata_elem and "planted" in text), f"in {self.cdata_elem}: {text}"
        self.texts.append(text)

    def handle_comment(self, text):
        assert "planted" not in text

    handle_decl = unknown_decl = handle_pi = handle_comment

    @property
    def text(self):
        return "".join(self.texts)


def leaves(value, path=()):
    "Return the paths of all values in `value` that hold no others."
    if isinstance(value, dict | list) and value:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for name, part in parts for leaf in leaves(part, (*path, name))]
    return [path]


def at(value, path):
    return at(value[path[0]], path[1:]) if path else value


def planted(value, *paths):
    "Return a copy of `value` with the marker in these places."
    copy = json.loads(json.dumps(value))
    for *above, last in paths:
        at(copy, above)[last] = MARKER
    return copy


def widgets(root):
    "Yield `root` and all widgets in it."
    yield root
    for child in getattr(root, "children", ()):
        yield from widgets(child)


def pages_of(root):
    return [w.value for w in widgets(root) if isinstance(w, ipywidgets.HTML) and w.value]


# -- runs -----------------------------------------------------------------------------------------------------------

STATUS = {
    **fuzz.STATUS,
    "activity": "saving",
    "message": "the end",
    "kept": "/kept",
    "merged": "merged",
    "pushed_to": "https://host/me/mine",
    "not_uploaded": ["a"],
    "skipped_steps": 2,
    "device": "cuda",
    "packing": "packed",
    "texts": 5000,
    "tokens": 9000,
    "epoch_steps": 9,
    "world_size": 2,
    "session_end": 9e9,
    "eval_before": {"step": 0, "loss": 2.0, "accuracy": 0.5, "f1": 0.5},
    "eval_after": {"loss": 1.0, "accuracy": 0.7, "f1": 0.6},
    "attempts": [{"state": "failed", "step": 2, "launched": 1.0, "ended": 2.0, "first_step": 1}],
    "failure": fuzz.FAILURE,
    "generated": {"written": {"answers.jsonl": 3}, "sequences": 3},
}
METRIC = {
    **fuzz.METRIC,
    "eval_loss": 2.0,
    "eval_accuracy": 0.5,
    "step_s": 0.5,
    "peak_memory_gib": [1.0, 2.0],
    "skipped_steps": 1,
    "sequences_per_second": 2.0,
    "accepted": 1,
    "reward_errors": 1,
}
STATES = ("starting", "running", "stopping", "done", NOTHING_TO_DO, "stopped", "failed")


@pytest.fixture
def run_dir(tmp_path):
    "Return a run directory in which each name is the marker, beside another run with that name."
    cfg = RunConfig(run_root=str(tmp_path), dataset=MARKER, eval_start_idx=5000, task="chat")
    for number in range(2):
        made = RunDir.create(cfg)
        made.write_config(cfg)
        made.path.rename(tmp_path / f"{NAME}{number}")
    made = RunDir(tmp_path / f"{NAME}0")
    fuzz.make_checkpoint(made, cfg, NAME)
    for log in (NAME, "rank0", "agent"):
        made.log_file(log).write_text(f"{MARKER}\n")
    (made.path / "config.json").write_text(
        json.dumps({**cfg.model_dump(), "run_name": None, "log_every": 1})
    )
    write(made, STATUS, METRIC)
    write(RunDir(tmp_path / f"{NAME}1"), STATUS, METRIC)
    return made


def write(run_dir, status, *metrics):
    (run_dir.path / "status.json").write_text(json.dumps(status))
    lines = [json.dumps({**metric, "step": i + 1}) for i, metric in enumerate(metrics)]
    (run_dir.path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))


def shown_of(run_dir):
    "Return the pages of a run: its end, its panel with all that can be unfolded, and its tables."
    run = Run(run_dir)
    live = panel._PanelWidgets(run, lambda: None)
    pages = []
    for opened in range(len(live._folds.widget.children)):
        live._folds.widget.selected_index = opened
        live.draw()
        pages += pages_of(live.root)
    others = [w for w in widgets(live.root) if isinstance(w, ipywidgets.SelectMultiple)]
    for chooser in others:
        chooser.value = chooser.options
        live.draw()
        pages += pages_of(live.root)
    live.close()
    pages += [panel.summary_html(run), run.attempts._repr_html_()]
    return [*pages, runs(run_dir.path.parent)._repr_html_()]


@pytest.mark.parametrize("kind", ["training", "generation"])
@pytest.mark.parametrize("state", STATES)
def test_texts_of_a_run_stay_texts(run_dir, state, kind):
    status = {**STATUS, "state": state} | ({"unit": "sequences"} if kind == "generation" else {})
    texts = [
        path
        for path in leaves(status)
        if isinstance(at(status, path), str) and path not in [("state",), ("line",), ("packing",)]
    ]
    everywhere = planted(status, *texts)
    everywhere["generated"]["written"] = {MARKER: 3}
    write(run_dir, everywhere, METRIC, METRIC)
    pages = shown_of(run_dir)
    text = "".join(Page(page).text for page in pages)
    assert MARKER in text and NAME in text, "it is shown as it is"
    for place in leaves(status):
        write(run_dir, planted(status, place), METRIC, METRIC)
        try:
            pages = shown_of(run_dir)
        except REFUSED:
            continue
        for page in pages:
            Page(page)


@pytest.mark.parametrize("kind", ["training", "generation"])
def test_numbers_that_are_texts_become_no_elements(run_dir, kind):
    status = {**STATUS, "state": "running"} | ({"unit": "s"} if kind == "generation" else {})
    for name in METRIC:
        write(run_dir, status, METRIC, planted(METRIC, (name,)))
        try:
            pages = shown_of(run_dir)
        except REFUSED:
            continue
        for page in pages:
            Page(page)


def test_the_names_of_curves_are_text(run_dir):
    curve = Curve(run_dir.path / "metrics.jsonl")
    write(run_dir, STATUS, METRIC, METRIC)
    curve.read()
    curve.over = [(MARKER, curve)]
    assert MARKER in Page(curve_svg(curve)).text


def test_slices_are_a_table():
    slices = object.__new__(Slices)
    slices.table = lambda: [{"slice": MARKER, "checkpoint": MARKER}]
    assert Page(slices._repr_html_()).text.count(MARKER) == 2


# -- examples, answers, checks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [None, MARKER])
def test_examples_are_shown_as_text(monkeypatch, label):
    kinds = ("trained", "read", "special trained", "special read")
    example = {
        "row": 1,
        "label": label,
        "pieces": [[MARKER, kind] for kind in kinds],
        "tokens": 4,
        "trained": 2,
        "whole": 9,
        "rest": MARKER,
    }
    monkeypatch.setattr(preview, "_ask", lambda cfg: [example])
    page = Page(preview.preview_html(RunConfig()))
    assert page.text.count(MARKER) == 5 + (label is not None)


def test_answers_are_shown_as_text(run_dir):
    made = {"accepted": None, "stopped": 1, "made": 0, "written": {MARKER: 1}, "sequences": 1}
    told = {"questions": 1, "generated": made, "remarks": [MARKER], "message": MARKER}
    write(run_dir, {**STATUS, **told})
    answers = Answers(Run(run_dir), run_dir.path / "answers.jsonl")
    turns = [{"role": role, "content": MARKER} for role in ("user", "assistant")]
    answers.path.write_text(json.dumps({"messages": turns, "reward": 1.0}) + "\n")
    assert Page(answers._repr_html_()).text.count(MARKER) == 3 + 4


def test_checks_are_shown_as_text():
    page = Page(Checkup([Row(MARKER, "bad", MARKER, MARKER)])._repr_html_())
    assert page.text.count(MARKER) == 3


def test_tables_escape_all_but_html():
    page = Page(html_table([(MARKER, MARKER)], (MARKER, short_html(MARKER, 20))))
    assert page.text.count(MARKER) == 4, "a header and two cells; a long name in its title"


# -- evaluations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "not finite", "chat", "classification"])
def test_evaluations_show_texts_as_text(tmp_path, kind):
    count, names = 40, [f"base {MARKER}", MARKER]
    truth = np.arange(count) % 2
    labels = (truth, {name: truth for name in names}) if kind == "classification" else ()
    losses = {name: np.linspace(1 + i, 3, count) for i, name in enumerate(names)}
    if kind == "not finite":
        losses[names[1]][3] = np.nan
    scored = Scores(
        MARKER,
        0,
        count,
        np.arange(count),
        np.full(count, 9),
        np.full(count, 8 if kind != "classification" else 1),
        losses,
        *labels,
    )
    measured = Measured(
        kind if kind in ("chat", "classification") else "causal-lm",
        [{"name": name, "trained": []} for name in names],
        scored,
        scored if kind == "text" else None,
        [{"prompt": MARKER, "texts": {name: f"{MARKER}{name}" for name in names}}],
        about={MARKER: MARKER, "remarks": [MARKER]},
        label_names=[MARKER, MARKER],
    )
    found = Evaluation(measured, tmp_path)
    found.rows = lambda count=5: [
        {
            "row": 1,
            "base": 2.0,
            "newest": 1.0,
            "change": change,
            **dict.fromkeys(("text", "text_pair", "question", "answer"), MARKER),
            **dict.fromkeys(("label", "predicted_base", "predicted_newest"), MARKER),
        }
        for change in (-1.0, 1.0)
    ]
    found.save()
    for page in (found._repr_html_(), (tmp_path / "evaluation.html").read_text()):
        assert Page(page).text.count(MARKER) > 20


# -- before a run ---------------------------------------------------------------------------------------------------


def test_the_form_shows_what_is_typed_and_refused_as_text(monkeypatch):
    monkeypatch.setattr(config_form, "_ESTIMATE_AFTER_S", 600)
    monkeypatch.setattr(config_form, "_CHECK_AFTER_S", 600)
    monkeypatch.setattr(config_form, "_errors_of_data", lambda cfg: {})
    monkeypatch.setattr(config_form, "too_slow_here", lambda cfg: MARKER)

    def refuse(*arguments):
        raise ConfigError(MARKER)

    def close(ask, cfg):
        return SimpleNamespace(line=MARKER, remedies=[MARKER])

    monkeypatch.setattr(config_form, "preview_html", refuse)
    monkeypatch.setattr(config_form, "_launch", refuse)
    monkeypatch.setattr(config_form, "estimate_with", close)
    f = form(RunConfig(model=MARKER, dataset=MARKER, text_field=MARKER))
    root, made = f._build().root, f._widgets
    pages = pages_of(root)
    made.run_button.click()
    pages += pages_of(root)
    made.run_button.click()
    pages += pages_of(root)
    made.preview.button.click()
    for thread in threading.enumerate():
        if thread.name == "form-preview":
            thread.join(10)
    made.memory._estimate(f.config)
    pages += pages_of(root)
    with f._lock:
        f._on_found(f.config, {"dataset": MARKER})
    pages += pages_of(root)
    f.inputs["run_name"].value = MARKER
    f.inputs["nproc"].value = MARKER
    f.inputs["model"].value = "other"
    pages += pages_of(root)
    made.fields.fields[0].tell("", MARKER)
    pages.append(made.fields.fields[0].note.value)
    text = "".join(Page(page).text for page in pages)
    assert text.count(MARKER) > 10
    for timer in (made.memory._timer, f._data._timer):
        timer.cancel()


def test_the_forms_record_and_remarks_are_text(run_dir, monkeypatch):
    write(run_dir, planted({**STATUS, "state": "failed"}, ("failure", "text")), METRIC)
    started = config_form._Started(Run(run_dir), MARKER, MARKER)
    record = config_form._record("", [started])["text/html"]
    assert Page(record).text.count(MARKER) == 3
    assert MARKER in Page(config_form._record(MARKER, [])["text/html"]).text
    runner = config_form._Runner(lambda: None)
    monkeypatch.setattr(config_form, "_too_slow", lambda cfg: None)
    monkeypatch.setattr(config_form, "_launch", lambda cfg, output: (Run(run_dir), MARKER))
    monkeypatch.setattr(runner, "_watch", lambda run: None)
    runner.start(RunConfig(), "")
    assert MARKER in Page(runner.remark).text
    monkeypatch.undo()
    runner.busy, runner.remark = MARKER, ""
    draft = SimpleNamespace(complaints=[])
    assert Page(config_form._message(draft, runner)).text.count(MARKER) == 1
    runner._watch(SimpleNamespace(name=MARKER, state=MARKER, wait=lambda panel: 1 / 0))
    assert Page(runner.remark).text.count(MARKER) == 2


def test_estimates_are_shown_as_text(monkeypatch):
    monkeypatch.setattr(memory, "png_bytes", lambda figure: b"")
    monkeypatch.setattr(memory, "_table", lambda found: [(MARKER, MARKER)])
    monkeypatch.setattr(memory, "_chosen", lambda found: MARKER)
    found = SimpleNamespace(
        line=MARKER,
        verdict=memory.DOES_NOT,
        fits=False,
        remarks=[MARKER],
        remedies=[f"{MARKER}: {MARKER}"],
        assumptions=[MARKER],
        plot=lambda: None,
    )
    assert Page(memory._html(found)).text.count(MARKER) == 9
    monkeypatch.setattr(scaling, "png_bytes", lambda figure: b"")
    monkeypatch.setattr(scaling, "_name", lambda paper: MARKER)
    row = {MARKER: MARKER}
    found = SimpleNamespace(
        lines=[MARKER], assumptions=MARKER, table=lambda: [row], plot=lambda: None
    )
    assert Page(scaling._html(found)).text.count(MARKER) == 6


def test_deployments_are_shown_as_text(monkeypatch):
    monkeypatch.setattr(kubernetes, "_facts", lambda *arguments: [(MARKER, MARKER)])
    namespace = {"kind": "Namespace", "metadata": {"name": MARKER}}
    manifests = kubernetes.Manifests(MARKER, [namespace, {**namespace, "kind": MARKER}], MARKER)
    manifests.remarks = [MARKER]
    monkeypatch.setattr(kubernetes.Manifests, "pod", {})
    assert Page(manifests._repr_html_()).text.count(MARKER) == 8
    places = {"use_spot": True, "accelerators": MARKER}
    task = SkyPilotTask(
        RunConfig(), {"name": MARKER, "num_nodes": 1, "resources": places}, [MARKER]
    )
    assert Page(task._repr_html_()).text.count(MARKER) >= 3
    request = {
        "ResourceConfig": {"InstanceCount": 1, "InstanceType": MARKER},
        "EnableManagedSpotTraining": True,
    }
    job = SageMakerJob(RunConfig(), request, MARKER, "s3://x", [MARKER])
    assert Page(job._repr_html_()).text.count(MARKER) >= 3


# -- model cards ----------------------------------------------------------------------------------------------------

IN_MARKDOWN = (
    f"{NAME} `planted` | planted | [planted](javascript:planted) ![](planted)\n\n"
    f"---\nlicense: planted\n---\n\n# planted\n\n```\nplanted\n{MARK}\n<planted>"
)
NAMED = {"model": "a/b", "dataset": "c/d"}


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": f"/data/{IN_MARKDOWN}", "model": "/models/" + IN_MARKDOWN.replace("/", "")},
        {**NAMED, "text_field": IN_MARKDOWN, "dataset_split": IN_MARKDOWN},
        {**NAMED, "eval_dataset": IN_MARKDOWN, "deepspeed_config": None},
    ],
)
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_card_shows_names_as_text(tmp_path, settings, tuning):
    cfg = RunConfig(run_root=str(tmp_path), run_name="x", tuning=tuning, **settings)
    run_dir = RunDir.create(cfg)
    told = ("dtype", "strategy")
    run_dir.update_status(**dict.fromkeys(told, IN_MARKDOWN), export="export")
    (run_dir.path / "report" / "evaluation.json").write_text(
        json.dumps({"verdict": {IN_MARKDOWN: IN_MARKDOWN}})
    )
    card = model_card(run_dir)
    _, head, body = card.split("---\n", 2)
    assert not {"license", "planted"} & {*yaml.safe_load(head)}
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(body)
    every = [t for token in tokens for t in (token, *(token.children or ()))]
    for token in every:
        if token.type in ("html_inline", "html_block"):
            assert token.content.strip() == MARK, token
        assert token.type not in ("image", "hr"), token
        assert "planted" not in str(token.attrs), token
    titles = [every[i + 1].content for i, t in enumerate(every) if t.type == "heading_open"]
    assert not any("planted" in title for title in titles), titles
    assert any(t.type == "table_open" for t in every)
    for fence in (t for t in every if t.type == "fence"):
        compile(fence.content, "card", "exec")


# -- terminals ------------------------------------------------------------------------------------------------------

CONTROLS = "\x1b[2J\x1b]0;planted\x07\x9b31m\r\u202egnp.exe"


def test_a_terminal_obeys_no_text_from_outside(run_dir, capsys, monkeypatch):
    told = {"asked_name": None, "export": CONTROLS, "failure": {"text": CONTROLS}}
    write(run_dir, {**STATUS, "state": "failed", **told})
    run_dir.log_file("rank0").write_text(f"\x1b[31mred\x1b[0m {CONTROLS.replace(chr(13), '')}\n")
    run = Run(run_dir)
    failure = {"rank": 0, "exitcode": 1, "pid": 9}
    said = [
        panel_line(CONTROLS, capsys),
        text_table([[CONTROLS, "x"]], [CONTROLS, "y"]),
        str(ConfigError(CONTROLS)),
        str(fuzz.failure_of(run_dir, failure)),
        str(fuzz.failure_of(run_dir, {**failure, "type": "E", "text": CONTROLS})),
        fuzz.failure_of(run_dir, {**failure, "traceback": CONTROLS}).traceback,
        fuzz.cli.describe(run),
        repr(Checkup([Row(CONTROLS, "ok", CONTROLS)])),
        tail(run_dir.log_file("rank0")),
        one_line(CONTROLS, 80),
        _clean(f"{CONTROLS}\r\n"),
    ]
    monkeypatch.setattr(
        run._answering, "ask", lambda question, base, show, *_, **__: show(CONTROLS)
    )
    run.ask("?")
    said.append(capsys.readouterr().out)
    with pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(fuzz.cli, "_VERBS", {"sync": refuse_as_a_library})
        monkeypatch.setattr("sys.argv", ["multigpu-ft", "sync"])
        fuzz.cli.main()
    said.append(ended.value.code)
    for text in said:
        assert "planted" in text or "red" in text
        assert printable(text) == text, repr(text)
    assert "red \\x1b[2J" in said[3], "colours are left out, the rest is spelt out"


def refuse_as_a_library(arguments, as_json):
    raise ValueError(CONTROLS)


def panel_line(text, capsys):
    panel.LiveLine().show(lambda: text, final=True)
    panel.say(text)
    return capsys.readouterr().err

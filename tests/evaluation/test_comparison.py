"""The statistics of an evaluation, its verdicts, pictures and files."""

import csv
import json
import re
import subprocess
import sys
from io import BytesIO

import numpy as np
import pytest
from harness.browser import chromium
from harness.runs import REPO
from PIL import Image
from scipy import stats

from multigpu_ft.data.labels import scores
from multigpu_ft.evaluation.comparison import (
    BETTER,
    NO_DIFFERENCE,
    WORSE,
    Compared,
    Comparison,
    Measured,
    Scores,
)
from multigpu_ft.evaluation.report import Evaluation
from multigpu_ft.evaluation.statistics import (
    _student,
    _tail,
    mcnemar,
    ratio_estimates,
    share_difference,
    share_estimate,
)


def made_up(n=400, falls=(0.2,), dataset="abstracts.jsonl", start=5000, seed=0, names=None):
    "Return losses of a base, and of one checkpoint per entry of `falls`, in nats per token below it."
    rng = np.random.default_rng(seed)
    targets = np.clip(rng.lognormal(5, 0.7, n), 2, 512).astype(int)
    base = 4.2 - 0.15 * np.log(targets) + rng.normal(0, 0.35, n)
    each = [base, *(base - fall * rng.gamma(4, 0.25, n) + rng.normal(0, 0.1, n) for fall in falls)]
    names = names or ["base", *(f"c{i}" for i in range(1, len(falls) + 1))]
    losses = {name: targets * e for name, e in zip(names, each, strict=True)}
    return Scores(
        dataset, start, start + n, np.arange(start, start + n), targets + 1, targets, losses
    )


def evaluation(folder, scored, forgetting=None, trained=(), samples=(), **about):
    "Return an `Evaluation` whose i-th model after the base was trained on the first i of the ranges `trained`."
    ledger = [{"start_idx": start, "end_idx": end, "epochs": 1} for start, end in trained]
    models = [{"name": name, "trained": ledger[:i]} for i, name in enumerate(scored.losses)]
    return Evaluation(
        Measured("causal-lm", models, scored, forgetting, list(samples), about=about), folder
    )


def classified(n=600, right=(0.55, 0.8), labels=3, seed=0):
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, labels, n)
    wrong = (truth + rng.integers(1, labels, n)) % labels
    predicted = {
        name: np.where(rng.random(n) < share, truth, wrong)
        for name, share in zip(("base", "new"), right, strict=True)
    }
    losses = {"base": rng.gamma(3, 0.33, n), "new": rng.gamma(2, 0.28, n)}
    return Scores(
        "dev.tsv",
        0,
        n,
        np.arange(n),
        rng.integers(5, 60, n),
        np.ones(n, int),
        losses,
        truth,
        predicted,
    )


# -- numbers --------------------------------------------------------------------------------------------------------


def test_mcnemar_is_the_exact_binomial_test():
    rng = np.random.default_rng(0)
    tables = [
        (0, 0),
        (1, 0),
        (7, 7),
        *rng.integers(0, 60, (200, 2)),
        *rng.integers(0, 3000, (30, 2)),
        (100_500, 99_700),
        (1_000_000, 1_004_000),
    ]
    for gained, lost in tables:
        expected = stats.binomtest(int(gained), int(gained + lost)).pvalue if gained + lost else 1.0
        assert mcnemar(int(gained), int(lost)) == pytest.approx(expected, rel=1e-7, abs=1e-300), (
            gained,
            lost,
        )


def test_quantiles_and_wilson():
    for n in (10, 11, 30, 400, 100_000):
        assert _student(n - 1) == pytest.approx(stats.t.ppf(0.975, n - 1), abs=1e-4)
        assert _tail(n) == pytest.approx(
            stats.norm.cdf(np.sqrt(n / (n - 1)) * stats.t.ppf(0.025, n - 1)), abs=1e-5
        )
    for hits, n in ((0, 5), (5, 5), (30, 40), (700, 872)):
        found, expected = (
            share_estimate(hits, n),
            stats.binomtest(hits, n).proportion_ci(method="wilson"),
        )
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_a_set_without_weights_is_nearly_students_interval():
    values = np.random.default_rng(0).normal(1, 2, 400)
    [found], expected = (
        ratio_estimates(values[:, None], np.ones(400)),
        stats.ttest_1samp(values, 0).confidence_interval(),
    )
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.03)


def test_columns_do_not_depend_on_each_other_or_on_how_many_are_drawn_at_once(monkeypatch):
    rng = np.random.default_rng(0)
    values, weights = rng.normal(0, 1, (50, 3)), rng.integers(1, 9, 50).astype(float)

    def numbers(values):
        return np.array([(e.value, e.low, e.high) for e in ratio_estimates(values, weights)])

    together = numbers(values)
    assert np.allclose(numbers(values[:, 1:2]), together[1:2]) and np.allclose(
        numbers(10 * values), 10 * together
    )
    monkeypatch.setattr("multigpu_ft.evaluation.statistics._AT_ONCE", 777)
    assert np.allclose(numbers(values), together)


@pytest.fixture(scope="module")
def simulation():
    sys.path.insert(0, str(REPO / "bench"))
    import intervals

    return intervals


@pytest.mark.parametrize(
    "shape", ["equal_lengths", "gain_grows_with_length", "skewed", "loss_of_a_model"]
)
def test_intervals_contain_the_truth_as_often_as_they_say(simulation, shape):
    """With 300 data sets of 40 texts, a coverage of 95% is known to ±1.3 points.
    bench/results/intervals.json has 1,000 of each, and more shapes."""
    found = simulation.coverage(shape, 40, 300, draws=1000)
    assert 0.91 <= found["held"] <= 0.99, found


def test_the_recorded_simulation_has_the_promised_coverage():
    results = json.loads((REPO / "bench" / "results" / "intervals.json").read_text())
    for row in results["intervals"]:
        assert row["sets"] == 1000 and row["held"] >= {
            "very_heavy_tails": 0.9,
            "skewed_and_grows_with_length": 0.915,
        }.get(row["shape"], 0.93), row
        assert row["held"] <= 0.985, row
    assert all(row["held"] >= 0.93 for row in results["accuracy"])
    assert all(row[NO_DIFFERENCE] >= 0.93 for row in results["nothing_to_find"])


def test_a_constant_change_and_a_single_changed_text():
    tokens = np.random.default_rng(0).integers(5, 500, 100).astype(float)
    [same], [constant] = (
        ratio_estimates(np.zeros((100, 1)), tokens),
        ratio_estimates(-0.2 * tokens[:, None], tokens),
    )
    assert (same.value, same.low, same.high) == (0, 0, 0) and (
        constant.low,
        constant.high,
    ) == pytest.approx((-0.2, -0.2))
    single = np.zeros((100, 1))
    single[3] = -50
    [one] = ratio_estimates(single, tokens)
    assert one.low <= one.value <= one.high and np.isfinite(one.low) and not one.excludes_zero, (
        "one text of 100 is no evidence"
    )
    giant = np.where(np.arange(100) == 0, 1e9, 1.0)
    [pulled] = ratio_estimates(
        -0.2 * giant[:, None] * np.random.default_rng(1).gamma(2, 1, (100, 1)), giant
    )
    assert np.isfinite([pulled.low, pulled.high]).all()


# -- verdicts -------------------------------------------------------------------------------------------------------


def verdict(scored, names=None, task="causal-lm"):
    return Comparison(scored, names or list(scored.losses), task).newest.to_base


def changed(scored, change):
    "Return `scored` with a second model, whose losses are a function of the base's."
    return Scores(
        **{
            **vars(scored),
            "losses": {"base": scored.losses["base"], "new": change(scored.losses["base"].copy())},
        }
    )


def test_identical_models_differ_in_nothing():
    same = verdict(changed(made_up(), lambda base: base))
    assert (
        same.verdict == NO_DIFFERENCE
        and same.loss.value == same.loss.low == same.loss.high == 0
        and "same on every example" in same.text
    )
    truth = classified()
    twice = {
        kind: dict.fromkeys(truth.losses, getattr(truth, kind)["base"])
        for kind in ("losses", "predicted")
    }
    same = verdict(Scores(**{**vars(truth), **twice}), task="classification")
    assert same.verdict == NO_DIFFERENCE and same.p_value == 1 and same.gained == same.lost == 0


def test_rounding_is_no_difference():
    for factor in (1 - 1e-7, 1 + 1e-5):
        found = verdict(changed(made_up(), lambda base, factor=factor: base * factor))
        assert (
            found.verdict == NO_DIFFERENCE and found.loss.excludes_zero and "rounding" in found.text
        )
    assert verdict(changed(made_up(), lambda base: base * 0.999)).verdict == BETTER


def test_the_verdict_states_its_numbers():
    found = verdict(made_up(falls=(0.2,)))
    number = r"\d\.\d{3,4}"
    pattern = (
        rf"the loss falls by ({number}) nats per token "
        rf"\(95 % interval ({number}) to ({number})\), "
        r"perplexity ([\d.]+) → ([\d.]+), on 400 examples"
    )
    value, low, high, before, after = map(float, re.fullmatch(pattern, found.text).groups())
    assert (
        value == pytest.approx(-found.loss.value, abs=6e-4)
        and low < value < high
        and np.log(before / after) == pytest.approx(value, abs=5e-3)
    )
    assert verdict(made_up(falls=(-0.2,))).text.startswith("the loss rises by 0.191 nats per token")
    assert "contains 0" in verdict(made_up(falls=(0.0,), seed=2)).text


@pytest.mark.parametrize("n", [0, 1, 2, 9])
def test_few_examples(n, tmp_path):
    found = evaluation(tmp_path, made_up(n))
    record = found.record()
    assert record["verdict"] == NO_DIFFERENCE and (
        "no example" in found.text if n == 0 else "10 examples" in found.text
    )
    assert record["sets"]["target"]["examples"] == n and (n not in (0, 2) or found.save()["files"])


def test_losses_that_are_not_finite(tmp_path):
    scored = made_up(50, (0.2, 0.2))
    scored.losses["base"][3], scored.losses["c1"][5], scored.targets[7] = np.nan, np.inf, 0
    record = evaluation(tmp_path, scored).record()
    assert (
        record["sets"]["target"] | {"examples": 48, "left_out": 2} == record["sets"]["target"]
        and record["verdict"] == BETTER
    )
    assert (
        "loss" not in record["models"][1]["target"]
        and record["models"][1]["target"]["not_finite"] == 1
    )
    assert (
        record["models"][1]["target"]["to_base"]["verdict"] == WORSE
        and record["models"][2]["target"]["to_previous"]["verdict"] == NO_DIFFERENCE
    )
    assert all(
        any(words in remark for remark in record["remarks"])
        for words in ("row 5003", "row 5007", "c1 is not finite on 1 ")
    )
    diverged = made_up(50)
    diverged.losses["c1"][:] = np.nan
    found = evaluation(tmp_path, diverged)
    assert (
        found.save()["verdict"] == WORSE
        and "not finite on 50 of 50" in found.text
        and len(found.rows(3)) == 3
    )
    diverged.losses["base"][:] = np.inf
    assert evaluation(tmp_path, diverged).verdict == NO_DIFFERENCE


def test_warnings_come_first_and_in_capitals(tmp_path):
    scored = made_up(400, (0.1, 0.2), start=1900)
    slices, about = (
        ((0, 1000), (1000, 2000)),
        {
            "adapter_active": False,
            "trained_dataset": "abstracts.jsonl",
            "remarks": ["The base was cut."],
        },
    )
    found = evaluation(tmp_path, scored, trained=slices, **about)
    assert (
        found.text.startswith("THE ADAPTER IS NOT ACTIVE")
        and "TRAINED ON 100 OF THE 400 EXAMPLES" in found.text
        and found.verdict == BETTER
    )
    record = found.record()
    assert (
        len(record["warnings"]) == 2
        and record["remarks"][0] == "The base was cut."
        and "newest of 2 models" in record["remarks"][-1]
    )
    for about in (
        {"trained_dataset": "other.jsonl"},
        {},
        {"adapter_active": True},
        {"adapter_active": None},
    ):
        assert not evaluation(tmp_path, scored, trained=slices, **about).compared.warnings


def test_forgetting_is_named(tmp_path):
    for fall, words in (
        (-0.1, "orgets on wiki: the loss rises"),
        (0.0, "o forgetting shown on wiki"),
        (0.1, "etter on wiki too: the loss falls"),
    ):
        found = evaluation(tmp_path, made_up(), made_up(300, (fall,), "wiki", 0, seed=2))
        assert (
            found.compared.forgetting_line[1:].startswith(words) and words in found.compared.summary
        )
        assert (
            found.verdict == BETTER
            and found.record()["forgetting"] == found.compared.forgetting_line
        )


def test_a_classifier_is_judged_by_its_answers(tmp_path):
    scored = classified()
    found = Evaluation(
        Measured(
            "classification",
            [{"name": "base"}, {"name": "new"}],
            scored,
            label_names=["a", "b", "c"],
        ),
        tmp_path,
    )
    record = found.save()
    new = record["models"][1]["target"]
    confusion = np.zeros((3, 3))
    np.add.at(confusion, (scored.labels, scored.predicted["new"]), 1)
    assert record["verdict"] == BETTER and (new["accuracy"]["value"], new["f1"]) == tuple(
        scores(confusion).values()
    )
    right = {name: predicted == scored.labels for name, predicted in scored.predicted.items()}
    assert (
        new["to_base"]["gained"] == (right["new"] & ~right["base"]).sum()
        and new["to_base"]["p_value"] < 1e-9
    )
    assert new["to_base"]["accuracy"]["value"] == pytest.approx(
        right["new"].mean() - right["base"].mean()
    )
    assert (
        "McNemar" in found.text
        and "perplexity" not in found.text
        and (tmp_path / "evaluation_confusion.png").exists()
    )
    one_more = Evaluation(
        Measured(
            "classification", [{"name": "base"}, {"name": "new"}], classified(right=(0.7, 0.71))
        ),
        tmp_path,
    )
    assert (
        one_more.verdict == NO_DIFFERENCE
        and one_more.compared.target.newest.to_base.loss.excludes_zero
    )
    assert share_difference(0, 0, 50).high > 0.01, (
        "no change among 50 texts does not rule out a change of one in 50"
    )


def test_accuracy_and_loss_that_disagree_are_remarked():
    scored = classified()
    scored.losses["new"] += 1
    compared = Compared(Measured("classification", [{"name": "base"}, {"name": "new"}], scored))
    assert compared.verdict == BETTER and any("disagree" in remark for remark in compared.remarks)


def test_arrays_of_different_lengths_are_refused():
    scored = made_up(50)
    with pytest.raises(ValueError, match="50 examples, got shapes {'targets'"):
        Scores(**{**vars(scored), "targets": scored.targets[:-1]})


# -- files ----------------------------------------------------------------------------------------------------------

HOSTILE = [
    {
        "prompt": "<script>alert(1)</script>",
        "texts": {
            "base": "</pre><img src=http://a.b/x onerror=alert(2)>",
            "c2": "lone \ud800 surrogate, \x00, \x1b[31m",
        },
    },
    {"prompt": "a long line", "texts": {"base": "x" * 10_000, "c2": "<" * 10_000}},
    {"prompt": "one is missing", "texts": {"c2": ""}},
    *(
        {"prompt": f"number {i}", "texts": {"base": "&" * 3000, "c2": '"' * 3000}}
        for i in range(100)
    ),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    "Return an evaluation with everything in it, and the record that it saved."
    folder = tmp_path_factory.mktemp("report") / "new" / "report"
    forgetting = made_up(300, (-0.02, -0.05), '<b onload="x">"wiki"</b> $1', 0, seed=2)
    found = evaluation(
        folder,
        made_up(400, (0.1, 0.2)),
        forgetting,
        ((0, 1000), (1000, 2000)),
        HOSTILE,
        max_length=512,
        nothing=float("nan"),
        path=folder,
    )
    return found, found.save()


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def test_the_json_is_strict_and_complete(saved):
    found, record = saved
    text = (found.folder / "evaluation.json").read_text()
    assert (
        json.loads(text, parse_constant=refuse) == record
        and not re.search(r"\\ud[89a-f]", text)
        and len(record["samples"]) == len(HOSTILE)
    )
    assert (
        record["verdict"] == BETTER
        and record["settings"]["nothing"] is None
        and record["settings"]["draws"] == 10_000
    )
    for kept, name in (
        (found.compared.target, "target"),
        (found.compared.forgetting, "forgetting"),
    ):
        for model, result in zip(record["models"], kept.results, strict=True):
            assert model[name]["loss"]["value"] == result.loss.value and model[name]["perplexity"][
                "high"
            ] == pytest.approx(np.exp(result.loss.high))
    assert [model["texts_seen"] for model in record["models"]] == [0, 1000, 2000] and record[
        "by_length"
    ][0]["change"]["value"] < 0
    assert {p.name for p in found.folder.iterdir()} == {*record["files"], "evaluation.json"}


def test_the_page_needs_nothing_and_runs_nothing(saved):
    found, _ = saved
    page = (found.folder / "evaluation.html").read_bytes().decode()
    assert (
        len(page) < 600_000
        and "cut here" in page
        and re.search(r"\d+ more in evaluation.json", page)
    )
    links = r'(src|href)="(?!data:image/png;base64,)'
    for outside in (
        r"<script",
        r"<link",
        r"<iframe",
        r"<b onload",
        r"@import",
        r"url\(",
        links,
        r"<img src=http",
        "[\x00-\x08\x1b]",
    ):
        assert not re.search(outside, page), outside
    assert "&lt;script&gt;" in page and page.count("<img ") == 4


def test_the_csv_has_every_example(saved):
    found, _ = saved
    lines = list(csv.DictReader((found.folder / "evaluation_rows.csv").open()))
    scored = found.measured.target
    assert (
        len(lines) == 400
        and [float(line["loss c2"]) for line in lines] == scored.losses["c2"].tolist()
        and int(lines[9]["row"]) == scored.rows[9]
    )
    assert len((found.folder / "evaluation_forgetting_rows.csv").read_text().splitlines()) == 301
    gained = found.rows(3)
    changes = (scored.losses["c2"] - scored.losses["base"]) / scored.targets
    assert [r["change"] for r in gained] == pytest.approx(
        [*np.sort(changes)[:3], *np.sort(changes)[-3:]]
    ) and gained[0]["row"] == scored.rows[changes.argmin()]


def test_pictures_are_pictures(saved):
    found, _ = saved
    assert list(found.pictures) == ["loss", "slices", "differences", "lengths"]
    for name, png in found.pictures.items():
        assert (found.folder / f"evaluation_{name}.png").read_bytes() == png and len(png) < 60_000
        assert (
            Image.open(BytesIO(png)).size[0] > 900
            and len(Image.open(BytesIO(png)).getcolors()) > 10
        )


def test_saving_again_replaces_all_files(tmp_path):
    for name in (
        "evaluation_slices.png",
        "evaluation_confusion.png",
        "evaluation_forgetting_rows.csv",
        "evaluation.html",
        "loss.png",
    ):
        (tmp_path / name).write_bytes(b"of something earlier")
    record = evaluation(tmp_path, made_up(20)).save()
    assert {p.name for p in tmp_path.iterdir()} == {
        *record["files"],
        "evaluation.json",
        "loss.png",
    } and "evaluation_slices.png" not in record["files"]
    assert (
        b"earlier" not in (tmp_path / "evaluation.html").read_bytes()
        and (tmp_path / "loss.png").read_bytes() == b"of something earlier"
    )


def test_many_models_and_odd_names(tmp_path):
    names = [
        "base",
        *(f"checkpoint $x_{i}^2$ with a name that is {'very ' * 10}long" for i in range(30)),
    ]
    found = evaluation(
        tmp_path,
        made_up(40, [0.01 * i for i in range(30)], names=names),
        trained=[(i, i + 1) for i in range(30)],
    )
    assert max(map(len, found.pictures.values())) < 80_000 and found.text.count("\n") > 30
    alone = evaluation(tmp_path, made_up(40, ()))
    assert (
        alone.record()["verdict"] == NO_DIFFERENCE
        and "only one model" in alone.text
        and alone.rows() == []
        and list(alone.pictures) == ["loss"]
    )


def test_the_report_does_not_import_torch():
    code = (
        "import sys; import multigpu_ft.evaluation.report; "
        "loaded = set(sys.modules) & {'torch', 'matplotlib', 'scipy'}; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_in_a_browser(saved, browser_there, shots, scheme):
    from playwright.sync_api import sync_playwright

    found, _ = saved
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": 1100, "height": 900})
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto(f"file://{found.folder / 'evaluation.html'}")
        page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        ink = [
            int(v)
            for v in re.findall(
                r"\d+", page.evaluate("getComputedStyle(document.querySelector('td')).color")
            )[:3]
        ]
        assert dark == (scheme == "dark") and (sum(ink) > 500) == dark
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 900)")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1100, (
            "nothing is wider than the page"
        )
        page.screenshot(path=shots / f"evaluation-{scheme}.png", full_page=True)
        browser.close()
    assert not said and all(url.startswith(("file://", "data:image/png")) for url in asked)

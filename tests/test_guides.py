"""The guides and the Kaggle kernels, each run from top to bottom in its own kernel, with smaller settings."""

import ast
import json
import os
import re
import shutil

import pytest
from harness import forks
from harness.guides import check
from harness.hub import Hub, environment
from harness.notebooks import outputs, papermill
from harness.runs import NBS, REPO, free_port, processes, slow

FOLDER = NBS / "guides"
GUIDES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
KAGGLE = REPO / "kaggle"
SMALLER = {  # papermill parameters
    "first_run": {"num_train": 32},
    "slices": {"end_idx": 600, "hf_repo": "jane/slices"},
    "chat": {"num_train": 160, "num_held_out": 20, "eval_every": 10},
    "sst2": {"num_epochs": 1},
    "evaluation": {"slice_size": 120, "held_out_end": 3030},
    "loop": {
        "dataset": "sums.jsonl",
        "model": "builtin:opt-tiny",
        "tuning": "full",
        "num_train": 64,
        "unseen": 64,
        "num_unseen": 8,
        "num_epochs": 20,
        "learning_rate": 2e-3,
        "learning_rate_again": 5e-4,
        "temperature": 0.5,
        "nproc": 1,
        "num_questions": 16,
        "num_sequences_per_question": 40,
        "max_new_tokens": 32,
    },
}
SLOW = ("first_run", "chat", "evaluation", "strategies")


def read(notebook):
    return json.loads(notebook.read_text())["cells"]


@pytest.fixture
def folder(tmp_path):
    "Return a folder with the files that lie beside a guide in a checkout."
    (tmp_path / "bench").symlink_to(REPO / "bench")
    (tmp_path / "nbs" / "guides").mkdir(parents=True)
    yield tmp_path / "nbs" / "guides"
    assert not processes(tmp_path)


def run(notebook, folder, parameters=(), env=None):
    words = [word for name, value in dict(parameters).items() for word in ("-p", name, value)]
    done = papermill(notebook, folder / "out.ipynb", *words, cwd=folder, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return outputs(folder / "out.ipynb")


def run_guide(guide, folder, env=None):
    "Run a guide in its smaller size, with its check as one more cell at the end."
    notebook = json.loads((FOLDER / f"{guide}.ipynb").read_text())
    cell = {"cell_type": "code", "execution_count": None, "id": "check", "metadata": {}}
    notebook["cells"].append({**cell, "outputs": [], "source": check(guide)})
    (folder / f"{guide}.ipynb").write_text(json.dumps(notebook))
    # a terminal finds multigpu-ft, as in an activated environment
    path = {"PATH": f"{forks.command().parent}{os.pathsep}{os.environ['PATH']}"}
    return run(folder / f"{guide}.ipynb", folder, SMALLER.get(guide, {}), {**path, **(env or {})})


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "guide",
    [
        slow(guide) if guide in SLOW else guide
        for guide in GUIDES
        if guide not in ("slices", "loop", "machines")
    ],
)
def test_a_guide_runs_from_top_to_bottom(guide, folder):
    run_guide(guide, folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_machines_find_each_other(folder, monkeypatch):
    monkeypatch.setitem(SMALLER, "machines", {"port": free_port()})
    run_guide("machines", folder, {"XDG_CONFIG_HOME": str(folder)})


@pytest.mark.timeout(900)
def test_slices_over_days_and_through_the_hub(folder, tmp_path):
    hub = Hub(tmp_path / "hub")
    try:
        shown = run_guide("slices", folder, environment(hub))
    finally:
        hub.close()
    assert (
        "day-1-2: continues from checkpoint" in shown
        and "from-the-hub: continues from checkpoint" in shown
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_learns_to_add_and_then_from_its_own_additions(folder):
    sums = [(i % 6, i // 6 % 6) for i in range(72)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {a} and {b}?"},
                {
                    "role": "assistant",
                    "content": f"It is <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b}",
                },
            ]
        }
        for a, b in sums
    ]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = run_guide("loop", folder)
    before, after = map(
        float,
        re.search(
            r"good answers to unseen questions: before ([\d.]+)%, after ([\d.]+)%", shown
        ).groups(),
    )
    assert min(before, after) > 0, (before, after)


def code(cells):
    "Yield the syntax tree of each code cell, without those of magics."
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not source.startswith("%%"):
            yield ast.parse(source)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_short_and_has_its_pictures(guide):
    cells = read(FOLDER / f"{guide}.ipynb")
    assert len(cells) < 30 and len(GUIDES) >= 8
    longest = max(len(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert longest <= 25, "one idea a cell"
    assert (FOLDER / f"{guide}.ipynb").stat().st_size < 300_000
    shown = [
        data
        for cell in cells
        for output in cell.get("outputs", [])
        for data in [output.get("data", {})]
    ]
    assert guide == "kubernetes" or any(
        "image/png" in data or "<svg" in str(data) or "data:image" in str(data) for data in shown
    )
    assert not any("application/vnd.jupyter.widget-view+json" in data for data in shown), (
        "a widget is an error in a notebook that is opened again"
    )
    for link in re.findall(r"\]\(([\w./-]+)\)", "".join("".join(cell["source"]) for cell in cells)):
        assert (FOLDER / link).exists(), link


def shows(source):
    "Return whether a cell ends in a value, prints, or starts a run."
    if source.startswith("%%"):
        return True
    body = ast.parse(source).body
    calls = [n.value for n in body if isinstance(n, (ast.Assign, ast.Expr))]
    called = {ast.unparse(call.func) for call in calls if isinstance(call, ast.Call)}
    ends_in_a_value = isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";")
    return ends_in_a_value or bool(called & {"launch", "generate", "print"})


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_has_its_outputs(guide):
    for cell in read(FOLDER / f"{guide}.ipynb"):
        if cell["cell_type"] == "code" and shows(source := "".join(cell["source"])):
            assert cell["outputs"], f"not executed:\n{source}"
            assert all(output["output_type"] != "error" for output in cell["outputs"]), source


@pytest.mark.parametrize("guide", GUIDES)
def test_the_cells_of_a_guide_are_what_a_user_writes(guide):
    for tree in code(read(FOLDER / f"{guide}.ipynb")):
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), "asserts are in tests/harness/guides.py"
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            if isinstance(node, ast.ImportFrom) and node.module.startswith("multigpu_ft"):
                assert node.module == "multigpu_ft", "an inner module"
            if isinstance(node, ast.Import):
                assert not {"sys", "os", "tempfile", "socket"} & set(names), names


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_begins_with_what_it_gives_and_ends_with_the_next(guide):
    prose = [
        "".join(cell["source"])
        for cell in read(FOLDER / f"{guide}.ipynb")
        if cell["cell_type"] == "markdown"
    ]
    assert re.search(r"^\*\*At the end you have\*\* ", prose[0], re.M)
    assert re.search(r"^\*\*It takes\*\* .*(minute|second)", prose[0], re.M)
    assert "**Next:** " in prose[-1]
    told = [
        text
        for text in prose
        if re.search(r"\bslices?\b", re.sub(r"\[[^\]]*\]\([^)]*\)", "", text))
    ]
    if told:
        assert "> A *slice* is " in told[0], "a slice is explained where it is first met"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kaggle_kernels_train_and_evaluate(folder):
    shown = run(KAGGLE / "train" / "train.ipynb", folder, {"preset": "tiny", "end_idx": 120})
    assert "start_idx=120" in shown
    shown = run(
        KAGGLE / "evaluate" / "evaluate.ipynb",
        folder,
        {"run": "runs/opt-tiny_0-120", "end_idx": 200, "samples": 1},
    )
    assert "nats per token" in shown and (folder / "report" / "evaluation.html").exists()


def test_the_kaggle_kernel_builds_wheels_of_a_checkout(folder):
    copy = folder / "checkout"
    shutil.copytree(
        REPO,
        copy,
        ignore=shutil.ignore_patterns(".venv", "runs", ".git", "*.egg-info", "build", "dist"),
    )
    run(KAGGLE / "wheels" / "wheels.ipynb", folder, {"package": "./checkout"})
    assert [path.name.split("-")[0] for path in (folder / "wheels").glob("*.whl")] == [
        "multigpu_ft"
    ]

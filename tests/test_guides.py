"""The guides and the Kaggle kernels, each run from top to bottom in its own kernel, with smaller settings."""

import json
import re
import shutil

import pytest
from harness.hub import Hub, environment
from harness.notebooks import outputs, papermill
from harness.runs import NBS, REPO, processes, slow

FOLDER = NBS / "guides"
GUIDES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
KAGGLE = REPO / "kaggle"
SMALLER = {  # papermill parameters
    "slices": {"end_idx": 600, "hf_repo": "jane/slices"},
    "chat": {"num_train": 200, "num_epochs": 1, "eval_every": 2, "presets": "qwen3-lora-chat"},
    "sst2": {"num_epochs": 1},
    "evaluation": {"slice_size": 120, "held_out_end": 9050},
    "loop": {
        "dataset": "sums.jsonl",
        "num_train": 64,
        "num_epochs": 20,
        "nproc": 1,
        "num_questions": 16,
        "num_sequences_per_question": 40,
        "max_new_tokens": 32,
        "num_epochs_again": 1,
    },
}
SLOW = ("chat", "evaluation", "machines", "strategies")


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


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "guide",
    [
        slow(guide) if guide in SLOW else guide
        for guide in GUIDES
        if guide not in ("slices", "loop")
    ],
)
def test_a_guide_runs_from_top_to_bottom(guide, folder):
    run(FOLDER / f"{guide}.ipynb", folder, SMALLER.get(guide, {}))


@pytest.mark.timeout(900)
def test_slices_over_days_and_through_the_hub(folder, tmp_path):
    hub = Hub(tmp_path / "hub")
    try:
        shown = run(FOLDER / "slices.ipynb", folder, SMALLER["slices"], environment(hub))
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
    shown = run(FOLDER / "loop.ipynb", folder, SMALLER["loop"])
    before, after = map(
        float,
        re.search(
            r"good answers to unseen questions: before ([\d.]+)%, after ([\d.]+)%", shown
        ).groups(),
    )
    assert min(before, after) > 0, (before, after)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_short_and_has_its_pictures(guide):
    cells = read(FOLDER / f"{guide}.ipynb")
    assert len(cells) < 15 and len(GUIDES) >= 8
    shown = [
        data
        for cell in cells
        for output in cell.get("outputs", [])
        for data in [output.get("data", {})]
    ]
    # kept for guides that take too long to run for every change
    kept = REPO / "bench" / "results" / f"guide_{guide}.ipynb"
    if kept.exists():
        shown += [
            output.get("data", {}) for cell in read(kept) for output in cell.get("outputs", [])
        ]
    assert guide == "kubernetes" or any(
        "image/png" in data or "<svg" in str(data) or "data:image" in str(data) for data in shown
    )
    assert all(cell.get("outputs") is not None for cell in cells if cell["cell_type"] == "code")
    for link in re.findall(r"\]\(([\w./-]+)\)", "".join("".join(cell["source"]) for cell in cells)):
        assert (FOLDER / link).exists(), link


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

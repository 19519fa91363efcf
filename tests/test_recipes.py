"""The recipe under papermill, as a user types it."""

import json
import shutil
from pathlib import Path

import pytest
from harness.notebooks import outputs, papermill
from harness.runs import BIN, NBS, processes

from multigpu_ft import Run


@pytest.fixture
def recipe(tmp_path):
    "Return a folder with train.ipynb in it, such as nbs/."
    folder = tmp_path / "nbs"
    folder.mkdir()
    shutil.copy(NBS / "train.ipynb", folder)
    yield folder
    assert not processes(folder)


@pytest.mark.slow
def test_slices_one_after_the_other(recipe):
    first = papermill(
        "train.ipynb",
        "first.ipynb",
        "-p",
        "end_idx",
        "64",
        cwd=recipe,
    )
    assert first.returncode == 0, first.stderr[-3000:]
    assert "starts from the base model" in outputs(recipe / "first.ipynb")
    # The manual's literal command, after the parameters were edited by hand. It names no output,
    # so the notebook goes to standard output.
    notebook = (recipe / "train.ipynb").read_text()
    assert notebook.count('"slice_size = None ') == 1
    (recipe / "train.ipynb").write_text(
        notebook.replace('"slice_size = None ', '"slice_size = 160 ')
    )
    second = papermill("train.ipynb", "-p", "start_idx", "5000", cwd=recipe)
    assert second.returncode == 0, second.stderr[-3000:]
    (recipe / "second.ipynb").write_text(second.stdout)
    assert "continues from checkpoint opt-tiny_0-64-epoch-1 of opt-tiny_0-64" in outputs(
        recipe / "second.ipynb"
    )
    run = Run(recipe / "runs" / "opt-tiny_5000-5160")
    assert (
        run.state == "done"
        and run.status["slice"] == [5000, 5160]
        and run.metrics[0]["step"] == Run(recipe / "runs" / "opt-tiny_0-64").status["step"] + 1
    )
    third = papermill(
        "train.ipynb",
        "out.ipynb",
        "-p",
        "start_idx",
        "5160",
        "-p",
        "end_idx",
        "5224",
        "-p",
        "strategy",
        "fsdp",
        cwd=recipe,
    )
    assert third.returncode == 0, third.stderr[-3000:]
    shown = outputs(recipe / "out.ipynb")
    assert (
        "continues from checkpoint opt-tiny_5000-5160-epoch-1" in shown
        and "papermill train.ipynb slice-5224.ipynb -p start_idx 5224" in shown
    )


def test_a_crash_is_not_hidden(recipe, failing_rank):
    done = papermill("train.ipynb", "out.ipynb", cwd=recipe, env=failing_rank)
    assert (
        done.returncode != 0 and "rank 1 raised ZeroDivisionError: planted in rank 1" in done.stderr
    )
    cells = json.loads((recipe / "out.ipynb").read_text())["cells"]
    assert not any(c.get("outputs") for c in cells[-1:]), "the cell after the crash ran"


@pytest.mark.parametrize(
    "parameters, reason",
    [
        (
            ("strat_idx", "5"),
            "ConfigError: unknown parameter 'strat_idx' (did you mean 'start_idx'?)",
        ),
        (("HF_TOKEN", "abc"), "ConfigError: 'HF_TOKEN' looks like a secret"),
        (("start_idx", "1000000"), "DataError: slice 1,000,000–(end) of builtin:python-docs"),
        (("strategy", "zero9"), "ConfigError: strategy='zero9'"),
        (
            ("preset", "opt-13b"),
            "ConfigError: unknown preset 'opt-13b' (did you mean 'opt-1.3b-arxiv'?)",
        ),
    ],
)
def test_bad_parameters(recipe, parameters, reason):
    done = papermill("train.ipynb", "out.ipynb", "-p", *parameters, cwd=recipe)
    assert done.returncode != 0 and reason in done.stderr and not (recipe / "runs").exists()


@pytest.mark.slow
def test_a_long_run_leaves_a_small_notebook(recipe, tmp_path, material):
    """The output is a line updated in place and a picture with few points, so it does not grow with the steps."""
    (tmp_path / "a.txt").write_text("".join(f"line {i}\n" for i in range(1500)))
    settings = "-p batch_size 1 -p nproc 1 -p packing padded -p max_length 32"
    done = papermill(
        "train.ipynb",
        "out.ipynb",
        "-p",
        "dataset",
        tmp_path / "a.txt",
        "-p",
        "model",
        material / "model",
        *settings.split(),
        cwd=recipe,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads((recipe / "out.ipynb").read_text())["cells"]
    launched = next(c for c in cells if "".join(c["source"]).startswith("run = launch"))
    assert [o["output_type"] for o in launched["outputs"]] == [
        "stream",
        "display_data",
        "display_data",
    ]
    assert (
        "step 1,500/1,500" in outputs(recipe / "out.ipynb")
        and (recipe / "out.ipynb").stat().st_size < 100_000
    )


def test_parameters_are_fields_of_the_config():
    from multigpu_ft import RunConfig

    cells = json.loads((NBS / "train.ipynb").read_text())["cells"]
    tagged = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    names = {line.split("=")[0].strip() for line in "".join(tagged[0]["source"]).splitlines()}
    assert names - {"preset"} <= set(RunConfig.model_fields)
    asked = (
        "num_epochs start_idx end_idx batch_size accum_steps initial_epoch hf_repo resume_file "
        "strategy model dataset"
    )
    assert set(asked.split()) <= names
    assert Path(BIN / "papermill").exists()

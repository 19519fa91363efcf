"""Kernels and commands that tests start are forks, as is what launches their runs: starting Python takes seconds.

Faults are planted in forks alone, so without this a test would wait for a fault that can't come."""

import os
import subprocess
import sys

import nbformat
import pytest
from harness import forks
from harness.notebooks import papermill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux to fork")
CALL = "from multigpu_ft import launch\nlaunch(lambda: None, nproc=1)"
AGENT = "multigpu_ft.launcher.agent"


@pytest.fixture
def forked(tmp_path):
    "Return the environment in which forks write down their modules, and a function that returns those."
    file = tmp_path / "forked"
    code = f"import sys\nprint(sys.argv[0], file=open({str(file)!r}, 'a'))"
    return forks.at_start(tmp_path, code), lambda: file.read_text().splitlines()


def test_a_kernel_and_its_ranks_are_forks(kernel, forked):
    environment, modules = forked
    kernel(**environment).run(CALL)
    assert modules()[0] == "ipykernel_launcher" and AGENT in modules()


def test_a_kernel_of_papermill_and_its_ranks_are_forks(tmp_path, forked):
    environment, modules = forked
    metadata = {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(CALL)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "a.ipynb")
    done = papermill("a.ipynb", "b.ipynb", cwd=tmp_path, env=environment)
    assert not done.returncode, done.stderr
    assert modules()[0] == "ipykernel_launcher" and AGENT in modules()


@pytest.mark.parametrize("folder", ["", "elsewhere"])
def test_a_command_and_its_ranks_are_forks(folder, tmp_path, run_root, forked):
    environment, modules = forked
    (tmp_path / folder).mkdir(exist_ok=True)
    command = [forks.command(), "train", "--max-steps", "1", "--nproc", "1", "--run-root", run_root]
    done = subprocess.run(
        command, cwd=tmp_path / folder, env={**os.environ, **environment}, capture_output=True
    )
    assert not done.returncode, done.stderr
    assert modules()[0] == "harness.command" and AGENT in modules()

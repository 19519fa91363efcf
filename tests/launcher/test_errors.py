"""What a person sees of an error, in a cell or a terminal: the cause first, then their own lines."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from harness.notebooks import CellError, Kernel, outputs, papermill
from harness.runs import processes, running, until

from multigpu_ft import Run, RunDir

IMPORTS = "from multigpu_ft import *\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "Return a folder with data, a model's configuration and a DeepSpeed file, none of them good."
    folder = tmp_path_factory.mktemp("newcomer")
    rows = [{"text": f"row {i}", "label": i % 2} for i in range(50)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "zero.json").write_text("{broken")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "opt"}')
    (folder / "bad.py").write_text("print(1\n")
    (folder / "raises.py").write_text("def work():\n    raise KeyError('x')\n\n\nwork()\n")
    (folder / "cells.py").write_text(
        "from multigpu_ft import *\n\n\ndef train(**settings):\n    launch(RunConfig(**settings))\n"
    )
    return folder


@pytest.fixture(scope="module")
def newcomer(folder):
    "Return a function that runs a cell and returns what its error shows."
    offline = {"HF_TOKEN": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    k = Kernel(folder, offline, forked=True)
    k.run(IMPORTS + "%load_ext multigpu_ft\nimport os")

    def shown(cell):
        with pytest.raises(CellError) as caught:
            k.run(cell)
        return caught.value.shown

    yield shown
    k.shutdown()


# A cell, and how the first line of its error begins and goes on.
REFUSED = [
    ("launch(RunConfig(dataset='row.jsonl'))", "DataError: dataset 'row.jsonl': .*rows.jsonl"),
    (
        "launch(RunConfig(dataset='rows.jsonl', start_idx=100))",
        "DataError: slice 100–.*the highest start_idx is 49",
    ),
    (
        "launch(RunConfig(dataset='rows.jsonl', end_idx=40, eval_start_idx=30, eval_end_idx=50))",
        "ConfigError: training rows and held-out rows of rows.jsonl overlap",
    ),
    ("RunConfig.preset('tinny')", "ConfigError: unknown preset 'tinny' .did you mean 'tiny'"),
    ("RunConfig(learnig_rate=1e-3)", "ConfigError: unknown .* .did you mean 'learning_rate'"),
    ("RunConfig(num_epochs='three')", "ConfigError: num_epochs='three': input should be"),
    ("RunConfig().seed = 3", "ConfigError: a RunConfig can't be changed; cfg.replace.seed=3."),
    ("estimate('tiny')", "ConfigError: estimate takes a RunConfig.*preset.'tiny'. makes one"),
    ("form('tiny')", "ConfigError: form takes a RunConfig, not a str"),
    ("launch('tiny')", "ConfigError: launch takes a RunConfig.*preset.'tiny'. makes one"),
    ("run_slices({})", "ConfigError: run_slices takes a RunConfig, not a dict"),
    ("launch(RunConfig(run_root='/proc/runs'))", "ConfigError: .*Set run_root to a writable"),
    (
        "launch(RunConfig(strategy='zero3', deepspeed_config='zero.json'))",
        "ConfigError: deepspeed_config='zero.json' is not valid JSON",
    ),
    ("launch(RunConfig(resume_file='nope'))", "CheckpointError: no checkpoint 'nope'"),
    ("Run.attach('runs/none')", "ConfigError: .* is not a run directory.*runs.run_root. lists"),
    ("Run.attach('model')", "ConfigError: .* is not a run directory: its config.json is a model"),
    ("evaluate('runs/none')", "ConfigError: run='runs/none': no run directory"),
    (
        "generate(model='builtin:opt-tiny', dataset='rows.jsonl', output='a.jsonl')",
        "DataError: .* has neither 'messages' .* nor 'question'",
    ),
    ("load_export('model')", "CheckpointError: model is not an export"),
    ("launch('none.py')", "ConfigError: there is no script 'none.py' here"),
    ("launch(print, nproc='two')", "ConfigError: nproc='two'"),
    ("import cells\ncells.train(nproc=0)", "ConfigError: nproc=0"),
    ("%%torchrun\na b", "ConfigError: line 1 of the %%torchrun cell is not Python"),
    ("%%torchrun\n!ls", "ConfigError: line 1 .* no %magics and no !commands"),
]


@pytest.mark.parametrize("cell, words", REFUSED, ids=[cell[:40] for cell, _ in REFUSED])
def test_a_refusal_is_a_sentence_and_the_cells_own_line(newcomer, cell, words):
    shown = newcomer(cell)
    assert re.match(words, shown[0]) and len(shown) <= 6, shown
    assert re.match(r"  Cell In\[\d+\], line ", shown[-1] if "cells." not in cell else shown[-2])
    assert not any("multigpu_ft/" in line or "errors.pydantic.dev" in line for line in shown)
    if "cells." in cell:
        assert shown[-1] == "  cells.py, line 5, in train: launch(RunConfig(**settings))"


FUNCTION = """def step(rows):
    import torch
    return torch.nn.Linear(3, 2)(rows)

def train():
    import torch
    try:
        step(torch.ones(4, 4))
    except RuntimeError as error:
        raise ValueError("no step") from error

launch(train, nproc=2)"""
KILLED = """def dies():
    import signal
    print("the last words")
    os.kill(os.getpid(), signal.SIGKILL)

launch(dies, nproc=1)"""
RAISED = [
    (
        FUNCTION,
        r"""RunFailed: rank \d raised ValueError: no step

  Cell In\[\d+\], line 10, in train: raise ValueError\("no step"\) from error
caused by RuntimeError: mat1 and mat2 .*
  Cell In\[\d+\], line 8, in train: step\(torch.ones\(4, 4\)\)
  Cell In\[\d+\], line 3, in step: return torch.nn.Linear\(3, 2\)\(rows\)
  … 3 frames of torch …

Whole traceback: `traceback` of this exception, or %tb Verbose in a notebook

Called from:
  Cell In\[\d+\], line 12: launch\(train, nproc=2\)""",
    ),
    (
        "launch('raises.py', nproc=1)",
        r"""RunFailed: rank 0 raised KeyError: 'x'

  raises.py, line 5: work\(\)
  raises.py, line 2, in work: raise KeyError\('x'\)

Called from:
  Cell In\[\d+\], line 1: launch\('raises.py', nproc=1\)""",
    ),
    (
        "launch('bad.py', nproc=1)",
        r"""RunFailed: rank 0 raised SyntaxError: '\(' was never closed \(bad.py, line 1\)

  bad.py, line 1: print\(1

Called from:
  Cell In\[\d+\], line 1: launch\('bad.py', nproc=1\)""",
    ),
    (
        "%%torchrun -n 1\nx = 1\nx / 0",
        r"""RunFailed: rank 0 raised ZeroDivisionError: division by zero

  the %%torchrun cell, line 2: x / 0

Called from:
  Cell In\[\d+\], line 1""",
    ),
    (
        KILLED,
        r"""RunFailed: rank 0 \(pid \d+\) was killed by signal 9 \(SIGKILL\): .*The end of its log:
the last words

Called from:
  Cell In\[\d+\], line 6: launch\(dies, nproc=1\)""",
    ),
]


@pytest.mark.parametrize("cell, pattern", RAISED, ids=[cell.split("\n")[0] for cell, _ in RAISED])
def test_a_failed_call_shows_its_cause_and_the_users_frames(newcomer, cell, pattern):
    shown = "\n".join(newcomer(cell))
    assert re.fullmatch(pattern, shown), shown
    assert "multigpu_ft-call-" not in shown, "that folder is gone"
    every = "\n".join(newcomer("%tb Verbose"))
    assert "multigpu_ft/launcher" in every and len(every) > 2 * len(shown)


def test_a_rank_that_refuses_is_shown_like_the_kernel(newcomer, run_root):
    settings = f"run_root={str(run_root)!r}, tuning='lora', lora_target_modules='no', nproc=1"
    shown = newcomer(f"launch(RunConfig({settings}))")
    assert shown[0].startswith("ModelError: lora_target_modules='no'") and len(shown) == 2, shown


@pytest.mark.parametrize("moment", ["agent.log", "began"])
def test_an_interrupted_function_shows_one_line(moment, tmp_path):
    "Interrupted while torch is still imported, as in the first launch of a kernel, or at work."
    k = Kernel(tmp_path, {"TMPDIR": str(tmp_path)})
    try:
        k.run(
            f"{IMPORTS}import time\ndef wait():\n    open('began', 'w').close()\n    time.sleep(60)"
        )
        cell = k.start("launch(wait, nproc=1)")
        until(lambda: list(tmp_path.rglob(moment)), 60, moment)
        k.manager.interrupt_kernel()
        with pytest.raises(CellError) as caught:
            cell.result(30)
    finally:
        k.shutdown()
    assert caught.value.shown == [
        "KeyboardInterrupt",
        "  Cell In[2], line 1: launch(wait, nproc=1)",
    ]


def test_a_run_that_is_interrupted_before_it_begins_is_stopped(tmp_path, run_root):
    k = Kernel(tmp_path, {})
    try:
        k.run(IMPORTS)
        cell = k.start(f"launch(RunConfig(run_root={str(run_root)!r}))")
        until(lambda: list(run_root.rglob("agent.log")), 60, "a run")
        k.manager.interrupt_kernel()
        with pytest.raises(CellError) as caught:
            cell.result(30)
        assert len(caught.value.shown) == 2, caught.value.shown
        assert "  stopped  " in k.run(f"print(runs({str(run_root)!r}))")
        k.run(f"run = launch(RunConfig(run_root={str(run_root)!r}, max_steps=1))")
    finally:
        k.shutdown()


def test_papermill_ends_with_the_cause_and_so_does_the_notebook(tmp_path):
    cells = [nbformat.v4.new_code_cell(code) for code in (IMPORTS, "RunConfig(batch_size=0)")]
    metadata = {"kernelspec": {"name": "python3", "display_name": "", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "a.ipynb")
    done = papermill("a.ipynb", "b.ipynb", cwd=tmp_path)
    assert done.returncode and "batch_size=0: input should be" in "".join(
        done.stderr.splitlines()[-4:]
    )
    for text in (done.stderr, outputs(tmp_path / "b.ipynb")):
        assert "batch_size=0: input should be" in text and "config.py" not in text


def test_a_plain_script_ends_with_the_message_and_its_own_line(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(IMPORTS + "launch(RunConfig(dataset='none.jsonl'))\n")

    def run(*flags):
        command = [sys.executable, *flags, script.name]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    done = run()
    said = done.stderr.splitlines()
    assert done.returncode == 1 and said[0].startswith("DataError: dataset 'none.jsonl'"), said
    assert re.fullmatch(r"  .*train.py, line 2: launch\(.*\)", said[1]) and len(said) == 2
    assert "Traceback" in (every := run("-X", "dev").stderr) and "sources.py" in every
    script.write_text(IMPORTS + "raise KeyError('mine')\n")
    assert run().stderr.startswith("Traceback"), "an error of the user's own looks as always"


def test_a_detached_launch_returns_at_once_and_outlives_its_kernel(kernel, run_root):
    k = kernel()
    k.run(IMPORTS)
    settings = f"RunConfig(run_root={str(run_root)!r}, run_name='on', nproc=1, num_epochs=50)"
    began = time.monotonic()
    shown = k.run(f"run = launch({settings}, detach=True)")
    assert time.monotonic() - began < 10
    assert f"Run.attach({str(run_root / 'on')!r}) shows it" in shown
    os.kill(k.pid, signal.SIGKILL)
    running(run_root)
    run = Run(run_root / "on")
    assert run.state == "running"
    run.stop()
    assert run.state == "stopped"
    until(lambda: not processes(run_root), 5, "all processes gone")


def test_a_remark_whose_count_grows_is_printed_at_its_beginning_and_its_end(tmp_path, capsys):
    from multigpu_ft import RunConfig
    from multigpu_ft.launcher.run import _Display

    run = Run(RunDir.create(RunConfig(run_root=str(tmp_path))))
    run.dir.update_status(state="done")
    display = _Display(run, set(), panel=False)
    for remarks in (["a"], ["a", "1 failed"], ["a", "2 failed"], ["a", "3 failed", "b"]):
        run.dir.update_status(remarks=remarks)
        display.update()
    display.update(final=True)
    said = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert [text for text in said if text != "done"] == ["a", "1 failed", "b", "3 failed"]

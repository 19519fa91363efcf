"""Functions and cells on every rank."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest
from harness import dying_kernels
from harness.notebooks import CellError
from harness.runs import slow

from multigpu_ft import ConfigError, RunConfig, RunFailed, launch


def where():
    return tuple(int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def test_a_function_gets_its_arguments_and_returns_what_rank_0_returns(capfd):
    factor = 3

    def work(number, names):
        print("on rank", where()[0])
        return {
            "rank": where()[0],
            "world": where()[2],
            "value": number * factor,
            "names": sorted(names),
        }

    assert launch(work, 5, {"b", "a"}, nproc=2) == {
        "rank": 0,
        "world": 2,
        "value": 15,
        "names": ["a", "b"],
    }
    shown = capfd.readouterr().out.splitlines()
    assert sorted(shown) == ["[0] on rank 0", "[1] on rank 1"]
    assert launch(lambda: where(), nproc=1) == (0, 0, 1)


def test_an_exception_of_a_rank_is_raised_by_launch():
    def fails():
        if where()[0] == 1:
            raise KeyError("planted")

    with pytest.raises(RunFailed, match="rank 1 raised KeyError: 'planted'") as caught:
        launch(fails, nproc=2)
    assert (
        caught.value.rank == 1
        and 'raise KeyError("planted")' in caught.value.traceback
        and "_rank_main" not in caught.value.traceback
    )


def test_a_rank_that_is_killed_is_named():
    def dies():
        import signal
        import time

        if where()[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RunFailed, match=r"rank 1 \(pid \d+\) was killed by signal 9"):
        launch(dies, nproc=2)


def test_a_script_may_end_itself():
    assert launch(lambda: sys.exit(0), nproc=1) is None
    with pytest.raises(RunFailed, match="SystemExit: 3"):
        launch(lambda: sys.exit(3), nproc=1)


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: launch(lambda file: 1, sys.stdout, nproc=1),
            "cannot be handed to other processes",
        ),
        (
            lambda: launch(lambda: (i for i in ()), nproc=1),
            "rank 0 returned a generator, which cannot be handed back",
        ),
        (lambda: launch(lambda: 1, nproc=0), "at least 1 process"),
        (lambda: launch(lambda: 1, wait=False), "only a RunConfig"),
        (lambda: launch(RunConfig(), 3), "belong to a function"),
        (lambda: launch({"model": "x"}), "takes a RunConfig or a function, not a dict"),
    ],
)
def test_a_call_that_cannot_work_is_rejected(call, words):
    with pytest.raises(ConfigError, match=words):
        call()


def test_code_for_accelerates_notebook_launcher_needs_one_changed_line():
    def training(rate):
        import torch
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = torch.nn.Linear(4, 1), None
        optimizer = torch.optim.SGD(model.parameters(), rate)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            loss = model(torch.ones(2, 4) * (accelerator.process_index + 1)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return accelerator.num_processes, accelerator.gather(loss.detach()[None]).tolist()

    # notebook_launcher(training, (1e-3,), num_processes=2)
    processes, losses = launch(training, 1e-3, nproc=2)
    assert processes == 2 and len(losses) == 2


def test_hidden_cuda_devices_do_not_count(tmp_path, monkeypatch):
    from multigpu_ft.run.environment import visible_gpus

    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\necho '0, GPU-1, Tesla T4, 15360, 3, 550.1, 7.5'\necho '1, GPU-2, Tesla T4, 15360, 3, 550.1, 7.5'\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for visible, count in ((None, 2), ("", 0), ("1", 1), ("0,1", 2), ("-1", 0), ("0,-1,1", 1)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert len(visible_gpus()) == count, visible


def test_the_magic(kernel):
    k = kernel(OMP_NUM_THREADS="1")
    k.run("%load_ext multigpu_ft\nrate, other = 0.5, 3")
    shown = k.run(
        "%%torchrun -n 2 --push rate,other --pull loss\nimport time\nimport torch.distributed "
        "as dist\ndist.init_process_group('gloo')\n"
        "time.sleep(rank / 2)\nloss = rate * other + rank\nprint('loss', loss)\nworld_size * 10"
    )
    lines = [line for line in shown.split("\n")[:-1] if "[Gloo]" not in line]  # torch 2.10's
    assert sorted(lines) == ["[0] 20", "[0] loss 1.5", "[1] 20", "[1] loss 2.5"]
    assert k.run("loss").strip() == "1.5"
    with pytest.raises(CellError) as caught:
        k.run("%%torchrun -n 2\nif rank == 1:\n    1 / 0")
    assert (
        caught.value.name == "RunFailed"
        and "rank 1 raised ZeroDivisionError" in caught.value.value
        and "  the %%torchrun cell, line 2: 1 / 0" in caught.value.value
    )
    for cell, words in (
        ("%%torchrun\na b", "invalid syntax"),
        ("%%torchrun --push nothing\n1", "the notebook has no variable"),
        ("%%torchrun -n 1 --pull rank,nothing\n1", "--pull nothing: rank 0"),
    ):
        with pytest.raises(CellError, match=words):
            k.run(cell)
    assert k.run("rank").strip() == "0", "the notebook's own `rank` was passed on"


def test_after_cuda_was_initialised_in_the_kernel(kernel):
    "A fork would inherit it and fail; the function's processes are not forked."
    k = kernel(OMP_NUM_THREADS="1")
    k.run(
        "import os, torch\nfrom multigpu_ft import launch\nowner = os.getpid()\ntouched = False\n"
        "os.register_at_fork(after_in_child=lambda: globals().update(touched=True))"
    )
    assert (
        k.run(
            "import sys\nlaunch(lambda: getattr(sys.modules['__main__'], 'touched', 'not forked'), nproc=2)"
        ).strip()
        == "'not forked'"
    )


def test_a_plain_script_can_launch_a_function(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import helper
        from multigpu_ft import launch

        if __name__ == "__main__":
            print("got", launch(helper.double, 21, nproc=2))
    """)
    )
    (tmp_path / "helper.py").write_text("def double(x):\n    return 2 * x\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "got 42" in done.stdout, done.stderr


def test_directories_of_dead_kernels_are_swept(tmp_path, monkeypatch):
    from multigpu_ft.run.run_dir import RunDir

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name, pid in (("multigpu_ft-call-dead", gone.pid), ("multigpu_ft-call-alive", os.getpid())):
        (tmp_path / name).mkdir()
        RunDir(tmp_path / name).update_status(
            state="starting", pids={"launcher": pid}, host=socket.gethostname()
        )
    assert launch(lambda: 1, nproc=1) == 1 and [p.name for p in tmp_path.iterdir()] == [
        "multigpu_ft-call-alive"
    ]


@pytest.mark.parametrize("fault", dying_kernels.FAULTS)
@pytest.mark.parametrize(
    "launcher", [slow(name) if name == "launch" else name for name in dying_kernels.CELLS]
)
def test_nothing_outlives_its_kernel_or_agent(tmp_path, launcher, fault):
    found = dying_kernels.trial(tmp_path, launcher, fault, 1.5 if launcher == "%%torchrun" else 3)
    assert found.get("seconds", 99) < (10 if fault == "interrupt" else 5), found


@pytest.mark.parametrize("launcher", ["launch(function)", "%%torchrun"])
def test_a_launch_after_a_crash_works(tmp_path, launcher):
    import random

    assert dying_kernels.relaunch(tmp_path, launcher, 1, random.Random(1)) == 1

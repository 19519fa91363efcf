"""Each way to fail, in a real kernel: one clear error in the cell, within seconds, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from harness.notebooks import CellError, Kernel
from harness.runs import free_port, processes, ranks, running, slow, until

from multigpu_ft import Run, RunConfig, RunDir
from multigpu_ft.run.run_dir import FAILURE_FILE

IMPORTS = "from multigpu_ft import *\n"


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    """A kernel without a token, with the Hub or without it, and its folder.

    It shows in the cell what is wrong with a setting, and then runs the next cell."""
    folder, started = tmp_path_factory.mktemp("refusing"), {}

    def start(offline=""):
        if offline not in started:
            started[offline] = Kernel(
                folder, {"HF_TOKEN": "", "HF_HUB_OFFLINE": offline}, forked=True
            )
            started[offline].run(IMPORTS)
        return started[offline], folder

    yield start
    for k in started.values():
        k.shutdown()


def test_one_rank_raises(kernel, run_root, failing_rank):
    cell = kernel(**failing_rank).start(
        IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}))"
    )
    run_dir = running(run_root)
    raised = (
        until(lambda: list(run_dir.glob("errors/rank1.json")), 30, "the planted fault")[0]
        .stat()
        .st_mtime
    )
    with pytest.raises(CellError) as caught:
        cell.result(15)
    assert time.time() - raised < 10
    error = caught.value
    assert (
        error.name == "RunFailed"
        and "rank 1 raised ZeroDivisionError: planted in rank 1" in error.value
    )
    log = run_dir / "logs" / "rank1.log"
    assert f"Whole traceback: {log}" in error.value and "trainer.py" in log.read_text()
    until(lambda: not processes(run_root), 2, "all processes gone")


def test_one_rank_is_killed(kernel, run_root):
    k = kernel()
    cell = k.start(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}))")
    run_dir = running(run_root)
    victim = ranks(run_dir)[1]
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(CellError) as caught:
        cell.result(15)
    assert time.monotonic() - killed < 10
    assert caught.value.name == "RunFailed"
    assert (
        f"rank 1 (pid {victim}) was killed by signal 9 (SIGKILL): probably out of host memory"
        in caught.value.value
    )
    until(lambda: not processes(run_root), 2, "all processes gone")
    # the next launch in this kernel works, on a fresh port
    assert "done" in k.run(
        f"launch(RunConfig(run_root={str(run_root)!r}, nproc=1, end_idx=32, resume_file='none')).state"
    )


def test_an_interrupt_saves_and_the_kernel_keeps_running(kernel, run_root):
    k = kernel()
    plain = f"run_root={str(run_root)!r}, packing='padded'"
    cell = k.start(IMPORTS + f"run = launch(RunConfig({plain}, batch_size=8, nproc=2))")
    running(run_root)
    k.manager.interrupt_kernel()
    interrupted = time.monotonic()
    until(lambda: not processes(run_root), 10, "all ranks gone after the interrupt")
    assert time.monotonic() - interrupted < 10
    cell.result(10)
    assert "stopped" in k.run("print(run.state)")
    step = int(k.run("print(run.status['step'])"))
    saved = k.run("print(run.status['checkpoint'])").strip()
    assert saved == f"opt-tiny_0-5000-step-{step}"
    # training resumes where it stopped, even with one rank
    shown = k.run(
        f"again = launch(RunConfig({plain}, batch_size=16, nproc=1, max_steps={step + 2})); "
        f"print(again.metrics[{step}]['step'], again.metrics[{step}]['samples_seen'])"
    )
    assert (
        f"resumes from its checkpoint {saved}" in shown and f"{step + 1} {16 * (step + 1)}" in shown
    )


def test_kernel_is_killed(kernel, run_root):
    k = kernel()
    k.start(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}))")
    running(run_root)
    os.kill(k.pid, signal.SIGKILL)
    until(lambda: not processes(run_root), 5, "agent and ranks gone after the kernel")


def test_kernel_is_killed_while_ranks_import(kernel, run_root):
    k = kernel()
    k.start(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}))")
    until(lambda: len(processes(run_root)) == 4, 30, "agent with its guard, and two ranks")
    os.kill(k.pid, signal.SIGKILL)
    until(lambda: not processes(run_root), 5, "agent and ranks gone after the kernel")


def test_a_rank_is_killed_before_training_begins(kernel, run_root):
    cell = kernel().start(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}))")
    victim = until(
        lambda: [p for p in processes(run_root) if "multigpu_ft.training" in p.cmdline()],
        30,
        "ranks",
    )[0]
    time.sleep(0.5)
    victim.kill()
    killed = time.monotonic()
    with pytest.raises(CellError, match="was killed by signal 9"):
        cell.result(15)
    assert time.monotonic() - killed < 10 and not processes(run_root)


@pytest.mark.parametrize("threads, nproc", [slow("1", 2), ("2", 1)])
def test_sigterm_saves(kernel, run_root, threads, nproc):
    "A cluster ends a job like this. With several threads, numpy has some that this package did not start."
    k = kernel(OMP_NUM_THREADS=threads)
    k.run(IMPORTS)
    if threads != "1":  # the second launch is a fork
        k.run(
            f"launch(RunConfig.preset('tiny').replace(run_root={str(run_root / 'first')!r}, end_idx=16))"
        )
    k.run(
        f"run = launch(RunConfig(run_root={str(run_root)!r}, nproc={nproc}, batch_size=2), wait=False)"
    )
    running(run_root)
    next(p for p in processes(run_root) if "multigpu_ft.launcher.agent" in p.cmdline()).terminate()
    until(lambda: not processes(run_root), 30, "saved and gone")
    shown = k.run("run.wait(); print(run.state, run.status['checkpoint'], run.status['step'])")
    state, checkpoint, step = shown.split("\n")[-2].split()
    assert state == "stopped" and checkpoint == f"opt-tiny_0-5000-step-{step}"


def test_agent_is_killed(kernel, run_root):
    k = kernel()
    cell = k.start(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}))")
    running(run_root)
    agent = next(p for p in processes(run_root) if "multigpu_ft.launcher.agent" in p.cmdline())
    agent.kill()
    until(lambda: not processes(run_root), 5, "ranks gone after the agent")
    with pytest.raises(CellError, match="agent .* was killed by signal 9"):
        cell.result(10)


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp")])
def test_no_listener_outside_loopback_and_a_hung_rank_is_killed_when_stopped(
    kernel, run_root, strategy
):
    k = kernel()
    k.run(
        IMPORTS
        + f"run = launch(RunConfig(run_root={str(run_root)!r}, strategy={strategy!r}), wait=False)"
    )
    run_dir = running(run_root)
    listening = [
        c.laddr.ip
        for p in processes(run_root)
        for c in p.net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    ]
    assert listening and set(listening) == {"127.0.0.1"}, listening
    psutil.Process(ranks(run_dir)[1]).suspend()
    started = time.monotonic()
    assert "stopped" in k.run("print(run.stop().state)")
    assert time.monotonic() - started < 10 and not processes(run_root)


@pytest.mark.slow
def test_second_interrupt_kills(kernel, run_root):
    k = kernel()
    cell = k.start(IMPORTS + f"run = launch(RunConfig(run_root={str(run_root)!r}))")
    run_dir = running(run_root)
    psutil.Process(ranks(run_dir)[1]).suspend()
    k.manager.interrupt_kernel()
    time.sleep(1)
    k.manager.interrupt_kernel()
    until(lambda: not processes(run_root), 2, "all processes killed")
    with pytest.raises(CellError, match="KeyboardInterrupt"):
        cell.result(5)


@pytest.mark.parametrize(
    "line, reason, nproc",
    [
        ('{"text": "ok"}\n{"text": broken}\n', "line 2: not valid JSON", 2),
        (
            '{"text": "ok"}\n{"body": "no text"}\n',
            "row 1 of .* has no field 'text'; its fields are: body",
            1,
        ),
    ],
)
def test_broken_data(refusing, run_root, line, reason, nproc):
    k, folder = refusing("1")
    (folder / "a.jsonl").write_text(line)
    with pytest.raises(CellError, match=reason) as caught:
        k.run(f"launch(RunConfig(run_root={str(run_root)!r}, dataset='a.jsonl', nproc={nproc}))")
    assert caught.value.name == "DataError" and "Traceback" not in caught.value.value


@pytest.mark.parametrize(
    "values, name, reason",
    [
        (
            "start_idx=300, end_idx=200",
            "DataError",
            r"slice 300–200 of builtin:python-docs, which has [\d,]+ rows: the slice is empty",
        ),
        ("start_idx=-1", "DataError", r"which has [\d,]+ rows: .*cannot be negative"),
        (
            "start_idx=1000000",
            "DataError",
            r"slice 1,000,000–\(end\) of builtin:python-docs, which has [\d,]+ rows: start_idx is beyond",
        ),
        ("end_idx=1000000", "DataError", r"which has [\d,]+ rows: end_idx is beyond"),
        ("dataset='none.jsonl'", "DataError", "dataset 'none.jsonl'"),
        slow("dataset='user/none', nproc=1", "DataError", "could not be loaded from the Hub"),
        ("model='user/none'", "ModelError", "'user/none' could not be loaded"),
        ("strat_idx=5", "ConfigError", "unknown parameter 'strat_idx' .did you mean 'start_idx'"),
        ("hf_token='x'", "ConfigError", "looks like a secret.*HF_TOKEN"),
        (
            "hf_repo='hf_" + "a" * 34 + "'",
            "ConfigError",
            "has the shape of an access token.*HF_TOKEN",
        ),
        ("resume_file='nope'", "CheckpointError", "no checkpoint 'nope'"),
        (
            "hf_repo='me/model'",
            "CheckpointError",
            "no Hub token: put one in the environment variable HF_TOKEN",
        ),
        ("max_length=4096, nproc=1", "ModelError", "512 positions"),
    ],
)
def test_bad_settings(refusing, run_root, values, name, reason):
    k, _ = refusing(
        "" if "dataset='user" in values or "hf_repo='me" in values else "1"
    )  # one case that waits for the hub client's retries is enough
    with pytest.raises(CellError, match=reason) as caught:
        k.run(f"launch(RunConfig(run_root={str(run_root)!r}, {values}))")
    assert caught.value.name == name and "Traceback" not in caught.value.value


def test_the_disk_fails_the_supervisor_of_a_node(run_root):
    # this machine may have no secret
    cfg = RunConfig(run_root=str(run_root), run_name="one", nproc=1, trusted_network=True)
    run_dir = RunDir.common(cfg)
    run_dir.write_config(cfg)
    (run_dir.path / FAILURE_FILE).mkdir()  # the supervisor expects a file here
    rdzv = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "multigpu_ft.launcher.supervisor",
        "--node-rank",
        "0",
        "--rdzv",
        rdzv,
        run_dir.path,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (
        ended.returncode == 1
        and "Traceback" in ended.stdout
        and run_dir.status()["state"] == "failed"
    ), ended
    assert "the supervisor of node 0 (" in str(Run(run_dir).failure) and "Error: [Errno" in str(
        Run(run_dir).failure
    )

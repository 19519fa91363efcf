"""Look at runs from outside: their folders, their processes and their files."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import forks

REPO = Path(__file__).parents[2]
NBS = REPO / "nbs"
BIN = Path(sys.executable).parent
DATA = REPO.parent / "shared" / "data"


def slow(*values):
    "Return parameters of a test that `make test` leaves to `make test-slow`."
    return pytest.param(*values, marks=pytest.mark.slow)


def multigpu_ft(*arguments, cwd, **env):
    "Run a command as in a terminal, and return its exit code and what it printed."
    environment, how = {**os.environ, **env}, {"cwd": cwd, "timeout": 120}
    try:
        return forks.run("harness.command", arguments, environment=environment, **how)
    except forks.Cold:
        command = [BIN / "multigpu-ft", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, **how)


def processes(run_root):
    "Return the agents and ranks of runs under `run_root`, which is in their command lines."
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and "-m" in line
                and any(str(run_root) in word for word in line)
            ):
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def free_port():
    """Return a free port for a process that binds it later.

    It's below those that Linux gives to sockets without a port of their own, which another test could get first."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(condition, seconds, what):
    "Wait until `condition()` is true, and return its value; fail after `seconds`."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


def ranks(run_dir):
    "Return the process ids of the ranks."
    return json.loads((run_dir / "status.json").read_text())["pids"]["ranks"]


def running(run_root, steps=3):
    "Return the directory of the only run under `run_root`, once it has logged `steps` steps."

    def ready():
        for metrics in run_root.glob("*/metrics.jsonl"):
            if (
                metrics.read_text().count("\n") >= steps
                and json.loads((metrics.parent / "status.json").read_text())["state"] == "running"
            ):
                return metrics.parent

    try:
        # Python starts four times, which takes a minute on a busy machine
        return until(ready, 120, "a run that trains")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{_evidence(run_root)}") from None


def _evidence(run_root):
    "Return why a run may be stuck: stacks of its ranks, what they wrote, and what else keeps the machine busy."
    busy = list(psutil.process_iter())
    for process in busy:
        _percent(process)
    for process in processes(run_root):
        if "multigpu_ft.training" in process.cmdline():
            process.send_signal(signal.SIGUSR1)
    time.sleep(2)
    lines = [f"load {os.getloadavg()}, {psutil.virtual_memory().available:,} bytes of memory free"]
    lines += [
        f"{percent:.0f} % {line[:200]}"
        for percent, line in sorted(map(_percent, busy), reverse=True)[:12]
    ]
    for path in sorted(run_root.glob("*/*.json*")) + sorted(run_root.glob("*/logs/*")):
        lines += [f"--- {path}", path.read_text()[-3000:]]
    return "\n".join(lines)


def _percent(process):
    "Return the processor usage since the last call in per cent, and the command line."
    try:
        return (
            process.cpu_percent(),
            f"{process.pid} {process.status()} {' '.join(process.cmdline())}",
        )
    except psutil.Error:  # it has ended, or belongs to another user
        return 0.0, "?"


def error_of(run_dir):
    return (
        "".join(
            json.loads(path.read_text())["message"]["message"]
            for path in sorted(run_dir.path.glob("errors/*.json"))
        )
        or run_dir.log_file(0).read_text()
    )

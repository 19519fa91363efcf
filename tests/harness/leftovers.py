"""End a run in each of six ways, and see which of the processes that it started are left.

A stand-in for what libraries start in a rank (an engine, a service) has a session of its own, ignores every signal that
can be ignored, and has a child like itself."""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time

import psutil
from harness import forks
from harness.runs import until

from multigpu_ft import RunDir
from multigpu_ft.run.run_dir import FINAL_STATES

WAYS = ("done", "stop", "interrupt", "kernel SIGKILL", "agent SIGKILL", "rank SIGKILL")
# seconds after the last state is written, or after the SIGKILL
GONE_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>

_STAND_IN = """
import os, signal, subprocess, sys, time
for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(name, signal.SIG_IGN)
if sys.argv[1] == "child":
    command = [sys.executable, "-S", "-c", os.environ["STAND_IN"], "grandchild"]
    subprocess.Popen(command, start_new_session=True)
time.sleep(600)
"""
# each process runs it first, so the package doesn't know about the stand-in
_AT_START = """
import os, subprocess, sys
if "RANK" in os.environ and "STAND_IN" not in os.environ:
    os.environ["STAND_IN"] = {code!r}
    command = [sys.executable, "-S", "-c", os.environ["STAND_IN"], "child"]
    subprocess.Popen(command, start_new_session=True)
"""


def stand_ins(folder):
    "Return an environment in which each rank has a stand-in."
    folder.mkdir()
    return forks.at_start(folder, _AT_START.format(code=_STAND_IN))


def _adopt(orphans):
    "Have orphans become children of this process, or of process 1 again. Does nothing except on Linux."
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)


class Leftovers:
    """The processes that descend from this one, started since `with` began, except those it was told to `ignore`.

    Meanwhile orphans become children of this process, so none is missed."""

    def __enter__(self):
        forks.prepare()
        self._known = {p.pid for p in psutil.Process().children(recursive=True)}
        _adopt(True)
        return self

    def ignore(self, pid):
        self._known.add(pid)

    def now(self):
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                gone = process.status() == psutil.STATUS_ZOMBIE
                if process.pid not in self._known and not gone and not _has_a_kernel(process):
                    found.append(process)
        return found

    def __exit__(self, *_):
        _adopt(False)
        while left := self.now():
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
        for process in psutil.Process().children():
            if process.pid not in self._known:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)


def _has_a_kernel(process):
    "Return whether this is the fork server of a process that is there."
    words = process.cmdline()
    if "multigpu_ft.run.fork_server" not in words:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(int(words[5])).status() != psutil.STATUS_ZOMBIE
    return False


def end(way, kernel, run_dir):
    """End a run that a cell of the `kernel` waits for.

    Returns when its last state is written, or after the SIGKILL."""
    if way == "stop":
        RunDir(run_dir).request_stop()
    elif way == "interrupt":
        kernel.manager.interrupt_kernel()
    elif way != "done":
        pids = _status(run_dir)["pids"]
        victims = {"kernel": kernel.pid, "agent": pids["agent"], "rank": pids["ranks"][-1]}
        if way == "guarded agent SIGKILL":
            victims["guarded"] = psutil.Process(pids["agent"]).children()[0].pid
        return os.kill(victims[way.split()[0]], signal.SIGKILL)
    state = until(lambda: (s := _status(run_dir)["state"]) in FINAL_STATES and s, 120, "the end")
    assert state == ("done" if way == "done" else "stopped")


def seconds_until_gone(leftovers):
    "Return after how many seconds nothing is left. Raises `AssertionError` if something is after 5."
    begun = time.monotonic()
    while left := leftovers.now():
        taken = time.monotonic() - begun
        assert taken < GONE_S, f"left after {taken:.1f} s: {list(map(_described, left))}"
        time.sleep(0.02)
    return time.monotonic() - begun


def at_work(root, seconds=120):
    "Return the only run directory under `root` once its ranks are at work."

    def found():
        for path in root.rglob("status.json"):
            status = _status(path.parent)
            if status["state"] == "running" and status.get("step"):
                return path.parent

    return until(found, seconds, "a run at work")


def _described(process):
    with contextlib.suppress(psutil.Error):
        return f"{process.pid}, child of {process.ppid()}: {' '.join(process.cmdline())[:120]}"
    return f"{process.pid}"


def _status(run_dir):
    return json.loads((run_dir / "status.json").read_text())

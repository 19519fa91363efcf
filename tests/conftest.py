"""Fixtures: a run root whose processes must all be gone when its test ends, and a real Jupyter kernel."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import faults
import psutil
import pytest
from jupyter_client import KernelManager

from multigpu_ft import Run

pytest_plugins = ["browser"]
REPO = Path(__file__).parents[1]
NBS = REPO / "nbs"
BIN = Path(sys.executable).parent
DATA = REPO.parent / "shared" / "data"


# Files that take longest, first: workers take whole files, and the last one to begin is the last one to end.
LONGEST = (
    "nodes",
    "guides",
    "failing_well",
    "zero",
    "project",
    "estimates",
    "calls",
    "tuning",
    "exactness",
    "faults",
    "generation",
    "resuming",
    "training",
    "trackers",
)


def slow(*values):
    "Parameters of a test that `make test` leaves to `make test-slow`."
    return pytest.param(*values, marks=pytest.mark.slow)


def pytest_collection_modifyitems(items):
    import torch

    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_sessionfinish(session):
    "In CI everything is there that a test may need, except a GPU and, in some containers, the right to mount: any other skip is a failure."
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:  # a worker of xdist; the process that collects what workers found comes here too
        return
    allowed = ("needs a CUDA GPU", "needs the right to mount")
    skipped = [r for r in reporter.stats.get("skipped", []) if not any(reason in str(r.longrepr) for reason in allowed)]
    if skipped and os.environ.get("CI"):
        print(f"\nskipped in CI: {[(r.nodeid, r.longrepr) for r in skipped]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def processes(run_root):
    "Agents and ranks of runs under `run_root`: their command lines name it."
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


def until(condition, seconds, what):
    "Wait for `condition()` to be true and return it; fail after `seconds`."
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left():
    "The files that a worker takes share its process, and which ones they are differs from gate to gate."
    yield
    distributed = sys.modules.get("torch.distributed")
    assert not (distributed and distributed.is_initialized()), "a test of this file left a process group"


@pytest.fixture
def run_root(tmp_path):
    root = tmp_path / "runs"
    yield root
    left = processes(root)
    for process in left:
        process.kill()
    assert not left, f"processes outlived the run: {left}"


@pytest.fixture
def shared_data():
    if not DATA.is_dir():
        pytest.skip(f"needs the real data sets in {DATA}")
    return DATA


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    "A tiny model with its tokenizer, and texts."
    return faults.make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def server(material):
    "Runs in milliseconds, forked from a process that has torch imported."
    started = faults.Server(material / "model")
    yield started
    started.close()


@pytest.fixture(scope="module")
def train(server):
    "`launch`, without what it takes to start Python and import torch."

    def train(cfg):
        nproc = cfg.nproc or (1 if cfg.strategy == "single" else 2)
        run = Run(server.finish(cfg.replace(nproc=nproc), seconds=300))
        assert run.status["state"] in ("done", "stopped"), run.logs(0)[-3000:]
        return run

    return train


def ranks(run_dir):
    "Process ids of the ranks."
    return json.loads((run_dir / "status.json").read_text())["pids"]["ranks"]


def running(run_root, steps=3):
    "The directory of the one run under `run_root`, once it has logged `steps` steps."

    def ready():
        for metrics in run_root.glob("*/metrics.jsonl"):
            if (
                metrics.read_text().count("\n") >= steps
                and json.loads((metrics.parent / "status.json").read_text())["state"] == "running"
            ):
                return metrics.parent

    try:
        return until(
            ready, 120, "a run that trains"
        )  # Python starts four times, which takes a minute where others do that, too
    except AssertionError as error:
        raise AssertionError(f"{error}\n{_evidence(run_root)}") from None


def _evidence(run_root):
    "Why a run may not have got on: where its ranks are, what they wrote, and who else has the processors."
    busy = list(psutil.process_iter())
    for process in busy:
        _percent(process)
    for process in processes(run_root):
        if "multigpu_ft.training" in process.cmdline():
            process.send_signal(signal.SIGUSR1)
    time.sleep(2)
    lines = [f"load {os.getloadavg()}, {psutil.virtual_memory().available:,} bytes of memory free"]
    lines += [f"{percent:.0f} % {line[:200]}" for percent, line in sorted(map(_percent, busy), reverse=True)[:12]]
    for path in sorted(run_root.glob("*/*.json*")) + sorted(run_root.glob("*/logs/*")):
        lines += [f"--- {path}", path.read_text()[-3000:]]
    return "\n".join(lines)


def _percent(process):
    "Per cent of a processor since the last call, and the command line."
    try:
        return process.cpu_percent(), f"{process.pid} {process.status()} {' '.join(process.cmdline())}"
    except psutil.Error:  # it ended, or is another user's
        return 0.0, "?"


class Kernel:
    "A notebook kernel, driven as a frontend drives it."

    def __init__(self, cwd, env):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(cwd), env={**os.environ, **env})
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self._stacks = tempfile.NamedTemporaryFile("r", prefix="kernel-stacks-")
        register = f"faulthandler.register(signal.SIGUSR1, open({self._stacks.name!r}, 'w'))"
        self.client.execute_interactive(
            f"import faulthandler, signal; {register}; del faulthandler, signal", silent=True, timeout=60
        )

    def run(self, code, timeout=120):
        "Execute `code`; returns what it printed or showed, and raises `CellError` as the frontend shows an error."
        return self.start(code).result(timeout)

    def start(self, code):
        "Execute `code` without waiting; `.result()` waits for what `run` returns or raises."
        return _Cell(self.client, self.client.execute(code), self.stacks)

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def stacks(self):
        "Where its threads are at the moment."
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(1)
        return self._stacks.read()

    def shutdown(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self._stacks.close()


class CellError(Exception):
    def __init__(self, name, value, output):
        super().__init__(f"{name}: {value}")
        self.name, self.value, self.output = name, value, output


class _Cell:
    def __init__(self, client, message_id, stacks):
        self.client, self.id, self._stacks = client, message_id, stacks

    def result(self, timeout=60):
        end, shown, error, before = time.monotonic() + timeout, [], None, None
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"the cell is still running after {timeout} s; it showed: {shown}; its threads:\n{self._stacks()}"
                ) from None
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != self.id:
                continue
            if kind == "stream" == before:  # what is printed later goes on where it was
                shown[-1] += content["text"]
            elif kind == "stream":
                shown.append(content["text"])
            elif kind in ("display_data", "execute_result", "update_display_data"):
                shown.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                error = CellError(content["ename"], content["evalue"], "\n".join(shown))
            elif kind == "status" and content["execution_state"] == "idle":
                if error:
                    raise error
                return "\n".join(shown)
            before = kind


@pytest.fixture
def kernel(tmp_path):
    started = []

    def start(**env):
        started.append(Kernel(tmp_path, env))
        return started[-1]

    yield start
    for k in started:
        k.shutdown()


@pytest.fixture
def failing_rank(tmp_path):
    """Environment in which rank 1 raises `ZeroDivisionError` after its third step. Python itself loads the fault, from a
    sitecustomize module; the package knows nothing of it."""
    folder = tmp_path / "fault"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "def fail(*_):\n"
        "    try: lines = open(os.path.join(sys.argv[1], 'metrics.jsonl')).read().count(chr(10))\n"
        "    except (OSError, IndexError): return\n"
        "    if lines >= 3:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "        raise ZeroDivisionError('planted in rank 1')\n"
        "if os.environ.get('RANK') == '1':\n"
        "    signal.signal(signal.SIGALRM, fail)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.1)\n"
    )
    return {"PYTHONPATH": str(folder)}


def papermill(*arguments, cwd, env=None, timeout=300):
    return subprocess.run(
        [BIN / "papermill", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def outputs(notebook):
    "All text that the notebook shows."
    cells = json.loads(Path(notebook).read_text())["cells"]
    found = [o for c in cells for o in c.get("outputs", [])]
    return "\n".join(
        "".join(o.get("text", ""))
        + "".join(o.get("data", {}).get("text/plain", ""))
        + "\n".join(o.get("traceback", []))
        for o in found
    )

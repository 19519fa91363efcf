"""Let kernels and agents die at random moments, for every way to start ranks from a cell.

Records which processes remain, and for how long.

python tests/harness/dying_kernels.py --trials 108 --relaunches 20 --json bench/results/kernels.json"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.notebooks import CellError, Kernel  # noqa: E402

MARKER = "MULTIGPU_FT_TRIAL"
WORK = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(600):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
"""
CELLS = {
    "launch": "launch(RunConfig(run_root='runs', packing='padded', batch_size=8, resume_file='none'))",
    "launch(function)": "def work():\n"
    + "".join(f"    {line}\n" for line in WORK.strip().splitlines())
    + "launch(work, nproc=2)",
    "%%torchrun": "%%torchrun -n 2\n" + WORK,
}
WORKS = {
    "launch": (
        "launch(RunConfig(run_root='runs', packing='padded', batch_size=8, end_idx=64, "
        "resume_file='none')).state"
    ),
    "launch(function)": "launch(lambda: 42, nproc=2)",
    "%%torchrun": "%%torchrun -n 2\n40 + 2",
}
SERVER = "multigpu_ft.run.fork_server"
FAULTS = ("interrupt", "restart", "kernel SIGKILL", "agent SIGKILL")


def marked(mark, but=(), server=False):
    "Return the living processes with the trial's mark, which children inherit. Of the fork server only if asked."
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.pid not in but
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(MARKER) == mark
                and (server or SERVER not in process.cmdline())
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found


class Trial:
    "A kernel in its own folder, in which a cell starts ranks."

    def __init__(self, folder):
        self.mark = uuid.uuid4().hex
        self.kernel = Kernel(folder, {MARKER: self.mark, "OMP_NUM_THREADS": "1"})
        self.kernel.run("from multigpu_ft import RunConfig, launch\n%load_ext multigpu_ft")
        self.own = {p.pid for p in marked(self.mark)}

    def start(self, cell, after_s, ranks=True):
        "Run `cell` without waiting. Returns `after_s` seconds after its ranks (or its agent) have started."
        self.cell = self.kernel.start(cell)
        end = time.monotonic() + 60
        # the agent has a guard
        while len(marked(self.mark, self.own)) < (4 if ranks else 1):
            assert time.monotonic() < end, "no ranks within 60 s"
            time.sleep(0.05)
        time.sleep(after_s)

    def fault(self, name):
        "Cause the fault `name`. Returns the seconds until no process was left, or after 30 how many were left."
        manager = self.kernel.manager
        agent = next(
            p for p in marked(self.mark, self.own) if "multigpu_ft.launcher.agent" in p.cmdline()
        )
        begun = time.monotonic()
        if name == "interrupt":
            manager.interrupt_kernel()
        elif name == "restart":
            manager.restart_kernel(now=False)
        elif name == "kernel SIGKILL":
            os.kill(self.kernel.pid, signal.SIGKILL)
        else:
            agent.kill()
        # the fork server ends with its kernel
        server = name in ("restart", "kernel SIGKILL")
        but = {*self.own, self.kernel.pid, *(p.pid for p in psutil.Process().children())}
        while left := marked(self.mark, but, server):
            if time.monotonic() - begun > 30:
                return {"left": len(left)}
            time.sleep(0.02)
        return {"seconds": round(time.monotonic() - begun, 2)}

    def end(self):
        self.kernel.shutdown()
        for process in marked(self.mark, server=True):
            process.kill()


def trial(folder, launcher, fault, after_s, ranks=True):
    one = Trial(folder)
    try:
        one.start(CELLS[launcher], after_s, ranks)
        return {
            "launcher": launcher,
            "fault": fault,
            "after_s": round(after_s, 2),
            **one.fault(fault),
        }
    finally:
        one.end()


def relaunch(folder, launcher, times, rng):
    "Kill ranks with their agent and launch again, in one kernel. Returns how often the launch worked."
    one, worked = Trial(folder), 0
    try:
        for _ in range(times):
            one.start(CELLS[launcher], rng.uniform(0, 3))
            one.fault("agent SIGKILL")
            try:
                one.cell.result(30)
            except CellError:
                pass
            shown = one.kernel.run(WORKS[launcher], 60)
            worked += "done" in shown or "42" in shown
        return worked
    finally:
        one.end()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--relaunches", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all ranks are on the CPU
    rng, outcomes = random.Random(options.seed), []
    cells = [(launcher, fault) for launcher in CELLS for fault in FAULTS]
    for number in range(options.trials):
        launcher, fault = cells[number % len(cells)]
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            outcomes.append(
                trial(folder, launcher, fault, rng.uniform(0, 6), ranks=rng.random() < 0.8)
            )
        print(outcomes[-1], flush=True)
    again = {}
    for number, launcher in enumerate(CELLS):
        times = options.relaunches // 3 + (number < options.relaunches % 3)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            again[launcher] = [relaunch(folder, launcher, times, rng), times]
        print("again", launcher, again[launcher], flush=True)
    for launcher, fault in cells:
        found = [o for o in outcomes if (o["launcher"], o["fault"]) == (launcher, fault)]
        seconds = sorted(o["seconds"] for o in found if "seconds" in o)
        if found:
            spread = (
                f"{statistics.median(seconds):.2f} s ({seconds[0]:.2f}-{seconds[-1]:.2f})"
                if seconds
                else "-"
            )
            print(
                f"| {launcher} | {fault} | {len(found)} | {sum(o.get('left', 0) for o in found)} left | {spread} |"
            )
    if options.json:
        options.json.write_text(
            json.dumps({"seed": options.seed, "trials": outcomes, "relaunched": again}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()

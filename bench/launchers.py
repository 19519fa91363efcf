"""Compare ways to run a function on two processes from a notebook cell, each in a real kernel.

Records what the cell shows when it works, fails, hangs or is interrupted.

    python bench/launchers.py [--only Lightning torchrun] [--scenarios 1 2] [--rounds 3] \
        [--json bench/results/launchers.json]

Every trial has its own kernel and folder. Needs `pip install lightning ipyparallel` in addition to
the package. Prints a table and writes everything observed; results of other launchers and scenarios
are kept. A cell hangs if it is not back 60 s after rank 1 failed. Seconds are counted from the
launch, or for failures from the failure.

Fairness. All run the same `work`, on gloo, in kernels that have imported torch and the launcher
before the clock starts.
- gloo reports at once to rank 0 that rank 1 is gone, so in 2 and 3 both ranks fail, and a launcher
  may name the wrong one. With NCCL, rank 0 would keep waiting, as in 9, where it computes.
- Accelerate: without a GPU, `notebook_launcher(..., num_processes=2)` takes the path it takes with
  two (torch's elastic agent, forked ranks; it prints "Launching training on 2 CUDAs."), so nothing
  is faked. A trial chooses a port, since other processes on this machine may use 29500, and keeps
  it, as users who choose none do; 5 works with a new port. ACCELERATE_DEBUG_MODE, which tries the
  devices first, has no device to try here.
- Lightning: `training_step` calls `work`, in the process group that the strategy made.
- ipyparallel: engines have no ranks, so the cell gives each one torchrun's variables. `apply_sync`
  waits for all engines, even if one fails; the second column asks for the first exception instead.
- torchrun: a cell with `!` does not raise when its command fails. The second column is `%%bash`,
  which does.
- CUDA: see `TOUCHED`.
"""

import argparse
import contextlib
import importlib.metadata
import inspect
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path

import nbformat
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gpus import hide_gpus
from harness.notebooks import Kernel
from harness.runs import BIN

# seconds after which a cell hangs, an interrupted one should be back, and processes should be gone
HANG, BACK, LEFT = 60, 15, 5
MARKER = "BENCH_LAUNCHERS_TRIAL"
# Text that tells the user the cause. It does not occur in the source of `work`, which tracebacks show.
CAUSES = {
    "raise": re.compile(r"ZeroDivisionError.*planted by rank 1", re.S),
    "kill": re.compile(r"SIGKILL|[Ss]ignal 9|exitcode\W+-9|Engine \d died"),
    "cuda": re.compile("Cannot re-initialize CUDA in forked subprocess"),
    "printed": re.compile(r"sum 3\.0"),
    "returned": re.compile(r"returned 3\.0"),
}
PACKAGES = (
    "multigpu_ft",
    "accelerate",
    "lightning",
    "ipyparallel",
    "torch",
    "ipykernel",
    "ipython",
    "jupyter_client",
    "papermill",
)


def work(what, marks):
    "Do what each rank does. The imports are inside because engines and train.py get only this function."
    import os
    import time
    from pathlib import Path

    import torch
    import torch.distributed as dist

    Path(marks, f"rank-{os.getpid()}").touch()
    if what == "cuda":
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:
            # torch checks for a fork before it looks for a driver, so another error means no fork
            if "forked subprocess" in str(error):
                raise
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    if what == "loop" or what == "alone" and rank == 0:
        Path(marks, f"loop-{rank}").touch()
        while True:
            time.sleep(0.01)
            torch.ones(100).sum()
    if rank == 1 and what in ("raise", "kill", "alone"):
        time.sleep(1)
        Path(marks, "fault").touch()
        if what == "kill":
            os.kill(os.getpid(), 9)
        raise ZeroDivisionError(f"planted by rank {rank}")
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total)
    if own:
        dist.destroy_process_group()
    if rank == 0:
        print(f"sum {total.item()}", flush=True)
    return total.item()


WORK = inspect.getsource(work)

# Simulates CUDA in a forked child whose parent has used it: torch's pthread_atfork handler makes
# `_is_in_bad_fork()` true there, and torch's own `_lazy_init` raises. An exec'd process starts afresh.
TOUCHED = """
import os, torch
torch.cuda._initialized = True
os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
assert torch.cuda.is_initialized()
"""

LIGHTNING = """
import lightning, torch
class Module(lightning.LightningModule):
    def __init__(self, *args):
        super().__init__()
        self.layer, self.args = torch.nn.Linear(1, 1), args
    def training_step(self, batch, index):
        self.log("sum", work(*self.args))
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
"""

ENGINES = """
import ipyparallel as ipp
def place(rank, port):
    import os
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
"""

CLUSTER = """
with ipp.Cluster(n=2) as rc:
    for rank in rc.ids:
        rc[rank].apply_sync(place, rank, "{port}")
    print("returned", %s[0])
"""

# cell that prepares, cell that launches
LAUNCHERS = {
    "multigpu_ft": (
        WORK + "import torch\nfrom multigpu_ft import launch",
        'print("returned", launch(work, "{what}", "{marks}", nproc=2))',
    ),
    "Accelerate": (
        WORK + "import torch\nfrom accelerate import notebook_launcher",
        'print("returned", notebook_launcher(work, ("{what}", "{marks}"), num_processes=2, use_port="{port}"))',
    ),
    "Lightning": (
        WORK + LIGHTNING,
        'trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp_notebook", '
        "max_epochs=1, logger=False, enable_checkpointing=False,\n"
        "                            enable_progress_bar=False, enable_model_summary=False)\n"
        'trainer.fit(Module("{what}", "{marks}"), torch.utils.data.DataLoader(torch.ones(2, 1)))\n'
        'print("returned", trainer.callback_metrics["sum"].item())',
    ),
    "ipyparallel": (
        WORK + "import torch" + ENGINES,
        CLUSTER % 'rc[:].apply_sync(work, "{what}", "{marks}")',
    ),
    "ipyparallel, first exception": (
        WORK + "import torch" + ENGINES,
        CLUSTER % 'rc[:].apply_async(work, "{what}", "{marks}").get(return_when="FIRST_EXCEPTION")',
    ),
    "torchrun": (
        f"%%writefile train.py\n{WORK}\nimport sys\nwork(*sys.argv[1:])",
        '!torchrun --standalone --nproc-per-node 2 train.py {what} "{marks}"',
    ),
    "torchrun, %%bash": (
        f"%%writefile train.py\n{WORK}\nimport sys\nwork(*sys.argv[1:])",
        '%%bash\ntorchrun --standalone --nproc-per-node 2 train.py {what} "{marks}"',
    ),
}


class Trial:
    "A folder, and a kernel. An environment variable marks all descendants of the kernel."

    def __init__(self, launcher, folder):
        self.folder, self.marks, self.kernel = folder, folder / "marks", None
        self.prepare, self.launch = LAUNCHERS[launcher]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.env = {
            MARKER: uuid.uuid4().hex,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "IPYTHONDIR": str(folder / "ipython"),
        }
        self.marks.mkdir()

    def code(self, what):
        return self.launch.format(what=what, marks=self.marks, port=self.port)

    def start(self):
        self.kernel = Kernel(self.folder, self.env)
        prepared = Watched(self.kernel, self.prepare)
        prepared.wait(limit=120)
        assert prepared.end and not prepared.error, prepared.seen()

    def cell(self, what):
        return Watched(self.kernel, self.code(what))

    def fault(self):
        "Return when rank 1 failed, or 0."
        with contextlib.suppress(FileNotFoundError):
            return (self.marks / "fault").stat().st_mtime
        return 0

    def processes(self):
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(MARKER) == self.env[MARKER]
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def left(self):
        "Return the processes that remain after `LEFT` seconds, except the kernel: ranks, and others by name."
        end, kernel = time.time() + LEFT, self.kernel and self.kernel.pid
        while (found := [p for p in self.processes() if p.pid != kernel]) and time.time() < end:
            time.sleep(0.1)
        names = []
        for process in found:
            with contextlib.suppress(psutil.Error):
                names.append(
                    "rank"
                    if (self.marks / f"rank-{process.pid}").exists()
                    else " ".join(process.cmdline())[-200:]
                )
        return sorted(names)

    def close(self):
        if self.kernel:
            self.kernel.shutdown()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


class Watched:
    "A running cell, and its output so far."

    def __init__(self, kernel, code):
        self.kernel, self.shown, self.error, self.start, self.end = (
            kernel,
            [],
            None,
            time.time(),
            None,
        )
        self.cell = kernel.start(code)

    def wait(self, limit=HANG, done=lambda: False, since=lambda: 0):
        "Wait until the cell ends, until `done()`, or for `limit` seconds after `since()` or after now."
        start = time.time()
        while self.end is None and not done() and time.time() - (since() or start) < limit:
            try:
                message = self.cell.client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != self.cell.id:
                continue
            if kind == "stream":
                self.shown.append(content["text"])
            elif kind in ("display_data", "execute_result", "update_display_data"):
                self.shown.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                self.error = {k: content[k] for k in ("ename", "evalue")} | {
                    "traceback": plain("\n".join(content["traceback"]))
                }
            elif kind == "status" and content["execution_state"] == "idle":
                self.end = time.time()

    def seen(self):
        "Return the outcome. Texts are cut short only after they were searched."
        error, shown = self.error and "\n".join(self.error.values()), plain("".join(self.shown))
        return {
            "seconds": self.end and self.end - self.start,
            "ename": self.error and self.error["ename"],
            "evalue": self.error and self.error["evalue"][-2000:],
            "traceback": self.error and self.error["traceback"][-500:],
            "shown": shown[-1000:],
            "in_error": [
                name for name, pattern in CAUSES.items() if error and pattern.search(error)
            ],
            "in_shown": [name for name, pattern in CAUSES.items() if pattern.search(shown)],
            "kernel_alive": self.kernel.manager.is_alive(),
        }


def plain(text):
    return re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", text)


def succeed(trial):
    trial.start()
    cell = trial.cell("sum")
    cell.wait()
    return {**cell.seen(), "left": trial.left()}


def fail(trial, what):
    trial.start()
    cell = trial.cell(what)
    cell.wait(since=trial.fault)
    seen = {**cell.seen(), "after_fault": cell.end and trial.fault() and cell.end - trial.fault()}
    return seen if cell.end is None else {**seen, "left": trial.left()}


def interrupt(trial):
    trial.start()
    cell = trial.cell("loop")
    cell.wait(done=lambda: len([*trial.marks.glob("loop-*")]) == 2)
    assert cell.end is None and len([*trial.marks.glob("loop-*")]) == 2, cell.seen()
    time.sleep(1)
    pressed = time.time()
    trial.kernel.manager.interrupt_kernel()
    cell.wait(BACK)
    seen = {**cell.seen(), "after_interrupt": cell.end and cell.end - pressed, "left": trial.left()}
    if cell.end is None:
        pressed = time.time()
        trial.kernel.manager.interrupt_kernel()
        cell.wait(BACK)
        seen |= {
            "after_second_interrupt": cell.end and cell.end - pressed,
            "left_after_second_interrupt": trial.left(),
        }
    return seen


def relaunch(trial):
    first = fail(trial, "raise")
    if first["seconds"] is None:
        trial.kernel.manager.interrupt_kernel()
        interrupted = Watched(trial.kernel, "None")
        interrupted.wait(BACK)
        first["back_after_interrupt"] = interrupted.end is not None
        if not interrupted.end:
            return {"first": first}
    cell = trial.cell("sum")
    cell.wait()
    return {"first": first, **cell.seen(), "left": trial.left()}


def touched(trial):
    trial.start()
    touch = Watched(trial.kernel, TOUCHED)
    touch.wait()
    assert touch.end and not touch.error, touch.seen()
    cell = trial.cell("cuda")
    cell.wait()
    return {**cell.seen(), "left": trial.left(), "ranks": len([*trial.marks.glob("rank-*")])}


def papermill(trial):
    notebook = nbformat.v4.new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        }
    )
    cells = [
        trial.prepare,
        trial.code("raise"),
        "from pathlib import Path\nPath('uploaded').touch()",
    ]
    notebook.cells = [nbformat.v4.new_code_cell(code) for code in cells]
    nbformat.write(notebook, trial.folder / "in.ipynb")
    started = time.time()
    with open(trial.folder / "papermill.log", "w") as log:
        process = subprocess.Popen(
            [BIN / "papermill", "in.ipynb", "out.ipynb"],
            cwd=trial.folder,
            env={**os.environ, **trial.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    while process.poll() is None and time.time() - (trial.fault() or started + 60) < HANG:
        time.sleep(0.1)
    seen = {
        "exit": process.poll(),
        "uploaded": (trial.folder / "uploaded").exists(),
        "after_fault": trial.fault() and time.time() - trial.fault(),
    }
    if process.poll() is None:
        process.kill()
        process.wait()
    else:
        seen["left"] = trial.left()
    return {**seen, "log": plain((trial.folder / "papermill.log").read_text())[-1000:]}


def kernel_killed(trial):
    trial.start()
    cell = trial.cell("loop")
    cell.wait(done=lambda: len([*trial.marks.glob("loop-*")]) == 2)
    assert cell.end is None and len([*trial.marks.glob("loop-*")]) == 2, cell.seen()
    time.sleep(1)
    before = len(trial.processes()) - 1
    os.kill(trial.kernel.pid, signal.SIGKILL)
    return {"processes_before": before, "left": trial.left()}


def told_left(left):
    "Return the remaining processes in words. An idle resource tracker that ends with the kernel does no harm."
    ranks, trackers = left.count("rank"), sum("resource_tracker" in name for name in left)
    counts = {"rank": ranks, "resource tracker": trackers, "other": len(left) - ranks - trackers}
    told = [f"{n} {what}{'s' * (n > 1)}" for what, n in counts.items() if n]
    return f", {' and '.join(told)} left" if told else ""


def told_sum(seen):
    if seen["seconds"] is None:
        return f"hangs ({HANG} s)"
    if seen["ename"]:
        return f"fails: {seen['ename']}" + told_left(seen["left"])
    said = (
        "returned"
        if "returned" in seen["in_shown"]
        else "printed, not returned"
        if "printed" in seen["in_shown"]
        else "no result"
    )
    return f"{said}, {seen['seconds']:.1f} s" + told_left(seen["left"])


def told_failure(cause, seen):
    if seen["seconds"] is None:
        return f"hangs ({HANG} s)"
    where = (
        "the cause in the error"
        if cause in seen["in_error"]
        else "the cause only in the output"
        if cause in seen["in_shown"]
        else "the cause not shown"
    )
    head = f"raised {seen['ename']}" if seen["ename"] else "does not raise"
    return f"{head}, {seen['after_fault']:.1f} s, {where}" + told_left(seen["left"])


def told_interrupt(seen):
    if seen["after_interrupt"] is None:
        again = seen["after_second_interrupt"]
        second = (
            f"{again:.1f} s after a second one" if again is not None else "nor after a second one"
        )
        return f"not back within {BACK} s, {second}" + told_left(
            seen["left_after_second_interrupt"]
        )
    return f"back after {seen['after_interrupt']:.1f} s, {seen['ename'] or 'no error'}" + told_left(
        seen["left"]
    )


def told_relaunch(seen):
    hung = seen["first"]["seconds"] is None
    if hung and not seen["first"]["back_after_interrupt"]:
        return "no: the kernel does not come back"
    if seen["seconds"] is None:
        return f"no: hangs ({HANG} s)"
    worked = (
        "works"
        if not seen["ename"] and {"printed", "returned"} & set(seen["in_shown"])
        else f"no: {seen['ename'] or 'no result'}"
    )
    return (
        worked
        + (" once the hanging cell was interrupted" if hung else "")
        + told_left(seen["left"])
    )


def told_touched(seen):
    if (
        not seen["ename"]
        and {"printed", "returned"} & set(seen["in_shown"])
        or seen["seconds"] is None
    ):
        return told_sum(seen)
    failed = "the ranks fail" if seen["ranks"] else "refuses before it starts ranks"
    where = (
        "the cause in the error"
        if "cuda" in seen["in_error"]
        else "the cause only in the output"
        if "cuda" in seen["in_shown"]
        else "the cause not shown"
    )
    return f"{failed}: {seen['ename'] or 'no error'}, {where}" + told_left(seen["left"])


def told_papermill(seen):
    ran = f"upload cell {'ran' if seen['uploaded'] else 'did not run'}"
    return (
        f"hangs ({HANG} s), {ran}"
        if seen["exit"] is None
        else f"exit {seen['exit']}, {ran}" + told_left(seen["left"])
    )


def told_killed(seen):
    return told_left(seen["left"])[2:] or "none left"


SCENARIOS = {
    1: ("succeeds", succeed, told_sum),
    2: (
        "rank 1 raises while rank 0 waits for it",
        partial(fail, what="raise"),
        partial(told_failure, "raise"),
    ),
    3: (
        "rank 1 is killed while rank 0 waits for it",
        partial(fail, what="kill"),
        partial(told_failure, "kill"),
    ),
    4: ("the cell is interrupted", interrupt, told_interrupt),
    5: ("launched again after 2", relaunch, told_relaunch),
    6: ("the kernel has used CUDA", touched, told_touched),
    7: ("papermill, rank 1 raises, the next cell uploads", papermill, told_papermill),
    8: (f"the kernel is killed: {LEFT} s later", kernel_killed, told_killed),
    9: (
        "rank 1 raises while rank 0 computes",
        partial(fail, what="alone"),
        partial(told_failure, "raise"),
    ),
}


def told(number, rounds):
    "Return the median round of each outcome."
    outcomes = {}
    for text in map(SCENARIOS[number][2], rounds):
        outcomes.setdefault(re.sub(r"\d+\.\d+ s", "", text), []).append(text)
    medians = [
        sorted(texts, key=lambda text: [float(s) for s in re.findall(r"(\d+\.\d+) s", text)])[
            (len(texts) - 1) // 2
        ]
        for texts in outcomes.values()
    ]
    return "; ".join(
        f"{len(texts)}×: {text}" if len(outcomes) > 1 else text
        for texts, text in zip(outcomes.values(), medians, strict=True)
    )


def table(trials):
    names = [name for name in LAUNCHERS if name in trials]
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for number, (title, _, _) in SCENARIOS.items():
        if any(str(number) in trials[name] for name in names):
            lines.append(
                [
                    f"{number} {title}",
                    *(told(number, trials[name].get(str(number), [])) for name in names),
                ]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=LAUNCHERS,
        default=list(LAUNCHERS),
        metavar="NAME",
        help=", ".join(LAUNCHERS),
    )
    parser.add_argument(
        "--scenarios", nargs="+", type=int, choices=SCENARIOS, default=list(SCENARIOS)
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "launchers.json"
    )
    options = parser.parse_args()
    hide_gpus()
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    print(json.dumps(versions), flush=True)
    old = json.loads(options.json.read_text()) if options.json.exists() else {"trials": {}}
    trials = old["trials"]
    for name in options.only:
        for number in options.scenarios:
            trials.setdefault(name, {})[str(number)] = seen = []
            for _ in range(options.rounds):
                started = time.time()
                with tempfile.TemporaryDirectory(
                    prefix="bench-launchers-", ignore_cleanup_errors=True
                ) as tmp:
                    trial = Trial(name, Path(tmp))
                    try:
                        seen.append(SCENARIOS[number][1](trial))
                    finally:
                        trial.close()
                print(
                    f"{name}, {number} {SCENARIOS[number][0]}: {told(number, seen[-1:])}  "
                    f"({time.time() - started:.0f} s)",
                    flush=True,
                )
            text = json.dumps({"versions": versions, "trials": trials}, indent=1)
            # keep only the file name of a path, since folders differ between machines
            options.json.write_text(re.sub(r"(?:/[\w.@+-]+)+/([\w.@+-]+)", r".../\1", text) + "\n")
    print(f"\n{table(trials)}")


if __name__ == "__main__":
    main()

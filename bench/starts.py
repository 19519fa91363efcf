"""Seconds from a launch to its first result, of warm and cold starts in turn, each in a real kernel.

    python bench/starts.py [--rounds 5] [--json bench/results/starts.json]

| arm | counts from, to |
|---|---|
| training | `launch(cfg)`, tiny preset, 2 ranks, to the end of the first step; not the kernel's first launch |
| training, first | the same, for the first launch of a kernel |
| training, form before | the same, 10 s after `form()` was shown in that kernel |
| function | `launch(function, nproc=2)`, not the first, to its result |
| function, first | the same, for the first launch of a kernel |
| restart | SIGKILL of a rank, to the end of the first step after the restart |
| restart, 2 nodes | the same, for a rank of the second of two supervisors on this machine |
| ask | `run.ask` to the first question's answer, one token; not the kernel's first process |
| notebook_launcher | Accelerate's, which forks the kernel, the same function, not the first, to its result |

Each arm takes place warm, and cold with MULTIGPU_FT_WARM=0. A round has a kernel of its own per
arm and way. Prints medians and ranges, and writes all seconds.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gpus import hide_gpus
from harness.notebooks import Kernel
from harness.runs import free_port, ranks, until

IMPORTS = "import time\nfrom multigpu_ft import RunConfig, form, launch"
FUNCTION = """
def work():
    import torch, torch.distributed as dist
    own = not dist.is_initialized()
    if own: dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    if own: dist.destroy_process_group()
    return total.item()
"""
CALL = "begun = time.time(); assert launch(work, nproc=2) == 2.0; print(time.time() - begun)"
NAMES = iter(range(10_000))


def run_config(folder, name, **more):
    "Return the cell text of a tiny run's configuration."
    settings = {
        "run_root": str(folder),
        "run_name": name,
        "nproc": 2,
        "resume_file": "none",
        **more,
    }
    return (
        f"RunConfig.preset('tiny').replace({', '.join(f'{k}={v!r}' for k, v in settings.items())})"
    )


def steps(folder, name):
    "Return the times at which the steps of a run ended, so far."
    path = Path(folder, name, "metrics.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["time"] for line in lines if line.endswith("}")]


def trained(kernel, folder):
    "Launch a tiny run. Returns the seconds to the end of its first step."
    name = f"run{next(NAMES)}"
    begun = time.time()
    kernel.run(f"run = launch({run_config(folder, name, end_idx=32)}, panel=False)")
    return steps(folder, name)[0] - begun


def training(folder, way, kernel):
    k = kernel()
    trained(k, folder)
    return trained(k, folder)


def training_first(folder, way, kernel):
    return trained(kernel(), folder)


def training_after_a_form(folder, way, kernel):
    k = kernel()
    k.run("form()")
    time.sleep(10)
    return trained(k, folder)


def function(folder, way, kernel):
    k = kernel()
    k.run(FUNCTION)
    k.run(CALL)
    return float(k.run(CALL).split()[-1])


def function_first(folder, way, kernel):
    k = kernel()
    k.run(FUNCTION)
    return float(k.run(CALL).split()[-1])


def restart(folder, way, kernel):
    k, name = kernel(), f"run{next(NAMES)}"
    trained(k, folder)
    k.run(
        f"run = launch({run_config(folder, name, max_restarts=1, save_every=2)}, wait=False, panel=False)"
    )
    return _seconds_after_a_kill(folder, name, Path(folder, name))


def restart_of_nodes(folder, way, kernel):
    name, port = f"run{next(NAMES)}", free_port()
    for node in (0, 1):
        cfg = run_config(
            folder, name, max_restarts=1, save_every=2, nproc=1, nnodes=2, trusted_network=True
        )
        how = f"node_rank={node}, rdzv='127.0.0.1:{port}', wait=False, panel=False"
        kernel().run(f"run = launch({cfg}, {how})")
    return _seconds_after_a_kill(folder, name, Path(folder, name, "nodes", "node-1"))


def _seconds_after_a_kill(folder, name, part):
    "Kill a rank of the run in the folder `part`. Returns the seconds to the next step's end."
    until(lambda: len(steps(folder, name)) > 6, 60, "steps")
    killed = time.time()
    os.kill(ranks(part)[-1], signal.SIGKILL)
    time.sleep(0.1)
    before = len(steps(folder, name))
    return until(lambda: steps(folder, name)[before:], 60, "a step after the restart")[0] - killed


def ask(folder, way, kernel):
    k = kernel()
    trained(k, folder)
    k.run(
        "begun = time.time(); answer = run.ask('Return', max_new_tokens=1); took = time.time() - begun"
    )
    return float(k.run("print(took)").split()[-1])


def notebook_launcher(folder, way, kernel):
    if way == "cold":
        return None
    k = kernel(ACCELERATE_USE_CPU="1", ACCELERATE_MIXED_PRECISION="no")
    k.run(FUNCTION + "from accelerate import notebook_launcher")
    launch = f"notebook_launcher(work, (), num_processes=2, use_port='{free_port()}')"
    call = f"begun = time.time(); {launch}; print(time.time() - begun)"
    k.run(call)
    return float(k.run(call).split()[-1])


ARMS = {
    "training": training,
    "training, first": training_first,
    "training, form before": training_after_a_form,
    "function": function,
    "function, first": function_first,
    "restart": restart,
    "restart, 2 nodes": restart_of_nodes,
    "ask": ask,
    "notebook_launcher": notebook_launcher,
}


def measure(name, way):
    "Return the seconds of one arm, in kernels of its own."
    kernels = []

    def kernel(**environment):
        warm = {"MULTIGPU_FT_WARM": "1" if way == "warm" else "0"}
        kernels.append(Kernel(folder, {"OMP_NUM_THREADS": "1", **warm, **environment}))
        kernels[-1].run(IMPORTS)
        return kernels[-1]

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            return ARMS[name](folder, way, kernel)
        finally:
            for k in kernels:
                k.shutdown()


def shown(seconds):
    return (
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
        if seconds
        else "-"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(ARMS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hide_gpus()
    found = {name: {"warm": [], "cold": []} for name in options.only}
    for number in range(options.rounds):
        for name in options.only:
            for way in ("warm", "cold") if number % 2 else ("cold", "warm"):
                if (seconds := measure(name, way)) is not None:
                    found[name][way].append(round(seconds, 3))
        print(
            number + 1,
            {n: {w: s[-1:] for w, s in ways.items()} for n, ways in found.items()},
            flush=True,
        )
    print("| seconds | warm | cold |\n|---|---|---|")
    for name, ways in found.items():
        print(f"| {name} | {shown(ways['warm'])} | {shown(ways['cold'])} |")
    if options.json:
        options.json.write_text(
            json.dumps({"rounds": options.rounds, "seconds": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""The first hour on a GPU: run the tests and benches that need one, the most telling ones first.

python bench/first_hour.py [--minutes 30] [--only NAME ...]
python bench/first_hour.py --list      # the plan, also on a machine without a GPU

Each step is a process of its own with a time limit. They run one after the other; a step that fails
or takes too long doesn't stop the next one, and a step that no longer fits is skipped. Writes
bench/results/gpu-facts.json (GPUs, driver, versions) and bench/results/gpu-NAME.json for each step:
the question it answers, the command, the exit code, the seconds, the end of the output, the result
of each test, and the numbers of a bench."""

import argparse
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from multigpu_ft.run.environment import visible_gpus

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
BIN = Path(sys.executable).parent
LAST_LINES, ENDING_S = 60, 10
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed", "accelerate", "trl")


@dataclass(frozen=True)
class Step:
    "A command, and what it tells."

    name: str
    question: str
    command: tuple[str, ...]
    limit_s: int
    rows: tuple[int, ...] = ()  # of the audit in bench/README.md
    gpus: int = 1
    memory_gib: float = 0  # that the GPU needs
    numbers: str | None = None  # the file in bench/results that a bench writes


def tests(*words):
    shown = ("-v", "-rfEs", "--tb=short")
    return (sys.executable, "-m", "pytest", *shown, "-m", "gpu", "tests/test_gpu.py", *words)


def chosen(*names):
    "Return the words that select the tests with these words in their names."
    return ("-k", " or ".join(names))


def bench(name, *words):
    return (sys.executable, f"bench/{name}.py", *words)


# in order of value: what everything else rests on comes first
PLAN = (
    Step(
        "doctor",
        "Do driver, torch and the GPUs work together?",
        (str(BIN / "multigpu-ft"), "doctor"),
        120,
        (3, 14),
    ),
    Step(
        "run",
        "Does a run train on the GPU, in the dtype it should, and resume with the losses of an uninterrupted one?",
        tests(
            *chosen("(resumed or trains or dtype or uninterrupted) and (single-auto or fsdp-fp16)")
        ),
        300,
    ),
    Step(
        "kernel",
        "Does launch leave CUDA alone, and work in a kernel that has used it?",
        tests(*chosen("launch_leaves", "launch_after")),
        180,
    ),
    Step(
        "waits",
        "Does a step leave the GPU busy: does the host never wait for it?",
        tests(*chosen("never_waits and packed and (single-fp16 or fsdp-bf16 or ddp-fp32)")),
        180,
        (13,),
    ),
    Step(
        "nccl",
        "Do two GPUs have the curve of one, over NCCL?",
        tests(*chosen("curve_of_one")),
        420,
        (8,),
        gpus=2,
    ),
    Step(
        "hang",
        "Does the watchdog name a rank that hangs, while NCCL waits in a kernel?",
        tests(*chosen("hangs")),
        150,
        (17,),
        gpus=2,
    ),
    Step(
        "graphs",
        "Are answers made with CUDA graphs those of transformers?",
        tests(*chosen("cuda_graphs", "half_precision")),
        240,
        (12,),
    ),
    Step(
        "memory",
        "How far is the estimate from what the GPU really allocates, and what is taken beside it?",
        bench(
            "memory", "--gpu", "ddp, fp16", "fsdp, fp16", "ddp, fp32", "fsdp, qlora", "fsdp, Qwen3"
        ),
        300,
        (4, 10, 16, 17),
        memory_gib=14,
        numbers="memory-gpu.json",
    ),
    Step(
        "out-of-memory",
        "Is CUDA's out-of-memory error recognised, and the micro-batch halved?",
        tests(*chosen("out_of_memory")),
        180,
        (9,),
    ),
    Step(
        "small-training",
        "How fast is training, and how much memory does it take, over transformers' Trainer?",
        bench("training", "--gpu", "--only", "OPT-125M", "--repeats", "2"),
        240,
        (4, 15, 16),
        memory_gib=10,
        numbers="training-gpu.json",
    ),
    Step(
        "saving",
        "For how long does a save hold up training, and how much host memory does it pin?",
        bench("saving", "--gpu", "--rounds", "2"),
        240,
        (6, 7),
        numbers="saving-gpu.json",
    ),
    Step(
        "ways",
        "Does each strategy in each dtype train and resume exactly?",
        tests(*chosen("(resumed or trains or dtype or uninterrupted) and not fp32")),
        900,
    ),
    Step(
        "thrift",
        "Do 8-bit Adam, compile and activation checkpointing learn?",
        tests(*chosen("save_memory")),
        240,
    ),
    Step(
        "large-training",
        "What of the GPU's peak does training reach?",
        bench("training", "--gpu", "--only", "Qwen3-0.6B", "--repeats", "2"),
        420,
        (15, 16),
        memory_gib=38,
        numbers="training-gpu.json",
    ),
)


class Skipped(Exception):
    "Why a step is not run."


def run(steps, minutes, results, devices=(), clock=time.monotonic):
    """Run `steps` in turn and write their results to the folder `results`. Returns their records.

    `devices` are the GPUs."""
    begun, records = clock(), []
    print(f"{'step':16} {'result':10} {'seconds':>7}  question", flush=True)
    for step in steps:
        left = 60 * minutes - (clock() - begun)
        try:
            _refuse(step, left, devices)
            record = _measure(step, results, min(step.limit_s, left))
        except Skipped as reason:
            record = {**_about(step), "result": "skipped", "why": str(reason), "seconds": 0.0}
        (results / f"gpu-{step.name}.json").write_text(_without_paths(record))
        records.append(record)
        why = f" ({record['why']})" if "why" in record else ""
        print(
            f"{step.name:16} {record['result']:10} {record['seconds']:7.1f}  {step.question}{why}",
            flush=True,
        )
    counts = {r: sum(x["result"] == r for x in records) for r in ("passed", "failed", "skipped")}
    print(", ".join(f"{number} {result}" for result, number in counts.items()), flush=True)
    return records


def _refuse(step, left, devices):
    "Raise `Skipped` for a step that can't run here, or that may take longer than the time `left`."
    if step.gpus > len(devices) > 0:
        raise Skipped(f"needs {step.gpus} GPUs, there are {len(devices)}")
    smallest = min((d.memory for d in devices), default=0) / 2**30
    if devices and 0 < smallest < step.memory_gib:
        raise Skipped(f"needs a GPU of {step.memory_gib:g} GiB, there are {smallest:.0f}")
    if left < step.limit_s / 2:
        raise Skipped(f"may take {step.limit_s} s, {max(0, left):.0f} are left")


def _measure(step, results, limit_s):
    begun, numbers = time.time(), results / step.numbers if step.numbers else None
    output, code = _finish(step.command, limit_s)
    seconds = round(time.time() - begun, 1)
    record = {**_about(step), "exit_code": code, "seconds": seconds}
    record["result"] = "passed" if code == 0 else "failed"
    if code is None:
        record["why"] = f"took longer than {limit_s:.0f} s"
    record["last_lines"] = output.splitlines()[-LAST_LINES:]
    if told := re.findall(r"^tests/\S+?::(.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.M):
        record["tests"] = dict(told)
        if code == 0 and "PASSED" not in record["tests"].values():
            record.update(result="failed", why="all of its tests were skipped")
    if numbers and numbers.exists() and numbers.stat().st_mtime >= begun - 1:
        record["numbers"] = json.loads(numbers.read_text())
    return record


def _finish(command, limit_s):
    "Return what `command` prints, and its exit code: None if it was killed after `limit_s` seconds."
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=limit_s)[0], process.returncode
        except subprocess.TimeoutExpired:
            # first as Ctrl-C does, so that it can end its ranks, which have sessions of their own
            os.killpg(process.pid, signal.SIGINT)
            try:
                return process.communicate(timeout=ENDING_S)[0], None
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return process.communicate()[0], None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def _about(step):
    return {
        "name": step.name,
        "question": step.question,
        "rows": list(step.rows),
        "command": shlex.join(_short(step.command)),
        "limit_s": step.limit_s,
    }


def _short(command):
    return ["python" if word == sys.executable else Path(word).name for word in command[:1]] + list(
        command[1:]
    )


def _without_paths(record):
    "Return `record` as JSON that doesn't name this machine's folders."
    text = json.dumps(record, indent=1) + "\n"
    return text.replace(str(ROOT), ".").replace(str(Path.home()), "~")


def facts(devices):
    "Return which GPUs, driver and versions the results are from."
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "gpus": [str(device) for device in devices],
        "capabilities": [device.capability for device in devices],
        "used_before_gib": [round(device.used / 2**30, 2) for device in devices],
        "driver": devices[0].driver if devices else None,
        "python": platform.python_version(),
        "versions": versions,
        **_of_torch(),
        "commit": _said("git", "rev-parse", "HEAD"),
        "links": _said("nvidia-smi", "topo", "-m").splitlines(),
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def _of_torch():
    "Return what torch says of CUDA and NCCL, in a process of its own: this one leaves the GPUs alone."
    code = (
        "import json, torch\n"
        "found = {'cuda': torch.version.cuda, 'sees_gpus': torch.cuda.device_count()}\n"
        "if torch.cuda.is_available():\n"
        "    found['nccl'] = '.'.join(map(str, torch.cuda.nccl.version()))\n"
        "print(json.dumps(found))"
    )
    told = _said(sys.executable, "-c", code)
    return json.loads(told.splitlines()[-1]) if told else {"cuda": None, "sees_gpus": 0}


def _said(*command):
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def show_plan(steps):
    print("In this order; each in a process of its own, with a time limit:")
    for number, step in enumerate(steps, 1):
        rows = f" Rows {', '.join(map(str, step.rows))}." if step.rows else ""
        more = f" Needs {step.gpus} GPUs." if step.gpus > 1 else ""
        print(f"\n{number:2}. {step.name}, at most {step.limit_s} s: {step.question}{rows}{more}")
        print(f"    {shlex.join(_short(step.command))}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the plan and run nothing")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--only", nargs="+", choices=[step.name for step in PLAN], metavar="NAME")
    options = parser.parse_args()
    steps = [step for step in PLAN if not options.only or step.name in options.only]
    if options.list:
        return show_plan(steps)
    devices = visible_gpus()
    if not devices:
        sys.exit(
            "There is no GPU here: nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides them all. "
            "`python bench/first_hour.py --list` prints what would be run on one."
        )
    RESULTS.mkdir(exist_ok=True)
    known = facts(devices)
    (RESULTS / "gpu-facts.json").write_text(_without_paths(known))
    print(f"{', '.join(known['gpus'])}; torch {known['versions']['torch']}", flush=True)
    if not known["sees_gpus"]:
        sys.exit(
            f"torch {known['versions']['torch']} sees no GPU although nvidia-smi lists one; "
            "`multigpu-ft doctor` says what to do."
        )
    records = run(steps, options.minutes, RESULTS, devices)
    sys.exit(any(record["result"] == "failed" for record in records))


if __name__ == "__main__":
    main()

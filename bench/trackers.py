"""Measure what trackers cost a run: seconds from its start to its first step and to its end.

unshare -rn python bench/trackers.py --json bench/results/trackers.json

The network namespace has only loopback: W&B has a key but no network. Arms with each tracker and
without any are interleaved. Runs are forked from a process that has imported torch, as in the test
harness, so that the numbers hold little else. Each run imports W&B."""

import argparse
import fcntl
import json
import os
import random
import socket
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gpus import hide_gpus
from harness import faults

from multigpu_ft.run.run_dir import RunDir

ARMS = ("none", "tensorboard", "wandb", "wandb,tensorboard")
KEY = "0123456789abcdef" * 2 + "01234567"


def loopback_up():
    "Turn on loopback, which is off in a new network namespace."
    with socket.socket() as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS: up and running


def run(server, cfg):
    begun = time.time()
    run_dir = server.finish(cfg, WANDB_API_KEY=KEY, WANDB_BASE_URL="https://api.wandb.ai")
    ended = time.time()
    assert run_dir.status()["state"] == "done", run_dir.log_file(0).read_text()
    metrics = RunDir(run_dir.path).metrics()
    return {
        "first_step_s": metrics[0]["time"] - begun,
        "run_s": ended - begun,
        "steps": len(metrics),
        "step_ms": 1000 * statistics.median(m["step_s"] for m in metrics),
        "remarks": [text.split(".")[0] for text in run_dir.status().get("remarks", [])],
    }


def summary(values):
    return {
        "median": round(statistics.median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
        "n": len(values),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hide_gpus()
    loopback_up()
    found = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as tmp:
        material = faults.make_material(Path(tmp))
        server = faults.Server(material / "model")
        for repeat in range(options.repeats):
            for arm in random.Random(repeat).sample(ARMS, len(ARMS)):
                cfg = faults.config(
                    material,
                    Path(tmp) / f"{arm}-{repeat}",
                    tracker=arm,
                    save_every=None,
                    num_epochs=25,
                )
                found[arm].append(run(server, cfg))
                print(repeat, arm, found[arm][-1], flush=True)
        server.close()
    report = {
        "cores": os.cpu_count(),
        "steps": found["none"][0]["steps"],
        "wandb_said": found["wandb"][0]["remarks"],
    }
    for arm in ARMS:
        report[arm] = {
            name: summary([r[name] for r in found[arm]])
            for name in ("first_step_s", "run_s", "step_ms")
        }
        report[arm]["first_step_s, more than none"] = summary(
            [
                r["first_step_s"] - n["first_step_s"]
                for r, n in zip(found[arm], found["none"], strict=True)
            ]
        )
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

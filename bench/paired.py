"""Comparisons with another trainer over the same seeds: the command line, the other trainer's two
ranks (the bench itself, run again by torchrun), and the interval of the differences."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path


def options(doc, arms, seeds):
    "Return the command line of a bench that compares `arms` on several seeds."
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(range(seeds)))
    parser.add_argument("--arms", nargs="*", default=list(arms))
    parser.add_argument("--add", action="store_true", help="to the results there are")
    parser.add_argument("--peer", nargs=3, help="arm, seed and folder, for a process of torchrun")
    return parser.parse_args()


def run_peer(script, data, arm, seed):
    "Run `script --data DATA --peer ARM SEED FOLDER` on 2 ranks; return what it wrote to peer.json."
    torchrun = Path(sys.executable).parent / "torchrun"
    with tempfile.TemporaryDirectory() as root:
        ranks = [torchrun, "--standalone", "--nproc-per-node", "2", script]
        done = subprocess.run(
            [*ranks, "--data", data, "--peer", arm, str(seed), root],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{arm}, seed {seed} failed:\n{done.stdout}{done.stderr}")
        return json.loads((Path(root) / "peer.json").read_text())


def take_turns(chosen, measure, path, show=lambda found: found):
    """Return what `measure(arm, seed)` finds for each of the chosen arms and seeds, by arm and seed.

    Each seed begins with another arm. What is known so far is in `path`, and is added to with --add."""
    runs = json.loads(path.read_text()) if chosen.add else {}
    for number, seed in enumerate(chosen.seeds):
        turn = number % len(chosen.arms)
        for arm in chosen.arms[turn:] + chosen.arms[:turn]:
            found = runs.setdefault(arm, {})[str(seed)] = measure(arm, seed)
            path.write_text(json.dumps(runs, indent=1))
            print(seed, arm, show(found), flush=True)
    return runs


def interval(values):
    "Return the mean of paired differences, and half of its 95 % interval (Student's t)."
    from scipy.stats import t

    if len(values) < 2:
        return statistics.mean(values), float("nan")
    half = t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), half

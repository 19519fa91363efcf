"""Seconds to the tokens of a large file, and from a launch to the first step, with nothing cached and cached.

    python bench/tokenization.py [--rows 1000000] [--rounds 5] [--arms ...] [--json bench/results/tokenization.json]

| arm | counts |
|---|---|
| ours | two processes call `tokenize_slice`, nothing cached, until both have the tokens |
| datasets.map | `load_dataset("json")` and `map` with two processes, nothing cached, with the same tokenizer |
| cold | `launch(cfg)`, 2 ranks, nothing cached, to the end of the first step |
| cached | the same launch with the tokens cached, right after another one |
| small | the same for 5,000 rows in a file of their own, cached, right after another one |

A row has 60 to 170 words of Python's documentation and a number. The arms take turns. The files and
the caches are in a new folder in TMPDIR, which needs 5 KB a row. `memory` is the larger peak of the
two processes, ranks or workers, in MiB.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gpus import hide_gpus

from multigpu_ft import RunConfig
from multigpu_ft.data.builtin import builtin_rows
from multigpu_ft.models.loading import load_tokenizer
from multigpu_ft.run.cache import cache_dir

SMALL = 5000
OURS = """
import json, os, resource, sys, time
from multigpu_ft import RunConfig
from multigpu_ft.data.tokenized_slices import tokenize_slice
from multigpu_ft.models.loading import load_tokenizer
cfg = RunConfig(dataset=sys.argv[1], end_idx=int(sys.argv[2]))
tokenizer = load_tokenizer(cfg)
tokenizer(["a"])
print("ready", flush=True)
input()
begun = time.time()
found = tokenize_slice(cfg, tokenizer)
assert len(found.texts) == cfg.end_idx
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
print(json.dumps({"seconds": time.time() - begun, "memory": peak}))
"""
MAP = """
import json, resource, sys, time
import datasets
from multigpu_ft import RunConfig
from multigpu_ft.models.loading import load_tokenizer
cfg = RunConfig()
tokenizer = load_tokenizer(cfg)
def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, max_length=cfg.max_length)
begun = time.time()
rows = datasets.load_dataset("json", data_files=sys.argv[1], split="train", cache_dir=sys.argv[3])
found = rows.map(tokenize, batched=True, num_proc=2, remove_columns=rows.column_names)
assert len(found) == int(sys.argv[2])
seconds = time.time() - begun
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
print(json.dumps({"seconds": seconds, "memory": peak}))
"""
LAUNCH = """
import json, sys, time
from multigpu_ft import RunConfig, launch
name, settings = sys.argv[4], {"max_steps": 1, "nproc": 2, "resume_file": "none"}
cfg = RunConfig(run_root=sys.argv[3], run_name=name, dataset=sys.argv[1], end_idx=int(sys.argv[2]), **settings)
begun = time.time()
run = launch(cfg, panel=False)
step = run.metrics[0]
print(json.dumps({"seconds": step["time"] - begun, "memory": max(step["peak_memory_gib"]) * 2**10}))
"""


def write_rows(path, count):
    "Write `count` rows of 60 to 170 words."
    rng = random.Random(0)
    words = " ".join(row["text"] for row in builtin_rows("builtin:python-docs")).split()
    with open(path, "w") as file:
        for row in range(count):
            length = rng.randrange(60, 170)
            first = rng.randrange(len(words) - length)
            text = f"{' '.join(words[first : first + length])} {row}"
            file.write(json.dumps({"text": text}) + "\n")


def new_cache(folder):
    "Return the environment with an empty cache that has the builtin tokenizer."
    load_tokenizer(RunConfig())
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    (cache / "multigpu_ft").mkdir(parents=True)
    (cache / "multigpu_ft" / cache_dir().name).symlink_to(cache_dir())
    return environment(cache)


def environment(cache):
    return {**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}


def start(code, *words, env):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def result(process):
    "Return what the process prints last."
    with process:
        told = process.stdout.read().splitlines()
    if process.returncode:
        sys.exit(f"a process ended with {process.returncode}")
    return json.loads(told[-1])


def ours(folder, rows, number):
    env = new_cache(folder)
    both = [
        start(
            OURS,
            folder / "rows.jsonl",
            rows,
            env={**env, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    found = [result(process) for process in both]
    return {name: max(one[name] for one in found) for name in found[0]}


def peer(folder, rows, number):
    cache = folder / "datasets"
    try:
        return result(start(MAP, folder / "rows.jsonl", rows, cache, env=dict(os.environ)))
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def launched(folder, file, rows, name, env):
    found = result(start(LAUNCH, folder / file, rows, folder / "runs", name, env=env))
    shutil.rmtree(folder / "runs")
    return found


def cold(folder, rows, number):
    return launched(folder, "rows.jsonl", rows, f"cold-{number}", new_cache(folder))


def again(folder, file, rows, name):
    "Launch twice, each in a process of its own, and return what the second finds."
    env = environment(folder / "cache")
    launched(folder, file, rows, f"{name}-before", env)
    return launched(folder, file, rows, name, env)


def cached(folder, rows, number):
    return again(folder, "rows.jsonl", rows, f"cached-{number}")


def small(folder, rows, number):
    return again(folder, "small.jsonl", SMALL, f"small-{number}")


ARMS = {"datasets.map": peer, "cold": cold, "ours": ours, "cached": cached, "small": small}
RATIOS = (("ours", "datasets.map"),)
DIFFERENCES = (("cached", "small"), ("cold", "small"))


def say(found):
    for arm, rounds in found.items():
        for name in ("seconds", "memory"):
            values = [one[name] for one in rounds]
            spread = f"{min(values):.1f}-{max(values):.1f}, n={len(values)}"
            print(f"{arm}: {name} {statistics.median(values):.1f} ({spread})")
    for one, other in RATIOS:
        if one in found and other in found:
            pairs = zip(found[one], found[other], strict=True)
            values = [a["seconds"] / b["seconds"] for a, b in pairs]
            spread = f"{min(values):.2f}-{max(values):.2f}"
            print(f"{one} over {other}: {statistics.median(values):.2f} ({spread})")
    for one, other in DIFFERENCES:
        if one in found and other in found:
            for name in ("seconds", "memory"):
                pairs = zip(found[one], found[other], strict=True)
                values = [a[name] - b[name] for a, b in pairs]
                spread = f"{min(values):.1f}-{max(values):.1f}"
                print(f"{one} minus {other}: {name} {statistics.median(values):.1f} ({spread})")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--add", action="store_true", help="keep the other arms' results")
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "tokenization.json"
    )
    chosen = parser.parse_args()
    hide_gpus()
    kept = json.loads(chosen.json.read_text())["arms"] if chosen.add else {}
    found = {arm: [] for arm in ARMS if arm in chosen.arms}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_rows(folder / "rows.jsonl", chosen.rows)
        write_rows(folder / "small.jsonl", SMALL)
        size = (folder / "rows.jsonl").stat().st_size
        for number in range(chosen.rounds):
            for arm, rounds in found.items():
                rounds.append(ARMS[arm](folder, chosen.rows, number))
                print(number, arm, rounds[-1], flush=True)
            told = {"rows": chosen.rows, "bytes": size, "arms": {**kept, **found}}
            chosen.json.write_text(json.dumps(told, indent=1) + "\n")
    say(found)


if __name__ == "__main__":
    main()

"""Measure answers per second: `generate` against `model.generate(num_return_sequences=n)` in static
halves, and two processes against one.

    python bench/generation.py --dataset questions.jsonl

A tiny model first learns real questions and answers, so that its answers end where such answers
end. Then the arms of a comparison take turns, each in its own processes of one thread.

- `static`: 25 answers to each of 22 questions, in halves for two ranks with 25 answers to a
  question at a time, against `generate` with the same number of places
- `processes`: 25 answers to each of 88 questions by `generate` with 38 places, on two ranks and on
  one
- `machine`: two independent processes of this kind at once, against one alone, which is the most
  that two processes could reach here
- `pretrained`: 200 answers of a real model (`--kind smollm2`) on two ranks, with as many places as
  `generate` chooses, against static halves, and against `engine="vllm"`, which has an environment
  of its own (`make .venv/vllm/installed`)

All sample at most 256 tokens at temperature 1. The time runs from the first question to the last
answer, without starting and loading. Writes bench/results/generation.json, where the results of
other comparisons are kept.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpus import hide_gpus

ROOT = Path(__file__).parents[1]
SAMPLES, NEW_TOKENS = 25, 256


def static_halves(folder, dataset, questions, out):
    "Answer half of the questions with `model.generate`, on a rank that torchrun started."
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    model.config.use_cache = model.generation_config.use_cache = True
    with open(dataset) as file:
        rows = [
            json.loads(line)["messages"][:1]
            for _, line in zip(range(questions), file, strict=False)
        ]
    half = len(rows) // ranks
    mine = rows[rank * half :] if rank == ranks - 1 else rows[rank * half : (rank + 1) * half]
    torch.manual_seed(rank)
    dist.barrier()
    begun, lengths = time.perf_counter(), []
    for row in mine:
        text = tokenizer.apply_chat_template(row, tokenize=False, add_generation_prompt=True)
        batch = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            made = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=NEW_TOKENS,
                num_return_sequences=SAMPLES,
                do_sample=True,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                pad_token_id=tokenizer.pad_token_id,
            )[:, batch["input_ids"].shape[1] :]
        lengths += (made != tokenizer.pad_token_id).sum(dim=1).tolist()
    seconds = time.perf_counter() - begun
    gathered = [None] * ranks
    dist.all_gather_object(gathered, (seconds, lengths))
    if rank == 0:
        seconds = max(s for s, _ in gathered)
        lengths = [n for _, part in gathered for n in part]
        with open(out, "w") as file:
            json.dump(
                {
                    "sequences_per_second": len(lengths) / seconds,
                    "seconds": seconds,
                    "tokens": sum(lengths),
                },
                file,
            )
    dist.barrier()


def prepare(root, dataset, kind):
    "Return the folder of a model of `kind`: a real one, or a tiny one trained on the questions."
    from multigpu_ft import RunConfig, launch
    from multigpu_ft.models.source import model_source

    if kind == "smollm2":
        return model_source(RunConfig(model="builtin:smollm2-135m"))[0]
    model = {} if kind == "opt" else {"model": str(make_qwen3(root))}
    run = launch(
        RunConfig(
            task="chat",
            dataset=str(dataset),
            end_idx=900,
            num_epochs=6,
            learning_rate=2e-3,
            max_length=256,
            batch_size=8,
            run_name=f"chat-{kind}",
            run_root=str(root),
            nproc=2,
            **model,
        )
    )
    return run.status["export"]


def make_qwen3(root):
    "Make a Qwen3 of 2 million parameters with the built-in tokenizer."
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from multigpu_ft.models.loading import load_tokenizer
    from multigpu_ft.run.config import RunConfig

    folder, tokenizer = root / "qwen3-tiny", load_tokenizer(RunConfig())
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ours(folder, dataset, questions, places, ranks, out, engine="transformers"):
    python = (
        sys.executable if engine == "transformers" else ROOT / ".venv" / "vllm" / "bin" / "python"
    )
    run = subprocess.run(
        [
            Path(python).with_name("multigpu-ft"),
            "generate",
            "--model",
            folder,
            "--dataset",
            dataset,
            "--num-questions",
            str(questions),
            "--num-sequences-per-question",
            str(SAMPLES),
            *(("--batch-size", str(places)) if places else ()),
            "--max-new-tokens",
            str(NEW_TOKENS),
            "--temperature",
            "1",
            "--top-k",
            "0",
            *("--nproc", str(ranks), "--engine", engine, "--dtype", "fp32"),
            *("--output", out, "--json"),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    said = json.loads(run.stdout)
    with open(out) as file:
        tokens = sum(json.loads(line)["completion_tokens"] for line in file)
    return {
        "sequences_per_second": said["sequences"] / said["seconds"],
        "seconds": said["seconds"],
        "start_seconds": said["start_seconds"],
        "tokens": tokens,
    }


def at_once(folder, dataset, out):
    "Run two independent generations, each on one rank."
    with ThreadPoolExecutor(2) as pool:
        both = list(
            pool.map(
                lambda n: ours(folder, dataset, 22, 38, 1, out.with_name(f"{n}-{out.name}")),
                range(2),
            )
        )
    return {
        "sequences_per_second": sum(b["sequences_per_second"] for b in both),
        "seconds": max(b["seconds"] for b in both),
        "start_seconds": max(b["start_seconds"] for b in both),
        "tokens": both[0]["tokens"] * 2,
    }


def theirs(folder, dataset, questions, out):
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            __file__,
            "--rank",
            "--model",
            folder,
            "--dataset",
            dataset,
            "--questions",
            str(questions),
            "--out",
            out,
        ],
        check=True,
        capture_output=True,
    )
    return json.loads(Path(out).read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dataset", type=Path, default=ROOT.parent / "shared" / "data" / "questions.jsonl"
    )
    parser.add_argument("--compare", choices=COMPARISONS, nargs="+")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--model", help="a model that is there already")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--questions", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    hide_gpus()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.rank:
        return static_halves(options.model, options.dataset, options.questions, options.out)
    path = ROOT / "bench" / "results" / "generation.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for kind in options.kind:
        with tempfile.TemporaryDirectory() as tmp:
            folder = options.model or prepare(Path(tmp), options.dataset.resolve(), kind)
            for name in options.compare or KINDS[kind]:
                results.setdefault(kind, {})[name] = compare(
                    COMPARISONS[name], options, folder, Path(tmp)
                )
                path.write_text(json.dumps(results, indent=1) + "\n")


def compare(comparison, options, folder, root):
    "Run the arms in turn, with one model."
    found = {arm: [] for arm in comparison}
    for number in range(options.repeats):
        for arm, run in comparison.items():
            found[arm].append(
                run(folder, options.dataset.resolve(), root / f"{arm}-{number}.jsonl")
            )
            print(number, arm, {k: round(v, 2) for k, v in found[arm][-1].items()}, flush=True)
    return summary(found)


def summary(found):
    "Return sequences per second of each arm, and ratios of runs that followed each other: median, minimum and maximum."

    def spread(values):
        return {
            "median": round(statistics.median(values), 3),
            "least": round(min(values), 3),
            "most": round(max(values), 3),
        }

    speeds = {name: [r["sequences_per_second"] for r in runs] for name, runs in found.items()}
    first, *others = speeds
    return {
        "repeats": len(next(iter(found.values()))),
        "sequences_per_second": {name: spread(values) for name, values in speeds.items()},
        "tokens_per_second": {
            name: spread([r["tokens"] / r["seconds"] for r in runs]) for name, runs in found.items()
        },
        "start_seconds": {
            name: spread([r["start_seconds"] for r in runs])
            for name, runs in found.items()
            if "start_seconds" in runs[0]
        },
        **{
            f"{first} / {other}": spread(
                [a / b for a, b in zip(speeds[first], speeds[other], strict=True)]
            )
            for other in others
        },
    }


COMPARISONS = {
    "pretrained": {
        "generate": lambda folder, dataset, out: ours(folder, dataset, 8, None, 2, out),
        "static halves": lambda folder, dataset, out: theirs(folder, dataset, 8, out),
        "vllm": lambda folder, dataset, out: ours(folder, dataset, 8, None, 2, out, "vllm"),
    },
    "static": {
        "generate": lambda folder, dataset, out: ours(folder, dataset, 22, SAMPLES, 2, out),
        "static halves": lambda folder, dataset, out: theirs(folder, dataset, 22, out),
    },
    "processes": {
        "2 processes": lambda folder, dataset, out: ours(folder, dataset, 88, 38, 2, out),
        "1 process": lambda folder, dataset, out: ours(folder, dataset, 88, 38, 1, out),
    },
    "machine": {
        "two at once": at_once,
        "one alone": lambda folder, dataset, out: ours(folder, dataset, 22, 38, 1, out),
    },
}


_MADE = ("static", "processes", "machine")
KINDS = {"opt": _MADE, "qwen3": _MADE, "smollm2": ("pretrained",)}


if __name__ == "__main__":
    main()

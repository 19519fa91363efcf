"""Compare the training core with what users would pick instead.

python bench/training.py [--dataset FILE.jsonl] [--repeats 5] [--only PART ...]

python bench/training.py --gpu [--only "OPT-125M fp16"]

Writes bench/results/cpu.json (or training-gpu.json with --gpu) and prints the table. Without --gpu
all arms run on the CPU, with it all run on one GPU. All arms train the same
model (OPT, hidden 384, 6 layers, from the same random weights) on texts of the same file, on 2 gloo
ranks of one thread each. Their micro-batches have 4 texts of at most 512 tokens or 2 full rows, ours
have 4 or 6 texts. A peer is compared with the arm of ours that has the most similar number of real
tokens in an optimizer step. Arms are interleaved in rotating order, and ratios are taken within a
round. It is an error if the first loss of an arm is not that of the untrained model."""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from gpus import hide_gpus, use_gpus

from multigpu_ft.run.environment import visible_gpus

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
# part: (vocabulary, dtype, {arm: steps}); our arms are named by strategy and texts of a micro-batch
PARTS = {
    "fp32, V=8,192": (
        8192,
        "fp32",
        {
            "ours ddp 4": 8,
            "original": 5,
            "dynamic": 7,
            "grouped": 7,
            "ours ddp 6": 7,
            "packed": 8,
            "trl": 6,
            "ours fsdp 4": 8,
            "ours single 4": 8,
        },
    ),
    "bf16, V=8,192": (8192, "bf16", {"ours ddp 4": 9, "grouped": 7, "ours ddp 6": 7, "packed": 9}),
    "fp32, V=50,272": (
        50272,
        "fp32",
        {
            "ours ddp 4": 5,
            "original": 3,
            "dynamic": 4,
            "grouped": 4,
            "ours ddp 6": 4,
            "packed": 5,
            "trl": 4,
        },
    ),
}
GPU_PARTS = {  # on one GPU; the models have random weights. The smallest one fits on every GPU
    "OPT-125M fp16": ("facebook/opt-125m", "fp16", {"ours single 24": 20, "packed": 20}),
    "OPT-1.3B bf16": ("facebook/opt-1.3b", "bf16", {"ours single 24": 20, "packed": 20}),
    "OPT-1.3B fp16": ("facebook/opt-1.3b", "fp16", {"ours single 24": 20, "packed": 20}),
    "Qwen3-0.6B bf16": ("Qwen/Qwen3-0.6B", "bf16", {"ours single 24": 20, "packed": 20}),
}
GPU_SHAPES = {
    "facebook/opt-125m": (
        "opt",
        {
            "vocab_size": 50272,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "ffn_dim": 3072,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 768,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "facebook/opt-1.3b": (
        "opt",
        {
            "vocab_size": 50272,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "ffn_dim": 8192,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
    ),
    "Qwen/Qwen3-0.6B": (
        "qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
}
SMALL = (
    "opt",
    {
        "hidden_size": 384,
        "word_embed_proj_dim": 384,
        "ffn_dim": 1536,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "max_position_embeddings": 512,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
)
LEAST = {"original": 2.7, "dynamic": 1.4, "grouped": 0.97, "packed": 1.0}
TARGETS = {  # least ratio of real tokens/s, ours over each peer
    "fp32, V=8,192": {**LEAST, "trl": 1.6},
    "fp32, V=50,272": {**LEAST, "trl": 1.8},
    "bf16, V=8,192": {"grouped": 1.15, "packed": 1.15},
}


def prepare(folder, dataset, kind, shape):
    "Write model, tokenizer and texts to disk. Returns the loss of the untrained model."
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from multigpu_ft import RunConfig
    from multigpu_ft.data.examples import load_texts

    texts = load_texts(RunConfig(dataset=dataset)).texts
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=8192, special_tokens=["<s>", "<pad>", "</s>"], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **shape, pad_token_id=1, bos_token_id=0, eos_token_id=2)
    ).eval()
    model.save_pretrained(folder)
    (folder / "texts.json").write_text(json.dumps(texts))
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    with torch.no_grad():
        return (
            sum(
                model(ids, labels=ids).loss.item()
                for ids in (torch.tensor([tokenizer(t)["input_ids"][:512]]) for t in texts[:8])
            )
            / 8
        )


def peer(arm, rows, folder, dtype, steps, ranks):
    started = time.time()
    command = [
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        HERE / "peers.py",
        arm,
        folder,
        dtype,
        str(rows),
        str(steps),
    ]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-5000:])
    result = json.loads(done.stdout.splitlines()[-1])
    times, tokens = result["times"], result["tokens"]
    return {
        "tokens_per_second": sum(tokens[1:]) / (times[-1] - times[0]),
        "first_step_s": times[0] - started,
        "first_loss": result["first_loss"],
        "peak_gib": result["peak_bytes"] / 2**30,
        "tokens_a_step": sum(tokens) / len(tokens),
    }


def ours(strategy, texts, folder, dtype, steps):
    from multigpu_ft import RunConfig, launch

    cfg = RunConfig(
        model=str(folder),
        dataset=f"{folder}/texts.jsonl",
        strategy=strategy,
        dtype=dtype,
        batch_size=texts,
        learning_rate=1e-4,
        max_steps=steps,
        nproc=1 if strategy == "single" else 2,
        run_root=f"{folder}/runs",
        resume_file="none",
    )
    started = time.time()
    metrics = launch(cfg, wait=False).wait().metrics
    tokens = [m["tokens_per_second"] * m["step_s"] for m in metrics]
    return {
        "tokens_per_second": sum(tokens[1:]) / sum(m["step_s"] for m in metrics[1:]),
        "first_step_s": metrics[0]["time"] - started,
        "first_loss": metrics[0]["loss"],
        "peak_gib": max(metrics[-1]["peak_memory_gib"]),
        "tokens_a_step": sum(tokens) / len(tokens),
        "mfu": metrics[-1]["mfu"],
        "padding": sum(m["padding"] for m in metrics) / len(metrics),
        "step_s": {
            p: statistics.mean(m[f"{p}_s"] for m in metrics[1:])
            for p in ("data", "forward_backward", "communication", "optimizer")
        },
    }


def spread(values):
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "n": len(values),
    }


def nearest(found, arm, mine):
    """Return our arm, of the same strategy as `mine`, whose tokens in an optimizer step are closest to
    those of the peer `arm`."""
    ours = [name for name in found if name.split()[:2] == mine.split()[:2]]
    return min(
        ours,
        key=lambda name: abs(
            math.log(found[name][0]["tokens_a_step"] / found[arm][0]["tokens_a_step"])
        ),
    )


def gemm_peak(dtype):
    "Return the GFLOP/s of one thread on this model's largest matrix product."
    code = (
        "import time, torch; torch.set_num_threads(1)\n"
        f"a, b = torch.randn(2048, 384).to(torch.{dtype}), torch.randn(384, "
        f"1536).to(torch.{dtype})\nbest = 9.0\nfor _ in range(40):\n"
        "    s = time.perf_counter(); a @ b; best = min(best, "
        "time.perf_counter() - s)\nprint(2 * 2048 * 384 * 1536 / best / 1e9)"
    )
    return float(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def multiplies_bf16():
    "Return whether this CPU multiplies matrices faster in bf16 than in fp32, as one with units for it does."
    return gemm_peak("bfloat16") > gemm_peak("float32")


def alternating(strategy, folder, steps):
    command = [
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        HERE / "alternating.py",
        strategy,
        folder,
        str(steps),
    ]
    return json.loads(
        subprocess.run(
            [str(c) for c in command], capture_output=True, text=True, check=True
        ).stdout.splitlines()[-1]
    )


def measure(name, vocabulary, dtype, arms, args, tmp, save):
    folder = Path(tmp) / name.replace(" ", "-").replace(",", "")
    folder.mkdir()
    kind, shape = (
        GPU_SHAPES[vocabulary] if args.gpu else (SMALL[0], {**SMALL[1], "vocab_size": vocabulary})
    )
    untrained = prepare(folder, args.dataset, kind, shape)
    found = {arm: [] for arm in arms}
    names = list(arms)
    for repeat in range(args.repeats):
        for arm in names[repeat % len(names) :] + names[: repeat % len(names)]:
            who, *setting = arm.split()
            if who == "ours":
                result = ours(setting[0], int(setting[1]), folder, dtype, arms[arm])
            else:
                rows, ranks = (8, 1) if args.gpu else (2, 2)
                result = peer(arm, rows, folder, dtype, arms[arm], ranks)
            if abs(result["first_loss"] - untrained) > 0.01 * untrained:
                sys.exit(
                    f"{arm}: its first loss is {result['first_loss']:.4f}, that of the untrained model {untrained:.4f}"
                )
            found[arm].append(result)
            print(
                f"{name} round {repeat + 1} {arm}: {result['tokens_per_second']:.0f} tokens/s, "
                f"{result['peak_gib']:.2f} GiB",
                flush=True,
            )
        mine, peers = names[0], [arm for arm in arms if not arm.startswith("ours")]
        compared = {arm: nearest(found, arm, mine) for arm in peers}
        ratios = {
            measured: {
                arm: spread(
                    [
                        m[measured] / p[measured]
                        for m, p in zip(found[compared[arm]], found[arm], strict=True)
                    ]
                )
                for arm in peers
            }
            for measured in ("tokens_per_second", "peak_gib", "first_step_s")
        }
        keys = ("tokens_per_second", "peak_gib", "first_step_s", "tokens_a_step")
        save(
            name,
            {
                "arms": {
                    arm: {k: spread([r[k] for r in results]) for k in keys}
                    for arm, results in found.items()
                },
                "ours over": ratios,
                "compared": compared,
                "untrained_loss": untrained,
                "first_losses": {arm: results[0]["first_loss"] for arm, results in found.items()},
                mine: {k: found[mine][0].get(k) for k in ("padding", "step_s", "mfu")},
            },
        )
    return folder, found


def chosen_parts(args):
    "Return the parts to measure. On a CPU without units for bf16, that part would take hours and tell nothing."
    parts = {
        name: part
        for name, part in (GPU_PARTS if args.gpu else PARTS).items()
        if not args.only or any(word in name for word in args.only)
    }
    slow = [] if args.gpu else [name for name, part in parts.items() if part[1] == "bf16"]
    if slow and not multiplies_bf16():
        print(f"{', '.join(slow)}: left out, since this CPU multiplies bf16 more slowly than fp32")
        parts = {name: part for name, part in parts.items() if name not in slow}
    return parts


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="builtin:python-docs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--only",
        nargs="*",
        help="parts to measure again; the others stay as they are in the result",
    )
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    use_gpus(1) if args.gpu else hide_gpus()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    out = HERE / "results" / ("training-gpu.json" if args.gpu else "cpu.json")
    out.parent.mkdir(exist_ok=True)
    result = json.loads(out.read_text()) if out.exists() and args.only else {}
    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers", "trl"))
    result["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, {packages}, {Path(args.dataset).name}"
    )
    if args.gpu:
        result["machine"] += f", {visible_gpus()[0]}"

    def save(part, value):
        result[part] = value
        out.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as tmp:
        for name, (vocabulary, dtype, arms) in chosen_parts(args).items():
            folder, found = measure(name, vocabulary, dtype, arms, args, tmp, save)
            if not args.gpu and name == "fp32, V=8,192":
                save(
                    "speed of a step, ours over a bare loop",
                    {s: spread(alternating(s, folder, 24)) for s in ("ddp", "fsdp")},
                )
                speeds = {
                    s: [r["tokens_per_second"] for r in found[f"ours {s} 4"]]
                    for s in ("single", "ddp", "fsdp")
                }
                save(
                    "2 ranks over 1",
                    {
                        s: spread(
                            [
                                two / one
                                for two, one in zip(speeds[s], speeds["single"], strict=True)
                            ]
                        )
                        for s in ("ddp", "fsdp")
                    },
                )
                save(
                    "GFLOP/s of one thread in a matrix product",
                    {d: round(gemm_peak(d), 1) for d in ("float32", "bfloat16")},
                )
    report(result, out)


def line(what, ratio, target):
    print(
        f"{what:52} {ratio['median']:.2f} ({ratio['min']:.2f}-{ratio['max']:.2f}, n={ratio['n']})  {target}"
    )


def report(result, out):
    "Return the table of all parts that were measured."
    for part, targets in TARGETS.items():
        for arm, least in targets.items() if part in result else ():
            line(
                f"{part}: tokens/s over {arm}",
                result[part]["ours over"]["tokens_per_second"][arm],
                f"at least {least}",
            )
    if "fp32, V=50,272" in result:
        line(
            "fp32, V=50,272: peak RSS over grouped",
            result["fp32, V=50,272"]["ours over"]["peak_gib"]["grouped"],
            "at most 0.75",
        )
    if "2 ranks over 1" in result:
        line(
            "launch to the end of the first step over grouped",
            result["fp32, V=8,192"]["ours over"]["first_step_s"]["grouped"],
            "at most 0.85",
        )
        for strategy, least in (("ddp", 1.8), ("fsdp", 1.5)):
            line(
                f"{strategy}: 2 ranks over 1",
                result["2 ranks over 1"][strategy],
                f"at least {least}",
            )
            line(
                f"{strategy}: a step over a bare loop's, speed",
                result["speed of a step, ours over a bare loop"][strategy],
                "at least 0.98",
            )
    for part in GPU_PARTS:
        if part in result:
            ours_over, mfu = result[part]["ours over"], result[part]["ours single 24"]["mfu"]
            line(
                f"{part}: tokens/s over packed",
                ours_over["tokens_per_second"]["packed"],
                "at least 1.3",
            )
            line(f"{part}: peak memory over packed", ours_over["peak_gib"]["packed"], "at most 0.6")
            print(
                f"{part}: MFU {mfu}  at least 0.5 in bf16; peak "
                f"{result[part]['arms']['ours single 24']['peak_gib']['median']} GiB, "
                "on a T4 at most 16"
            )
    print(f"all of it: {out}")


if __name__ == "__main__":
    main()

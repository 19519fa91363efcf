"""How long an estimate takes, and how exact few blocks are.

`--times`: seconds of `estimate`, without a cached answer, in a process that has estimated something
else before (warm) and in one that has imported nothing (cold), in turn. `--exact`: the same
configurations simulated from few blocks and with all of them: the peak's difference, what the
allocator reserves, and the verdict on a T4.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from gpus import hide_gpus
from transformers import AutoConfig

from multigpu_ft import RunConfig
from multigpu_ft.memory.fit import Fit
from multigpu_ft.run.environment import find_gpu

LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
LARGE = {
    "llama-70b": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64},
    "llama-405b": LLAMA
    | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
    | {"num_attention_heads": 128},
}
TIMES = {
    "OPT-1.3B, 2 x T4": ({"model": "facebook/opt-1.3b"}, 2, "T4"),
    "Qwen3-14B, QLoRA under fsdp, 2 x T4": (
        {"model": "Qwen/Qwen3-14B", "tuning": "qlora", "strategy": "fsdp"},
        2,
        "T4",
    ),
    "Qwen3-32B, 8 x H100": ({"model": "Qwen/Qwen3-32B"}, 8, "H100"),
    "Qwen3-32B, 2 x T4": ({"model": "Qwen/Qwen3-32B"}, 2, "T4"),
    "Llama-70B, 64 x H100": ({"model": "llama-70b", "nnodes": 8}, 64, "H100"),
    "Llama-405B, 512 x H100": ({"model": "llama-405b", "nnodes": 64}, 512, "H100"),
}

SMALL = {"vocab_size": 32000, "num_hidden_layers": 16}
HIDDEN = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
GROUPED = HIDDEN | {"num_key_value_heads": 8, "head_dim": 64}
SHAPES = {
    "OPT": {"model_type": "opt", "hidden_size": 1024, "word_embed_proj_dim": 1024}
    | {"ffn_dim": 4096, "num_attention_heads": 16}
    | SMALL,
    "Qwen3": {"model_type": "qwen3"} | SMALL | GROUPED,
    "Llama": {"model_type": "llama"} | SMALL | GROUPED,
    "GPT-NeoX": {"model_type": "gpt_neox"} | SMALL | HIDDEN,
    "BERT": {"model_type": "bert"} | SMALL | HIDDEN,
    "Gemma 2, windows in turns": {"model_type": "gemma2"} | SMALL | GROUPED,
    "Gemma 3, every 6th without a window": {"model_type": "gemma3_text"}
    | SMALL
    | GROUPED
    | {"num_hidden_layers": 34},
    "Qwen3-MoE, every 2nd with experts": {"model_type": "qwen3_moe"}
    | SMALL
    | GROUPED
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 704}
    | {"decoder_sparse_step": 2},
}
FSDP = {"strategy": "fsdp"}
WAYS = {
    "ddp": {"strategy": "ddp", "activation_checkpointing": "none"},
    "ddp, fp32, full": {"strategy": "ddp", "dtype": "fp32", "activation_checkpointing": "full"},
    "fsdp": FSDP | {"activation_checkpointing": "none"},
    "fsdp, full": FSDP | {"activation_checkpointing": "full", "communication": "micro_batch"},
    "fsdp, every 3rd": FSDP | {"activation_checkpointing": 3},
    "lora, ddp": {
        "tuning": "lora",
        "lora_dropout": 0.0,
        "strategy": "ddp",
        "activation_checkpointing": "none",
    },
    "qlora, fsdp": FSDP
    | {"tuning": "qlora", "lora_dropout": 0.0, "activation_checkpointing": "full"},
    "zero2": {"strategy": "zero2", "activation_checkpointing": "none"},
}
ON_EACH = ("ddp", "fsdp", "fsdp, full")
# the others: one each, on every architecture in turn
ONCE = [way for way in WAYS if way not in ON_EACH]

ASK = """
import json, os, sys, tempfile, time
begun = time.perf_counter()
from multigpu_ft import RunConfig, estimate
if sys.argv[1] == "warm":
    from multigpu_ft.run.warm_start import warm_up
    estimate(RunConfig(model="facebook/opt-125m", dataset="none/none"), 2, "H100")
    begun = time.perf_counter()
settings, gpus, gpu = json.loads(sys.argv[2])
found = estimate(RunConfig(**settings, dataset="none/none"), gpus, gpu)
print(json.dumps([time.perf_counter() - begun, found.line]))
"""


def save(folder, shape):
    "Write the configuration of a model into `folder`."
    AutoConfig.for_model(**shape).save_pretrained(folder)
    return str(folder)


def seconds(way, settings, gpus, gpu):
    "Estimate in a process of its own. Returns the seconds and the line."
    with tempfile.TemporaryDirectory() as cache:
        asked = [sys.executable, "-c", ASK, way, json.dumps([settings, gpus, gpu])]
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])


def time_all(folder, rounds):
    "Return the seconds of every estimate, warm and cold."
    found = {name: {"warm": [], "cold": [], "line": None} for name in TIMES}
    for number in range(rounds):
        for name, (settings, gpus, gpu) in TIMES.items():
            if settings["model"] in LARGE:
                model = save(folder / settings["model"], LARGE[settings["model"]])
                settings = settings | {"model": model}
            for way in ("warm", "cold") if number % 2 else ("cold", "warm"):
                took, found[name]["line"] = seconds(way, settings, gpus, gpu)
                found[name][way].append(round(took, 2))
                print(number + 1, name, way, round(took, 2), flush=True)
    print("| seconds | warm | cold | |\n|---|---|---|---|")
    for name, ways in found.items():
        print(f"| {name} | {shown(ways['warm'])} | {shown(ways['cold'])} | {ways['line']} |")
    return found


def shown(took):
    return f"{statistics.median(took):.1f} ({min(took):.1f}-{max(took):.1f})"


def compare_all(folder):
    "Return the differences between few blocks and all, for every architecture."
    found = []
    for number, (name, shape) in enumerate(SHAPES.items()):
        model = save(folder / str(number), shape)
        for way in (*ON_EACH, ONCE[number % len(ONCE)]):
            found.append({"architecture": name, "way": way, **compare(model, name, WAYS[way])})
            print(found[-1], flush=True)
    extended = [one for one in found if one["few"]]
    worst = max(abs(one["peak"]) for one in extended)
    differ = sum(one["verdicts"][0] != one["verdicts"][1] for one in extended)
    print(
        f"{len(found)} configurations of {len(SHAPES)} architectures, {len(extended)} from few blocks:"
    )
    print(f"the peak is at most {worst:.3%} off, and {differ} verdicts differ")
    return found


def compare(model, name, settings):
    "Return by how much the peak from few blocks differs from that of all, and both verdicts."
    from multigpu_ft.memory.simulation import _read_shape, _Request, _simulate_few, simulate

    task = "classification" if name == "BERT" else "causal-lm"
    cfg = RunConfig(model=model, **{"dtype": "fp16", "accum_steps": 4, "task": task} | settings)
    t4 = find_gpu("T4")
    every = Fit(cfg, t4, 2, simulate(cfg, t4, 2, whole=True))
    few = _simulate_few(_Request(cfg, _read_shape(cfg), t4, 2, "cuda"))
    if not few:
        return {"few": False, "gib": round(every.peak / 2**30, 2)}
    few = Fit(cfg, t4, 2, few.result())
    return {
        "few": True,
        "peak": few.peak / every.peak - 1,
        "tensors": few.used / every.used - 1,
        "moments": [max(f.found["peaks"], key=lambda p: p["bytes"])["phase"] for f in (few, every)],
        "verdicts": [few.verdict, every.verdict],
        "gib": round(every.peak / 2**30, 2),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, metavar="ROUNDS")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    hide_gpus()
    with tempfile.TemporaryDirectory() as folder:
        found = {"t4": asdict(find_gpu("T4"))}
        if options.times:
            found["times"] = time_all(Path(folder), options.times)
        if options.exact:
            found["exact"] = compare_all(Path(folder))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Predicted against measured: what two training steps take, simulated on fake tensors and run for real.

    python bench/memory.py                 # 2 processes on a CPU; bytes that torch's CPU allocator handed out, from its profiler
    python bench/memory.py --gpu           # the same on one GPU, in a world of ranks that are not there: max_memory_allocated and max_memory_reserved

Writes bench/results/memory.json, or memory-gpu.json.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from multigpu_ft.batches import Step
from multigpu_ft.config import RunConfig
from multigpu_ft.gpus import GPU
from multigpu_ft.models import choose_quantization
from multigpu_ft.preparing import load_base, put_under, with_loss
from multigpu_ft.simulation import NoTokenizer, longest_batch, simulate
from multigpu_ft.strategies import compute_dtype, join_world, make_strategy
from multigpu_ft.tracking import Stopwatch
from multigpu_ft.training import train_step

RESULTS = Path(__file__).parent / "results"
OPT = {"model_type": "opt", "vocab_size": 4000, "hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 1024, "num_hidden_layers": 6,
       "num_attention_heads": 8, "max_position_embeddings": 512, "dropout": 0.1}
QWEN = {"model_type": "qwen3", "vocab_size": 6000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True}
BERT = {"model_type": "bert", "vocab_size": 4000, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
LABELLED = {"task": "classification", "max_length": 128, "batch_size": 16}
ON_CPU = {
    "ddp": (OPT, {"strategy": "ddp"}),
    "ddp, accumulated": (OPT, {"strategy": "ddp", "accum_steps": 2}),
    "ddp, checkpointed": (OPT, {"strategy": "ddp", "activation_checkpointing": "full"}),
    "ddp, 8-bit Adam": (OPT, {"strategy": "ddp", "optimizer": "adamw_8bit"}),
    "ddp, bucketed": (OPT, {"strategy": "ddp", "packing": "bucketed"}),
    "ddp, eager": (OPT, {"strategy": "ddp", "attn_implementation": "eager"}),
    "fsdp": (OPT, {"strategy": "fsdp"}),
    "fsdp, sharded in each micro-batch": (OPT, {"strategy": "fsdp", "communication": "micro_batch", "accum_steps": 2}),
    "fsdp, shard_grad_op": (OPT, {"strategy": "fsdp", "communication": "micro_batch", "sharding": "shard_grad_op"}),
    "fsdp, checkpointed": (OPT, {"strategy": "fsdp", "activation_checkpointing": "full"}),
    "fsdp, every 2nd checkpointed": (OPT, {"strategy": "fsdp", "activation_checkpointing": 2}),
    "fsdp, bf16": (OPT, {"strategy": "fsdp", "dtype": "bf16"}),
    "ddp, bf16": (OPT, {"strategy": "ddp", "dtype": "bf16"}),
    "lora": (QWEN, {"strategy": "ddp", "tuning": "lora", "quantization": "none"}),
    "lora, fsdp": (QWEN, {"strategy": "fsdp", "tuning": "lora", "quantization": "none"}),
    "qlora": (QWEN, {"strategy": "ddp", "tuning": "qlora"}),
    "qlora, fsdp": (QWEN, {"strategy": "fsdp", "tuning": "qlora"}),
    "qlora, checkpointed": (QWEN, {"strategy": "ddp", "tuning": "qlora", "activation_checkpointing": "full"}),
    "Qwen3, padded": (QWEN, {"strategy": "fsdp", "packing": "padded"}),
    "BERT": (BERT, {"strategy": "ddp", **LABELLED}),
    "BERT, lora": (BERT, {"strategy": "ddp", "tuning": "lora", "quantization": "none", **LABELLED}),
}


def configuration(folder: str, settings: dict) -> RunConfig:
    return RunConfig(**{"model": folder, "dataset": "none/none", "dtype": "fp32", "batch_size": 4, "max_length": 256, "packing": "packed", **settings})


def measured(cfg: RunConfig, packing: str) -> dict[str, float]:
    "One rank's peak in two real steps, in bytes."
    world = join_world(cfg)
    labels = ["0", "1"] if cfg.task == "classification" else None
    quantization, _ = choose_quantization(cfg, world.size, world.device)
    dtype = torch.float32 if cfg.tuning == "full" else compute_dtype(cfg.dtype, world.device)
    begun: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profile:
        model, streamed = load_base(cfg, world, NoTokenizer(), labels, dtype, quantization, cfg.strategy == "fsdp")
        strategy, _ = make_strategy(cfg, world, 0)
        put_under(cfg, strategy, with_loss(cfg, model, labels), streamed)
        del model
        step = Step([longest_batch(cfg, packing, bool(labels))] * cfg.accum_steps, 1, 1, 1, 1, 1, 1)
        for _ in range(2):
            with torch.profiler.record_function("a step begins"):
                pass
            train_step(strategy, step, cfg.learning_rate, cfg.max_grad_norm, Stopwatch(world.device))
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    begun = next(e.start_ns() for e in events if e.name() == "a step begins")
    total = peak = 0
    for event in events:
        if event.name() == "[memory]":
            total += event.nbytes()
            peak = max(peak, total) if event.start_ns() >= begun else 0
    return {"peak": peak}


def in_processes(cfg: RunConfig, packing: str) -> int:
    "The highest peak of 2 ranks."
    with tempfile.TemporaryDirectory() as folder:
        port = 20000 + os.getpid() % 20000
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        request = json.dumps({"cfg": cfg.model_dump(), "packing": packing, "folder": folder})
        ranks = [
            subprocess.Popen([sys.executable, __file__, "--rank", request], env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        codes = [rank.wait(600) for rank in ranks]
        assert codes == [0, 0], codes
        # rank 0's weights are views into the file they were read from, which no allocator counts
        return json.loads((Path(folder) / "1.json").read_text())["peak"]


def on_cpu() -> None:
    wanted, rows = sys.argv[1:], []
    gpu = GPU("CPU", 24 * 1024)
    for name, (architecture, settings) in ON_CPU.items():
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            save_model(architecture, folder, settings.get("task"))
            cfg = configuration(folder, settings)
            packing = "padded" if cfg.task == "classification" else cfg.packing
            found = simulate(cfg, gpu, 2, kind="cpu")
            predicted = max(peak["bytes"] for peak in found["peaks"] if "step" in peak["phase"])
            real = in_processes(cfg, packing)
        mib = {"predicted_mib": round(predicted / 2**20, 2), "measured_mib": round(real / 2**20, 2)}
        rows.append({"configuration": name, **mib, "error": predicted / real - 1})
        print(f"{name:36} predicted {predicted / 2**20:8.2f} MiB   measured {real / 2**20:8.2f} MiB   {predicted / real - 1:+.2%}", flush=True)
    errors = [abs(row["error"]) for row in rows]
    summary = {"rows": rows, "median_error": median(errors), "worst_error": max(errors), "torch": torch.__version__}
    print(f"median {summary['median_error']:.2%}, worst {summary['worst_error']:.2%} of {len(rows)}")
    if not wanted:
        (RESULTS / "memory.json").write_text(json.dumps(summary, indent=1) + "\n")


def save_model(architecture: dict, folder: str, task: str | None) -> None:
    "A model with random weights, in a folder."
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    config = AutoConfig.for_model(**architecture)
    kind = AutoModelForSequenceClassification if task else AutoModelForCausalLM
    kind.from_config(config).save_pretrained(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        request = json.loads(sys.argv[2])
        found = measured(RunConfig(**request["cfg"]), request["packing"])
        (Path(request["folder"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
        dist.barrier()
        os._exit(0)
    on_cpu()

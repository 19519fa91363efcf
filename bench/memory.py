"""Compare predicted and measured memory of two training steps, simulated on fake tensors and run for real.

python bench/memory.py [NAME ...]        # 2 processes on a CPU; bytes from the profiler of torch's CPU allocator
python bench/memory.py --gpu [NAME ...]  # one GPU as rank 0 of 2; max_memory_allocated and max_memory_reserved
python bench/memory.py --table           # which of the popular models fit on 2 x T4
python bench/memory.py --time [N]        # how long estimates take on the command line, without a cache

Without --gpu no GPU is used. Writes bench/results/memory.json, memory-gpu.json, memory-table.json or
memory-time.json; with names it only prints, except with --gpu."""

import gc
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from gpus import hide_gpus, use_gpus
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from multigpu_ft.data.batches import Step
from multigpu_ft.distributed.strategies import DDP, FSDP
from multigpu_ft.distributed.weights import places
from multigpu_ft.distributed.world import compute_dtype, join_world
from multigpu_ft.memory.api import estimate
from multigpu_ft.memory.fake_strategies import SimulatedWorld
from multigpu_ft.memory.simulation import NoTokenizer, longest_batch, simulate
from multigpu_ft.models.loading import load_model
from multigpu_ft.models.quantization import choose_quantization
from multigpu_ft.run.config import RunConfig
from multigpu_ft.run.environment import GPU, find_gpu
from multigpu_ft.tracking.metrics import Stopwatch
from multigpu_ft.training.setup import load_base, make_strategy, put_under, with_loss
from multigpu_ft.training.step import train_step

RESULTS = Path(__file__).parent / "results"
OPT = {
    "model_type": "opt",
    "vocab_size": 4000,
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 512,
    "dropout": 0.1,
}
QWEN = {
    "model_type": "qwen3",
    "vocab_size": 6000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 4000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
SMOLLM2 = {  # SmolLM2-135M's shape, which decides the memory; the weights are random
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
LABELLED = {"task": "classification", "packing": "padded", "max_length": 128, "batch_size": 16}
ON_CPU = {
    "ddp": (OPT, {"strategy": "ddp"}),
    "ddp, accumulated": (OPT, {"strategy": "ddp", "accum_steps": 2}),
    "ddp, checkpointed": (OPT, {"strategy": "ddp", "activation_checkpointing": "full"}),
    "ddp, 8-bit Adam": (OPT, {"strategy": "ddp", "optimizer": "adamw_8bit"}),
    "ddp, bucketed": (OPT, {"strategy": "ddp", "packing": "bucketed"}),
    "ddp, bucketed, eager": (
        OPT,
        {"strategy": "ddp", "packing": "bucketed", "attn_implementation": "eager"},
    ),
    "fsdp": (OPT, {"strategy": "fsdp"}),
    "fsdp, sharded in each micro-batch": (
        OPT,
        {"strategy": "fsdp", "communication": "micro_batch", "accum_steps": 2},
    ),
    "fsdp, shard_grad_op": (
        OPT,
        {"strategy": "fsdp", "communication": "micro_batch", "sharding": "shard_grad_op"},
    ),
    "fsdp, checkpointed": (OPT, {"strategy": "fsdp", "activation_checkpointing": "full"}),
    "fsdp, every 2nd checkpointed": (OPT, {"strategy": "fsdp", "activation_checkpointing": 2}),
    "fsdp, bf16": (OPT, {"strategy": "fsdp", "dtype": "bf16"}),
    "ddp, bf16": (OPT, {"strategy": "ddp", "dtype": "bf16"}),
    "lora": (QWEN, {"strategy": "ddp", "tuning": "lora", "quantization": "none"}),
    "lora, fsdp": (QWEN, {"strategy": "fsdp", "tuning": "lora", "quantization": "none"}),
    "qlora": (QWEN, {"strategy": "ddp", "tuning": "qlora"}),
    "qlora, fsdp": (QWEN, {"strategy": "fsdp", "tuning": "qlora"}),
    "qlora, checkpointed": (
        QWEN,
        {"strategy": "ddp", "tuning": "qlora", "activation_checkpointing": "full"},
    ),
    "Qwen3, padded": (QWEN, {"strategy": "fsdp", "packing": "padded"}),
    "SmolLM2, lora": (SMOLLM2, {"strategy": "ddp", "tuning": "lora", "quantization": "none"}),
    "SmolLM2, lora, fsdp": (
        SMOLLM2,
        {"strategy": "fsdp", "tuning": "lora", "quantization": "none"},
    ),
    "SmolLM2, qlora": (SMOLLM2, {"strategy": "ddp", "tuning": "qlora"}),
    "SmolLM2, qlora, fsdp": (SMOLLM2, {"strategy": "fsdp", "tuning": "qlora"}),
    "SmolLM2, lora 8 bit": (SMOLLM2, {"strategy": "ddp", "tuning": "lora8bit"}),
    "SmolLM2, fsdp": (SMOLLM2, {"strategy": "fsdp"}),
    "BERT": (BERT, {"strategy": "ddp", **LABELLED}),
    "BERT, lora": (BERT, {"strategy": "ddp", "tuning": "lora", "quantization": "none", **LABELLED}),
}


def configuration(folder: str, settings: dict) -> RunConfig:
    return RunConfig(
        **{
            "model": folder,
            "dataset": "none/none",
            "dtype": "fp32",
            "batch_size": 4,
            "max_length": 256,
            "packing": "packed",
            **settings,
        }
    )


def save_model(
    architecture: dict, folder: str, task: str | None, dtype: torch.dtype = torch.float32
) -> None:
    "Save a model with random weights to a folder."
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    config = AutoConfig.for_model(**architecture)
    kind = AutoModelForSequenceClassification if task else AutoModelForCausalLM
    kind.from_config(config).to(dtype).save_pretrained(folder)


def packing_of(cfg: RunConfig) -> str:
    return "padded" if cfg.task == "classification" else cfg.packing


def predicted(found: dict) -> int:
    return max(peak["bytes"] for peak in found["peaks"] if "step" in peak["phase"])


# -- two processes on a CPU -----------------------------------------------------------------------------------------


def measure(cfg: RunConfig) -> tuple[int, int]:
    "Return this rank's peak in two real steps, in bytes, with and without gloo's own copies."
    world = join_world(cfg)
    labels = ["0", "1"] if cfg.task == "classification" else None
    quantization, _ = choose_quantization(cfg, world.size, world.device)
    dtype = torch.float32 if cfg.tuning == "full" else compute_dtype(cfg.dtype, world.device)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profile:
        model, streamed = load_base(
            cfg, world, NoTokenizer(), labels, dtype, quantization, cfg.strategy == "fsdp"
        )
        # On a GPU each parameter is a copy. Here it is a view of the file, which counts as a whole
        # while one view exists.
        for parameter in () if streamed else model.parameters():
            if not hasattr(parameter, "quant_state"):
                parameter.data = parameter.data.clone()
        strategy, _ = make_strategy(cfg, world, 0)
        put_under(cfg, strategy, with_loss(cfg, model, labels), streamed)
        del model
        step = Step(
            [longest_batch(cfg, packing_of(cfg), bool(labels))] * cfg.accum_steps, 1, 1, 1, 1, 1
        )
        for _ in range(2):
            with torch.profiler.record_function("a step begins"):
                pass
            train_step(
                strategy, step, cfg.learning_rate, cfg.max_grad_norm, Stopwatch(world.device)
            )
    return peaks_of(profile.profiler.kineto_results.experimental_event_tree())


def peaks_of(tree: list) -> tuple[int, int]:
    """Return the most bytes allocated at once since the first step, with and without the copies of
    gloo's reduce_scatter, which it keeps for a time that varies by run. NCCL makes no copies."""
    moments: list[tuple[int, int, int, bool]] = []
    begun = 0

    def walk(event: Any, copied: bool) -> None:
        nonlocal begun
        copied = copied or event.name == "c10d::_reduce_scatter_base_"
        if event.name == "a step begins":
            begun = begun or event.start_time_ns
        if event.tag == torch._C._profiler._EventType.Allocation:
            moments.append(
                (event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, copied)
            )
        for child in event.children:
            walk(child, copied)

    for event in sorted(tree, key=lambda e: e.start_time_ns):
        walk(event, False)
    total = own = most = most_own = 0
    copies = set()
    for at, size, address, copied in sorted(moments, key=lambda moment: moment[0]):
        if size > 0 and copied:
            copies.add(address)
        total += size
        if address not in copies:
            own += size
        if size < 0:
            copies.discard(address)
        if at >= begun:
            most, most_own = max(most, total), max(most_own, own)
    return most, most_own


def in_processes(cfg: RunConfig) -> tuple[int, int]:
    "Return the peak of rank 1 of 2. Rank 0's weights are views of a file, which no allocator counts."
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
        }
        environment["MASTER_PORT"] = str(probe.getsockname()[1])
        probe.close()
        command = [sys.executable, __file__, "--rank", json.dumps(cfg.model_dump()), folder]
        ranks = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
            )
            for rank in range(2)
        ]
        errors = [rank.communicate(timeout=600)[1].decode() for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors)[-3000:]
        return json.loads((Path(folder) / "1.json").read_text())


def compare(name: str) -> tuple[int, int, int]:
    "Return predicted and measured bytes of one of `ON_CPU`, and the measured ones with gloo's own copies."
    architecture, settings = ON_CPU[name]
    with tempfile.TemporaryDirectory() as folder:
        save_model(architecture, folder, settings.get("task"))
        cfg = configuration(folder, settings)
        measured, own = in_processes(cfg)
        found = simulate(cfg, GPU("CPU", 24 * 1024), 2, kind="cpu")
        # the simulation leaves its group behind
        dist.destroy_process_group()
        return predicted(found), own, measured


def on_cpu(wanted: list[str]) -> None:
    rows = []
    for name in wanted or ON_CPU:
        guess, real, copies = compare(name)
        mib = {"predicted_mib": guess, "measured_mib": real, "measured_with_gloo_mib": copies}
        mib = {k: round(v / 2**20, 2) for k, v in mib.items()}
        rows.append(
            {
                "configuration": name,
                **mib,
                "error": guess / real - 1,
                "error_with_gloo": guess / copies - 1,
            }
        )
        print(
            f"{name:36} predicted {guess / 2**20:8.2f} MiB   measured {real / 2**20:8.2f} MiB   "
            f"{guess / real - 1:+.2%}   "
            f"with gloo's copies {copies / 2**20:8.2f} MiB {guess / copies - 1:+.2%}",
            flush=True,
        )
    summary = summarise(rows)
    if not wanted:
        save("memory.json", summary)


def summarise(rows: list[dict]) -> dict:
    errors = [abs(row["error"]) for row in rows]
    print(f"median error {median(errors):.2%}, worst {max(errors):.2%}, of {len(rows)}")
    return {
        "rows": rows,
        "median_error": median(errors),
        "worst_error": max(errors),
        "torch": torch.__version__,
    }


def save(name: str, content: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    (Path(os.environ.get("OUT", RESULTS)) / name).write_text(json.dumps(content, indent=1) + "\n")


# -- one GPU --------------------------------------------------------------------------------------------------------

LARGE_OPT = {
    **OPT,
    "vocab_size": 50272,
    "hidden_size": 1024,
    "word_embed_proj_dim": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
}
LARGE_QWEN = {
    **QWEN,
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
LARGE_BERT = {
    **BERT,
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}


def gpu_configurations() -> dict[str, tuple[dict, dict]]:
    "Return the combinations of strategies, dtypes, tunings and other settings to measure."
    base = {"max_length": 512, "dtype": "bf16", "activation_checkpointing": "none"}
    found = {}
    for strategy in ("ddp", "fsdp"):
        for dtype in ("bf16", "fp16", "fp32"):
            found[f"{strategy}, {dtype}"] = (
                LARGE_OPT,
                {**base, "strategy": strategy, "dtype": dtype},
            )
        for name, settings in {
            "checkpointed": {"activation_checkpointing": "full"},
            "every 2nd": {"activation_checkpointing": 2},
            "accumulated": {"accum_steps": 2},
            "bucketed": {"packing": "bucketed"},
            "batch 16": {"batch_size": 16},
        }.items():
            found[f"{strategy}, {name}"] = (LARGE_OPT, {**base, "strategy": strategy, **settings})
        for tuning in ("lora", "qlora"):
            whole = {"quantization": "none"} if tuning == "lora" else {}
            found[f"{strategy}, {tuning}"] = (
                LARGE_QWEN,
                {**base, "strategy": strategy, "tuning": tuning, **whole},
            )
        found[f"{strategy}, Qwen3"] = (LARGE_QWEN, {**base, "strategy": strategy})
    found["fsdp, micro_batch"] = (
        LARGE_OPT,
        {**base, "strategy": "fsdp", "communication": "micro_batch"},
    )
    found["ddp, 8-bit Adam"] = (LARGE_OPT, {**base, "strategy": "ddp", "optimizer": "adamw_8bit"})
    found["ddp, lora 8 bit"] = (LARGE_QWEN, {**base, "strategy": "ddp", "tuning": "lora8bit"})
    found["ddp, BERT"] = (LARGE_BERT, {**base, "strategy": "ddp", **LABELLED})
    return found


class OnOneGPU:
    "A mixin for a strategy without its other ranks: it sends no weights and asks no rank."

    def _place(self, unit: nn.Module, leave: set[nn.Module]) -> list[torch.Tensor]:
        if packed := [m for m in unit.modules() if hasattr(m, "quant_state")]:
            for module in packed:
                module.to(self.world.device)
        known: dict[int, torch.Tensor] = {}
        for module, kind, name in places(unit, leave):
            tensor = getattr(module, kind)[name]
            if tensor.device != self.world.device:
                if id(tensor) not in known:
                    new = tensor.detach().to(self.world.device)
                    known[id(tensor)] = (
                        nn.Parameter(new, requires_grad=tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else new
                    )
                getattr(module, kind)[name] = known[id(tensor)]
        return []

    def _packed_outputs(self, unit: nn.Module) -> dict[str, torch.Tensor]:
        return {}

    def _wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super()._wrap(model)
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            # a group without peers reports no sum, for which a bucket would wait
            wrapped.register_comm_hook(None, _hand_back)
        return wrapped


def _hand_back(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def measure_alone(cfg: RunConfig, device: torch.device) -> dict[str, float]:
    """Return the peaks of three real steps on `device`, as rank 0 of 2, in bytes.

    Values gathered from the other rank are whatever was in memory. On a CPU nothing is counted."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    memory = _Memory(device)
    world = SimulatedWorld(0, 0, 2, device)
    labels = ["0", "1"] if cfg.task == "classification" else None
    quantization, _ = choose_quantization(cfg, 2, device)
    dtype = torch.float32 if cfg.tuning == "full" else compute_dtype(cfg.dtype, device)
    kind = type("Strategy", (OnOneGPU, {"ddp": DDP, "fsdp": FSDP}[cfg.strategy]), {})
    model = load_model(cfg, NoTokenizer(), labels, dtype, quantization, device)
    strategy = kind(cfg, world)
    put_under(cfg, strategy, with_loss(cfg, model, labels), streamed=True)
    del model
    gc.collect()
    memory.begin()
    step = Step(
        [longest_batch(cfg, packing_of(cfg), bool(labels))] * cfg.accum_steps, 1, 1, 1, 1, 1
    )
    begun = 0.0
    for _ in range(3):
        memory.wait()
        begun = time.perf_counter()
        _, norm = train_step(
            strategy, step, cfg.learning_rate, cfg.max_grad_norm, Stopwatch(device)
        )
        memory.wait()
    seconds = time.perf_counter() - begun
    found = {**memory.read(), "seconds": seconds, "finite": bool(norm.isfinite())}
    dist.destroy_process_group()
    return found


class _Memory:
    "The memory of `device` in this process."

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_counted = device.type != "cpu"
        self._module = torch.get_device_module(device)
        self._free = self._module.mem_get_info(device)[0] if self._is_counted else 0

    def begin(self) -> None:
        if self._is_counted:
            self._module.empty_cache()
            self._module.reset_peak_memory_stats()

    def wait(self) -> None:
        if self._is_counted:
            self._module.synchronize()

    def read(self) -> dict[str, int]:
        "Return the peaks since `begin`, and what the process has beside torch's allocator."
        if not self._is_counted:
            return {"allocated": 0, "reserved": 0, "beside": 0}
        taken = self._free - self._module.mem_get_info(self._device)[0]
        return {
            "allocated": self._module.max_memory_allocated(),
            "reserved": self._module.max_memory_reserved(),
            "beside": taken - self._module.memory_reserved(),
        }


def on_gpu(wanted: list[str]) -> None:
    gpu = find_gpu(
        torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 2**20
    )
    known, rows, failed = gpu_configurations(), [], {}
    for name in wanted or known:
        architecture, settings = known[name]
        with tempfile.TemporaryDirectory() as folder:
            save_model(architecture, folder, settings.get("task"))
            cfg = configuration(folder, settings)
            guess = simulate(cfg, gpu, 2)
            dist.destroy_process_group()
            done = subprocess.run(
                [sys.executable, __file__, "--on-gpu", json.dumps(cfg.model_dump())],
                capture_output=True,
                text=True,
                timeout=600,
            )
        if done.returncode:
            failed[name] = done.stderr[-800:]
            print(f"{name}: failed: {failed[name]}", flush=True)
            continue
        rows.append(_row(name, guess, json.loads(done.stdout.splitlines()[-1])))
    if rows:
        found = {
            **summarise(rows),
            "gpu": torch.cuda.get_device_name(),
            "false_fits": sum(r["reserved_error"] < 0 for r in rows),
            "failed": failed,
        }
        save("memory-gpu.json", found)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _row(name: str, guess: dict, real: dict) -> dict:
    row = {
        "configuration": name,
        "predicted_mib": round(predicted(guess) / 2**20, 1),
        "measured_mib": round(real["allocated"] / 2**20, 1),
        "predicted_reserved_mib": round(guess["reserved"] / 2**20, 1),
        "measured_reserved_mib": round(real["reserved"] / 2**20, 1),
        "error": predicted(guess) / real["allocated"] - 1,
        "reserved_error": guess["reserved"] / real["reserved"] - 1,
        "predicted_s": guess["seconds"],
        "measured_s": real["seconds"],
        "beside_mib": round(real["beside"] / 2**20, 1),
        "finite": real["finite"],
    }
    print(
        f"{name:24} allocated {row['predicted_mib']:9.1f} {row['measured_mib']:9.1f} "
        f"{row['error']:+.2%}   reserved {row['predicted_reserved_mib']:9.1f} "
        f"{row['measured_reserved_mib']:9.1f} {row['reserved_error']:+.2%}   "
        f"beside it {row['beside_mib']:.0f}",
        flush=True,
    )
    return row


# -- what fits on 2 x T4, and how long an estimate takes --------------------------------------------------------------

LORA = {
    "tuning": "lora",
    "quantization": "none",
    "task": "chat",
    "batch_size": 2,
    "accum_steps": 4,
    "max_length": 1024,
}
QLORA = {"tuning": "qlora", "task": "chat", "batch_size": 1, "accum_steps": 8, "max_length": 1024}
TABLE = {
    "OPT-1.3B, full, fsdp, 4 x 512": {
        "model": "facebook/opt-1.3b",
        "strategy": "fsdp",
        "batch_size": 4,
        "max_length": 512,
        "activation_checkpointing": "none",
    },
    "OPT-1.3B, the preset": {"preset": "opt-1.3b-arxiv"},
    "OPT-1.3B, full, ddp": {
        "model": "facebook/opt-1.3b",
        "strategy": "ddp",
        "batch_size": 4,
        "max_length": 512,
    },
    "Qwen3-0.6B, LoRA, ddp": {"model": "Qwen/Qwen3-0.6B", "strategy": "ddp", **LORA},
    "Qwen3-1.7B, LoRA, ddp": {"model": "Qwen/Qwen3-1.7B", "strategy": "ddp", **LORA},
    "Qwen3-8B, QLoRA": {"model": "Qwen/Qwen3-8B", **QLORA},
    "Qwen3-14B, QLoRA": {"model": "Qwen/Qwen3-14B", **QLORA},
    "Qwen3-32B, QLoRA": {"model": "Qwen/Qwen3-32B", **QLORA},
}


def table() -> None:
    rows = {}
    for name, settings in TABLE.items():
        preset, settings = (
            settings.get("preset"),
            {k: v for k, v in settings.items() if k != "preset"},
        )
        cfg = (
            RunConfig.preset(preset, **settings)
            if preset
            else RunConfig(dataset="user/data", **settings)
        )
        begun = time.perf_counter()
        found = estimate(cfg, 2, "T4")
        rows[name] = {**found.record(), "took_s": round(time.perf_counter() - begun, 1)}
        print(f"{name:32} {found.line}", flush=True)
    save("memory-table.json", rows)


def timing(repeats: int) -> None:
    rows = {}
    for name, arguments in {
        "OPT-1.3B, full, fsdp": ["--preset", "opt-1.3b-arxiv"],
        "Qwen3-32B, QLoRA, fsdp": [
            "--model",
            "Qwen/Qwen3-32B",
            "--tuning",
            "qlora",
            "--strategy",
            "fsdp",
            "--batch-size",
            "1",
            "--max-length",
            "1024",
            "--activation-checkpointing",
            "full",
        ],
    }.items():
        took, most = [], 0.0
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as cache:
                command = [
                    Path(sys.executable).parent / "multigpu-ft",
                    "estimate",
                    *arguments,
                    "--gpus",
                    "2",
                    "--gpu-memory-gib",
                    "A100",
                    "--json",
                ]
                begun = time.perf_counter()
                subprocess.run(
                    command,
                    env={**os.environ, "XDG_CACHE_HOME": cache},
                    check=True,
                    capture_output=True,
                )
                took.append(round(time.perf_counter() - begun, 2))
                most = max(most, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20)
        rows[name] = {"seconds": took, "peak_gib_of_a_process": round(most, 2)}
        print(
            f"{name:28} {min(took):.1f}-{max(took):.1f} s, median {median(took):.1f}, up to {most:.2f} GiB",
            flush=True,
        )
    save("memory-time.json", rows)


def main() -> None:
    what, rest = sys.argv[1] if len(sys.argv) > 1 else "", sys.argv[2:]
    if what == "--gpu":
        use_gpus(1)
        return on_gpu(rest)
    if what == "--on-gpu":
        cfg = RunConfig(**json.loads(rest[0]))
        return print(json.dumps(measure_alone(cfg, torch.device("cuda", 0))))
    hide_gpus()
    if what == "--rank":
        found = measure(RunConfig(**json.loads(rest[0])))
        (Path(rest[1]) / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
        dist.barrier()
        os._exit(0)
    if what == "--table":
        table()
    elif what == "--time":
        timing(int(rest[0]) if rest else 5)
    else:
        on_cpu(sys.argv[1:])


if __name__ == "__main__":
    main()

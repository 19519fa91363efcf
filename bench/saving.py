"""Measure how long a save stalls training, and how long it takes: ours and torch's, with 110M parameters.

python bench/saving.py [--rounds 6] [--gpu] [--json bench/results/saving.json]

Every round runs every arm once, in a different order. A stall is the time until training may
continue. A full save is the time until the checkpoint is complete and flushed to the disk, with a
digest of each file (torch's arms make no digests). All arms run on 2 ranks on the CPU, or with --gpu
on one or two GPUs. There the result, saving-gpu.json, also says how much host memory was pinned."""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpus import hide_gpus, use_gpus

ARMS = (
    "ours, waiting for all of it",
    "ours",
    "torch.save of the full state",
    "torch dcp.save",
    "torch dcp.async_save",
)


def rank(strategy_name, rounds, report):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed import distributed_c10d
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from transformers import AutoModelForCausalLM, OPTConfig

    from multigpu_ft import RunConfig, RunDir
    from multigpu_ft.checkpoints.progress import Progress
    from multigpu_ft.checkpoints.writer import CheckpointWriter
    from multigpu_ft.distributed.world import join_world
    from multigpu_ft.models.loss import LossModel
    from multigpu_ft.training.setup import make_strategy
    from multigpu_ft.training.step import make_optimizer

    torch.set_num_threads(1)
    folder = Path(report).parent / strategy_name
    cfg = RunConfig(
        run_root=str(folder), strategy=strategy_name, dtype="fp32", keep=1, run_name="run"
    )
    unpickler = distributed_c10d._unpickler
    world = join_world(cfg)
    # ours refuses the plans that torch's arms send to each other
    distributed_c10d._unpickler = unpickler
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        OPTConfig(
            vocab_size=32_000,
            hidden_size=768,
            word_embed_proj_dim=768,
            ffn_dim=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            dropout=0.0,
        )
    )
    parameters = sum(p.numel() for p in model.parameters())
    strategy, _ = make_strategy(cfg, world, 0)
    strategy.prepare(LossModel(model), lambda m: make_optimizer(cfg, m))
    ids = torch.arange(64).reshape(1, 64)
    batch = {"input_ids": ids, "predictors": torch.arange(63), "targets": torch.arange(1, 64)}
    batch = {name: tensor.to(world.device) for name, tensor in batch.items()}
    # keeps the thread of dcp.async_save apart from a step's collectives
    apart = dist.new_group(backend="gloo")
    if world.is_main:
        RunDir.create(cfg)
    dist.barrier()
    writer, count = CheckpointWriter(RunDir(folder / "run"), cfg, strategy, {}), 0

    def wait():
        if world.device.type != "cpu":
            torch.get_device_module(world.device).synchronize()

    def step():
        strategy.backward(strategy.forward(**batch, scale=1 / 63)[0])
        strategy.clip_grad_norm(1.0)
        strategy.step()
        wait()

    def ours(to_the_end):
        nonlocal count
        count += 1
        begun = time.perf_counter()
        writer.start(Progress(0, 5000, 1, count, count, count, count), end_of_epoch=False)
        if to_the_end:
            writer.wait()
        stall = time.perf_counter() - begun
        steps = []
        # train while the save is being written
        while not to_the_end and world.sum(writer._thread.is_alive())[0]:
            before = time.perf_counter()
            step()
            steps.append(time.perf_counter() - before)
        save = None if to_the_end else writer.wait()
        assert to_the_end or save.error is None, save
        return {
            "stall": stall,
            "seconds": stall if to_the_end else save.seconds,
            "step_meanwhile": statistics.median(steps) if steps else None,
        }

    def theirs(arm):
        path = folder / "theirs"
        begun = time.perf_counter()
        if arm == "torch.save of the full state":
            state = get_state_dict(
                model,
                strategy.optimizer,
                options=StateDictOptions(full_state_dict=True, cpu_offload=True),
            )
            if world.is_main:
                path.mkdir()
                with open(path / "state.pt", "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
            dist.barrier()
            stall = seconds = time.perf_counter() - begun
        else:
            found, optim = get_state_dict(model, strategy.optimizer)
            if arm == "torch dcp.save":
                dcp.save({"model": found, "optimizer": optim}, checkpoint_id=path)
                stall = seconds = time.perf_counter() - begun
            else:
                future = dcp.async_save(
                    {"model": found, "optimizer": optim}, checkpoint_id=path, process_group=apart
                )
                stall = time.perf_counter() - begun
                while world.sum(not future.done())[0]:
                    step()
                future.result()
                seconds = time.perf_counter() - begun
        dist.barrier()
        if world.is_main:
            shutil.rmtree(path)
        dist.barrier()
        return {"stall": stall, "seconds": seconds}

    step()
    taken, alone = {arm: [] for arm in ARMS}, []
    for number in range(rounds + 1):  # the first is a warm-up
        for arm in random.Random(number).sample(ARMS, len(ARMS)):
            dist.barrier()
            found = ours(arm != "ours") if arm.startswith("ours") else theirs(arm)
            slowest = {
                k: max(v for v in vs)
                for k in found
                if None not in (vs := of_all_ranks(dist, world, found[k]))
            }
            if world.is_main:
                print(f"{strategy_name}, round {number}, {arm}: {slowest}", flush=True)
            if number:
                taken[arm].append(slowest)
        before = time.perf_counter()
        for _ in range(3):
            step()
        alone.append((time.perf_counter() - before) / 3)
    if world.is_main:
        Path(report).write_text(
            json.dumps(
                {
                    "parameters": parameters,
                    "arms": taken,
                    "step_alone": alone[1:],
                    "bytes": 3 * 4 * parameters,
                    "device": str(world.device),
                    "pinned_bytes": pinned_bytes(world.device),
                }
            )
        )
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def pinned_bytes(device):
    "Return the most host memory that this process has had pinned at a time; None on a CPU or before torch 2.8."
    import torch

    if device.type == "cpu" or not hasattr(torch.cuda, "host_memory_stats"):
        return None
    return torch.cuda.host_memory_stats().get("allocated_bytes.peak")


def of_all_ranks(dist, world, value):
    values = [None] * world.size
    dist.all_gather_object(values, value)
    return values


def spread(values):
    return {
        "median": round(statistics.median(values), 4),
        "range": [round(min(values), 4), round(max(values), 4)],
        "n": len(values),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = use_gpus(2) if options.gpu else 2
    if not options.gpu:
        hide_gpus()
    name = "saving-gpu.json" if options.gpu else "saving.json"
    out, results = options.json or Path(__file__).parent / "results" / name, {}
    for strategy in ("ddp", "fsdp"):
        with tempfile.TemporaryDirectory(prefix="bench-saving-") as tmp:
            report = Path(tmp) / "report.json"
            torchrun = [
                Path(sys.executable).parent / "torchrun",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
            ]
            subprocess.run(
                [*torchrun, __file__, "rank", strategy, str(options.rounds), report],
                check=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            found = json.loads(report.read_text())
        arms, full = (
            found["arms"],
            [r["seconds"] for r in found["arms"]["ours, waiting for all of it"]],
        )
        meanwhile = [r["step_meanwhile"] for r in arms["ours"] if r.get("step_meanwhile")]
        results[strategy] = {
            "parameters": found["parameters"],
            "bytes": found["bytes"],
            "ranks": ranks,
            "device": found["device"],
            "pinned_bytes": found["pinned_bytes"],
            "stall_s": {arm: spread([r["stall"] for r in arms[arm]]) for arm in ARMS},
            "until_complete_s": {arm: spread([r["seconds"] for r in arms[arm]]) for arm in ARMS},
            "stall over a synchronous full save": spread(
                [a["stall"] / b for a, b in zip(arms["ours"], full, strict=True)]
            ),
            "stall over torch.save of the full state": spread(
                [a["stall"] / b["stall"] for a, b in zip(arms["ours"], arms[ARMS[2]], strict=True)]
            ),
            "stall over torch dcp.async_save": spread(
                [a["stall"] / b["stall"] for a, b in zip(arms["ours"], arms[ARMS[4]], strict=True)]
            ),
            "a step while a save is written, over one alone": spread(
                [m / statistics.median(found["step_alone"]) for m in meanwhile]
            ),
        }
        print(strategy, json.dumps(results[strategy], indent=1), flush=True)
    out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    rank(sys.argv[2], int(sys.argv[3]), sys.argv[4]) if sys.argv[1:2] == ["rank"] else main()

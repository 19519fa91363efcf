"""Compare accelerate and ZeRO with the same job written directly on Accelerate, and measure what each
strategy keeps on a rank.

python bench/zero.py [--rounds 5]

The same OPT (hidden 384, 6 layers, V=8,192) trains on 2 gloo ranks of one thread each, in fp32.
"Ours" is all that a run does for a step (see ours.py). The direct job gets its batch at no cost, and
has the same DeepSpeed settings. Both take turns in the same two processes, and their losses are
compared. A round is a pair of processes for each strategy; tokens/s are those of ours alone. Bytes
are those of all live tensors, between two micro-batches or after the last backward pass of a step,
whichever is more. Writes results/zero.json."""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpus import hide_gpus

HERE, BIN = Path(__file__).parent, Path(sys.executable).parent
WAYS = {
    "single": {"strategy": "single"},
    "ddp": {"strategy": "ddp"},
    "shard_grad_op": {"strategy": "fsdp", "sharding": "shard_grad_op"},
    "full_shard": {"strategy": "fsdp", "sharding": "full_shard"},
    "accelerate": {"strategy": "accelerate"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3, offload": {"strategy": "zero3", "offload": "all"},
}
DIRECT = ("accelerate", "zero1", "zero2", "zero3")


def storages(tensors):
    "Return bytes by address."
    found = {}
    for tensor in tensors:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return found


def alive():
    "Return all floating-point tensors, as gradients are, without token ids or positions in a cache."
    import torch

    tensors = [
        t
        for t in gc.get_objects()
        if isinstance(t, torch.Tensor)
        and type(t).__name__ != "FakeTensor"
        and t.layout == torch.strided
    ]
    return [t for t in tensors if t.is_floating_point()]


def kept_bytes(strategy, micro_batches, targets):
    """Return the bytes of a rank's parameters, fp32 copies, gradients (between two micro-batches or
    after the last, whichever is more) and moments."""
    import torch

    from multigpu_ft.distributed.world import to_device

    gc.collect()
    # held to the end, so that no new tensor gets the address of one of these
    before, gradients = alive(), 0
    parameters = storages(
        [
            t
            for p in strategy.model.parameters()
            for t in (p.data, getattr(p, "ds_tensor", None))
            if t is not None
        ]
    )
    inner = getattr(strategy.optimizer, "optimizer", strategy.optimizer)
    zero, inner = inner, getattr(inner, "optimizer", inner)
    updated = strategy.partition.flat() if hasattr(strategy, "partition") else []
    copies = {at: size for at, size in storages(updated).items() if at not in parameters}
    moments = storages(
        t for state in inner.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim
    )
    flat = getattr(zero, "grad_partitions_flat_buffer", None)
    # ZeRO-3 keeps the memory of its gradients all the time
    kept = storages([] if flat is None else [flat])
    for last in (False, True):
        batch = to_device(micro_batches[last], torch.device("cpu"))
        with strategy.accumulate(last):
            strategy.backward(strategy.forward(**batch, scale=1 / targets)[0])
        # a worker of gloo reports a sum before it releases the tensor
        time.sleep(0.2)
        gc.collect()
        known = {**storages(before), **parameters, **copies, **moments}
        new = {at: size for at, size in storages(alive()).items() if at not in known}
        new |= storages(p.grad for p in strategy.model.parameters() if p.grad is not None)
        gradients = max(gradients, sum({**new, **kept}.values()))
    strategy.clip_grad_norm(1.0)
    strategy.step()
    sums = {
        kind: sum(found.values())
        for kind, found in {
            "parameters": parameters,
            "fp32 copies": copies,
            "moments": moments,
        }.items()
    }
    return {
        "parameters": sums["parameters"],
        "fp32 copies": sums["fp32 copies"],
        "gradients": gradients,
        "moments": sums["moments"],
    }


def be_rank(way, folder, steps, compare):
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from ours import Ours, take_turns

    ours = Ours(folder, communication="micro_batch", **WAYS[way])
    if compare:
        from accelerate import Accelerator

        # shares the state and the settings, but has its own engine
        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(
            ours.base, torch.optim.AdamW(ours.base.parameters(), lr=1e-4, fused=True)
        )
        batches = ours.batches()

    def their_step():
        ids, labels = batches.pop(0)
        targets = torch.tensor(float((labels[:, 1:] != -100).sum()))
        dist.all_reduce(targets)
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
        )
        accelerator.sync_gradients = True
        accelerator.backward(loss * ours.world.size / targets)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return (total / targets).item()

    seconds = take_turns((ours.step, their_step) if compare else (ours.step,), steps, 1e-4)
    if compare:
        found = {
            "ratio": statistics.median(
                t / o for o, t in zip(seconds[ours.step][2:], seconds[their_step][2:], strict=True)
            )
        }
    else:
        found = {"tokens_per_second": sum(ours.tokens[2:]) / sum(seconds[ours.step][2:])}
        pair = next(ours.stream), next(ours.stream)
        found["bytes"] = kept_bytes(
            ours.strategy,
            [step.micro_batches[0] for step in pair],
            sum(step.targets for step in pair),
        )
        found["elements"] = sum(p.numel() for p in ours.base.parameters())
    if ours.world.is_main:
        print(json.dumps(found))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def ask(way, folder, steps, compare):
    ranks = "1" if way == "single" else "2"
    command = [
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node",
        ranks,
        __file__,
        "--rank",
        way,
        "--folder",
        folder,
        "--steps",
        steps,
    ]
    if compare:
        command.append("--compare")
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-5000:])
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="builtin:python-docs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument(
        "--only",
        nargs="*",
        default=["alone", "compared"],
        help="parts to measure again; the other stays as it is in the result",
    )
    parser.add_argument("--rank")
    parser.add_argument("--folder")
    parser.add_argument("--compare", action="store_true")
    args = parser.parse_args()
    hide_gpus()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    if args.rank:
        be_rank(args.rank, args.folder, args.steps, args.compare)
    from training import SMALL, prepare, spread

    with tempfile.TemporaryDirectory() as tmp:
        prepare(Path(tmp), args.dataset, SMALL[0], {**SMALL[1], "vocab_size": 8192})
        ratios, speeds, kept = {way: [] for way in DIRECT}, {way: [] for way in WAYS}, {}
        for number in range(args.rounds):
            for way in list(WAYS)[number % len(WAYS) :] + list(WAYS)[: number % len(WAYS)]:
                if "alone" in args.only:
                    alone = ask(way, tmp, args.steps, compare=False)
                    kept[way] = {
                        kind: round(size / alone["elements"], 3)
                        for kind, size in alone["bytes"].items()
                    }
                    speeds[way].append(alone["tokens_per_second"])
                if "compared" in args.only and way in DIRECT:
                    ratios[way].append(ask(way, tmp, args.steps, compare=True)["ratio"])
                print(
                    number,
                    way,
                    *speeds[way][-1:],
                    kept.get(way),
                    *ratios.get(way, [])[-1:],
                    flush=True,
                )
    out = HERE / "results" / "zero.json"
    result = json.loads(out.read_text()) if out.exists() else {}
    if "compared" in args.only:
        result["tokens/s over the same job directly on Accelerate"] = {
            way: spread(found) for way, found in ratios.items()
        }
    if "alone" in args.only:
        result |= {
            "tokens/s": {way: spread(found) for way, found in speeds.items()},
            "bytes an element on a rank": kept,
        }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

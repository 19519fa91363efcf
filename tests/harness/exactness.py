"""Compute what test_exactness.py compares, on each of two ranks.

torchrun --nproc-per-node 2 tests/harness/exactness.py REPORT.json [ARCHITECTURE ...] [others]

One pair of processes does everything, because importing takes longer than the steps."""

import copy
import hashlib
import json
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from multigpu_ft import RunConfig
from multigpu_ft.data.batches import collate, epoch_steps
from multigpu_ft.data.layout import lay_out
from multigpu_ft.data.order import SampleOrder, epoch_order
from multigpu_ft.data.tokenization import tokenize_texts
from multigpu_ft.distributed.world import World, join_world, to_device
from multigpu_ft.models.loss import LossModel
from multigpu_ft.tracking.metrics import Stopwatch
from multigpu_ft.training.packing import settle_packing
from multigpu_ft.training.setup import make_strategy
from multigpu_ft.training.step import make_optimizer, train_step

STEPS, MAX_LENGTH, VOCABULARY = 20, 64, 512
LINEAR = torch.nn.functional.linear
ARCHITECTURES = {
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0, "attention_dropout": 0.0},
    "llama": {"intermediate_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen3": {
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "opt-gelu": {
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_function": "gelu",
    },
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
SHAPE = {  # of a small model of any architecture
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
SPLITS = [  # ways to split 8 rows
    ("single", {"batch_size": 8}),
    ("single", {"batch_size": 2, "accum_steps": 4}),
    ("ddp", {"batch_size": 4}),
    ("ddp", {"batch_size": 1, "accum_steps": 4}),
    ("fsdp", {"batch_size": 4, "sharding": "full_shard"}),
    (
        "fsdp",
        {
            "batch_size": 2,
            "accum_steps": 2,
            "sharding": "full_shard",
            "communication": "micro_batch",
        },
    ),
    ("fsdp", {"batch_size": 1, "accum_steps": 4, "sharding": "shard_grad_op"}),
    ("accelerate", {"batch_size": 2, "accum_steps": 2}),
    ("zero1", {"batch_size": 2, "accum_steps": 2}),
    ("zero2", {"batch_size": 1, "accum_steps": 4}),
    ("zero3", {"batch_size": 2, "accum_steps": 2}),
]


def build(name):
    torch.manual_seed(0)
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_LENGTH,
    }
    config = AutoConfig.for_model(
        name.removesuffix("-gelu"),
        **common,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        **ARCHITECTURES[name],
    )
    return AutoModelForCausalLM.from_config(config).train()


class Words:
    "A tokenizer of texts that are lists of numbers; each number is a token."

    eos_token_id, pad_token_id = 2, 1

    def __call__(self, texts, max_length, **settings):
        return {"input_ids": [[int(word) for word in text.split()][:max_length] for text in texts]}


def slice_of(count, seed=0):
    rng = np.random.default_rng(seed)
    texts = [
        " ".join(map(str, rng.integers(3, VOCABULARY, rng.integers(3, 50)))) for _ in range(count)
    ]
    return tokenize_texts(texts, Words(), MAX_LENGTH)


def config(strategy, **settings):
    return RunConfig(
        strategy=strategy, max_length=MAX_LENGTH, **{"learning_rate": 1e-3, **settings}
    )


def start(model, cfg, world):
    # this state belongs to the process, which has several strategies here, one after the other
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    torch.nn.functional.linear = LINEAR  # ZeRO-3 replaces it
    strategy, _ = make_strategy(cfg, world, 0)
    strategy.prepare(LossModel(copy.deepcopy(model)), lambda m: make_optimizer(cfg, m))
    return strategy


def steps(texts, cfg, packing, world):
    epoch = 1
    while True:
        yield from epoch_steps(
            texts,
            SampleOrder.of(cfg, len(texts), world.size),
            cfg,
            packing,
            epoch,
            0,
            world.rank,
            world.size,
        )
        epoch += 1


def curve(model, texts, packing, world, strategy, settings):
    cfg = config(strategy, **settings)
    world = World(0, 0, 1, world.device) if strategy == "single" else world
    strategy, watch, points = start(model, cfg, world), Stopwatch(world.device), []
    stream = steps(texts, cfg, packing, world)
    for _ in range(STEPS):
        step = next(stream)
        loss, norm = train_step(strategy, step, 1e-3, 1.0, watch)
        points.append(
            (
                world.sum(loss.item())[0] / step.targets
                if world.size > 1
                else loss.item() / step.targets,
                norm.item(),
            )
        )
    return points


def deviation(points, reference):
    return [
        max(abs(p[i] - r[i]) / r[i] for p, r in zip(points, reference, strict=True)) for i in (0, 1)
    ]


def fingerprint(strategy):
    "Return a digest of this rank's parameters, bit for bit."
    digest = hashlib.sha256()
    for parameter in strategy.model.parameters():
        local = (
            parameter.to_local()
            if hasattr(parameter, "to_local")
            else getattr(parameter, "ds_tensor", parameter)
        )
        digest.update(local.detach().clone().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def everybodys(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def planted_infinity(model, texts, world, way, dtype):
    "Return parameters, scale and skipped steps before and after a step with an infinite gradient on rank 1 only."
    strategy, _, offload = way.partition(" ")
    cfg = config(strategy, batch_size=2, dtype=dtype, offload="optimizer" if offload else "none")
    strategy, stream = start(model, cfg, world), steps(texts, cfg, "packed", world)
    before = fingerprint(strategy)
    batch = to_device(next(stream).micro_batches[0], world.device)
    with strategy.accumulate(last=True):
        loss = strategy.forward(**batch, scale=strategy.loss_scale.value / 100)[0]
        # DeepSpeed doesn't expose its gradients, so the loss is infinite instead
        strategy.backward(loss * float("inf") if world.rank == 1 and cfg.zero_stage else loss)
    if world.rank == 1 and not cfg.zero_stage:
        gradient = next(strategy.model.parameters()).grad
        (gradient.to_local() if hasattr(gradient, "to_local") else gradient).view(-1)[0] = float(
            "inf"
        )
    norm = strategy.clip_grad_norm(1.0)
    strategy.step()
    unchanged = fingerprint(strategy) == before
    train_step(strategy, next(stream), 1e-3, 1.0, Stopwatch(world.device))
    report = {
        "norm_finite": bool(norm.isfinite()),
        "unchanged": unchanged,
        "skipped": int(strategy.skipped),
        "in_a_row": int(strategy.skipped_in_a_row),
        "scale": strategy.loss_scale.value.item(),
        "goes_on": fingerprint(strategy) != before,
    }
    return everybodys(report)


def scale_reads(model, texts, world, strategy):
    "Return how often the host reads the loss scale in a step of four micro-batches, the second one."
    cfg = config(strategy, batch_size=1, accum_steps=4, dtype="fp16")
    strategy, stream = start(model, cfg, world), steps(texts, cfg, "packed", world)
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                reads.append(args[0] is strategy.loss_scale.value)
            return func(*args, **(kwargs or {}))

    train_step(strategy, next(stream), 1e-3, 1.0, Stopwatch(world.device))
    with Reads():
        train_step(strategy, next(stream), 1e-3, 1.0, Stopwatch(world.device))
    return sum(reads)


def check_changes(model, texts, world, strategy, dtype):
    """Return what the self-check found under a strategy, and whether the three steps after it are those
    of a run without it, to the bit."""
    cfg, found = config(strategy, batch_size=2, accum_steps=2, dtype=dtype, packing="packed"), []
    curves = []
    for checks in (False, True):
        begun, stream = start(model, cfg, world), steps(texts, cfg, "packed", world)
        if checks:
            found = settle_packing(cfg, begun, texts)
        watch = Stopwatch(world.device)
        pairs = [train_step(begun, next(stream), 1e-3, 1.0, watch) for _ in range(3)]
        curves.append([(loss.item(), norm.item()) for loss, norm in pairs])
    return {"found": found, "same": curves[0] == curves[1]}


@torch.no_grad()
def alone_and_together(model, texts):
    "Return the largest difference of a token's loss between a text alone and packed or bucketed with others."
    losses_of = LossModel(model).eval()

    def run(rows, packing):
        batch = collate(rows, 1, packing)
        return losses_of(**to_device(batch, torch.device("cpu")))[1]

    alone = {i: run([[texts[i]]], "padded") for i in range(len(texts))}
    worst = {}
    for packing in ("packed", "bucketed", "padded"):
        order, worst[packing] = epoch_order(len(texts), 0, 1), 0.0
        for group in lay_out(texts.lengths[order], 1, 4 * MAX_LENGTH, packing):
            shared = [texts[i] for i in order[group]]
            rows = [shared] if packing == "packed" else [[text] for text in shared]
            expected = torch.cat([alone[i] for i in order[group]])
            worst[packing] = max(worst[packing], (run(rows, packing) - expected).abs().max().item())
    model.train()
    return worst


def other_numbers(models, texts, world, report):
    "Add to `report` what takes no whole curves."
    sys.path.insert(0, "bench")
    from zero import kept_bytes

    few = slice_of(3, seed=2)  # rank 1 has no targets in the last step
    reference = curve(
        models["llama"], few, "padded", world, "single", {"batch_size": 1, "accum_steps": 2}
    )
    for name in ("ddp", "fsdp", "accelerate", "zero1", "zero2", "zero3"):
        report["uneven"][name] = deviation(
            curve(models["llama"], few, "padded", world, name, {"batch_size": 1}), reference
        )
    for way in (
        "ddp",
        "fsdp",
        "zero1",
        "zero2",
        "zero3",
        "zero1 offload",
        "zero2 offload",
        "zero3 offload",
    ):
        for dtype in ("fp16",) if "offload" in way else ("fp32", "bf16", "fp16"):
            report["infinity"][f"{way} {dtype}"] = planted_infinity(
                models["opt"], texts, world, way, dtype
            )
    for way in ("ddp", "fsdp", "accelerate", "zero1", "zero2", "zero3"):
        # Accelerate has fp16 for GPUs only
        for dtype in ("fp32", "bf16" if way == "accelerate" else "fp16"):
            report["checks"][f"{way} {dtype}"] = check_changes(
                models["qwen3"], texts, world, way, dtype
            )
    for way in ("zero1", "zero2", "zero3"):
        report["scale reads"][way] = scale_reads(models["opt"], texts, world, way)
    for dtype in ("fp32", "bf16", "fp16"):
        cfg = config("ddp", batch_size=2, dtype=dtype)
        strategy, stream = start(models["opt"], cfg, world), steps(texts, cfg, "bucketed", world)
        for _ in range(50):
            train_step(strategy, next(stream), 1e-3, 1.0, Stopwatch(world.device))
        report["bits"][dtype] = everybodys(fingerprint(strategy))
    for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3"):
        cfg = config(strategy, batch_size=2, communication="micro_batch")
        begun, stream = start(models["opt-gelu"], cfg, world), steps(texts, cfg, "packed", world)
        train_step(begun, next(stream), 1e-3, 1.0, Stopwatch(world.device))
        pair = next(stream), next(stream)
        kept = kept_bytes(
            begun, [step.micro_batches[0] for step in pair], sum(step.targets for step in pair)
        )
        report["bytes"][strategy] = {
            kind: size / sum(p.numel() for p in models["opt-gelu"].parameters())
            for kind, size in kept.items()
        }


def main():
    torch.set_num_threads(1)
    world = join_world(RunConfig(strategy="ddp"))
    texts, report = (
        slice_of(400),
        {
            **{"curves": {}, "texts": {}, "infinity": {}, "bits": {}, "uneven": {}, "bytes": {}},
            "scale reads": {},
            "checks": {},
        },
    )
    models = {name: build(name) for name in ARCHITECTURES}
    for name, model in models.items():
        reference = []  # packed, on a single process
        report["texts"][name] = alone_and_together(model, slice_of(24, seed=1))
        for packing in (
            ()
            if name not in sys.argv[2:]
            else ("packed", "bucketed", "padded")
            if name in ("llama", "qwen3")
            else ("packed",)
        ):
            for strategy, settings in SPLITS:
                points = curve(model, texts, packing, world, strategy, settings)
                reference = reference or points
                label = f"{name} {packing} {strategy} {' '.join(map(str, settings.values()))}"
                report["curves"][label] = deviation(points, reference)
    if "others" in sys.argv[2:]:
        other_numbers(models, texts, world, report)
    if world.is_main:
        with open(sys.argv[1], "w") as file:
            json.dump(report, file, indent=1)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

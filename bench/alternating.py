"""Our step and a bare one in turn, in the same two processes: what the machine does to one it does to the other.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/alternating.py ddp|fsdp FOLDER STEPS

"Ours" is all that a run does for a step: cut and deal the rows, train, agree on stopping, sum the loss over the ranks, log a line, keep the heartbeat. The bare
step gets its batch, the same one, for nothing. Prints the ratio of each pair, bare time over our time.
"""
import copy
import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from bare import bare_step, wrap

from multigpu_ft.batches import Order, epoch_steps
from multigpu_ft.config import RunConfig
from multigpu_ft.data import load_texts
from multigpu_ft.losses import LossModel
from multigpu_ft.models import load_model, load_tokenizer
from multigpu_ft.optimizers import make_optimizer
from multigpu_ft.rundir import RunDir
from multigpu_ft.strategies import join_world, make_strategy
from multigpu_ft.tokens import tokenize_texts
from multigpu_ft.tracking import Interval, Stopwatch, Tracker
from multigpu_ft.training import train_step

strategy_name, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
cfg = RunConfig(model=folder, dataset=f"{folder}/texts.jsonl", batch_size=2, strategy=strategy_name, run_root=tempfile.mkdtemp(), learning_rate=1e-4)
world, tokenizer = join_world(cfg), load_tokenizer(cfg)
texts = tokenize_texts(load_texts(cfg).texts, tokenizer, cfg.max_length)
order = Order.of(cfg, "bucketed", len(texts), world.size)
tracker, watch = Tracker(RunDir.create(cfg), world.is_main), Stopwatch(world.device)
base = load_model(cfg, tokenizer)

strategy, _ = make_strategy(cfg, world, 0)
strategy.prepare(LossModel(copy.deepcopy(base)), lambda prepared: make_optimizer(cfg, prepared))
stream = epoch_steps(texts, order, cfg, 1, 0, world.rank, world.size)


def our_step():
    interval, step = Interval(strategy), next(stream)
    loss, norm = train_step(strategy, step, 1e-4, 1.0, watch)
    interval.add(step, loss)
    world.sum(False)
    measured = interval.measure(watch, 0.0)
    tracker.log({**measured, "grad_norm": norm.item(), "time": time.time()})
    tracker.heartbeat(loss=measured["loss"])
    return measured["loss"]


model = wrap(base, strategy_name)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
batches = []
for step in epoch_steps(texts, order, cfg, 1, 0, world.rank, world.size):
    batch = {name: torch.from_numpy(array) for name, array in step.micro_batches[0].items()}
    labels = torch.full_like(batch["input_ids"], -100)
    labels.view(-1)[batch["predictors"] + 1] = batch["targets"]
    batches.append((batch["input_ids"], labels))


def their_step():
    return bare_step(model, optimizer, *batches.pop(0))


seconds = {our_step: [], their_step: []}
for number in range(steps):
    losses = []
    for step in (our_step, their_step) if number % 2 else (their_step, our_step):
        dist.barrier()
        started = time.perf_counter()
        losses.append(step())
        seconds[step].append(time.perf_counter() - started)
    assert abs(losses[0] - losses[1]) < 1e-3 * losses[0], losses
if world.is_main:
    print(json.dumps([bare / ours for ours, bare in zip(seconds[our_step], seconds[their_step], strict=True)][2:]))
sys.stdout.flush()
dist.barrier()
os._exit(0)

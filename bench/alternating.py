"""Our step and a bare one in turn, in the same two processes: what the machine does to one it does to the other.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/alternating.py ddp|fsdp DATASET STEPS

"Ours" is all that a run does for a step: tokenize and deal the rows, train, sum the loss over the ranks, log it, keep the heartbeat. The bare step gets
its batch for nothing. Prints the ratio of each pair, bare time over our time.
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
from transformers import OPTConfig, OPTForCausalLM

from multigpu_ft.config import RunConfig, RunDir
from multigpu_ft.data import epoch_steps, load_texts
from multigpu_ft.models import load_tokenizer
from multigpu_ft.strategies import join_world, make_strategy
from multigpu_ft.tracking import Tracker
from multigpu_ft.training import train_step

strategy_name, dataset, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
run_root = tempfile.mkdtemp()
cfg = RunConfig(dataset=dataset, batch_size=4, end_idx=8 * steps, strategy=strategy_name, run_root=run_root)
world, tokenizer, texts = join_world(cfg), load_tokenizer(cfg), load_texts(cfg)
tracker = Tracker(RunDir.create(cfg), world.is_main)
torch.manual_seed(0)
base = OPTForCausalLM(OPTConfig(
    vocab_size=8192, hidden_size=384, word_embed_proj_dim=384, ffn_dim=1536, num_hidden_layers=6, num_attention_heads=6,
    max_position_embeddings=512, dropout=0.0, attention_dropout=0.0,
)).train()
base.config.use_cache = False

strategy, _ = make_strategy(cfg, world, 0)
strategy.prepare(copy.deepcopy(base), lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True))
stream = epoch_steps(texts, tokenizer, cfg, 1, 0, world.rank, world.size)


def our_step():
    step = next(stream)
    loss_sum, norm, _ = train_step(strategy, step, 1e-4, 1.0)
    loss = world.sum(loss_sum, False)[0] / step.targets
    tracker.log({"loss": loss, "grad_norm": norm, "time": time.time()})
    tracker.heartbeat(loss=loss)
    return loss


model = wrap(base, strategy_name)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
batches = [s.micro_batches[0] for s in epoch_steps(texts, tokenizer, cfg, 1, 0, world.rank, world.size)]


def their_step():
    batch = batches.pop(0)
    return bare_step(model, optimizer, *(torch.from_numpy(batch[name]) for name in ("input_ids", "attention_mask", "labels")))


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

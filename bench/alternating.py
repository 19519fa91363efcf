"""Take our step and a bare one in turn, in the same two processes, so that the machine's noise affects both alike.

OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/alternating.py ddp|fsdp FOLDER STEPS

"Ours" is all that a run does for a step (see ours.py). The bare step gets the same batch, at no
cost. Prints the ratio of each pair, bare time over our time."""

import json
import os
import sys

import torch
import torch.distributed as dist
from bare import bare_step, wrap
from gpus import hide_gpus
from ours import Ours, take_turns

hide_gpus()
strategy_name, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
ours = Ours(folder, strategy=strategy_name)
model = wrap(ours.base, strategy_name)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
batches = ours.batches()


def their_step():
    return bare_step(model, optimizer, *batches.pop(0))


seconds = take_turns((ours.step, their_step), steps, 1e-3)
if ours.world.is_main:
    print(
        json.dumps(
            [bare / own for own, bare in zip(seconds[ours.step], seconds[their_step], strict=True)][
                2:
            ]
        )
    )
sys.stdout.flush()
dist.barrier()
os._exit(0)

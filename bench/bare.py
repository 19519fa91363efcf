"""The loop one would write by hand: nothing but torch and transformers, on batches that were prepared before.

torchrun --standalone --nproc-per-node 2 bench/bare.py ddp|fsdp FOLDER STEPS
"""
import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM


def wrap(model, strategy):
    if strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for layer in model.model.decoder.layers:
        fully_shard(layer)
    return fully_shard(model)


def bare_step(model, optimizer, ids, mask, labels):
    "One optimizer step on this rank's batch; returns the mean loss over all targets of all ranks."
    targets = torch.tensor(float((labels[:, 1:] != -100).sum()))
    dist.all_reduce(targets)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")
    (loss * dist.get_world_size() / targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return (total / targets).item()


def main():
    strategy, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    dist.init_process_group("gloo")
    batches = np.load(os.path.join(folder, f"batches{dist.get_rank()}.npz"))
    model = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "model"), dtype=torch.float32).train()
    model.config.use_cache = False
    model = wrap(model, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    times, losses = [], []
    for step in range(steps):
        losses.append(bare_step(model, optimizer, *(torch.from_numpy(batches[f"{name}{step}"]) for name in ("ids", "mask", "labels"))))
        times.append(time.time())
    if dist.get_rank() == 0:
        print(json.dumps({"times": times, "losses": losses}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a gloo thread that releases the last tensors while the interpreter shuts down aborts the process


if __name__ == "__main__":
    main()

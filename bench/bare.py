"""The loop one would write by hand: only torch and transformers, on batches that were prepared in advance."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def wrap(model, strategy):
    if strategy == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for layer in model.model.decoder.layers:
        fully_shard(layer)
    return fully_shard(model)


def bare_step(model, optimizer, ids, labels):
    "Take an optimizer step on this rank's batch. Returns the mean loss over all targets of all ranks."
    targets = torch.tensor(float((labels[:, 1:] != -100).sum()))
    dist.all_reduce(targets)
    logits = model(input_ids=ids).logits
    loss = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
    )
    (loss * dist.get_world_size() / targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    return (total / targets).item()

"""Measure attention in packed rows: text by text, and with a mask over the whole row.

python bench/attention.py [--rounds 7] [--gpu] [--json bench/results/attention.json]

Each round runs every arm once, in a different order: forward and backward of four blocks with the
shape of SmolLM2-135M (576 units, 9 heads of queries, 3 of keys), in one packed row of texts as long
as abstracts (30 to 600 tokens, median 220). Arms: text by text; the mask that is added to the scores,
made once for all layers; and each text in a row of its own length, without padding, which no packing
could beat in attention. Printed are seconds, and their ratios to those of the first arm."""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from gpus import hide_gpus

ARMS = ("text by text", "added mask", "one call a text")
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}


def row_of(length, seed):
    "Return lengths of texts that fill a row of `length` tokens."
    import numpy as np

    rng, lengths = np.random.default_rng(seed), []
    while sum(lengths) < length:
        lengths.append(int(np.clip(rng.lognormal(5.4, 0.5), 30, 600)))
    lengths[-1] -= sum(lengths) - length
    return [n for n in lengths if n]


def inputs_of(arm, ids, lengths, device, dtype):
    "Return what the model is called with."
    import numpy as np
    import torch

    from multigpu_ft.data.batches import text_blocks
    from multigpu_ft.distributed.world import to_device
    from multigpu_ft.models.attention import NO_MASK, TextLayout

    documents = np.repeat(np.arange(len(lengths)), lengths)[None]
    places = torch.cat([torch.arange(n) for n in lengths])[None].to(device)
    call = {"input_ids": ids, "position_ids": places, "use_cache": False}
    if arm == "added mask":
        of = torch.from_numpy(documents).to(device)
        seen = (of[:, None, :, None] == of[:, None, None, :]).tril()
        mask = torch.zeros(seen.shape, dtype=dtype, device=device)
        return {**call, "attention_mask": mask.masked_fill_(~seen, torch.finfo(dtype).min)}
    blocks = text_blocks(documents)
    if arm == "one call a text":
        first = np.cumsum([0, *lengths[:-1]])
        gather = np.concatenate([np.arange(a, a + n) for a, n in zip(first, lengths, strict=True)])
        blocks = {
            "gather": gather,
            "scatter": np.argsort(gather),
            "groups": tuple((1, n) for n in lengths),
        }
    return {**call, "attention_mask": NO_MASK, "layout": TextLayout(**to_device(blocks, device))}


def measure(length, rounds, device, dtype):
    "Return the seconds of each arm, a list with one number a round."
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from multigpu_ft.models.attention import BY_TEXT, sdpa_configs, use_attention

    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SHAPE)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").model
    model = model.to(device, dtype)
    use_attention(sdpa_configs(model), BY_TEXT)
    seconds, shuffled = {arm: [] for arm in ARMS}, random.Random(0)
    for number in range(-1, rounds):  # the first round warms up
        lengths = row_of(length, max(0, number))
        ids = torch.randint(1000, (1, length), device=device)
        for arm in shuffled.sample(ARMS, len(ARMS)):
            inputs = inputs_of(arm, ids, lengths, device, dtype)
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            model(**inputs).last_hidden_state.float().square().mean().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= 0:
                seconds[arm].append(time.perf_counter() - begun)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not args.gpu:
        hide_gpus()
    import torch

    torch.set_num_threads(1)
    device = torch.device("cuda" if args.gpu else "cpu")
    half = torch.bfloat16 if args.gpu and torch.cuda.get_device_capability() >= (8, 0) else None
    dtype = half or (torch.float16 if args.gpu else torch.float32)
    results = {}
    for length in (512, 2048, 4096):
        seconds = measure(length, args.rounds, device, dtype)
        results[length] = seconds
        for arm, measured in seconds.items():
            ratios = [a / b for a, b in zip(measured, seconds[ARMS[0]], strict=True)]
            print(
                f"{length:5} tokens  {arm:16} {statistics.median(measured):7.3f} s   "
                f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

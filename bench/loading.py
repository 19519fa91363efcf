"""Measure host memory while two ranks load a model of about 500M parameters under fsdp, over one fp32 copy.

python bench/loading.py --rounds 5
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from gpus import hide_gpus

RESULTS = Path(__file__).parent / "results"
# how, and the precision on the disk
ARMS = {
    "full, from fp32": ("full", "fp32"),
    "full, from fp16": ("full", "fp16"),
    "lora in fp32, from fp32": ("lora", "fp32"),
    "qlora, from fp16": ("qlora", "fp16"),
    "each rank by itself, from fp32": ("each", "fp32"),
}
SIZE = {
    "vocab_size": 32000,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}


def make(folder):
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from multigpu_ft import RunConfig
    from multigpu_ft.models.loading import load_tokenizer

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZE, max_position_embeddings=512, pad_token_id=1, eos_token_id=2)
    )
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16)):
        model.to(dtype).save_pretrained(folder / name)
        load_tokenizer(RunConfig()).save_pretrained(folder / name)
    return sum(p.numel() for p in model.parameters())


def be_rank(arm, folder):
    "Load as training does, up to the prepared model, and wait for the measurement."
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from multigpu_ft import RunConfig
    from multigpu_ft.distributed.weights import share_quantization
    from multigpu_ft.distributed.world import join_world
    from multigpu_ft.models.blocks import transformer_blocks
    from multigpu_ft.models.loading import load_model, load_shell, load_tokenizer
    from multigpu_ft.models.lora import add_adapter
    from multigpu_ft.models.loss import LossModel
    from multigpu_ft.training.setup import make_strategy

    torch.set_num_threads(1)
    tuning, precision = ARMS[arm]
    cfg = RunConfig(
        model=str(folder / precision),
        strategy="fsdp",
        tuning="full" if tuning == "each" else tuning,
    )
    world, tokenizer = join_world(cfg), load_tokenizer(cfg)
    quantization = "4bit" if tuning == "qlora" else "none"
    strategy, _ = make_strategy(cfg, world, 0)
    (folder / f"ready{world.rank}").write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.01)
    begun = time.perf_counter()
    if tuning == "each":
        model = load_model(cfg, tokenizer)
        for block in transformer_blocks(model):
            fully_shard(block)
        fully_shard(model)
    else:
        model = (
            load_model(cfg, tokenizer, quantization=quantization)
            if world.is_main
            else load_shell(cfg, tokenizer)
        )
        if quantization == "4bit":
            share_quantization(model, torch.float32, world.is_main)
        model = add_adapter(cfg, model) if tuning != "full" else model
        strategy.prepare(LossModel(model), lambda _: None, streamed=True)
    dist.barrier()
    (folder / f"done{world.rank}").write_text(str(time.perf_counter() - begun))
    while (folder / "go").exists():
        time.sleep(0.01)
    os._exit(0)


def measure(arm, folder):
    "Return by how much the two ranks' resident memory grew at most, together (bytes), and the seconds it took."
    for path in [*folder.glob("ready*"), *folder.glob("done*"), *folder.glob("go")]:
        path.unlink()
    command = [
        Path(sys.executable).parent / "torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        "--rank",
        arm,
        str(folder),
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.DEVNULL,
    )
    while len(list(folder.glob("ready*"))) < 2:
        assert process.poll() is None, arm
        time.sleep(0.05)
    time.sleep(0.5)
    ranks = [psutil.Process(int(path.read_text())) for path in folder.glob("ready*")]
    before, peak = sum(rank.memory_info().rss for rank in ranks), 0
    (folder / "go").touch()
    while len(list(folder.glob("done*"))) < 2:
        assert process.poll() is None, arm
        peak = max(peak, sum(rank.memory_info().rss for rank in ranks))
        time.sleep(0.005)
    after = sum(rank.memory_info().rss for rank in ranks)
    seconds = max(float(path.read_text()) for path in folder.glob("done*"))
    (folder / "go").unlink()
    process.wait()
    return {"peak": peak - before, "after": after - before, "seconds": seconds}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--rank", nargs=2)
    options = parser.parse_args()
    hide_gpus()
    if options.rank:
        return be_rank(options.rank[0], Path(options.rank[1]))
    with tempfile.TemporaryDirectory() as folder:
        folder = options.folder or Path(folder)
        parameters = make(folder)
        results = {arm: [] for arm in options.arms}
        for _ in range(options.rounds):
            for arm in options.arms:
                results[arm].append(measure(arm, folder))
    for arm, runs in results.items():
        ratios = sorted(run["peak"] / (4 * parameters) for run in runs)
        seconds = statistics.median(run["seconds"] for run in runs)
        print(
            f"{arm:32} {statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) of "
            f"one fp32 copy, {seconds:.1f} s"
        )
    (RESULTS / "loading.json").write_text(
        json.dumps({"parameters": parameters, "runs": results}, indent=1)
    )


if __name__ == "__main__":
    main()

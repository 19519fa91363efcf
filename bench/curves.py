"""Plot the loss curves of all strategies over each other, in fp32.

python bench/curves.py [--dataset FILE.jsonl]; writes bench/results/curves.png."""

import argparse
import os
import tempfile
from pathlib import Path

from gpus import hide_gpus
from matplotlib.figure import Figure

from multigpu_ft import RunConfig, launch
from multigpu_ft.display.plots import save_png

WAYS = {
    "single, 8 texts": {"strategy": "single", "batch_size": 8},
    "ddp, 2 × 4 texts": {"strategy": "ddp", "batch_size": 4},
    "ddp, 2 × 4 × 1 texts": {"strategy": "ddp", "batch_size": 1, "accum_steps": 4},
    "fsdp full_shard, 2 × 4 texts": {
        "strategy": "fsdp",
        "batch_size": 4,
        "communication": "micro_batch",
    },
    "fsdp shard_grad_op, 2 × 2 × 2 texts": {
        "strategy": "fsdp",
        "batch_size": 2,
        "accum_steps": 2,
        "sharding": "shard_grad_op",
    },
    "accelerate, 2 × 2 × 2 texts": {"strategy": "accelerate", "batch_size": 2, "accum_steps": 2},
    "zero1, 2 × 2 × 2 texts": {"strategy": "zero1", "batch_size": 2, "accum_steps": 2},
    "zero2, 2 × 1 × 4 texts": {"strategy": "zero2", "batch_size": 1, "accum_steps": 4},
    "zero3, 2 × 4 texts": {"strategy": "zero3", "batch_size": 4},
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dataset", default="builtin:python-docs")
args = parser.parse_args()
hide_gpus()
os.environ["OMP_NUM_THREADS"] = "1"
curves = {}
with tempfile.TemporaryDirectory() as root:
    for way, settings in WAYS.items():
        run = launch(
            RunConfig(
                dataset=args.dataset,
                run_root=root,
                resume_file="none",
                packing="packed",
                max_steps=25,
                **settings,
            ),
            wait=False,
        ).wait()
        curves[way] = [[m["step"], m["loss"]] for m in run.metrics]
reference = next(iter(curves.values()))
figure = Figure(figsize=(8, 4.8), dpi=100, layout="constrained")
loss, apart = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
for number, (way, points) in enumerate(curves.items()):
    steps, losses = zip(*points, strict=True)
    loss.plot(steps, losses, linewidth=9 - 0.95 * number, alpha=0.8, label=way)
    relative = [max(abs(a - b) / b, 1e-12) for a, (_, b) in zip(losses, reference, strict=True)]
    if number:
        apart.semilogy(steps, relative, color=f"C{number}")
loss.set(
    ylabel="loss (nats per token)",
    title=f"tiny OPT, fp32, {Path(args.dataset).name}: one curve, however the work is shared",
)
loss.legend(frameon=False, fontsize=8)
apart.axhline(1e-5, color="grey", linestyle=":")
apart.set(xlabel="optimizer step", ylabel="difference\n(relative)")
out = Path(__file__).parent / "results" / "curves.png"
out.parent.mkdir(exist_ok=True)
save_png(figure, out)
print(
    out,
    "largest relative difference: "
    f"{max(abs(a[1] - b[1]) / b[1] for c in curves.values() for a, b in zip(c, reference, strict=True)):.1e}",
)

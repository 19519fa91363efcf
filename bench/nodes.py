"""Plot the loss curves of two machines over that of one, in fp32.

python bench/nodes.py; needs root, and writes bench/results/nodes.{png,json}."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from gpus import hide_gpus
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness import hosts  # noqa: E402

from multigpu_ft import RunConfig  # noqa: E402
from multigpu_ft.display.plots import save_png  # noqa: E402
from multigpu_ft.launcher.commands import flags  # noqa: E402

WAYS = {
    "ddp": {"strategy": "ddp"},
    "full shard": {"strategy": "fsdp"},
    "hybrid": {"strategy": "fsdp", "sharding": "hybrid_shard"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
}
STEPS = 40

hide_gpus()
os.environ["OMP_NUM_THREADS"] = "1"
curves, seconds = {}, {}
with tempfile.TemporaryDirectory() as root:
    common = {
        "run_root": f"{root}/runs",
        "resume_file": "none",
        "packing": "packed",
        "max_length": 128,
        "batch_size": 2,
        "max_steps": STEPS,
    }
    one = RunConfig(**common, run_name="one", nproc=4, strategy="ddp")
    subprocess.run(
        [hosts.BIN / "multigpu-ft", "train", *shlex.split(flags(one))],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    curves["one machine, 4 ranks, ddp"] = hosts.losses(f"{root}/runs/one")
    with hosts.Hosts() as net:
        for way, settings in WAYS.items():
            for disks in ("one disk", "two disks"):
                cfg = RunConfig(
                    **common,
                    run_name=f"{way} {disks}".replace(" ", "-"),
                    nproc=2,
                    nnodes=2,
                    **settings,
                )
                other = cfg if disks == "one disk" else cfg.replace(run_root=f"{root}/other")
                codes, texts = hosts.wait([net.train(0, cfg), net.train(1, other)], 400)
                assert codes == [0, 0], texts
                curves[f"2 × 2 ranks, {way}, {disks}"] = hosts.losses(f"{root}/runs/{cfg.run_name}")
reference = next(iter(curves.values()))
apart = {
    way: max(abs(a[1] - b[1]) / b[1] for a, b in zip(curve, reference, strict=True))
    for way, curve in curves.items()
}
figure = Figure(figsize=(8, 5.2), dpi=100, layout="constrained")
loss, difference = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
for number, (way, points) in enumerate(curves.items()):
    steps, losses, _ = zip(*points, strict=True)
    loss.plot(
        steps,
        losses,
        linewidth=10 - 0.85 * number,
        alpha=0.8,
        label=way,
        color=f"C{number}" if number < 10 else "black",
    )
    relative = [max(abs(a - b) / b, 1e-12) for a, (_, b, _) in zip(losses, reference, strict=True)]
    if number:
        difference.semilogy(steps, relative, color=f"C{number}" if number < 10 else "black")
loss.set(
    ylabel="loss (nats per token)", title="tiny OPT, fp32: two machines over a network, and one"
)
loss.legend(frameon=False, fontsize=7, ncols=2)
difference.axhline(1e-5, color="grey", linestyle=":")
difference.set(xlabel="optimizer step", ylabel="difference\n(relative)")
out = Path(__file__).parent / "results" / "nodes.png"
save_png(figure, out)
record = {
    "steps": STEPS,
    "largest relative difference": apart,
    "losses": {way: [loss for _, loss, _ in curve] for way, curve in curves.items()},
}
out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
print(out, json.dumps(apart, indent=1))

"""The GPUs of this machine: a bench hides them, so that all its arms run on the CPU, unless it is
told to measure them."""

import os
import sys


def hide_gpus():
    "Hide the GPUs from this process and from all that it starts. Call it before torch looks for one."
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def use_gpus(most):
    """Let this process, and all that it starts, see at most `most` GPUs. Returns how many there are.

    Ends the process if there is none."""
    from multigpu_ft.run.environment import visible_gpus

    chosen = visible_gpus()[:most]
    if not chosen:
        sys.exit("--gpu: there is no GPU here; without --gpu the arms run on the CPU.")
    words = os.environ.get("CUDA_VISIBLE_DEVICES")
    named = words.split(",") if words else [str(gpu.index) for gpu in chosen]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named[: len(chosen)])
    # CUDA would count the fastest GPU first, nvidia-smi counts by the bus
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return len(chosen)

"""Count how often a step makes the host wait for the device, in a rank that is set up as one of a run.

`launch(waits.count, settings, nproc=1)` returns what `count` does. A wait leaves the device idle
while the host queues the next work. CUDA reports waits by `torch.cuda.set_sync_debug_mode`, the
tests' second device by `torch.second.waits` and `torch.second.refusing_waits`; a CPU has none."""

import contextlib
import tempfile
import warnings
from itertools import islice

WARM_UP, COUNTED = 2, 3  # steps; the first ones set up streams and states, and may wait


def count(settings):
    """Train a few steps of `RunConfig(**settings)` on this rank. Returns its kind of `device`, its
    `packing` and `dtype`, the `waits` of the counted steps, the places in the code `at` which the
    host waited where that is known, whether the last gradient norm is `finite`, and the seconds of
    each phase.

    Raises what the device does if the last step waits, with the traceback of that wait."""
    with tempfile.TemporaryDirectory() as folder:
        training = _begin(folder, settings)
        strategy = training.strategy
        stream = _steps(training)
        norms = [_step(training, step) for step in islice(stream, WARM_UP)]
        with _counted(strategy.world.device) as found:
            norms += [_step(training, step) for step in islice(stream, COUNTED - 1)]
        with _refused(strategy.world.device):
            norms += [_step(training, step) for step in islice(stream, 1)]
        assert len(norms) == WARM_UP + COUNTED, "the texts make too few steps"
        return {
            "device": strategy.world.device.type,
            "packing": training.packing,
            "dtype": str(strategy.dtype).removeprefix("torch."),
            **found,
            "finite": bool(norms[-1].isfinite()),
            "phases": training.watch.read(),
        }


def _begin(folder, settings):
    "Return the `Training` of a rank, as `python -m multigpu_ft.training` makes it."
    from multigpu_ft import RunConfig, RunDir
    from multigpu_ft.run.processes import StopSignal
    from multigpu_ft.training.trainer import open_training

    cfg = RunConfig(run_root=folder, resume_file="none", **settings)
    return open_training(RunDir.create(cfg), StopSignal(lambda: True))


def _steps(training):
    from multigpu_ft.data.batches import epoch_steps

    world = training.strategy.world
    return epoch_steps(
        training.data.texts,
        training.order,
        training.cfg,
        training.packing,
        1,
        0,
        world.rank,
        world.size,
    )


def _step(training, step):
    "Make a step. Returns its gradient norm, which is still on the device."
    from multigpu_ft.training.step import train_step

    cfg = training.cfg
    return train_step(
        training.strategy, step, cfg.learning_rate, cfg.max_grad_norm, training.watch
    )[1]


@contextlib.contextmanager
def _counted(device):
    "Count the waits for `device` in a block, and return the dictionary that has them afterwards."
    import torch

    found = {"waits": 0, "at": []}
    module = torch.get_device_module(device)
    if hasattr(module, "waits"):
        before = module.waits()
        yield found
        found["waits"] = module.waits() - before
    elif device.type == "cuda":
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits = [w for w in told if "synchronizing CUDA operation" in str(w.message)]
        found.update(waits=len(waits), at=sorted({f"{w.filename}:{w.lineno}" for w in waits}))
    else:
        yield found


@contextlib.contextmanager
def _refused(device):
    "Have `device` raise an error where the host would wait for it."
    import torch

    module = torch.get_device_module(device)
    if hasattr(module, "refusing_waits"):
        with module.refusing_waits():
            yield
    elif device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        yield

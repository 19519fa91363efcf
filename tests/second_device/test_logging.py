"""A line of metrics.jsonl doesn't keep the device waiting."""

import pytest
import torch
from harness.exactness import build, config, slice_of, start, steps

from multigpu_ft.distributed.world import World
from multigpu_ft.tracking.metrics import Interval, NumbersOnTheWay, Stopwatch
from multigpu_ft.training.step import train_step


@pytest.fixture
def alone(monkeypatch):
    "Return a world of this process alone."
    import torch.distributed as dist

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "cpu:gloo,second:secondccl", store=dist.HashStore(), rank=0, world_size=1
    )
    yield World(0, 0, 1, torch.device("second", 0))
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_steps_and_their_lines_are_queued_without_waiting(alone, dtype):
    cfg, texts = config("single", batch_size=2, accum_steps=2, dtype=dtype), slice_of(60)
    strategy = start(build("opt"), cfg, alone)
    stream, watch = steps(texts, cfg, "packed", alone), Stopwatch(alone.device)
    first, second = next(stream), next(stream)
    train_step(strategy, first, 1e-3, 1.0, watch)  # makes the moments
    watch.read()
    interval = Interval(strategy)
    with torch.second.refusing_waits():
        loss, norm = train_step(strategy, second, 1e-3, 1.0, watch)
        interval.add(second, loss)
        interval.end(watch, norm)
        train_step(strategy, first, 1e-3, 1.0, watch)
    line = interval.measure(0.0)
    assert line["loss"] == loss.item() / second.targets and line["grad_norm"] == norm.item()
    assert line["step_s"] > 0 and line["skipped_steps"] == 0


def test_numbers_are_read_once_they_have_arrived():
    x = torch.ones(4, device="second")
    on_the_way = NumbersOnTheWay(x.sum(), x[0] * 7)
    assert on_the_way.values() == [4.0, 7.0]

"""Saves of tensors on a device: copies that are waited for, pinned memory, and little memory."""

import os
import subprocess
import sys

import pytest
import torch
from harness import faults
from safetensors.torch import load_file

from multigpu_ft import launch
from multigpu_ft.checkpoints.staging import HostBuffers, StoredTensor, write_tensors
from multigpu_ft.distributed.world import World

DEVICE = torch.device("second", 0) if hasattr(torch, "second") else None


@pytest.fixture
def buffers():
    with faults.world_of_one() as world:
        yield HostBuffers(World(world.rank, world.local_rank, world.size, DEVICE))


def state():
    return {
        "weights": torch.randn(300, 700),
        "bias": torch.randn(701),
        "half": torch.randn(999).half(),
        "step": torch.tensor(3.0),
        "random": torch.arange(5056).to(torch.uint8),
    }


def reserve(buffers, tensors):
    return buffers.reserve(sum(tensor.nbytes for tensor in tensors.values()))


def assert_equal(copies, tensors):
    for name, tensor in tensors.items():
        assert torch.cat([*copies[name].chunks()]).equal(tensor.reshape(-1)), name


def test_copies_are_there_when_copying_returns(buffers):
    "The device puts them off until they are waited for, and goes on to change the tensors."
    tensors = state()
    here = {name: tensor.to(DEVICE) for name, tensor in tensors.items()}
    assert reserve(buffers, here)
    for _ in range(2):
        waits = torch.second.waits()
        copies = buffers.copy(here)
        assert torch.second.waits() == waits + 1, "one wait for all copies"
        assert_equal(copies, tensors)
        for name, tensor in here.items():
            tensor.add_(1)
            tensors[name] = tensors[name] + 1
            assert not torch.cat([*copies[name].chunks()]).equal(tensors[name].reshape(-1)), (
                "it is a copy"
            )


def test_hardly_more_is_locked_than_is_copied(buffers):
    before = torch.second.pinned_bytes()
    tensors = {str(i): torch.ones(1025 * 1024, device=DEVICE) for i in range(20)}
    assert reserve(buffers, tensors) and buffers.remark is None
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert total <= torch.second.pinned_bytes() - before == buffers.bytes < 1.02 * total
    reserve(buffers, {"0": tensors["0"]})
    assert torch.second.pinned_bytes() - before == buffers.bytes, "it is kept"


def run(code, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **environment},
        cwd=os.path.dirname(__file__) + "/..",
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


PARTLY_LOCKED = """
import torch
from harness import faults
from multigpu_ft.checkpoints.staging import HostBuffers
from multigpu_ft.distributed.world import World

with faults.world_of_one() as world:
    buffers = HostBuffers(World(0, 0, 1, torch.device("second", 0)))
    tensors = {str(i): torch.randn(300_000, device="second") for i in range(4)}
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    assert buffers.reserve(4 * 1_200_000)
    copies = buffers.copy(tensors)
    for name, tensor in tensors.items():
        tensor.zero_()
        assert torch.cat([*copies[name].chunks()]).equal(expected[name])
    print(torch.second.pinned_bytes(), [b.is_pinned() for b in buffers._buffers], buffers.remark)
"""


def test_what_cannot_be_locked_is_copied_all_the_same():
    said = run(PARTLY_LOCKED, SECOND_PINNED_MIB="4.1")
    assert said.startswith(f"{4 * 2**20} [True, False") and "out of memory" in said
    assert "each holds up training longer" in said


def test_a_run_that_can_lock_little_saves_and_says_so(run_root, tmp_path, monkeypatch):
    monkeypatch.setenv("SECOND_PINNED_MIB", "0.02")  # a batch fits, a state doesn't
    material = faults.make_material(tmp_path)
    run = launch(faults.config(material, run_root, packing="packed", max_steps=4))
    assert run.state == "done" and run.dir.config().batch_size == 2
    assert sum("could be locked" in remark for remark in run.status["remarks"]) == 1
    assert run.dir.checkpoints()


PEAK = """
import resource, sys
from pathlib import Path
import torch
from multigpu_ft.checkpoints.staging import StoredTensor, write_tensors

torch.set_num_threads(1)
# one is much larger than a chunk
tensors = {str(i): torch.ones(n * 2**20, device="second") for i, n in enumerate((75, 50, 25))}  # 600 MiB
def save(tensors):
    stored = {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
    write_tensors(Path(sys.argv[1]), stored, {"pieces": "{}"})
save({"a": torch.ones(9, device="second")})  # imports what it needs
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save(tensors)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_without_room_for_copies_a_file_is_written_from_the_device(tmp_path):
    tensors = state()
    here = {name: StoredTensor.of(tensor.to(DEVICE)) for name, tensor in tensors.items()}
    write_tensors(tmp_path / "small", here, {"pieces": "{}"})
    found = load_file(tmp_path / "small")
    assert found.keys() == tensors.keys()
    assert all(found[name].equal(tensor) for name, tensor in tensors.items())


def test_that_takes_a_chunk_of_host_memory(tmp_path):
    peak = int(run(PEAK, tmp_path / "file"))
    assert peak < 3 * 64 * 2**10, f"{peak / 2**10:.0f} MiB"

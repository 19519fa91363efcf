"""The host memory that a save takes, and the files that are written through it."""

import json
import math
import os
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from harness import faults
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from multigpu_ft import RunDir
from multigpu_ft.checkpoints import staging
from multigpu_ft.checkpoints.progress import Progress
from multigpu_ft.checkpoints.resume import load_checkpoint
from multigpu_ft.checkpoints.staging import (
    HostBuffers,
    StoredTensor,
    arrange,
    buffer_sizes,
    write_tensors,
)
from multigpu_ft.checkpoints.writer import CheckpointWriter
from multigpu_ft.distributed.world import World

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.float64, torch.int64),
]


def stored(tensors):
    return {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}


def whole(tensor):
    "Return the elements of a stored tensor as bytes."
    return b"".join(chunk.contiguous().view(torch.uint8).numpy() for chunk in tensor.chunks())


@pytest.fixture
def world():
    with faults.world_of_one() as world:
        yield world


# -- sizes ----------------------------------------------------------------------------------------------------------


def opt_1_3b():
    hidden, shapes = 2048, {}
    for layer in range(24):
        for name in ("q", "k", "v", "out"):
            shapes |= {f"{layer}.{name}": (hidden, hidden), f"{layer}.{name}.bias": (hidden,)}
        shapes |= {f"{layer}.fc1": (4 * hidden, hidden), f"{layer}.fc1.bias": (4 * hidden,)}
        shapes |= {f"{layer}.fc2": (hidden, 4 * hidden), f"{layer}.fc2.bias": (hidden,)}
        shapes |= {f"{layer}.norm{i}": (hidden,) for i in range(4)}
    embeddings = {"tokens": (50272, hidden), "positions": (2050, hidden)}
    return {**shapes, **embeddings, "norm": (hidden,), "norm.bias": (hidden,)}


def qwen3_0_6b():
    hidden, shapes = 1024, {"tokens": (151_936, 1024), "norm": (1024,)}
    for layer in range(28):
        shapes |= {f"{layer}.q": (2048, hidden), f"{layer}.o": (hidden, 2048)}
        shapes |= {f"{layer}.{name}": (1024, hidden) for name in "kv"}
        shapes |= {f"{layer}.{name}": (3072, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.down": (hidden, 3072)}
        shapes |= {f"{layer}.norm{i}": (hidden,) for i in range(2)}
        shapes |= {f"{layer}.norm_{name}": (128,) for name in "qk"}
    return shapes


def lora_of_opt_1_3b(rank=8):
    places = [f"{layer}.{name}" for layer in range(24) for name in "qv"]
    return {f"{p}.a": (rank, 2048) for p in places} | {f"{p}.b": (2048, rank) for p in places}


def state_of(shapes, ranks):
    "Return, without memory, a rank's rows of parameters and moments, the steps, and random numbers."
    rows = {name: (-(-shape[0] // ranks), *shape[1:]) for name, shape in shapes.items()}
    with torch.device("meta"):
        tensors = {
            f"{kind}/{name}": torch.empty(shape)
            for kind in ("model", "exp_avg", "exp_avg_sq")
            for name, shape in rows.items()
        }
        tensors |= {f"step/{name}": torch.empty(()) for name in shapes}
        return tensors | {
            "random/torch": torch.empty(5056, dtype=torch.uint8),
            "random/python": torch.empty(626, dtype=torch.int64),
        }


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("shapes", "parameters"),
    [
        (opt_1_3b(), 1_315_758_080),
        (qwen3_0_6b(), 596_049_920),
        (lora_of_opt_1_3b(), 1_572_864),
    ],
    ids=["opt-1.3b", "qwen3-0.6b", "lora"],
)
def test_what_is_locked_is_hardly_more_than_what_is_saved(shapes, parameters, ranks):
    "CUDA's allocator rounds each pinned tensor up to a power of two."
    assert sum(map(math.prod, shapes.values())) == parameters
    tensors = state_of(shapes, ranks)
    total = sum(tensor.nbytes for tensor in tensors.values())
    sizes = buffer_sizes(total)
    assert all(size.bit_count() == 1 for size in sizes) and len(sizes) <= 7
    assert total <= sum(sizes) < 1.02 * total
    buffers = [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]
    places = arrange(tensors, buffers)
    assert places.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert sum(part.nbytes for part in places[name].stretches) == tensor.nbytes
    assert sum(len(place.stretches) for place in places.values()) <= len(tensors) + len(sizes)


@given(st.integers(1, 2**45))
def test_any_number_of_bytes_has_its_buffers(total):
    sizes = buffer_sizes(total)
    assert total <= sum(sizes) and sum(sizes) <= max(4096, total * 65 / 64) + 4096
    assert len(sizes) <= 7 and sizes == sorted(sizes, reverse=True)
    assert all(size.bit_count() == 1 and size >= 4096 for size in sizes)


def test_room_is_asked_for_what_is_locked(world, monkeypatch):
    total = 2**20 + 1
    needed = sum(buffer_sizes(total))
    for free, room in ((2 * needed - 2, False), (2 * needed, True)):
        memory = SimpleNamespace(available=free)
        monkeypatch.setattr(staging.psutil, "virtual_memory", lambda memory=memory: memory)
        buffers = HostBuffers(world)
        assert buffers.reserve(total) is room and buffers.bytes == room * needed
    memory.available = 0
    assert buffers.reserve(total), "it has its buffers already"
    assert not buffers.reserve(total * 2)


# -- what is written ------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_files_are_safetensors_own_to_the_byte(tmp_path_factory, data):
    "From one stretch of memory each, and from buffers that cut them."
    folder = tmp_path_factory.getbasetemp()
    dims = st.lists(st.integers(0, 40), max_size=3)
    names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
    tensors = {}
    for name in data.draw(st.lists(names, max_size=12, unique=True)):
        shape, dtype = data.draw(dims), data.draw(st.sampled_from(DTYPES))
        tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        turned = data.draw(st.booleans()) and tensor.ndim > 1
        tensors[name] = tensor.transpose(0, 1) if turned else tensor
    metadata = {"pieces": json.dumps({name: [0, list(t.shape)] for name, t in tensors.items()})}
    expected = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(expected, folder / "theirs", metadata)
    write_tensors(folder / "ours", stored(tensors), metadata)
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()

    alone = World(0, 0, 1, torch.device("cpu"))
    buffers = HostBuffers(alone)
    buffers._allocate(buffer_sizes(sum(tensor.nbytes for tensor in tensors.values())))
    write_tensors(folder / "staged", buffers.copy(tensors), metadata)
    assert (folder / "staged").read_bytes() == (folder / "theirs").read_bytes()


def test_a_tensor_larger_than_a_chunk_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "_CHUNK", 4096)
    tensors = {"large": torch.randn(77, 111), "other": torch.arange(7000, dtype=torch.int16)}
    write_tensors(tmp_path / "ours", stored(tensors), {"pieces": "{}"})
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"pieces": "{}"}
        assert all(file.get_tensor(name).equal(tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_number_that_is_not_finite_is_found_in_any_chunk(dtype, monkeypatch):
    monkeypatch.setattr(staging, "_CHUNK", 4096)
    for place in (0, 4095, 4096, 9999):
        tensor = torch.zeros(10_000, dtype=dtype)
        assert StoredTensor.of(tensor).is_finite()
        tensor[place] = float("nan")
        assert not StoredTensor.of(tensor).is_finite()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_a_file_has_the_mode_of_the_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_tensors(tmp_path / "file", stored({"a": torch.ones(2)}), {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask


# -- little memory --------------------------------------------------------------------------------------------------

PEAK = """
import json, resource, sys
from pathlib import Path
import torch
from multigpu_ft.checkpoints.staging import StoredTensor, write_tensors

torch.set_num_threads(1)
tensors = {f"model/{i}": torch.ones(75 * 2**20) for i in range(2)}  # 600 MiB
stored = {name: StoredTensor.of(tensor) for name, tensor in tensors.items()}
small = {"model/a": StoredTensor.of(torch.ones(9))}
def save(what):
    assert all(tensor.is_finite() for tensor in what.values())
    write_tensors(Path(sys.argv[1]), what, {"pieces": "{}"})
save(small)  # what is imported by the first
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
save(stored)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_writing_takes_little_memory_of_its_own(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "file"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64 * 2**10, f"{int(done.stdout) / 2**10:.0f} MiB"


def save_of(material, folder, world, remark=None):
    "Return the save of a model with moments, and a strategy that it can be loaded into."
    from multigpu_ft.models.loading import load_model, load_tokenizer
    from multigpu_ft.models.loss import LossModel
    from multigpu_ft.training.setup import make_strategy
    from multigpu_ft.training.step import make_optimizer

    cfg = faults.config(material, folder, strategy="single", nproc=1)
    strategy, _ = make_strategy(cfg, world, 0)
    torch.manual_seed(0)
    model = load_model(cfg, load_tokenizer(cfg))
    strategy.prepare(LossModel(model), lambda m: make_optimizer(cfg, m))
    for p in strategy.model.parameters():
        p.grad = torch.ones_like(p)
    strategy.optimizer.step()
    torch.manual_seed(0)
    writer = CheckpointWriter(RunDir.create(cfg), cfg, strategy, {})
    writer._buffers.remark = remark
    writer.start(Progress(0, 48, 1, 2, 2, 2, 2), end_of_epoch=False)
    return writer.wait(), strategy


def test_a_save_is_the_same_with_little_host_memory(material, tmp_path, world, monkeypatch):
    "Then training waits, and the file is written from the tensors themselves."
    found, copied = {}, []
    copy = HostBuffers.copy
    monkeypatch.setattr(HostBuffers, "copy", lambda *a: copied.append(1) or copy(*a))
    for available in (2**40, 0):
        memory = SimpleNamespace(available=available)
        monkeypatch.setattr(staging.psutil, "virtual_memory", lambda memory=memory: memory)
        saved, strategy = save_of(material, tmp_path / str(available), world)
        assert saved.error is None and saved.remarks == [] and len(copied) == 1
        assert load_checkpoint(saved.path, strategy).step == 2
        tensors = saved.path / "rank0.safetensors"
        assert saved.bytes < tensors.stat().st_size
        found[available] = tensors.read_bytes()
    assert found[0] == found[2**40]


class Device:
    """Stands for torch on a machine with a GPU that locks at most `lockable` bytes, and holds
    `limit` bytes in all."""

    def __init__(self, monkeypatch, lockable, limit=2**40):
        self.lockable, self.limit = lockable, limit
        self.locked, self.asked, self._empty = 0, [], torch.empty
        monkeypatch.setattr(torch, "empty", self.empty)

    def empty(self, *size, pin_memory=False, **kind):
        self.asked.append((*size, pin_memory))
        if pin_memory and self.locked + size[0] > self.lockable:
            raise RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
        if size[0] > self.limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        self.locked += size[0] * pin_memory
        return self._empty(*size, **kind)


@pytest.fixture
def beside_a_gpu(world):
    return World(world.rank, world.local_rank, world.size, torch.device("cuda", 0))


def test_memory_that_cannot_be_locked_is_used_as_it_is(beside_a_gpu, monkeypatch):
    "The error reads like one of a full GPU, for which a run halves its micro-batches."
    total = 2**20 + 2**19 + 2**18
    device = Device(monkeypatch, lockable=2**20 + 2**18)
    buffers = HostBuffers(beside_a_gpu)
    assert buffers.reserve(total) and buffers.bytes == total
    sizes = buffer_sizes(total)
    assert device.asked == [
        *((sizes[0], True), (sizes[1], True), (sizes[1], False)),
        *((size, False) for size in sizes[2:]),
    ], "after the first failure, nothing more is locked"
    assert (
        "only 0.00 of 0.00 GiB" in buffers.remark and "CUDA error: out of memory" in buffers.remark
    )
    assert "DSA" not in buffers.remark, "the first line tells it"


def test_memory_that_can_be_locked_is_not_remarked_on(beside_a_gpu, monkeypatch):
    device = Device(monkeypatch, lockable=2**21)
    buffers = HostBuffers(beside_a_gpu)
    assert buffers.reserve(2**20 + 5) and buffers.remark is None
    assert device.locked == buffers.bytes == sum(buffer_sizes(2**20 + 5))


def test_a_limit_on_virtual_memory_ends_no_run(beside_a_gpu, monkeypatch):
    Device(monkeypatch, lockable=0, limit=2**16)
    buffers = HostBuffers(beside_a_gpu)
    assert not buffers.reserve(2**20) and buffers.bytes == 0


def test_a_remark_on_memory_comes_with_the_save(material, tmp_path, world):
    saved, _ = save_of(material, tmp_path, world, remark="not locked")
    assert saved.error is None and saved.remarks == ["not locked"]

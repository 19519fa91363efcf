"""Errors put into the package's code, which only a device of its own shows, and each of which must be noticed."""

import os
import shutil

import pytest
from harness import faults
from harness.runs import REPO, slow

# FSDP2 moves what it is given to the device, and waits for that; DDP doesn't
_MOVED = "two devices, second:0 and cpu!|waits"
# name: where, what is there, what takes its place, what is said then
MUTANTS = {
    "the layout of texts stays on the host": (
        "distributed/world.py",
        "tensor = tensor.pin_memory().to(device, non_blocking=True)",
        "tensor = tensor if name == 'gather' else tensor.pin_memory().to(device, non_blocking=True)",
        _MOVED,
    ),
    "targets stay on the host": (
        "distributed/world.py",
        "tensor = tensor.pin_memory().to(device, non_blocking=True)",
        "tensor = tensor if name == 'targets' else tensor.pin_memory().to(device, non_blocking=True)",
        _MOVED,
    ),
    "batches are copied from pageable memory": (
        "distributed/world.py",
        "tensor.pin_memory().to(device, non_blocking=True)",
        "tensor.to(device, non_blocking=True)",
        "waits",
    ),
    "the loss scale goes to the host": (
        "distributed/strategies.py",
        "self._good_steps = torch.where(grow, 0, good)",
        "self._good_steps = torch.where(grow, 0, good).cpu()",
        "waits",
    ),
    "the loss is read in each step": (
        "training/step.py",
        "total += token_losses.sum(dtype=torch.float64)",
        "total += token_losses.sum(dtype=torch.float64).item()",
        "waits",
    ),
    "the device's random numbers are not restored": (
        "checkpoints/writer.py",
        "if _OF_DEVICE in state and is_accelerator(device):",
        "if False:",
        "parameters or optimizer differ",
    ),
    "a save doesn't wait for its copies": (
        "checkpoints/staging.py",
        ".current_stream(device).synchronize()",
        ".current_stream(device)",
        # what lay there before may be anything, also numbers so large that no gradient is finite
        "parameters are not finite|parameters or optimizer differ|the gradient was not finite",
    ),
}
IN_GATE = ("the device's random numbers are not restored", "a save doesn't wait for its copies")


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return faults.make_material(tmp_path_factory.mktemp("material"))


def steps_of(run_dir):
    "Return how often each step of rank 0 has waited."
    path = run_dir.path / "waits0.jsonl"
    return [int(n) for n in path.read_text().split()] if path.exists() else []


def check(server, material, folder, dtype):
    """Fail unless a killed run on the device goes on as if undisturbed, and its steps don't wait.

    Nothing is logged before the end, because that would wait for copies as well."""
    way = {"strategy": "ddp", "dtype": dtype, "packing": "packed", "batch_size": 1}
    way |= {"save_every": 2, "log_every": 1000}
    plain = faults.done(server.finish(faults.config(material, folder / "plain", **way)))
    expected = faults.outcome(folder / "plain", [plain])
    waits = steps_of(plain)
    assert not any(waits[2:]), f"waits in a step: {waits}"
    cfg = faults.config(material, folder / "killed", **way)
    killed = faults.kill_when(server, cfg, lambda run_dir: len(steps_of(run_dir)) >= 5)
    resumed = faults.done(server.finish(cfg))
    found = faults.outcome(folder / "killed", [killed, resumed])
    assert found["state"] == expected["state"], (
        "parameters are not finite|parameters or optimizer differ"
    )


@pytest.mark.parametrize("name", [None, *(n if n in IN_GATE else slow(n) for n in MUTANTS)])
def test_each_error_is_noticed(material, tmp_path, monkeypatch, name):
    package = tmp_path / "code" / "multigpu_ft"
    shutil.copytree(REPO / "multigpu_ft", package, ignore=shutil.ignore_patterns("__pycache__"))
    if name:
        file, old, new, said = MUTANTS[name]
        path, code = package / file, (package / file).read_text()
        assert code.count(old) == 1, f"{file} has {code.count(old)} times: {old}"
        path.write_text(code.replace(old, new))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(package.parent), os.environ["PYTHONPATH"]])
    )
    server = faults.Server(material / "model")
    # in fp16, reading the loss scale waits for the copies as well
    dtype = "fp32" if name == "a save doesn't wait for its copies" else "fp16"
    try:
        if name is None:
            check(server, material, tmp_path, dtype)
        else:
            with pytest.raises(AssertionError, match=said):
                check(server, material, tmp_path, dtype)
    finally:
        server.close()

"""A torch that doesn't see the machine's GPUs: the run is refused, and nothing trains on the CPU unasked."""

import os
import time

import pytest
import torch

from multigpu_ft import ConfigError, RunConfig, launch
from multigpu_ft.distributed import world
from multigpu_ft.distributed.world import join_world, torch_here
from multigpu_ft.launcher import agent
from multigpu_ft.run.environment import refuse_blind_torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA GPU to be absent")

CPU_BUILD = {"version": "2.13.0+cpu", "cuda": None, "devices": 0, "errors": []}
OLD_DRIVER = {
    **CPU_BUILD,
    "cuda": "13.0",
    "errors": ["The NVIDIA driver on your system is too old"],
}


def test_a_run_is_refused_before_its_ranks_start(two_t4, run_root):
    cfg = RunConfig(
        run_root=str(run_root), end_idx=40, max_length=64, nproc=1, memory_check="off", run_name="x"
    )
    with pytest.raises(ConfigError, match="would train on the CPU") as caught:
        launch(cfg)
    said = str(caught.value)
    assert "pip install torch" in said and "set CUDA_VISIBLE_DEVICES=''" in said
    assert not list(run_root.glob("x/logs/rank*.log")), "no rank was started"


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_run_trains_on_the_cpu_when_that_is_asked_for(two_t4, run_root, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    cfg = RunConfig(run_root=str(run_root), end_idx=16, max_length=32, nproc=1, num_epochs=1)
    run = launch(cfg)
    assert (run.state, run.status["device"]) == ("done", "cpu")


def test_ranks_that_torchrun_starts_itself_refuse_too(two_t4, monkeypatch):
    monkeypatch.delenv(world.AGENT_PID_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="would train on the CPU"):
        join_world(RunConfig())
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "found, nproc, visible, words",
    [
        (CPU_BUILD, None, None, "built without CUDA, but there are 2 GPUs"),
        (OLD_DRIVER, None, None, r"driver 550\.1: The NVIDIA driver.* too old.* update it"),
        (OLD_DRIVER, 1, "1", "too old"),
        ({**OLD_DRIVER, "devices": 1, "errors": []}, None, None, "sees 1 GPUs, nvidia-smi 2"),
        ({**OLD_DRIVER, "devices": 1, "errors": []}, 1, None, None),
        ({**OLD_DRIVER, "devices": 1, "errors": []}, None, "0,1", None),
        ({**OLD_DRIVER, "devices": 2, "errors": []}, None, None, None),
        (CPU_BUILD, None, "", None),
        (CPU_BUILD, None, "-1", None),
    ],
)
def test_what_is_refused(two_t4, monkeypatch, found, nproc, visible, words):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if words is None:
        refuse_blind_torch(found, nproc)
        return
    with pytest.raises(ConfigError, match=words):
        refuse_blind_torch(found, nproc)


def test_a_driver_that_hangs_or_is_missing_costs_little_and_proves_nothing(two_t4, monkeypatch):
    two_t4.write_text("#!/bin/sh\nexec sleep 30\n")
    begun = time.monotonic()
    assert agent._blind_failure(RunConfig()) is None
    assert time.monotonic() - begun < 4
    two_t4.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    refuse_blind_torch(CPU_BUILD)
    monkeypatch.setenv("PATH", "/nowhere")
    refuse_blind_torch(CPU_BUILD)


@pytest.mark.parametrize("asks_nvml", [False, True])
def test_gpus_that_only_nvml_counts_are_not_seen(monkeypatch, asks_nvml):
    "With a driver that is too old, `device_count` asks NVML and finds them; DeepSpeed makes torch ask."
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    if asks_nvml:
        monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: "NVML" in "".join(os.environ))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = torch_here()
    assert found["devices"] == 0 and found["errors"], found
    assert ("PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ) == asks_nvml

"""The doctor's findings and its advice."""

import json
import os
import stat
import types

import pytest
from harness.modules import fake_module, no_such_secret
from harness.runs import multigpu_ft

from multigpu_ft import ModelError, diagnostics
from multigpu_ft.memory.api import gpus_here
from multigpu_ft.run import environment

pytestmark = pytest.mark.usefixtures("elsewhere")

T4 = "GPU-{0}a, Tesla T4, 15360, {1}, 550.54.15, 7.5"


def smi(monkeypatch, folder, *lines, code=0):
    "Put an nvidia-smi on the PATH that prints `lines`."
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(
        "#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n"
    )
    (folder / "nvidia-smi").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def t4s(used=3):
    return [f"{i}, {T4.format(i, used)}" for i in range(2)]


def test_doctor_on_this_machine():
    found = diagnostics.doctor(bandwidth=False)
    names = [row.name for row in found.rows]
    assert names == [
        "session",
        "Python",
        "packages",
        "GPUs",
        "torch",
        "disk for runs",
        "memory",
        "warm starts",
        "Hub",
        "pretrained model",
        "tokens",
    ]
    assert (
        all(row.state in ("ok", "warn", "bad") and row.found for row in found.rows)
        and found.rows[1].state == found.rows[4].state == "ok"
    )
    assert (
        all(
            row.found in found._repr_html_().replace("&#x27;", "'")
            for row in found.rows
            if "<" not in row.found
        )
        and "<style" not in found._repr_html_()
    )


def test_the_preset_for_a_first_run(monkeypatch, tmp_path):
    def missing():
        raise ModelError("no memory")

    for have, preset in ((lambda: "the cache", "smollm2-lora-chat"), (missing, "tiny")):
        monkeypatch.setattr(diagnostics, "pretrained_source", have)
        row = diagnostics._pretrained_row()
        assert diagnostics.Checkup([row]).preset == diagnostics.first_preset() == preset
        assert (row.state == "ok") == (preset != "tiny")
    assert "no memory" in row.found and "preset 'tiny'" in row.remedy
    alone = {"XDG_CACHE_HOME": str(tmp_path), "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}
    done = multigpu_ft("presets", "--first", cwd=tmp_path, **alone)
    assert done.stdout == "tiny\n", done.stderr
    done = multigpu_ft("presets", "--first", "--json", cwd=tmp_path, **alone)
    assert list(json.loads(done.stdout)) == ["tiny"]


def test_bandwidth_of_two_processes():
    row = diagnostics._interconnect_row([])
    assert (
        row.state == "ok"
        and "2 processes on the CPU, gloo" in row.found
        and float(row.found.split(" at ")[1].split()[0]) > 0
    )


def test_hanging_ranks_are_reported(monkeypatch):
    monkeypatch.setattr(diagnostics, "_ALL_REDUCE_SECONDS", 0.01)
    row = diagnostics._interconnect_row([])
    assert row.state == "warn" and "not finished after 0.01 s" in row.found


def test_gpus_that_torch_cannot_use(monkeypatch, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without GPU")
    smi(monkeypatch, tmp_path / "bin", *t4s())
    done = multigpu_ft("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 1
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert (
        "2 x Tesla T4, 16 GB; driver 550.54.15; compute capability 7.5: fp16"
        in rows["GPUs"]["found"]
        and rows["GPUs"]["state"] == "ok"
    )
    assert rows["torch"]["state"] == "bad" and "pip install torch" in rows["torch"]["remedy"]
    assert "interconnect" not in rows, "there is nothing to measure"


def test_mig_slices_are_named(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    a100 = environment.Device(0, "GPU-a", "NVIDIA A100-SXM4-80GB", 0.0, 0.0, "550.54", "8.0")
    slices = tuple(
        environment.Device(
            0, f"MIG-{i}", f"{a100.name} MIG 1g.10gb", 10e9, 0.0, "550.54", "8.0", (), "1g.10gb"
        )
        for i in range(2)
    )
    row = diagnostics._gpu_row([environment.replace(a100, slices=slices)])
    assert row.state == "warn" and "1 x NVIDIA A100-SXM4-80GB MIG 1g.10gb, 10 GB" in row.found
    assert "a process sees one" in row.found and "sudo nvidia-smi -i 0 -mig 0" in row.remedy


def test_gpus_that_are_hidden_or_busy(monkeypatch, tmp_path):
    smi(monkeypatch, tmp_path / "bin", *t4s(used=9000))
    row = diagnostics._gpu_row(environment.installed_gpus())
    assert row.state == "warn" and "GPU 1: 9.4 GB" in row.found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert (
        "1 x Tesla T4" in (found := diagnostics._gpu_row(environment.installed_gpus()).found)
        and "hides GPU 0 (Tesla T4" in found
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert diagnostics._gpu_row(environment.installed_gpus()).remedy.startswith(
        "Unset CUDA_VISIBLE_DEVICES"
    )


FIELDS = ["0", "GPU-5a", "Tesla T4", "15360", "3", "550.54.15", "7.5"]
WITHOUT = {
    "uuid": (1, "1 x Tesla T4, 16 GB; driver 550.54.15; compute capability 7.5: fp16"),
    "name": (2, "1 x GPU of unknown kind, 16 GB; driver 550.54.15; compute capability 7.5: fp16"),
    "memory.total": (3, "1 x Tesla T4; driver 550.54.15; compute capability 7.5: fp16"),
    "memory.used": (4, "1 x Tesla T4, 16 GB; driver 550.54.15; compute capability 7.5: fp16"),
    "driver": (5, "1 x Tesla T4, 16 GB; driver unknown; compute capability 7.5: fp16"),
    "compute_cap": (6, "1 x Tesla T4, 16 GB; driver 550.54.15; compute capability unknown"),
}


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A", ""])
@pytest.mark.parametrize("field", WITHOUT)
def test_a_value_that_nvidia_smi_does_not_know(monkeypatch, tmp_path, field, word):
    place, found = WITHOUT[field]
    line = ", ".join([*FIELDS[:place], word, *FIELDS[place + 1 :]])
    smi(monkeypatch, tmp_path / "bin", line)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(
        diagnostics, "_torch_row", lambda gpus: diagnostics._judge_torch(NO_CUDA, gpus)
    )
    monkeypatch.setattr(diagnostics, "_hub_row", lambda: None)
    rows = {row.name: row for row in diagnostics.doctor(bandwidth=False).rows}
    assert (rows["GPUs"].state, rows["GPUs"].found[: len(found)]) == ("ok", found)
    assert rows["torch"].state == "bad" and "too old" in rows["torch"].found
    assert len(gpus_here()) == 1 and gpus_here()[0].memory_mib > 0


NO_CUDA = {
    "version": "2.13.0",
    "cuda": "13.0",
    "nccl": None,
    "devices": 0,
    "errors": ["The NVIDIA driver on your system is too old (found version 12040)."],
}


def test_capabilities_are_compared_as_versions(monkeypatch, tmp_path):
    "12.0 is newer than 7.5, and one GPU that names none doesn't hide the others."
    lines = [
        ", ".join([str(i), f"GPU-{i}", *FIELDS[2:6], capability])
        for i, capability in enumerate(["12.0", "[N/A]", "7.5"])
    ]
    smi(monkeypatch, tmp_path / "bin", *lines)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = diagnostics._gpu_row(environment.installed_gpus()).found
    assert "3 x Tesla T4" in found and "compute capability 7.5, 12.0: fp16" in found


def test_a_broken_driver_and_failing_or_hanging_checks_are_reported(monkeypatch, tmp_path, kaggle):
    smi(
        monkeypatch,
        tmp_path / "bin",
        "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.",
        code=9,
    )
    fake_module(monkeypatch, "kaggle_secrets", UserSecretsClient=no_such_secret)
    monkeypatch.setattr(
        diagnostics, "_torch_row", lambda gpus: diagnostics.Row("torch", "warn", "not looked at")
    )
    monkeypatch.setattr(diagnostics, "_packages_row", lambda: 1 / 0)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    rows = {row.name: row for row in diagnostics.doctor().rows}
    assert rows["GPUs"].state == "bad" and "has failed because" in rows["GPUs"].found
    assert "ZeroDivisionError" in rows["packages"].found and "Internet on" in rows["Hub"].remedy
    assert (
        "Kaggle, interactive; 10.0 of 12 hours left" in rows["session"].found
        and "Secrets" in rows["tokens"].remedy
    )
    assert (
        diagnostics._begin("slow", 0.05, lambda: environment.time.sleep(1))().found
        == "no answer within 0.05 s"
    )


def test_offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert (
        diagnostics._hub_row().state == "warn" and "model='FOLDER'" in diagnostics._hub_row().remedy
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in diagnostics._hub_row().found


def test_a_token_is_never_shown(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    row = diagnostics._token_row()
    assert "HF_TOKEN in the environment" in row.found and "hf_secret" not in repr(row)


def test_packages_that_are_too_old_or_missing(monkeypatch):
    monkeypatch.setattr(
        diagnostics.importlib.metadata,
        "requires",
        lambda name: ["torch>=99", "no-such-package>=1", 'neither-this; extra == "quantization"'],
    )
    row = diagnostics._packages_row()
    assert (
        row.state == "bad"
        and "is not >=99" in row.found
        and "no-such-package is missing" in row.found
        and "'torch>=99'" in row.remedy
    )


def test_disk_and_memory(monkeypatch, tmp_path):
    for count, state in ((30e9, "ok"), (10e9, "warn"), (4e9, "bad")):
        monkeypatch.setattr(
            diagnostics.shutil,
            "disk_usage",
            lambda path, count=count: types.SimpleNamespace(free=count),
        )
        assert diagnostics._disk_row("disk", tmp_path / "not" / "there", 20).state == state
    (tmp_path / "memory.max").write_text("1000000000\n")
    monkeypatch.setattr(diagnostics, "_CGROUP", tmp_path)
    assert (
        diagnostics._memory_row().state == "bad"
        and "may use 1.0 GB" in diagnostics._memory_row().found
    )
    (tmp_path / "memory").mkdir()
    version_1 = (tmp_path / "memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    for folder, limit, usage, dropped in ((tmp_path, "max", "current", "inactive_file"), version_1):
        (folder / f"memory.{limit}").write_text("10000000000\n")
        (folder / f"memory.{usage}").write_text("9500000000\n")
        (folder / "memory.stat").write_text(f"anon 5\n{dropped} 500000000\n")
        assert (
            diagnostics._container_memory() == (10e9, 9e9)
            and diagnostics._memory_row().state == "bad"
        ), "memory that the container already uses counts as free"
        (folder / f"memory.{limit}").unlink()

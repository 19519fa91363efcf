"""Where we are, what is saved from there, and what the doctor finds."""

import json
import os
import stat
import sys
import types
from pathlib import Path

import pytest
from test_cli import multigpu_ft

from multigpu_ft import diagnostics
from multigpu_ft.checkpoints.manifest import commit, digest
from multigpu_ft.launcher import outputs
from multigpu_ft.run import environment, secrets
from multigpu_ft.run.config import RunConfig
from multigpu_ft.run.run_dir import PARTIAL, RunDir

T4 = "GPU-{0}a, Tesla T4, 15360, {1}, 550.54.15, 7.5"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    "No machine in particular, whatever this one is."
    for name in (
        "KAGGLE_KERNEL_RUN_TYPE",
        "COLAB_RELEASE_TAG",
        "CUDA_VISIBLE_DEVICES",
        secrets._ASKED,
        *secrets.SECRETS,
    ):
        monkeypatch.setenv(name, "")  # so that it is restored, even if the code under test sets it
        monkeypatch.delenv(name)
    for name in ("KAGGLE_OUTPUTS", "KAGGLE_SCRATCH", "COLAB_SCRATCH", "COLAB_DRIVE"):
        monkeypatch.setattr(environment, name, tmp_path / name.lower())
        if hasattr(outputs, name):
            monkeypatch.setattr(outputs, name, tmp_path / name.lower())


@pytest.fixture
def kaggle(monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    monkeypatch.setattr(
        environment.psutil,
        "Process",
        lambda pid: types.SimpleNamespace(create_time=lambda: environment.time.time() - 2 * 3600),
    )


def fake_module(monkeypatch, name, **content):
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))


def no_such_secret(*_):
    raise RuntimeError("no secret of that name")


def test_on_kaggle(monkeypatch, kaggle, tmp_path):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "Kaggle's image has it as well")
    assert environment.platform() == "kaggle" and environment.default_run_root() == str(
        tmp_path / "kaggle_scratch" / "runs"
    )
    assert environment.outputs_folder() == tmp_path / "kaggle_outputs" and environment.session_hours() == pytest.approx(
        10, abs=0.01
    )
    assert "30 hours" in environment.quota_note()
    monkeypatch.setattr(environment.psutil, "Process", lambda pid: types.SimpleNamespace(create_time=lambda: 0.0))
    assert environment.session_hours() is None


def test_on_colab(monkeypatch, tmp_path):
    fake_module(monkeypatch, "google.colab")
    assert environment.platform() == "colab" and environment.default_run_root() == str(
        tmp_path / "colab_scratch" / "runs"
    )
    assert environment.outputs_folder() is None and "drive.mount" in diagnostics._outputs_row().remedy
    environment.COLAB_DRIVE.mkdir()
    assert environment.outputs_folder() == tmp_path / "colab_drive" / "multigpu_ft"


def test_elsewhere():
    assert (environment.platform(), environment.default_run_root()) == ("other", "runs")
    assert environment.outputs_folder() is environment.session_hours() is environment.quota_note() is None


def test_secrets_of_kaggle(monkeypatch, kaggle):
    stored = {"HF_TOKEN": "hf_x\n"}
    fake_module(
        monkeypatch,
        "kaggle_secrets",
        UserSecretsClient=lambda: types.SimpleNamespace(get_secret=lambda name: stored[name]),
    )
    monkeypatch.setenv("WANDB_API_KEY", "mine")
    assert secrets.secret("HF_TOKEN") == "hf_x" and secrets.secret("OTHER") is None
    assert (
        secrets.use_secrets() == ["HF_TOKEN"]
        and os.environ["HF_TOKEN"] == "hf_x"
        and os.environ["WANDB_API_KEY"] == "mine"
    )
    stored["HF_TOKEN"] = "hf_y"
    assert secrets.use_secrets() == [] and os.environ["HF_TOKEN"] == "hf_x", "what is there stays"
    monkeypatch.delenv("HF_TOKEN")
    assert secrets.use_secrets() == ["HF_TOKEN"], "asked again by the same process"
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv(secrets._ASKED, "1")
    assert secrets.use_secrets() == [], "a parent has asked"


def test_a_store_that_does_not_answer_is_asked_once(monkeypatch, kaggle):
    asked = []

    def get_secret(name):
        asked.append(name)
        raise ConnectionError

    fake_module(monkeypatch, "kaggle_secrets", UserSecretsClient=lambda: types.SimpleNamespace(get_secret=get_secret))
    assert secrets.use_secrets() == [] and asked == ["HF_TOKEN"]


@pytest.mark.parametrize("get", [no_such_secret, lambda name: "", lambda name: None])
def test_a_store_without_the_secret(monkeypatch, get):
    fake_module(monkeypatch, "google.colab", userdata=types.SimpleNamespace(get=get))
    monkeypatch.setitem(sys.modules, "google", types.SimpleNamespace(colab=sys.modules["google.colab"]))
    assert secrets.secret("HF_TOKEN") is None and secrets.use_secrets() == [] and "HF_TOKEN" not in os.environ
    sys.modules["google.colab"].userdata.get = lambda name: "hf_z"
    assert secrets.secret("HF_TOKEN") == "hf_z"


@pytest.fixture
def run(tmp_path):
    run_dir = RunDir.create(RunConfig(run_root=str(tmp_path / "scratch")))
    run_dir.update_status(launched=1.0, state="done")
    (run_dir.path / "metrics.jsonl").write_text('{"step": 1}\n')
    (run_dir.path / "export" / "model.safetensors").write_bytes(b"model")
    return run_dir


def save(run_dir, name, content=b"weights"):
    partial = run_dir.path / "checkpoints" / f"{name}.0{PARTIAL}"
    partial.mkdir()
    (partial / "rank0.safetensors").write_bytes(content)
    return commit(partial, {}, {"rank0.safetensors": digest(partial / "rank0.safetensors")})


def checkpoints(kept):
    return [p.name for p in (kept / "checkpoints").iterdir()]


def free(monkeypatch, count):
    monkeypatch.setattr(outputs.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=count))


def test_outputs_are_kept(run, tmp_path):
    save(run, "step-1")
    save(run, "step-2")
    kept, remarks = outputs.keep_outputs(run.path, tmp_path / "out")
    assert kept == tmp_path / "out" / "runs" / run.name and not remarks
    assert sorted(p.name for p in kept.iterdir()) == [
        "checkpoints",
        "config.json",
        "export",
        "metrics.jsonl",
        "status.json",
    ]
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (run.path / "export" / "model.safetensors").write_bytes(b"better model")
    save(run, "step-3")
    assert outputs.keep_outputs(run.path, tmp_path / "out") == (kept, [])
    assert (
        checkpoints(kept) == ["step-3"]
        and len(RunDir(kept).metrics()) == 2
        and (kept / "export" / "model.safetensors").read_bytes() == b"better model"
    )
    assert not list(kept.rglob(f"*{PARTIAL}")) and outputs.keep_outputs(kept, tmp_path / "out") == (kept, [])


def test_another_run_of_that_name_is_left_alone(run, tmp_path):
    kept, _ = outputs.keep_outputs(run.path, tmp_path / "out")
    run.update_status(launched=2.0)
    second, _ = outputs.keep_outputs(run.path, tmp_path / "out")
    assert second.name == f"{kept.name}-2" and RunDir(kept).status()["launched"] == 1.0
    assert outputs.keep_outputs(run.path, tmp_path / "out")[0] == second


def test_what_does_not_fit_is_said_and_the_old_stays(run, tmp_path, monkeypatch):
    save(run, "step-1")
    kept, _ = outputs.keep_outputs(run.path, tmp_path / "out")
    save(run, "step-2", b"weights" * 10**6)
    free(monkeypatch, 7_100_000)
    _, (remark,) = outputs.keep_outputs(run.path, tmp_path / "out")
    assert "checkpoint step-2" in remark and "7.0 MB" in remark and "7.1 MB" in remark and "hf_repo" in remark
    assert checkpoints(kept) == ["step-1"]


def test_a_disk_that_fills_up_leaves_nothing_half_copied(run, tmp_path, monkeypatch):
    save(run, "step-1")
    kept, _ = outputs.keep_outputs(run.path, tmp_path / "out")
    save(run, "step-2")
    (run.path / "export" / "model.safetensors").write_bytes(b"better model")
    copytree, copy = outputs.shutil.copytree, outputs.shutil.copy2

    def full(source, target, **options):
        if Path(source).suffix == ".safetensors":
            Path(target).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return copy(source, target, **options)

    monkeypatch.setattr(
        outputs.shutil,
        "copytree",
        lambda source, target, **options: copytree(source, target, **{**options, "copy_function": full}),
    )
    _, remarks = outputs.keep_outputs(run.path, tmp_path / "out")
    assert len(remarks) == 2 and all("No space left on device" in r for r in remarks)
    assert (
        checkpoints(kept) == ["step-1"]
        and (kept / "export" / "model.safetensors").read_bytes() == b"model"
        and not list(kept.rglob(f"*{PARTIAL}"))
    )


def test_of_damaged_checkpoints_the_next_older_is_kept(run, tmp_path):
    save(run, "step-1")
    (save(run, "step-2") / "rank0.safetensors").write_bytes(b"wEights")
    kept, (remark,) = outputs.keep_outputs(run.path, tmp_path / "out")
    assert "step-2 is damaged (rank0.safetensors: its content was altered)" in remark and checkpoints(kept) == [
        "step-1"
    ]


def test_keeping_raises_nothing(run, tmp_path):
    assert "no run directory" in outputs.keep_outputs(tmp_path / "nothing", tmp_path / "out")[1][0]
    (tmp_path / "file").write_text("")
    assert "was not kept" in outputs.keep_outputs(run.path, tmp_path / "file")[1][0]


def smi(monkeypatch, folder, *lines, code=0):
    "Put an nvidia-smi on the PATH that says `lines`."
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"exit {code}\n")
    (folder / "nvidia-smi").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def t4s(used=3):
    return [f"{i}, {T4.format(i, used)}" for i in range(2)]


def test_doctor_on_this_machine():
    found = diagnostics.doctor(bandwidth=False)
    names = [row.name for row in found.rows]
    assert names == ["session", "Python", "packages", "GPUs", "torch", "disk for runs", "memory", "Hub", "tokens"]
    assert (
        all(row.state in ("ok", "warn", "bad") and row.found for row in found.rows)
        and found.rows[1].state == found.rows[4].state == "ok"
    )
    assert (
        all(row.found in found._repr_html_().replace("&#x27;", "'") for row in found.rows if "<" not in row.found)
        and "<style" not in found._repr_html_()
    )


def test_bandwidth_of_two_processes():
    row = diagnostics._interconnect_row([])
    assert (
        row.state == "ok"
        and "2 processes on the CPU, gloo" in row.found
        and float(row.found.split(" at ")[1].split()[0]) > 0
    )


def test_ranks_that_hang_are_a_row(monkeypatch):
    monkeypatch.setattr(diagnostics, "_ALL_REDUCE_SECONDS", 0.01)
    row = diagnostics._interconnect_row([])
    assert row.state == "warn" and "not done after 0.01 s" in row.found


def test_gpus_without_a_torch_that_can_use_them(monkeypatch, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without GPU")
    smi(monkeypatch, tmp_path / "bin", *t4s())
    done = multigpu_ft("doctor", "--json", cwd=tmp_path)
    assert done.returncode == 1
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert (
        "2 x Tesla T4, 16 GB; driver 550.54.15; compute capability 7.5: fp16" in rows["GPUs"]["found"]
        and rows["GPUs"]["state"] == "ok"
    )
    assert rows["torch"]["state"] == "bad" and "pip install torch" in rows["torch"]["remedy"]
    assert "interconnect" not in rows, "nothing to be measured"


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
    assert diagnostics._gpu_row(environment.installed_gpus()).remedy.startswith("Unset CUDA_VISIBLE_DEVICES")


def test_a_driver_that_does_not_run_and_checks_that_fail_or_hang_are_rows(monkeypatch, tmp_path, kaggle):
    smi(
        monkeypatch,
        tmp_path / "bin",
        "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.",
        code=9,
    )
    fake_module(monkeypatch, "kaggle_secrets", UserSecretsClient=no_such_secret)
    monkeypatch.setattr(diagnostics, "_torch_row", lambda gpus: diagnostics.Row("torch", "warn", "not looked at"))
    monkeypatch.setattr(diagnostics, "_packages_row", lambda: 1 / 0)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    rows = {row.name: row for row in diagnostics.doctor().rows}
    assert rows["GPUs"].state == "bad" and "has failed because" in rows["GPUs"].found
    assert "ZeroDivisionError" in rows["packages"].found and "Internet on" in rows["Hub"].remedy
    assert "Kaggle, interactive; 10.0 of 12 hours left" in rows["session"].found and "Secrets" in rows["tokens"].remedy
    assert diagnostics._begin("slow", 0.05, lambda: environment.time.sleep(1))().found == "no answer within 0.05 s"


def test_offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert diagnostics._hub_row().state == "warn" and "model='FOLDER'" in diagnostics._hub_row().remedy
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
            diagnostics.shutil, "disk_usage", lambda path, count=count: types.SimpleNamespace(free=count)
        )
        assert diagnostics._disk_row("disk", tmp_path / "not" / "there", 20).state == state
    (tmp_path / "memory.max").write_text("1000000000\n")
    monkeypatch.setattr(diagnostics, "_CGROUP", tmp_path)
    assert diagnostics._memory_row().state == "bad" and "may use 1.0 GB" in diagnostics._memory_row().found
    (tmp_path / "memory").mkdir()
    version_1 = (tmp_path / "memory", "limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    for folder, limit, usage, dropped in ((tmp_path, "max", "current", "inactive_file"), version_1):
        (folder / f"memory.{limit}").write_text("10000000000\n")
        (folder / f"memory.{usage}").write_text("9500000000\n")
        (folder / "memory.stat").write_text(f"anon 5\n{dropped} 500000000\n")
        assert diagnostics._container_memory() == (10e9, 9e9) and diagnostics._memory_row().state == "bad", (
            "what the container uses already is not free"
        )
        (folder / f"memory.{limit}").unlink()

"""SkyPilot's own loader and optimizer read the written tasks, and a real shell runs their commands.

SkyPilot is installed in an environment of its own."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from multigpu_ft.deploy.skypilot import deploy_skypilot
from multigpu_ft.run.config import RunConfig
from multigpu_ft.run.errors import ConfigError

SKY = Path(sys.prefix) / "skypilot" / "bin" / "python"  # made by the Makefile


def load(folder, *flags):
    "Return how SkyPilot reads the task in `folder`, and the `flags` of sky jobs launch."
    if not SKY.exists():
        pytest.skip("SkyPilot is not installed in .venv/skypilot")
    home = folder.parent / "home"
    home.mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "SKYPILOT_DISABLE_USAGE_COLLECTION": "1",
        "HF_TOKEN": "hf_of_a_user",
    }
    script = Path(__file__).parents[1] / "harness" / "skypilot_loader.py"
    done = subprocess.run(
        [SKY, script, json.dumps(flags or ["task.yaml"])],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("READ "))[5:]
    )


def fake(path, script):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_skypilot_reads_a_task_of_two_nodes_and_finds_a_machine(tmp_path):
    cfg = RunConfig.preset(
        "opt-1.3b-arxiv",
        dataset="s3://bucket/data/a.jsonl",
        end_idx=5000,
        hf_repo="user/opt",
        tracker="wandb",
        strategy="fsdp",
    )
    task = deploy_skypilot(cfg, "volume:ft", num_nodes=2, out=str(tmp_path / "job"))
    read = load(tmp_path / "job", "--yes", "--detach-run", "--secret", "HF_TOKEN", "task.yaml")
    assert (
        read["num_nodes"] == 2
        and read["accelerators"] == {"H100": 8}
        and read["use_spot"]
        and read["machine"] == "p5.48xlarge"
        and read["strategy_known"]
    )
    assert read["job_recovery"] == {
        "strategy": "FAILOVER",
        "max_restarts_on_errors": 0,
        "recover_on_exit_codes": [75],
    }
    assert (
        read["secrets"] == ["HF_TOKEN", "RUN_SECRET", "WANDB_API_KEY"]
        and read["volumes"] == {"/runs": "ft"}
        and read["launch"]["entrypoint"] == ["task.yaml"]
    )
    assert (
        read["file_mounts"] == {"/inputs/dataset/a.jsonl": "s3://bucket/data/a.jsonl"}
        and read["storage_mounts"] == {}
    )
    assert (
        (read["run"], read["setup"]) == (task.task["run"], task.task["setup"])
        and read["launch"]["detach_run"]
        and read["launch"]["yes"]
    )
    there = RunConfig(**json.loads((tmp_path / "job" / "config.json").read_text()))
    assert (
        there == task.config
        and there.run_root == "/runs"
        and there.dataset == "/inputs/dataset/a.jsonl"
    )


def test_skypilot_reads_a_task_with_a_bucket(tmp_path):
    deploy_skypilot(
        RunConfig(),
        "s3://bucket/ft/runs",
        accelerators="A100:8",
        infra="aws",
        spot=False,
        recover=False,
        out=str(tmp_path / "job"),
    )
    read = load(tmp_path / "job")
    assert (
        read["storage_mounts"] == {"/runs": ["s3://bucket/ft/runs", "MOUNT_CACHED"]}
        and read["machine"] == "p4d.24xlarge"
        and not read["use_spot"]
    )
    assert read["secrets"] == [] and read["num_nodes"] == 1


@pytest.mark.parametrize("code", [0, 75, 78])
def test_the_command_of_each_node(tmp_path, code):
    "Run the section `run` in a shell with SkyPilot's variables, and check the node's command and exit code."
    task = deploy_skypilot(RunConfig(), "/mnt/shared", num_nodes=2)
    fake(tmp_path / "multigpu_ft_env" / "bin" / "multigpu-ft", f'printf "%s\\n" "$@"; exit {code}')
    for rank in ("0", "1"):
        told = {
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": rank,
            "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        }
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **told}
        done = subprocess.run(
            ["bash", "-c", task.task["run"]], env=env, capture_output=True, text=True, timeout=20
        )
        assert done.returncode == code and not done.stderr
        assert done.stdout.split() == [
            "train",
            "--config",
            "config.json",
            "--nnodes",
            "2",
            "--node-rank",
            rank,
            "--rdzv",
            "10.0.0.1:29400",
            "--as-job",
        ]


def test_the_packed_code_can_be_installed_and_starts(tmp_path):
    "pip installs the packed code without its requirements, which are here, and the command runs that code."
    deploy_skypilot(RunConfig(), "/mnt/shared", out=str(tmp_path / "job"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", tmp_path / "there"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, tmp_path / "job" / "code"],
        check=True,
        timeout=200,
        capture_output=True,
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "there")}
    done = subprocess.run(
        [tmp_path / "there" / "bin" / "multigpu-ft", "presets"],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and "multigpu-ft train --preset tiny" in done.stdout, done.stderr[
        -2000:
    ]


def test_nodes_keep_the_run_secret_in_a_private_file(tmp_path):
    "It is neither in the task nor in the environment of the command, and each job has its own."
    task = deploy_skypilot(RunConfig(), "/mnt/shared", num_nodes=2)
    seen = 'env; stat -c "%a %n" "$MULTIGPU_FT_SECRETS_DIR" "$MULTIGPU_FT_SECRETS_DIR"/*'
    fake(tmp_path / "multigpu_ft_env" / "bin" / "multigpu-ft", f"{seen}; multigpu-ft-secret")
    fake(
        tmp_path / "multigpu_ft_env" / "bin" / "multigpu-ft-secret",
        f"{sys.executable} -c 'from multigpu_ft.run.secrets import run_secret; print(run_secret())'",
    )
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HOME": str(tmp_path),
        "TMPDIR": str(tmp_path),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "RUN_SECRET": "5a" * 32,
    }
    done = subprocess.run(
        ["bash", "-c", task.task["run"]], env=env, capture_output=True, text=True, timeout=60
    )
    *listed, folder, file, found = done.stdout.splitlines()
    assert "5a5a" not in "".join(listed) and found == repr(b"5a" * 32)
    assert folder.startswith("700 ") and file.endswith("/RUN_SECRET")
    trusting = deploy_skypilot(RunConfig(trusted_network=True), "/mnt/shared", num_nodes=2)
    assert "RUN_SECRET" not in trusting.yaml
    assert "RUN_SECRET" not in deploy_skypilot(RunConfig(), "/mnt/shared").yaml


def test_submitting_passes_on_the_names_of_secrets(tmp_path, monkeypatch):
    there = "ls code/multigpu_ft/training/trainer.py config.json; printenv SKYPILOT_DISABLE_USAGE_COLLECTION"
    fake(
        tmp_path / "sky",
        f'set -e; printf "%s\\n" "$@" > {tmp_path}/said; cat task.yaml >> {tmp_path}/said; {there}',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 30)
    task = deploy_skypilot(RunConfig(hf_repo="user/opt"), "volume:ft")
    assert not (tmp_path / "said").exists() and "not submitted" in repr(task)
    task.submit()
    said = (tmp_path / "said").read_text()
    assert (
        said.startswith("jobs\nlaunch\n--yes\n--detach-run\n--secret\nHF_TOKEN\ntask.yaml\n")
        and "hf_x" not in said
        and task.submitted
    )
    assert yaml.safe_load(said.partition("task.yaml\n")[2])["secrets"] == {"HF_TOKEN": None}
    fake(tmp_path / "sky", f'printenv RUN_SECRET >> {tmp_path}/secrets; printf "%s\n" "$@"')
    for _ in range(2):
        deploy_skypilot(RunConfig(), "volume:ft", num_nodes=2, submit=True)
    secrets = (tmp_path / "secrets").read_text().split()
    assert len({*secrets}) == 2 and {len(each) for each in secrets} == {64}
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match="HF_TOKEN"):
        deploy_skypilot(RunConfig(hf_repo="user/opt"), "volume:ft", submit=True)
    fake(tmp_path / "sky", "echo no cloud is set up >&2; exit 1")
    with pytest.raises(ConfigError, match="no cloud is set up"):
        deploy_skypilot(RunConfig(), "volume:ft", submit=True)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "sky").unlink()
    with pytest.raises(ConfigError, match=r"multigpu_ft\[skypilot\]"):
        deploy_skypilot(RunConfig(), "volume:ft", submit=True)

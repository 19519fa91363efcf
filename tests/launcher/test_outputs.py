"""Outputs of a run that are kept beyond its session."""

import types
from pathlib import Path

import pytest

from multigpu_ft.checkpoints.manifest import commit, digest
from multigpu_ft.launcher import outputs, restarts
from multigpu_ft.run.config import RunConfig
from multigpu_ft.run.run_dir import PARTIAL, RunDir

pytestmark = pytest.mark.usefixtures("elsewhere")


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
    monkeypatch.setattr(
        outputs.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=count)
    )


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
    assert not list(kept.rglob(f"*{PARTIAL}")) and outputs.keep_outputs(kept, tmp_path / "out") == (
        kept,
        [],
    )


def test_another_run_of_that_name_is_left_alone(run, tmp_path):
    kept, _ = outputs.keep_outputs(run.path, tmp_path / "out")
    run.update_status(launched=2.0)
    second, _ = outputs.keep_outputs(run.path, tmp_path / "out")
    assert second.name == f"{kept.name}-2" and RunDir(kept).status()["launched"] == 1.0
    assert outputs.keep_outputs(run.path, tmp_path / "out")[0] == second


def test_a_run_that_was_started_again_has_one_copy(tmp_path):
    run = RunDir.create(RunConfig(run_root=str(tmp_path / "runs")))
    run.update_status(state="stopped", launched=1.0)
    kept, _ = outputs.keep_outputs(run.path, tmp_path / "kept")
    restarts.reopen(run, run.config().replace(save_every=5))
    run.update_status(launched=2.0)
    assert outputs.keep_outputs(run.path, tmp_path / "kept")[0] == kept


def test_a_checkpoint_that_does_not_fit_is_reported_and_the_old_one_stays(
    run, tmp_path, monkeypatch
):
    save(run, "step-1")
    kept, _ = outputs.keep_outputs(run.path, tmp_path / "out")
    save(run, "step-2", b"weights" * 10**6)
    free(monkeypatch, 7_100_000)
    _, (remark,) = outputs.keep_outputs(run.path, tmp_path / "out")
    assert (
        "checkpoint step-2" in remark
        and "7.0 MB" in remark
        and "7.1 MB" in remark
        and "hf_repo" in remark
    )
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
        lambda source, target, **options: copytree(
            source, target, **{**options, "copy_function": full}
        ),
    )
    _, remarks = outputs.keep_outputs(run.path, tmp_path / "out")
    assert len(remarks) == 2 and all("No space left on device" in r for r in remarks)
    assert (
        checkpoints(kept) == ["step-1"]
        and (kept / "export" / "model.safetensors").read_bytes() == b"model"
        and not list(kept.rglob(f"*{PARTIAL}"))
    )


def test_the_next_older_checkpoint_is_kept_if_the_newest_is_damaged(run, tmp_path):
    save(run, "step-1")
    (save(run, "step-2") / "rank0.safetensors").write_bytes(b"wEights")
    kept, (remark,) = outputs.keep_outputs(run.path, tmp_path / "out")
    assert (
        "step-2 is damaged (rank0.safetensors: its content was altered)" in remark
        and checkpoints(kept) == ["step-1"]
    )


def test_keeping_raises_nothing(run, tmp_path):
    assert (
        "not a run directory" in outputs.keep_outputs(tmp_path / "nothing", tmp_path / "out")[1][0]
    )
    (tmp_path / "file").write_text("")
    assert "was not kept" in outputs.keep_outputs(run.path, tmp_path / "file")[1][0]

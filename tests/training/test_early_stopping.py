"""Evaluation while a run trains: the run stops when the loss no longer falls, and exports the best checkpoint."""

import json

import pytest
from harness import faults
from harness.runs import until
from safetensors import safe_open
from safetensors.torch import load_file

from multigpu_ft.checkpoints.discovery import find_checkpoints
from multigpu_ft.run.run_dir import RunDir

HALF = {
    "end_idx": 24,
    "eval_start_idx": 24,
    "eval_every": 2,
    "save_every": None,
    "learning_rate": 0.03,
    "num_epochs": 12,
}


def evaluated(run_dir):
    return {m["step"]: m["eval_loss"] for m in run_dir.metrics() if "eval_loss" in m}


def weights(checkpoint):
    "Return the full parameters in a checkpoint by name."
    found = {}
    for path in sorted(checkpoint.glob("rank*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if name.startswith("model/"):
                    found.setdefault(name.removeprefix("model/"), []).append(file.get_tensor(name))
    return found


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def stopped_early(request, server, material, tmp_path_factory):
    cfg = faults.config(
        material,
        tmp_path_factory.mktemp("early"),
        strategy=request.param,
        patience=3,
        keep=1,
        run_name="first",
        **HALF,
    )
    return server.finish(cfg)


def test_a_run_stops_after_patience_and_keeps_the_best_checkpoint(stopped_early):
    losses, status = evaluated(stopped_early), stopped_early.status()
    best = min(losses, key=losses.get)
    after = [step for step in losses if step > best]
    assert (
        status["state"] == "done"
        and len(after) == 3
        and status["step"] == after[-1] < status["total_steps"]
    )
    assert (
        status["best"]["step"] == best
        and status["best"]["loss"] == losses[best] == status["eval_after"]["loss"]
    )
    # keep=1 keeps the newest, and the best beside it
    assert [c.name for c in stopped_early.checkpoints()] == [
        status["best"]["checkpoint"],
        status["checkpoint"],
    ]
    assert any("3 evaluation(s) in a row" in remark for remark in status["remarks"])


def test_the_best_checkpoint_is_exported(stopped_early):
    exported = load_file(stopped_early.path / "export" / "model.safetensors")
    best, last = (weights(c) for c in stopped_early.checkpoints())
    assert stopped_early.status()["exported_checkpoint"] == stopped_early.checkpoints()[0].name
    for name, parts in best.items():
        first = 0
        for rows in parts:
            assert (exported[name][first : first + len(rows)] == rows).all(), name
            first += len(rows)
    name = "model.decoder.layers.0.fc1.weight"
    assert not (best[name][0] == last[name][0]).all(), "otherwise the test shows nothing"


def test_the_next_slice_continues_from_the_best_and_the_same_slice_from_the_newest(stopped_early):
    cfg, (best, newest) = stopped_early.config(), stopped_early.checkpoints()
    assert find_checkpoints(cfg)[0] == newest, "its patience has ended, so nothing is left to do"
    following = cfg.replace(start_idx=24, end_idx=36, eval_start_idx=36)
    assert find_checkpoints(following) == [best]


def test_a_second_start_has_nothing_left_to_train(stopped_early, server):
    again = server.finish(stopped_early.config().replace(run_name=None))
    status = again.status()
    assert (
        status["state"] == "nothing to do"
        and again.metrics() == []
        and "were trained until patience=3 was over" in status["message"]
    )
    assert status["exported_checkpoint"] == stopped_early.status()["best"]["checkpoint"], (
        "even if another run saved it"
    )


def test_a_resumed_run_stops_where_it_would_have_stopped(stopped_early, server, tmp_path):
    "The checkpoint has the best evaluation, and the count of evaluations since."
    whole = stopped_early.status()
    cfg = stopped_early.config().replace(run_root=str(tmp_path), run_name=None)
    first = server.finish(cfg.replace(max_steps=whole["best"]["step"] + 3))
    assert first.status()["step"] == whole["best"]["step"] + 3
    second = server.finish(cfg)
    assert evaluated(first) | evaluated(second) == {
        **evaluated(stopped_early),
        first.status()["step"]: evaluated(first)[first.status()["step"]],
    }
    assert (second.status()["best"], second.status()["eval_after"]) == (
        whole["best"],
        whole["eval_after"],
    )
    assert second.status()["exported_checkpoint"] == whole["exported_checkpoint"]


def test_keep_best_without_room_for_two_checkpoints_is_refused(server, material, run_root):
    cfg = faults.config(material, run_root, keep_best=True, disk_budget_gb=5e-4, **HALF)
    failed = server.finish(cfg)
    error = json.loads(failed.error_file(0).read_text())["message"]["message"]
    assert "CheckpointError" in error and "leave out keep_best and patience" in error


def test_the_best_checkpoint_may_be_the_last(server, material, run_root):
    run_dir = server.finish(
        faults.config(
            material, run_root, keep_best=True, **{**HALF, "learning_rate": 1e-4, "num_epochs": 1}
        )
    )
    status = run_dir.status()
    assert (
        status["best"]["step"] == status["step"]
        and status["best"]["checkpoint"] == status["checkpoint"]
        and status["exported_checkpoint"] is None
    )
    assert RunDir(run_dir.path).checkpoints()[-1].name == status["checkpoint"]


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_run_has_one_before_however_often_it_resumes(server, material, run_root, nproc):
    "The first evaluation and the first-step loss are those before the run's first step."
    settings = {**HALF, "num_epochs": 4, "save_every": 1, "learning_rate": 1e-3}
    cfg = faults.config(material, run_root, nproc=nproc, **settings)
    whole = server.finish(cfg.replace(run_root=str(run_root / "whole")))
    run_dir, agent = server.start(cfg)
    until(lambda: len(run_dir.metrics()) > 3, 30, "steps")
    run_dir.request_stop()
    faults.wait_for_end(run_dir, agent)
    stopped = run_dir.status()
    assert stopped["state"] == "stopped" and 3 < stopped["step"] < stopped["total_steps"]
    server.finish(cfg, run_dir)
    status, undisturbed = run_dir.status(), whole.status()
    assert status["state"] == "done" and status["eval_before"] == stopped["eval_before"]
    assert status["eval_before"]["step"] == 0
    assert status["eval_before"]["loss"] > status["eval_after"]["loss"]
    for name in ("loss_before", "loss_after"):
        assert status[name] == pytest.approx(undisturbed[name], rel=1e-6), name
    assert status["eval_after"] == pytest.approx(undisturbed["eval_after"], rel=1e-6)


def test_the_next_slice_is_evaluated_where_it_starts(server, material, run_root):
    cfg = faults.config(material, run_root, **{**HALF, "num_epochs": 1, "end_idx": 12})
    first = server.finish(cfg)
    second = server.finish(cfg.replace(start_idx=12, end_idx=24))
    before = second.status()["eval_before"]
    assert before["step"] == first.status()["step"] > 0
    assert before["loss"] == pytest.approx(first.status()["eval_after"]["loss"], rel=1e-6)

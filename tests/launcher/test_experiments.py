"""What `resume_file="auto"` means: one test for each row of the README's table."""

import json
import os
import shutil
import signal

import pytest
from harness.runs import multigpu_ft, ranks, running, until

from multigpu_ft import ConfigError, Run, RunConfig, launch, runs
from multigpu_ft.launcher import api
from multigpu_ft.run.errors import DataError


@pytest.fixture
def cfg(tmp_path):
    rows = [
        {"text": f"sentence {n} of the {n % 7}th kind " * 12, "label": n % 2} for n in range(120)
    ]
    data = tmp_path / "x.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunConfig(
        run_root=str(tmp_path / "runs"),
        dataset=str(data),
        end_idx=40,
        max_length=64,
        packing="padded",
        learning_rate=1e-3,
        nproc=1,
    )


def directories(cfg):
    return sorted(run.dir.path.name for run in runs(cfg.run_root))


def origin(run):
    "Return the name of the run that `run` continues."
    path = run.status.get("resumed_from")
    return path and path.split("/")[-3]


def following(cfg, **changes):
    return cfg.replace(start_idx=40, end_idx=80, **changes)


@pytest.mark.parametrize("name", [None, "mine"])
def test_the_same_run_resumes_in_its_directory_with_one_curve(cfg, name):
    cfg = cfg.replace(run_name=name, save_every=2)
    whole = launch(cfg.replace(run_root=cfg.run_root + "-whole"))
    run = launch(cfg, wait=False)
    running(run.dir.path.parent, steps=4)
    os.kill(ranks(run.dir.path)[0], signal.SIGKILL)
    until(lambda: run.state == "failed", 60, "the failure")
    before = run.status["loss_before"]
    again = launch(cfg)
    assert directories(cfg) == [again.dir.path.name] and again.dir.path == run.dir.path
    assert again.state == "done" and again.status["loss_before"] == before
    steps = [m["step"] for m in again.metrics]
    assert steps == list(range(1, len(steps) + 1)), "one curve, each step once"
    losses = [(m["step"], m["loss"]) for m in whole.metrics if m["step"]]
    assert [(m["step"], m["loss"]) for m in again.metrics if m["step"]] == losses
    first, last = again.attempts
    assert (first["state"], last["state"]) == ("failed", "done")
    assert first["first_step"] == 1 and 1 < last["first_step"] <= first["step"] + 1
    assert not again.status.get("failure") and again.failure is None


def test_a_run_that_failed_before_its_first_checkpoint_is_the_same_run_too(cfg, tmp_path):
    broken = cfg.replace(model=str(tmp_path / "model"))
    (tmp_path / "model").mkdir()
    for _ in range(2):
        with pytest.raises(Exception, match="model"):
            launch(broken)
    assert len(directories(cfg)) == 1


def test_a_run_that_is_alive_is_not_started_twice(cfg):
    run = launch(cfg.replace(num_epochs=50), wait=False)
    running(run.dir.path.parent, steps=1)
    try:
        with pytest.raises(ConfigError, match="is running already.*another run_name"):
            launch(cfg.replace(num_epochs=50))
    finally:
        run.kill()
    assert len(directories(cfg)) == 1


def test_the_next_slice_continues_its_own_series(cfg, capfd):
    launch(cfg.replace(run_name="slow", learning_rate=1e-4))
    launch(cfg.replace(run_name="fast"))
    second = launch(following(cfg, learning_rate=1e-4))
    assert origin(second) == "slow", "although fast is newer"
    assert "continues from checkpoint opt-tiny_0-40-epoch-1 of slow" in capfd.readouterr().err
    assert origin(launch(following(cfg, run_name="fast"))) == "fast"
    assert directories(cfg) == ["fast", "fast-2", "opt-tiny_40-80", "slow"]


def test_several_series_that_fit_are_listed(cfg):
    launch(cfg.replace(run_name="a"))
    launch(cfg.replace(run_name="b"))
    with pytest.raises(ConfigError) as caught:
        launch(following(cfg))
    message = str(caught.value)
    assert "more than one series" in message and "resume_file='none'" in message
    for name in "ab":
        assert f"{cfg.run_root}/{name}/checkpoints/opt-tiny_0-40-epoch-1'" in message
    assert directories(cfg) == ["a", "b"]
    assert origin(launch(following(cfg, run_name="b"))) == "b", "its name decides"
    only_b = launch(cfg.replace(start_idx=80, end_idx=120))
    assert origin(only_b) == "b-2", "only one series has reached row 80"


@pytest.mark.parametrize(
    "other, why",
    [
        ({"run_name": "second"}, "it has another run_name"),
        ({"learning_rate": 1e-4}, "learning_rate is 0.001 there, 0.0001 here"),
        ({"batch_size": 8}, "batch_size × accum_steps is 4 there, 8 here"),
    ],
)
def test_another_experiment_starts_from_the_base_model(cfg, capfd, other, why):
    first = launch(cfg.replace(run_name="first"))
    capfd.readouterr()
    second = launch(cfg.replace(**{"run_name": "first"} | other))
    said = capfd.readouterr().err
    assert "starts from the base model" in said and f"does not continue first: {why}" in said
    assert second.state == "done" and origin(second) is None and second.dir.path != first.dir.path
    assert second.status["first_step"] == 1 and second.status["loss_before"] == pytest.approx(
        first.status["loss_before"], rel=0.01
    )


@pytest.mark.parametrize("name", [None, "longer"])
def test_more_rows_from_the_same_start_are_another_experiment(cfg, capfd, name):
    launch(cfg)
    launch(following(cfg))
    capfd.readouterr()
    longer = launch(cfg.replace(end_idx=60, run_name=name))
    said = capfd.readouterr().err
    assert origin(longer) is None and longer.status["first_step"] == 1
    assert "starts from the base model" in said and "does not continue opt-tiny_40-80" in said
    assert "its rows are 40–80" in said
    assert origin(launch(cfg.replace(end_idx=20))) is None


def test_a_name_that_is_taken_is_said(cfg, capfd):
    launch(cfg.replace(run_name="mine"))
    second = launch(cfg.replace(run_name="mine", learning_rate=1e-4))
    assert second.name == "mine-2"
    said = capfd.readouterr().err
    assert "mine-2: run_name='mine' is taken by a run with other settings or rows" in said


def test_rows_that_follow_a_run_with_other_settings_are_in_doubt(cfg):
    launch(cfg)
    changed = following(cfg, learning_rate=1e-4)
    with pytest.raises(ConfigError, match="other settings .learning_rate is 0.001 there") as caught:
        launch(changed)
    named = str(caught.value).split("resume_file='")[1].partition("'")[0]
    assert origin(launch(changed.replace(resume_file=named))) == "opt-tiny_0-40"
    assert directories(cfg) == ["opt-tiny_0-40", "opt-tiny_40-80"]


def test_nothing_to_do_is_not_done(cfg, capfd):
    done = launch(cfg)
    exported = {p.name: p.read_bytes() for p in (done.dir.path / "export").iterdir()}
    again = launch(cfg)
    assert again.state == "nothing to do" and again.dir.path == done.dir.path
    said = capfd.readouterr().err
    assert "Raise num_epochs" in said and "another run_name" in said and "start_idx=40" in said
    assert {p.name: p.read_bytes() for p in (done.dir.path / "export").iterdir()} == exported
    assert [attempt["state"] for attempt in again.attempts] == ["done", "nothing to do"]
    flags = ["--dataset", cfg.dataset, "--run-root", cfg.run_root, "--end-idx", 40, "--nproc", 1]
    flags += ["--max-length", 64, "--packing", "padded", "--learning-rate", 1e-3]
    ended = multigpu_ft("train", *flags, cwd=done.dir.path.parent)
    assert ended.returncode == 0 and "nothing to do" in ended.stdout, ended.stderr
    more = launch(cfg.replace(num_epochs=2))
    assert more.state == "done" and more.dir.path == done.dir.path
    assert more.metrics[-1]["epoch"] == 2
    launch(following(cfg))
    shutil.rmtree(more.dir.path / "checkpoints")
    (more.dir.path / "checkpoints").mkdir()
    assert launch(cfg.replace(num_epochs=2)).state == "nothing to do", "whatever its checkpoints"
    with_repository = more.config.replace(hf_repo="jane/model")
    assert api._is_complete(more.dir, with_repository), "ranks would train it again"
    with pytest.raises(ConfigError, match="can't train more with another num_epochs"):
        launch(cfg.replace(num_epochs=3))


def test_a_run_killed_in_its_export_is_done_by_the_next_launch(cfg):
    run = launch(cfg)
    shutil.rmtree(run.dir.path / "export")
    # as in a run that was killed there
    run.dir.update_status(state="running", activity="exporting the model")
    again = launch(cfg)
    assert again.state == "done" and again.dir.path == run.dir.path and not again.status["message"]
    assert list((run.dir.path / "export").glob("*.safetensors"))
    assert [attempt["state"] for attempt in again.attempts] == ["failed", "done"]
    assert [m["step"] for m in again.metrics] == [m["step"] for m in run.metrics]
    assert launch(cfg).state == "nothing to do"
    more = launch(cfg.replace(num_epochs=2))
    more.dir.update_status(state="running", activity="exporting the model")
    assert launch(cfg.replace(num_epochs=2)).state == "done", "the longer training, not the first"


def test_runs_of_an_earlier_version_keep_working(cfg):
    "Its resumed runs have a directory each, and neither records the name that was asked for."
    first = launch(cfg.replace(max_steps=4))
    old = json.loads((first.dir.path / "status.json").read_text())
    for new in ("asked_name", "attempts", "attempt_first_step"):
        old.pop(new, None)
    (first.dir.path / "status.json").write_text(json.dumps({**old, "state": "stopped"}))
    resumed = first.dir.path.with_name("opt-tiny_0-40-2")
    shutil.copytree(first.dir.path, resumed)
    checkpoint = str(first.dir.checkpoints()[-1])
    Run(resumed).dir.update_status(resumed_from=checkpoint, launched=old["launched"] + 1)
    run = launch(cfg)
    assert run.dir.path == resumed and run.state == "done" and run.metrics[-1]["step"] > 4
    assert origin(launch(following(cfg))) == "opt-tiny_0-40-2"


def test_wrong_data_make_no_directory(cfg, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": 3}\n')
    for wrong in (
        {"dataset": cfg.dataset + "x"},
        {"dataset": str(tmp_path / "broken.jsonl"), "end_idx": 2},
        {"text_field": "texts"},
        {"start_idx": 500, "end_idx": 600},
        {"task": "chat"},
        {"task": "classification", "label_field": "lable"},
        {"eval_dataset": str(tmp_path / "dev.jsonl")},
    ):
        with pytest.raises(DataError):
            launch(cfg.replace(**wrong))
    assert directories(cfg) == []

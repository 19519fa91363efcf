"""Saving, stopping and resuming as a user sees them: messages, kept checkpoints, and runs that cannot continue."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest
from harness import faults, forks
from harness.runs import BIN, NBS, error_of, processes, ranks, running, slow, until

from multigpu_ft import CheckpointError, Run, RunConfig, RunDir, RunFailed, Slices, launch
from multigpu_ft.checkpoints.discovery import find_checkpoints
from multigpu_ft.checkpoints.manifest import (
    commit,
    contents,
    digest,
    fingerprint,
    read_progress,
    verify_checkpoint,
)
from multigpu_ft.data.examples import load_texts
from multigpu_ft.data.order import used_texts
from multigpu_ft.data.tokenization import tokenize
from multigpu_ft.models.loading import load_tokenizer
from multigpu_ft.run.run_dir import PARTIAL, STOPPED_EXIT_CODE, read_commit, write_json


def remarks(run):
    return (
        run.status().get("remarks", [])
        if not isinstance(run, Run)
        else run.status.get("remarks", [])
    )


def saved_what_it_did(run):
    "Return whether the checkpoint that the status names has the last step, within an epoch or at its end."
    newest = run.dir.checkpoints()[-1]
    verify_checkpoint(newest)
    return (
        run.status["checkpoint"] == newest.name
        and read_progress(newest)["slice_step"] == run.status["slice_step"]
    )


# -- resuming -------------------------------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_is_reported_and_the_next_older_one_used(
    material, run_root, server, capsys
):
    cfg = faults.config(material, run_root)
    first = Run(server.finish(cfg))
    older, newest = first.dir.checkpoints()
    first.dir.update_status(state="stopped")
    shard = newest / "rank1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    again = launch(cfg.replace(nproc=1, batch_size=4))
    assert again.dir.path == first.dir.path and again.status["attempt_first_step"] == 23
    assert [m["step"] for m in again.metrics] == list(range(1, 25))
    assert (
        f"checkpoint {newest.name} of {first.name} is damaged: rank1.safetensors has"
        in remarks(again)[0]
    )
    assert f"resuming from the older {older.name}" in remarks(again)[0]
    assert remarks(again)[0] in capsys.readouterr().err, "the cell shows the remark, too"
    again.dir.update_status(state="stopped")
    for checkpoint in again.dir.checkpoints():
        (checkpoint / "commit.json").unlink()
    with pytest.raises(
        CheckpointError,
        match="no checkpoint is usable: .*commit.json is missing.*resume_file='none' to start from the base model",
    ):
        launch(cfg.replace(nproc=1, batch_size=4))


def _plant(checkpoint):
    "Put a file of a third rank into a checkpoint: parameters and moments as in the others, but all zero."
    from safetensors import safe_open
    from safetensors.torch import save_file

    places, tensors = {}, {}
    for path in sorted(checkpoint.glob("rank*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name, place in json.loads(file.metadata()["pieces"]).items():
                # what has no shape, such as Adam's step, is read whole
                if place[1] and not name.startswith("random/") and name not in places:
                    places[name], tensors[name] = place, file.get_tensor(name) * 0
    save_file(tensors, checkpoint / "rank9.safetensors", metadata={"pieces": json.dumps(places)})
    return {name.split("/")[0] for name in places}


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_file_that_the_commit_does_not_name_is_not_loaded(
    material, run_root, tmp_path, server, strategy
):
    cfg = faults.config(material, run_root, strategy=strategy)
    server.finish(cfg.replace(max_steps=4))
    clean, planted = tmp_path / "clean", tmp_path / "planted"
    for root in (clean, planted):
        shutil.copytree(run_root, root)
    assert len(_plant(faults.newest(planted))) > 1, "parameters and optimizer"
    found = []
    for root in (clean, planted):
        resumed = cfg.replace(run_root=str(root), nproc=1, batch_size=4, max_steps=2)
        run = server.finish(resumed)
        assert run.status()["state"] == "done" and run.status()["slice_step"] == 6
        found.append((run.metrics()[-1]["loss"], faults.final_state(run.checkpoints()[-1])))
    assert found[0] == found[1]


@pytest.mark.parametrize("packing, rows", [("packed", 8), ("bucketed", 13), ("padded", 12)])
def test_a_checkpoint_that_counts_rows_resumes_with_the_texts_it_has_not_seen(
    material, run_root, server, packing, rows
):
    "As versions before 0.1.0 wrote them, whose steps took rows of a whole slice, several texts in one."
    cfg = faults.config(material, run_root, num_epochs=1, save_every=None)
    run = server.finish(cfg.replace(max_steps=3))
    (checkpoint,) = run.checkpoints()
    progress, record = read_progress(checkpoint), read_commit(checkpoint)
    now = {"packing": packing, "max_length": cfg.max_length, "rows_a_step": 4}
    seed, texts = progress["order"]["seed"], tokenize(cfg, load_texts(cfg), load_tokenizer(cfg))
    used = used_texts({**now, "epoch": 1, "position": rows}, seed, texts.lengths)
    order = {name: progress["order"][name] for name in ("seed", "num_texts", "texts")}
    del progress["num_texts"]
    progress |= {"position": rows, "num_rows": 99, "order": {**order, **now}}
    partial = checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.0{PARTIAL}"))
    write_json(partial / "progress.json", progress)
    record["files"]["progress.json"] = digest(partial / "progress.json")
    commit(partial, record["fingerprint"], record["files"])

    last = server.finish(cfg.replace(packing="packed" if packing == "padded" else "bucketed"))
    _, steps = faults.lineage([last])
    assert sorted([*itertools.chain(*steps), *used.tolist()]) == list(range(len(texts)))
    size = read_progress(last.checkpoints()[-1])["order"]["texts_a_step"]
    assert {len(step) for step in steps[:-1]} == {size} and size >= 4
    assert size == 4 or f"a step takes {size} texts, as when the slice began" in remarks(last)[0]


def test_the_ledger_reports_gaps_overlaps_and_repeats_before_training(
    material, run_root, server, capsys
):
    cfg = faults.config(material, run_root, num_epochs=1, save_every=None)
    server.finish(cfg.replace(end_idx=16))
    server.finish(cfg.replace(start_idx=12, end_idx=24))
    gap = launch(cfg.replace(start_idx=30, end_idx=40, max_steps=1, nproc=1, batch_size=4))
    told = ["rows 24–30 are left out: the slices so far end at row 24, this one starts at row 30"]
    assert remarks(gap) == told and told[0] in capsys.readouterr().err
    newest = str(gap.dir.checkpoints()[-1])
    repeat = server.finish(cfg.replace(end_idx=16, resume_file=newest))
    assert remarks(repeat) == [
        "slice 0–16 was trained before (1 epoch(s)); it is now trained again",
        "rows 12–16 were trained before, in slice 12–24; they are now trained again",
        "slice 30–40 was left after 40 % of epoch 1; this run does not finish it",
    ]
    checkpoint = json.loads((repeat.checkpoints()[-1] / "progress.json").read_text())
    assert [(s["start_idx"], s["end_idx"]) for s in checkpoint["trained"]] == [
        (0, 16),
        (12, 24),
        (30, 40),
        (0, 16),
    ]


def test_weights_alone_come_with_a_new_optimizer_and_schedule(material, run_root, server):
    cfg = faults.config(
        material,
        run_root,
        num_epochs=1,
        save_every=None,
        warmup_steps=4,
        lr_scheduler="linear",
        end_idx=24,
    )
    first = server.finish(cfg)
    kept = server.finish(cfg.replace(start_idx=24, end_idx=48))
    fresh = server.finish(
        cfg.replace(
            start_idx=24,
            end_idx=48,
            resume_scope="weights",
            resume_file=first.checkpoints()[-1].name,
        )
    )
    assert (
        [m["step"] for m in kept.metrics()]
        == [m["step"] for m in fresh.metrics()]
        == list(range(7, 13))
    )
    assert (
        kept.metrics()[0]["learning_rate"] == 1e-3
        and fresh.metrics()[0]["learning_rate"] == 1e-3 / 4
    ), "the warm-up belongs to the optimizer"
    other = material / "other.jsonl"
    other.write_text((material / "texts.jsonl").read_text())
    elsewhere = cfg.replace(dataset=str(other), resume_file=str(first.checkpoints()[-1]))
    with pytest.raises(
        CheckpointError, match="belongs to another run .dataset: .*resume_scope='weights'"
    ):
        launch(elsewhere.replace(nproc=1, batch_size=4))
    assert server.finish(elsewhere.replace(resume_scope="weights")).status()["state"] == "done"


def test_the_state_of_another_optimizer_is_refused_with_a_remedy(material, run_root, server):
    cfg = faults.config(material, run_root, num_epochs=1, save_every=None, end_idx=16, nproc=1)
    first = str(server.finish(cfg).checkpoints()[-1])
    later = cfg.replace(start_idx=16, end_idx=32, optimizer="adamw_8bit", resume_file=first)
    said = error_of(server.finish(later))
    assert "optimizer='adamw_8bit'" in said and "resume_scope='weights'" in said
    fresh = server.finish(later.replace(resume_scope="weights"))
    assert fresh.status()["state"] == "done"


def test_files_of_the_original_script_are_loaded(material, run_root, server):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(material / "model")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    path = material / "opt_0-24-epoch-1.pt"
    torch.save({"MODEL_STATE": model.state_dict(), "EPOCHS_RUN": 1}, path)
    cfg = faults.config(material, run_root, strategy="fsdp", num_epochs=1, start_idx=30)
    base, taken = (
        server.finish(cfg.replace(resume_file="none")),
        server.finish(cfg.replace(resume_file=str(path))),
    )
    assert (
        taken.status()["resumed_from"] == str(path)
        and taken.status()["loss_before"] != base.status()["loss_before"]
    )
    assert remarks(taken) == [
        "rows 24–30 are left out: the slices so far end at row 24, this one starts at row 30"
    ]
    path.write_bytes(path.read_bytes()[:5000])
    broken = server.finish(cfg.replace(resume_file=str(path)))
    assert "CheckpointError" in error_of(
        broken
    ) and "cannot be read as weights saved by torch.save" in error_of(broken)


def test_another_tokenizer_or_text_is_refused(material, run_root, server):
    folder = material / "moved"
    folder.mkdir()
    subprocess.run(["cp", "-r", material / "model", material / "texts.jsonl", folder], check=True)
    cfg = faults.config(folder, run_root, max_steps=3, save_every=None)
    server.finish(cfg)
    lines = (folder / "texts.jsonl").read_text().splitlines(keepends=True)
    (folder / "texts.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    changed = server.finish(cfg)
    assert "its texts would now be in another order (texts: checkpoint" in error_of(changed)
    (folder / "texts.jsonl").write_text("".join(lines))
    tokenizer = json.loads((folder / "model" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["w0"], tokenizer["model"]["vocab"]["w1"] = (
        tokenizer["model"]["vocab"]["w1"],
        tokenizer["model"]["vocab"]["w0"],
    )
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "belongs to another run (tokenizer: checkpoint" in error_of(server.finish(cfg))


def test_a_restarted_run_resumes_from_its_own_checkpoint(material, run_root, server):
    "A cluster restarts a killed job: the same command and directory, and no step twice in the metrics."
    cfg = faults.config(material, run_root, strategy="fsdp", save_every=5, nproc=1)
    whole = server.finish(cfg.replace(run_root=str(run_root / "whole")))
    run_dir, agent = server.start(cfg)
    until(lambda: len(run_dir.metrics()) >= 8, 30, "8 steps")
    os.kill(agent, signal.SIGKILL)
    faults.wait_for_end(run_dir, agent)
    command = [
        BIN / "torchrun",
        "--standalone",
        "--nproc-per-node",
        "1",
        "-m",
        "multigpu_ft.training",
        run_dir.path,
    ]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=100,
    )
    assert [(m["step"], m["loss"]) for m in run_dir.metrics()] == [
        (m["step"], m["loss"]) for m in whole.metrics()
    ]
    assert run_dir.status()["state"] == "done" and run_dir.status()["first_step"] == 1
    shutil.rmtree(run_root / "whole")


def test_a_restart_resumes_from_its_own_checkpoint_even_if_it_began_with_weights_alone(
    material, run_root, server
):
    cfg = faults.config(material, run_root, num_epochs=1, save_every=2)
    origin = server.finish(cfg.replace(end_idx=24)).checkpoints()[-1]
    cfg = cfg.replace(start_idx=24, resume_scope="weights", resume_file=str(origin), num_epochs=4)
    whole = server.finish(cfg.replace(run_root=str(run_root / "whole")))
    run_dir, agent = server.start(cfg)
    until(lambda: len(run_dir.metrics()) >= 7, 30, "7 steps")
    os.kill(agent, signal.SIGKILL)
    faults.wait_for_end(run_dir, agent)
    run_dir.request_stop()  # a request that came too late; the next start must ignore it
    (run_dir.path / "errors" / "rank0.json").write_text("{}")
    server.finish(cfg, run_dir)
    assert [(m["step"], m["loss"]) for m in run_dir.metrics()] == [
        (m["step"], m["loss"]) for m in whole.metrics()
    ]
    assert run_dir.status()["state"] == "done" and not list(run_dir.path.glob("errors/*"))
    server.finish(cfg, run_dir)  # a start of a finished run exports again
    assert (
        run_dir.status()["state"] == "nothing to do"
        and (run_dir.path / "export" / "model.safetensors").exists()
    )


# -- keeping --------------------------------------------------------------------------------------------------------


def test_the_newest_checkpoints_are_kept_within_the_budget(material, run_root, server):
    cfg = faults.config(material, run_root, num_epochs=1)
    first = server.finish(cfg.replace(keep=3, end_idx=24))
    assert [c.name for c in first.checkpoints()] == [
        "model_0-24-step-2",
        "model_0-24-step-4",
        "model_0-24-epoch-1",
    ]
    each = sum(p.stat().st_size for p in first.checkpoints()[0].iterdir())
    second = server.finish(cfg.replace(start_idx=24, keep=3, disk_budget_gb=2.5 * each / 1e9))
    assert [c.name for c in second.checkpoints()] == [
        "model_24-48-step-4",
        "model_24-48-epoch-1",
    ] and not first.checkpoints()
    short = server.finish(
        cfg.replace(start_idx=24, initial_epoch=2, disk_budget_gb=1.5 * each / 1e9)
    )
    assert "disk_budget_gb" in error_of(short) and not short.metrics(), (
        "the checkpoint to resume from must stay; the error comes before training"
    )
    third = server.finish(cfg.replace(start_idx=40, keep=1))
    assert [c.name for c in third.checkpoints()] == [
        "model_40-48-epoch-1"
    ] and not second.checkpoints()


def test_the_next_run_deletes_what_a_killed_run_left_half_written(material, run_root, server):
    cfg = faults.config(material, run_root, save_every=1)
    for _ in range(20):
        run_dir, agent = server.start(cfg)
        partials = run_dir.path / "checkpoints"
        until(lambda: list(partials.glob("*.partial")) or faults.gone(agent), 30, "a save")  # noqa: B023
        with faults.contextlib.suppress(ProcessLookupError):
            os.killpg(agent, signal.SIGKILL)
        faults.wait_for_end(run_dir, agent)
        if list(run_dir.path.glob("checkpoints/*.partial")):
            break
    else:
        raise AssertionError("never killed in the middle of a save")
    server.finish(cfg)
    assert not list(run_root.glob("*/checkpoints/*.partial"))


# -- stopping -------------------------------------------------------------------------------------------------------

SLOW = """
import sys
if 'multigpu_ft.training' in sys.orig_argv:
    import time
    from multigpu_ft.training import trainer
    original = trainer.epoch_steps
    def slow(*arguments):
        for step in original(*arguments):
            time.sleep(0.05)
            yield step
    trainer.epoch_steps = slow
"""


@pytest.fixture
def slow_steps(tmp_path):
    "Return an environment in which steps take long without using the processor."
    return {**os.environ, **forks.at_start(tmp_path, SLOW), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_max_hours_stops_in_time_saves_and_says_so(material, run_root, slow_steps):
    "In a terminal: exit code 75, and the command that resumes the run."
    data = [
        "--model",
        str(material / "model"),
        "--dataset",
        str(material / "texts.jsonl"),
        "--run-root",
        str(run_root),
        "--max-length",
        "32",
    ]
    started = time.monotonic()
    command = [
        forks.command(),
        "train",
        *data,
        "--num-epochs",
        "2000",
        "--max-hours",
        "0.014",
        "--packing",
        "padded",
        "--nproc",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=slow_steps)
    assert done.returncode == STOPPED_EXIT_CODE, done.stderr
    assert time.monotonic() - started < 0.014 * 3600 + 10
    run = Run(next(run_root.iterdir()))
    assert run.state == "stopped" and saved_what_it_did(run)
    assert "beyond max_hours=0.014; it stops and saves after about step" in done.stderr
    step = run.status["step"]
    resume = re.search(r"resume +multigpu-ft (train --run-root .*)", done.stdout)[1].split()
    again = [forks.command(), *resume, "--max-hours", "1", "--max-steps", str(step + 2)]
    assert subprocess.run(again, capture_output=True, text=True, timeout=120).returncode == 0
    assert [path.name for path in run_root.iterdir()] == [run.name]
    assert run.status["attempt_first_step"] == step + 1 and run.metrics[-1]["step"] == step + 2


def test_sigterm_to_the_command_saves(material, run_root):
    data = [
        "--model",
        str(material / "model"),
        "--dataset",
        str(material / "texts.jsonl"),
        "--run-root",
        str(run_root),
        "--max-length",
        "32",
    ]
    command = [forks.command(), "train", *data, "--num-epochs", "2000", "--nproc", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    running(run_root)
    process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == STOPPED_EXIT_CODE and time.monotonic() - asked < 15, shown
    run = Run(next(run_root.iterdir()))
    assert run.state == "stopped" and saved_what_it_did(run) and not processes(run_root)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_stopped_process_is_found_within_the_timeout(run_root, strategy):
    "After SIGSTOP a rank neither answers its peers nor handles SIGTERM."
    run = launch(
        RunConfig(run_root=str(run_root), strategy=strategy, timeout_s=6, packing="padded"),
        wait=False,
    )
    run_dir = running(run_root)
    psutil.Process(ranks(run_dir)[1]).suspend()
    stopped = time.monotonic()
    with pytest.raises(
        RunFailed,
        match=r"rank 1 hangs in step \d+: it was stopped by a signal. No rank has come any further for timeout_s=6 s",
    ) as caught:
        run.wait(60)
    assert time.monotonic() - stopped < 16 and not processes(run_root)
    step = int(str(caught.value).split("in step ")[1].split(":")[0])
    assert abs(step - run.metrics[-1]["step"]) <= 2


HANG = """
import os, sys
if os.environ.get('RANK') == '1' and 'multigpu_ft.training' in sys.orig_argv:
    from multigpu_ft.training import trainer
    original = trainer.epoch_steps
    def hanging(*arguments):
        for number, step in enumerate(original(*arguments), 1):
            if number == 4:
                import threading; threading.Event().wait()
            yield step
    trainer.epoch_steps = hanging
"""


def test_a_rank_that_waits_forever_is_named_with_its_stack(run_root, tmp_path, monkeypatch):
    for variable in forks.at_start(tmp_path, HANG).items():
        monkeypatch.setenv(*variable)
    with pytest.raises(
        RunFailed,
        match="rank 1 hangs in step 3. No rank has come any further for timeout_s=6 s "
        ".rank 0 in step 4, .*; rank 1 in step 3, data",
    ):
        launch(RunConfig(run_root=str(run_root), strategy="ddp", timeout_s=6, packing="padded"))
    assert "in hanging" in Run(next(run_root.iterdir())).logs(1)


OUT_OF_MEMORY = """
import os, sys
if os.environ.get('RANK') == '1' and 'multigpu_ft.training' in sys.orig_argv:
    import torch
    from multigpu_ft.models import loss
    original, calls = loss.LossModel.forward, []
    def hungry(self, input_ids, **inputs):
        calls.append(1)
        if len(calls) > 12 and torch.is_grad_enabled() and input_ids.numel() > LIMIT:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
        return original(self, input_ids, **inputs)
    loss.LossModel.forward = hungry
"""


@pytest.mark.parametrize("strategy", [slow("ddp"), "fsdp"])
def test_out_of_memory_on_one_rank_halves_the_micro_batch_of_all(
    material, run_root, tmp_path, monkeypatch, server, strategy
):
    "The global batch, and with it the loss curve, stays the same."
    if not (material / "smooth").exists():
        faults.Reshapes(material, server)
    cfg = faults.config(
        material,
        run_root,
        model=str(material / "smooth"),
        strategy=strategy,
        batch_size=4,
        save_every=3,
    )
    plain = server.finish(cfg.replace(run_root=str(run_root / "plain")))
    for variable in forks.at_start(tmp_path, OUT_OF_MEMORY.replace("LIMIT", "2 * 32")).items():
        monkeypatch.setenv(*variable)
    run = launch(cfg)
    assert (run.state, run.dir.config().batch_size, run.dir.config().accum_steps) == ("done", 2, 2)
    assert any(
        "rank 1 ran out of memory in step" in r and "batch_size 4 -> 2, accum_steps 1 -> 2" in r
        for r in remarks(run)
    )
    assert [m["step"] for m in run.metrics] == list(range(1, 13))
    assert all(
        abs(a["loss"] - b["loss"]) / b["loss"] < 1e-5
        for a, b in zip(run.metrics, plain.metrics(), strict=True)
    )
    if strategy == "fsdp":
        return
    forks.at_start(tmp_path, OUT_OF_MEMORY.replace("LIMIT", "0"))
    with pytest.raises(
        RunFailed,
        match="rank 1 ran out of memory in step .* with batch_size=1.*activation_checkpointing='full'",
    ):
        launch(cfg.replace(batch_size=2, resume_file="none"))


# -- slices ---------------------------------------------------------------------------------------------------------


def test_a_series_knows_its_own_runs_and_what_is_new(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name, rows in (("a", 48), ("b", 48)):
        (tmp_path / name / "texts.jsonl").write_text('{"text": "x"}\n' * rows)
    cfg = RunConfig(
        run_root=str(tmp_path / "runs"),
        dataset=str(tmp_path / "a" / "texts.jsonl"),
        slice_size=20,
        max_grad_norm="none",
    )
    assert cfg.max_grad_norm is None
    slices = Slices(cfg)
    assert slices.bounds == [(0, 20), (20, 40), (40, 48)]
    for start, end in slices.bounds:
        RunDir.create(slices.config.replace(start_idx=start, end_idx=end)).update_status(
            state="done", launched=start
        )
    assert Slices(cfg).state == "done" and Slices(cfg.replace(num_epochs=2)).state == "to do"
    assert Slices(cfg.replace(dataset=str(tmp_path / "b" / "texts.jsonl"))).state == "to do", (
        "other data with the same name"
    )
    with open(tmp_path / "a" / "texts.jsonl", "a") as file:
        file.write('{"text": "x"}\n' * 20)
    grown = Slices(cfg)
    assert (
        grown.bounds == [(0, 20), (20, 40), (40, 48), (48, 60), (60, 68)]
        and [row["state"] for row in grown.table()] == ["done"] * 3 + ["to do"] * 2
    )


def test_a_moved_series_continues_even_with_a_run_of_another_version(tmp_path):
    "The runs' settings name the old folder. One checkpoint proves the data equal, also for runs without checkpoints."
    project = tmp_path / "project"
    project.mkdir()
    (project / "texts.jsonl").write_text('{"text": "x"}\n' * 60)
    cfg = RunConfig(
        run_root=str(project / "runs"), dataset=str(project / "texts.jsonl"), slice_size=20
    )
    slices = Slices(cfg)
    for start, end in slices.bounds[:2]:
        run_dir = RunDir.create(slices.config.replace(start_idx=start, end_idx=end))
        run_dir.update_status(state="done", launched=start)
    partial = run_dir.path / "checkpoints" / f"texts_20-40.0{PARTIAL}"
    partial.mkdir()
    checkpoint = commit(
        partial, {**fingerprint(slices.config), "contents": contents(slices.config)}, {}
    )
    shutil.copy(project / "texts.jsonl", tmp_path)
    beside = Slices(cfg.replace(dataset=str(tmp_path / "texts.jsonl")))
    assert not beside.runs() and not find_checkpoints(beside.config), (
        "these runs' data have not moved"
    )
    moved = project.rename(tmp_path / "moved")
    there = Slices(cfg.replace(run_root=str(moved / "runs"), dataset=str(moved / "texts.jsonl")))
    assert [row["state"] for row in there.table()] == ["done", "done", "to do"]
    third = there.config.replace(start_idx=40, end_idx=60)
    assert [c.name for c in find_checkpoints(third)] == [checkpoint.name], (
        "the third slice continues from it"
    )
    strange = RunDir.create(there.config)
    (strange.path / "config.json").write_text('{"a_field_of_another_version": 1}')
    assert len(Slices(there.config.replace(run_root=str(moved / "runs"))).runs()) == 2


@pytest.mark.slow
def test_a_series_of_slices_survives_its_driver(material, run_root, tmp_path, slow_steps):
    "SIGKILL ends the driver in its second slice; the same command then finishes, with one schedule over all slices."
    (tmp_path / "nbs").mkdir()
    for name in ("train.ipynb", "slices.ipynb"):
        (tmp_path / "nbs" / name).write_text((NBS / name).read_text())
    data = [
        "--model",
        material / "model",
        "--dataset",
        material / "texts.jsonl",
        "--run-root",
        run_root,
        "--size",
        "20",
        "--max-length",
        "32",
    ]
    how = "--num-epochs 5 --save-every 2 --lr-scheduler linear --packing padded --batch-size 1 --nproc 1 --json".split()
    command = list(map(str, [forks.command(), "slices", *data, *how]))
    driver = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=slow_steps,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder = run_root / "slices_model_texts_20"
    until(
        lambda: [
            p for p in folder.glob("model_20-40/metrics.jsonl") if p.read_text().count("\n") > 5
        ],
        90,
        "the second slice trains",
    )
    driver.kill()
    driver.communicate()
    until(
        lambda: not processes(run_root),
        15,
        "papermill, its kernel and the ranks gone after their driver",
    )
    done = subprocess.run(
        command, cwd=tmp_path, env=slow_steps, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["state"] == "done" and [row["slice"] for row in report["slices"]] == [
        "0-20",
        "20-40",
        "40-48",
    ]
    assert [row["runs"] for row in report["slices"]] == [1, 2, 1] and [
        row["steps"] for row in report["slices"]
    ] == [
        100,
        100,
        40,
    ]
    assert (
        sorted(p.name for p in folder.glob("*.ipynb"))
        == ["slice-0-20.ipynb", "slice-20-40.ipynb", "slice-40-48.ipynb"]
        and (folder / "loss.png").exists()
    )
    runs = sorted(
        (Run(p.parent) for p in folder.glob("*/config.json")), key=lambda r: r.status["launched"]
    )
    losses, _ = faults.lineage([r.dir for r in runs])
    rates = {m["step"]: m["learning_rate"] for r in runs for m in r.metrics}
    assert len(losses) == len(rates) == 240
    assert all(rates[s] > rates[s + 1] for s in range(1, 240)) and rates[240] < 0.01 * rates[1], (
        "one schedule over all slices"
    )

"""W&B and TensorBoard agree with metrics.jsonl across kills and slices, and their failures never disturb a run."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest
from harness import faults, forks
from harness.leftovers import Leftovers
from harness.runs import BIN, REPO, until
from harness.wandb_server import KEY, SilentServer, WandbServer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from multigpu_ft import ConfigError, RunConfig, launch
from multigpu_ft.launcher.api import for_this_machine
from multigpu_ft.launcher.outputs import keep_outputs
from multigpu_ft.run.run_dir import RunDir
from multigpu_ft.tracking.lineage import earlier_metrics
from multigpu_ft.tracking.tensorboard import TensorBoard, scalars
from multigpu_ft.tracking.trackers import check_trackers
from multigpu_ft.tracking.wandb import logged_steps

NOBODY = {
    "WANDB_API_KEY": "",
    "WANDB_BASE_URL": "http://127.0.0.1:9",
    "NETRC": "/dev/null",
    "HF_TOKEN": "",
}
EVERYTHING = {
    "scalars": 0,
    "histograms": 0,
    "tensors": 0,
}  # EventAccumulator otherwise keeps a sample


@pytest.fixture(scope="module", autouse=True)
def no_account():
    "Hide any W&B account of this machine from the tests."
    before = dict(os.environ)
    os.environ.update(NOBODY)
    yield
    os.environ.clear()
    os.environ.update(before)


def wandb_files(run_dir):
    return sorted(run_dir.path.glob("wandb/*run-*/*.wandb"))


def steps_in_wandb(run_dir):
    return [step for path in wandb_files(run_dir) for step in logged_steps(path)]


def cores():
    "Return W&B's service processes that these tests started."
    worker, found = os.environ.get("PYTEST_XDIST_WORKER"), []
    for process in psutil.process_iter(["name", "status"]):
        with contextlib.suppress(psutil.Error):
            if (process.info["name"] or "").startswith("wandb-core") and process.info[
                "status"
            ] != psutil.STATUS_ZOMBIE:
                found += (
                    [process.pid] if process.environ().get("PYTEST_XDIST_WORKER") == worker else []
                )
    return found


def assert_same_scalars(found, records):
    "Check that W&B's history has the steps and numbers of metrics.jsonl, each step once and in order."
    assert [h["_step"] for h in found] == [m["step"] for m in records]
    for h, m in zip(found, records, strict=True):
        assert {
            k: v
            for k, v in h.items()
            if not k.startswith("_") and not k.startswith(("gradients/", "parameters/"))
        } == scalars(m)


def assert_same_curves(folder, records):
    "Check that TensorBoard has the numbers of metrics.jsonl, in fp32."
    import numpy as np

    board = EventAccumulator(str(folder), EVERYTHING).Reload()
    expected = {}
    for m in records:
        for name, value in scalars(m).items():
            if name not in ("step", "time"):
                expected.setdefault(name, []).append(
                    (m["step"], float(np.float32(value)), m["time"])
                )
    tags = {tag.split("/", 1)[1]: tag for tag in board.Tags()["scalars"]}
    assert tags.keys() == expected.keys()
    for name, points in expected.items():
        assert [(e.step, e.value, e.wall_time) for e in board.Scalars(tags[name])] == points, name
    return board


def logged_first(runs):
    """Return the lines of metrics.jsonl that W&B has: the first of a repeated step. They differ only in their times."""
    found = {}
    for run in runs:
        found = {m["step"]: m for m in run.metrics() if m["step"] in steps_in_wandb(run)} | found
    for m in earlier_metrics(runs[-1], 10**9):
        same = found.setdefault(m["step"], m)
        assert all(
            same[name] == m[name]
            for name in ("loss", "grad_norm", "learning_rate", "samples_seen", "epoch")
        )
    return [found[step] for step in sorted(found)]


def sync(run_dir, server):
    done = subprocess.run(
        [forks.command(), "sync", str(run_dir.path), "--json"],
        env={**os.environ, **server.environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["wandb"]["uploaded"]


def start_and_kill(server, cfg, enough, victim=0, **environment):
    "Start a run, and kill a rank once `enough(run_dir)` is true."
    run_dir, agent = server.start(cfg, **environment)
    until(lambda: enough(run_dir), 60, f"{run_dir.log_file(0)}: enough steps")
    os.kill(run_dir.status()["pids"]["ranks"][victim], signal.SIGKILL)
    faults.wait_for_end(run_dir, agent)
    assert run_dir.status()["state"] != "done", "it was too fast for the test"
    return run_dir


# -- one curve ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curve(material, server, tmp_path_factory):
    "Return runs without a network: one that is killed, its resumption, and the next slice."
    root = tmp_path_factory.mktemp("curve") / "runs"
    cfg = faults.config(
        material,
        root,
        tracker="wandb,tensorboard",
        histogram_every=50,
        log_artifacts=True,
        num_epochs=60,
        save_every=20,
        end_idx=24,
    )

    def between_saves(run_dir):  # right after a save, the last line may be that of the checkpoint
        return len(steps_in_wandb(run_dir)) >= 30 and run_dir.metrics()[-1]["step"] % 20 in range(
            3, 13
        )

    killed = start_and_kill(server, cfg, between_saves)
    file, block = wandb_files(killed)[-1], 32_768
    os.truncate(
        file, file.stat().st_size // block * block
    )  # W&B writes whole blocks, so a kill leaves the first part of a record at the end
    resumed = server.finish(cfg)
    second = server.finish(cfg.replace(start_idx=24, end_idx=48, num_epochs=5))
    assert second.status()["state"] == "done", second.log_file(0).read_text()
    return [killed, resumed, second]


def test_a_kill_a_resume_and_a_slice_are_one_curve(curve):
    killed, resumed, second = curve
    lines = {run.status()["line"] for run in curve}
    records = earlier_metrics(second, 10**9)
    assert len(lines) == 1 and [m["step"] for m in records] == list(
        range(1, second.status()["step"] + 1)
    )
    assert killed.metrics()[-1]["step"] >= resumed.status()["first_step"] > 1, (
        "some steps were trained twice"
    )
    steps = [step for run in curve for step in steps_in_wandb(run)]
    assert steps == list(range(1, len(records) + 1)), "each step once, in order, without gaps"
    board = assert_same_curves(killed.path.parent / "tensorboard" / lines.pop(), records)
    assert b"| learning_rate | 0.001 |" in board.Tensors("settings")[0].tensor_proto.string_val[0]
    checkpoint = json.loads((second.checkpoints()[-1] / "progress.json").read_text())
    assert checkpoint["line"] == second.status()["line"]
    assert not cores(), "W&B's process ends with its run"
    assert all(
        "no WANDB_API_KEY" in run.status()["remarks"][0]
        and "multigpu-ft sync" in run.status()["remarks"][0]
        for run in curve[1:]
    )


def test_histograms_stand_at_the_steps_they_were_taken(curve):
    board = EventAccumulator(
        str(curve[0].path.parent / "tensorboard" / curve[0].status()["line"]), EVERYTHING
    ).Reload()
    name = "parameters/model.decoder.final_layer_norm.weight"
    found, last = board.Histograms(name), curve[-1].status()["step"]
    assert [h.step for h in found] == list(range(50, last + 1, 50)) and board.Histograms(
        name.replace("parameters", "gradients")
    )
    assert found[0].histogram_value.num == 32 == sum(found[0].histogram_value.bucket)


def test_offline_logs_are_uploaded_later_and_once(curve):
    "W&B's own client reads the files and sends them to a server that keeps them."
    server, last = WandbServer(), curve[-1]
    try:
        uploaded = sync(last, server)
        assert [name[:11] for name in uploaded if name.startswith("offline")] == ["offline-run"] * 3
        history = server.history(last.status()["line"])
        assert_same_scalars(history, logged_first(curve))
        assert (
            any("gradients/model.decoder.embed_tokens.weight" in h for h in history)
            and len(server.histories) == 1
        )
        assert sync(last, server) == [] and server.history(last.status()["line"]) == history
        config = json.loads(server.configs[last.status()["line"]])
        assert (
            config["learning_rate"]["value"] == 1e-3
            and config["decided_strategy"]["value"] == "ddp"
            and config["decided_world_size"]["value"] == 2
        )
        assert (
            server.names[last.status()["line"]] == last.name
            and server.groups[last.status()["line"]] == "model texts.jsonl"
        )
    finally:
        server.close()


def test_files_that_wandb_sync_did_not_upload_count_as_not_uploaded(
    material, server, run_root, tmp_path
):
    "Otherwise metrics.jsonl would supply the steps, but never the histograms."
    run = server.finish(
        faults.config(
            material, run_root, tracker="wandb", histogram_every=5, num_epochs=1, save_every=None
        )
    )
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif sys.orig_argv[2:4] == ['wandb', 'sync']: raise SystemExit('no core could be started')"
    )
    taking, command = WandbServer(), [BIN / "multigpu-ft", "sync", str(run.path)]
    try:
        environment = {**os.environ, **taking.environment}
        done = subprocess.run(
            command,
            env={**environment, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert (
            done.returncode == 1
            and f"has 0 of {run.status()['step']} steps: SystemExit: no core could be started"
            in done.stderr
        ), done.stderr
        assert not list(run.path.glob("wandb/*/*.synced"))
        assert sync(run, taking)[0].startswith("offline-run")
        history = taking.history(run.status()["line"])
        assert_same_scalars(history, run.metrics())
        assert any("gradients/model.decoder.embed_tokens.weight" in h for h in history)
    finally:
        taking.close()


def test_a_rejected_key_is_reported_and_nothing_counts_as_uploaded(material, server, run_root):
    run = server.finish(
        faults.config(material, run_root, tracker="wandb", num_epochs=1, save_every=None)
    )
    refusing = WandbServer()
    refusing.refuse = True
    try:
        command = [forks.command(), "sync", str(run.path)]
        done = subprocess.run(
            command,
            env={**os.environ, **refusing.environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (
            done.returncode == 1
            and "ConfigError: W&B rejected the run" in done.stderr
            and KEY not in done.stdout + done.stderr
        )
        assert not list(run.path.glob("wandb/*/*.synced"))
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "there is no WANDB_API_KEY" in done.stderr
    finally:
        refusing.close()


def test_the_curve_is_kept_with_the_run(curve, tmp_path):
    "On Kaggle the disk is lost when the session ends."
    line = curve[-1].status()["line"]
    kept, remarks = keep_outputs(curve[-1].path, tmp_path)
    assert (
        not remarks
        and list(kept.glob("wandb/offline-run-*/*.wandb"))
        and list((kept.parent / "tensorboard" / line).iterdir())
    )


def test_an_experiment_on_an_older_checkpoint_is_a_curve_of_its_own(material, server, run_root):
    cfg = faults.config(
        material, run_root, tracker="tensorboard", num_epochs=1, keep=9, save_every=6
    )
    first = server.finish(cfg)
    other = server.finish(cfg.replace(learning_rate=1e-4, resume_file=first.checkpoints()[0].name))
    lines = [run.status()["line"] for run in (first, other)]
    assert lines[0] != lines[1] and "another learning_rate" in other.status()["remarks"][0]
    for run, line in zip((first, other), lines, strict=True):
        assert [m["step"] for m in earlier_metrics(run, 100)] == list(range(1, 13))
        assert_same_curves(run_root / "tensorboard" / line, earlier_metrics(run, 100))


# -- W&B in trouble -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_online_curves_survive_slices_and_the_death_of_wandb(material, server, run_root):
    wandb = WandbServer()
    try:
        cfg = faults.config(
            material, run_root, tracker="wandb", num_epochs=2, save_every=None, end_idx=24
        )
        first = server.finish(cfg, **wandb.environment)
        line = first.status()["line"]
        assert not first.status().get("remarks")
        assert_same_scalars(wandb.history(line), first.metrics())

        longer = cfg.replace(start_idx=24, end_idx=48, num_epochs=60)
        second, agent = server.start(longer, **wandb.environment)
        until(lambda: len(second.metrics()) > 5 and cores(), 60, "W&B's process")
        os.kill(cores()[0], signal.SIGKILL)
        faults.wait_for_end(second, agent)
        assert (
            second.status()["state"] == "done"
            and len(second.metrics()) == 360
            and second.status()["line"] == line
        )
        assert "multigpu-ft sync" in second.status()["remarks"][0], second.status()
        records = earlier_metrics(second, 10**9)
        assert len(wandb.history(line)) < len(records)
        assert sync(second, wandb)[0].startswith("steps ")
        assert_same_scalars(wandb.history(line), records)
        assert sync(second, wandb) == []
        assert not cores()
    finally:
        wandb.close()


def test_the_agent_ends_no_upload(material, run_root, monkeypatch):
    "What a rank has started is ended after the rank, which has waited for W&B's service."
    wandb = WandbServer()
    try:
        for name, value in wandb.environment.items():
            monkeypatch.setenv(name, value)
        with Leftovers() as leftovers:
            run = launch(faults.config(material, run_root, tracker="wandb", num_epochs=1, nproc=1))
            assert not leftovers.now()
        assert not run.status.get("remarks"), run.status["remarks"]
        assert_same_scalars(wandb.history(run.status["line"]), run.metrics)
    finally:
        wandb.close()


def test_a_server_that_never_answers_delays_no_run(material, server, run_root):
    silent = SilentServer()
    try:
        cfg = faults.config(material, run_root, tracker="wandb", num_epochs=1, save_every=None)
        begun = time.monotonic()
        run = server.finish(cfg, **silent.environment)
        took = time.monotonic() - begun
        assert (
            run.status()["state"] == "done"
            and "does not answer within 3 s" in run.status()["remarks"][0]
        )
        assert steps_in_wandb(run) == [m["step"] for m in run.metrics()] and took < 30
    finally:
        silent.close()


def test_a_run_without_a_network_is_logged_offline(tmp_path):
    "The process has a key, and a network namespace with loopback only."
    allowed = subprocess.run(["unshare", "-rn", "true"], capture_output=True)
    if allowed.returncode:
        pytest.skip(f"needs the right to unshare: {allowed.stderr.decode()}")
    (tmp_path / "x.jsonl").write_text(
        "".join(
            json.dumps({"text": f"number {i} is followed by {i + 1}"}) + "\n" for i in range(100)
        )
    )
    up = (
        "import fcntl, socket, struct; s = socket.socket(); "
        "fcntl.ioctl(s, 0x8914, struct.pack('16sH14x', b'lo', 0x41))"
    )
    train = (
        f"{BIN}/multigpu-ft train --dataset x.jsonl --tracker wandb,tensorboard "
        "--batch-size 8 --run-root runs --json"
    )
    environment = {**os.environ, "WANDB_API_KEY": KEY, "WANDB_BASE_URL": "https://api.wandb.ai"}
    command = ["unshare", "-rn", "sh", "-c", f'{sys.executable} -c "{up}" && {train}']
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = RunDir(json.loads(done.stdout)["run"])
    assert "api.wandb.ai does not answer" in run.status()["remarks"][0]
    assert steps_in_wandb(run) == [m["step"] for m in run.metrics()] and run.metrics()
    assert_same_curves(run.path.parent / "tensorboard" / run.status()["line"], run.metrics())
    assert run.metrics()[0]["time"] - run.status()["launched"] < 60
    assert "tensorflow" not in run.log_file(0).read_text().lower() and not cores()


def test_a_missing_package_is_reported_before_anything_is_loaded(monkeypatch, material, run_root):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        ConfigError,
        match=r'wandb and tensorboard, which is not installed: pip install "multigpu_ft\[tracking\]"',
    ):
        check_trackers(RunConfig(tracker="wandb,tensorboard"))
    check_trackers(RunConfig())


def test_a_full_disk_ends_no_run_and_loses_no_point(tmp_path):
    "RLIMIT_FSIZE makes a write fail half-way, as a full disk does."
    board = TensorBoard(tmp_path, 0, {}, list)
    before, size = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        next(tmp_path.iterdir()).stat().st_size,
    )
    for step in range(1, 11):
        limited = 3 <= step <= 7
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 200 if limited else before[0], before[1]))
        try:
            board.log({"step": step, "loss": step / 2, "time": 1.7e9})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    read = EventAccumulator(str(tmp_path), EVERYTHING).Reload()
    assert [(e.step, e.value) for e in read.Scalars("train/loss")] == [
        (s, s / 2) for s in range(1, 11)
    ]


# -- histograms -----------------------------------------------------------------------------------------------------


def counted_on_each_rank(strategy_name):
    "Return, on the main rank, histograms and numpy's counts of the gathered tensors between the same edges."
    import numpy as np
    import torch
    import torch.distributed as dist

    from multigpu_ft.data.batches import collate
    from multigpu_ft.data.tokenization import Text
    from multigpu_ft.distributed.world import World
    from multigpu_ft.models.loading import load_model, load_tokenizer
    from multigpu_ft.models.loss import LossModel
    from multigpu_ft.tracking.histograms import histograms
    from multigpu_ft.training.setup import make_strategy
    from multigpu_ft.training.step import make_optimizer

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=size)
    cfg = RunConfig(strategy=strategy_name)
    strategy, _ = make_strategy(cfg, World(rank, rank, size, torch.device("cpu")), 0)
    strategy.prepare(
        LossModel(load_model(cfg, load_tokenizer(cfg))), lambda model: make_optimizer(cfg, model)
    )
    batch = collate([[Text(np.arange(12 + rank))], [Text(np.arange(30, 42 + rank))]], 0, "bucketed")
    with strategy.accumulate(last=True):
        strategy.backward(
            strategy.forward(**{k: torch.from_numpy(v) for k, v in batch.items()}, scale=1 / 22)[0]
        )
    strategy.clip_grad_norm(0.5)
    calls, reduce = [], dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.append(1), reduce(*a, **k))[1]
    found = histograms(strategy)
    dist.all_reduce = reduce
    gathered = {}
    for name, p in strategy.unwrap_model().named_parameters():
        for kind, tensor in (("gradients", p.grad), ("parameters", p.detach())):
            gathered[f"{kind}/{name}"] = (
                tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            ).numpy()
    if rank:
        assert not found
        return None
    assert found.keys() == gathered.keys()
    wrong = [
        n
        for n, h in found.items()
        if (np.histogram(gathered[n], bins=h.edges)[0] != h.counts).any()
        or h.counts.sum() != gathered[n].size
    ]
    extremes = all(
        h.edges[0] <= gathered[n].min() and gathered[n].max() <= h.edges[-1]
        for n, h in found.items()
    )
    sums = max(
        abs(h.sum - gathered[n].sum(dtype=float))
        + abs(h.squares - np.square(gathered[n], dtype=float).sum())
        for n, h in found.items()
    )
    parameters = {n: h.counts.tolist() for n, h in found.items() if n.startswith("parameters/")}
    return {
        "wrong": wrong,
        "extremes": extremes,
        "sums": float(sums),
        "collectives": len(calls),
        "parameters": parameters,
    }


@pytest.mark.slow
def test_counts_equal_numpys_however_tensors_are_spread(tmp_path):
    from multigpu_ft import launch

    found = {
        name: launch(counted_on_each_rank, name, nproc=nproc)
        for name, nproc in (("single", 1), ("ddp", 2), ("fsdp", 2))
    }
    for name, result in found.items():
        assert result["wrong"] == [] and result["extremes"] and result["sums"] < 1e-6, (
            name,
            result,
        )
        assert result["parameters"] == found["single"]["parameters"]
        assert result["collectives"] == (2 if name == "fsdp" else 0)


# -- the kernel's side ----------------------------------------------------------------------------------------------


def test_the_environment_supplies_names(monkeypatch):
    monkeypatch.setenv("RUN_NAME", "friday")
    assert (
        for_this_machine(RunConfig()).run_name == "friday"
        and for_this_machine(RunConfig(run_name="mine")).run_name == "mine"
    )
    monkeypatch.setenv("RUN_NAME", "no/path")
    with pytest.raises(ConfigError, match="names a folder"):
        for_this_machine(RunConfig())


@pytest.mark.parametrize(
    "statement", ["import multigpu_ft", "from multigpu_ft import launch", "import multigpu_ft.cli"]
)
def test_importing_the_package_imports_no_tracker(statement):
    heavy = {"wandb", "tensorboard", "tensorflow", "torch"}
    code = (
        f"import sys; {statement}; loaded = set(sys.modules) & {heavy}; assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)

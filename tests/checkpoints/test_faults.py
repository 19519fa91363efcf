"""No step is lost or repeated, whatever kills a run. The harness is faults.py; `make faults` runs it at full size."""

import itertools
import json
import subprocess
from dataclasses import asdict

import pytest
from harness import faults
from harness.runs import REPO, slow
from harness.small_disks import leave, small_disk
from hypothesis import given, settings
from hypothesis import strategies as st

from multigpu_ft import RunConfig
from multigpu_ft.checkpoints.manifest import verify_checkpoint
from multigpu_ft.checkpoints.progress import Progress, next_progress
from multigpu_ft.data.batches import epoch_steps
from multigpu_ft.data.order import SampleOrder
from multigpu_ft.data.tokenization import tokenize_texts


@pytest.fixture(scope="module")
def kills(material, server):
    return faults.Kills(material, server)


@pytest.mark.parametrize("first_seed", [0, *map(slow, range(5, 50, 5))])
def test_a_run_killed_at_any_moment_ends_as_if_undisturbed(kills, first_seed):
    "Parameters, moments, losses and the texts of each step equal the undisturbed run, to the bit."
    for seed in range(first_seed, first_seed + 5):
        kills.trial(seed)


@pytest.mark.slow
def test_a_run_killed_under_torchrun_ends_as_if_undisturbed(kills):
    faults.torchrun_trial(kills, 1)


def test_a_run_stopped_at_any_moment_loses_no_step(kills):
    asked = [kills.stop_trial(seed) for seed in range(8)]
    assert max(seconds for _, _, seconds in asked) < 30 and len({kind for kind, _, _ in asked}) == 3
    assert sum(state == "stopped" for _, state, _ in asked) >= 6, (
        "most runs were stopped before their end"
    )


def test_ranks_that_left_normally_do_not_end_the_run(kills):
    "Once all is saved, only rank 0 writes how the run ended, which may take long: an upload, or a busy machine."
    kind, state, _ = kills.stop_trial(7, delay_s=1.0)
    assert (kind, state) == ("SIGTERM to all", "stopped")


@pytest.mark.slow
def test_each_text_is_seen_once_across_ranks_strategies_and_micro_batches(material, server):
    reshapes = faults.Reshapes(material, server)
    for seed in range(20):
        reshapes.trial(seed)


def test_a_damaged_checkpoint_is_never_loaded(material, server):
    with faults.world_of_one() as world:
        damage = faults.Damage(material, server, world)
        for seed in range(100):
            damage.trial(seed, "truncated" if seed % 2 else "removed")
        for seed in range(300):
            damage.trial(seed, "flipped")


class Numbers:
    eos_token_id, pad_token_id = 1, 0

    def __call__(self, texts, max_length, **settings):
        return {"input_ids": [[int(word) for word in text.split()][:max_length] for text in texts]}


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_any_series_of_world_sizes_and_batch_sizes_visits_each_text_once(data):
    """Only the data path: two slices of two epochs, interrupted at random steps, resumed on random numbers of
    ranks and with random packings."""
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=40))
    texts = tokenize_texts(
        [" ".join([str(100 + i)] + ["5"] * (n - 1)) for i, n in enumerate(lengths)], Numbers(), 24
    )
    cut = data.draw(st.integers(0, len(lengths) - 1))
    seen, saved, last_step = [], None, 0
    for start, end in ((0, cut), (cut, len(lengths))):
        if start == end:
            continue
        part = tokenize_texts(
            [
                " ".join(map(str, texts[i].ids[:-1] if texts[i].ids[-1] == 1 else texts[i].ids))
                for i in range(start, end)
            ],
            Numbers(),
            24,
        )
        epoch_texts = {1: [], 2: []}
        done = False
        while not done:
            world_size, batch_size, accum_steps = (
                data.draw(st.integers(1, high)) for high in (4, 3, 3)
            )
            cfg = RunConfig(
                start_idx=start,
                end_idx=end,
                batch_size=batch_size,
                accum_steps=accum_steps,
                max_length=24,
                num_epochs=2,
            )
            order = SampleOrder.of(cfg, len(part), world_size, part.digest)
            now = Progress(start, end, 1, num_texts=len(part), order=asdict(order))
            if saved:
                stored = json.loads(json.dumps(asdict(saved)))
                now = next_progress(Progress.read(stored), cfg, end, order, part.lengths)
            packing = data.draw(st.sampled_from(["packed", "bucketed", "padded"]))
            order, steps_left = SampleOrder(**now.order), data.draw(st.integers(1, 8))
            ranks = [
                epoch_steps(part, order, cfg, packing, now.epoch, now.position, rank, world_size)
                for rank in range(world_size)
            ]
            for of_ranks in itertools.islice(zip(*ranks, strict=True), steps_left):
                assert (
                    len(
                        {
                            (step.position, step.targets, len(step.micro_batches))
                            for step in of_ranks
                        }
                    )
                    == 1
                ), "ranks disagree"
                ids = [
                    int(t) - 100
                    for step in of_ranks
                    for batch in step.micro_batches
                    for t in batch["input_ids"].ravel()
                    if t >= 100
                ]
                assert len(ids) == of_ranks[0].texts
                epoch_texts[now.epoch] += ids
                now.position = of_ranks[0].position
                now.step, now.slice_step = now.step + 1, now.slice_step + 1
            assert now.step > last_step
            last_step, saved = now.step, now
            done = now.epoch == 2 and now.position >= now.num_texts
        assert sorted(epoch_texts[1]) == sorted(epoch_texts[2]) == list(range(start, end))
        seen += epoch_texts[1]
    assert sorted(seen) == list(range(len(lengths)))
    assert [(s["start_idx"], s["end_idx"], s["epochs"]) for s in saved.trained()] == [
        (a, b, 2) for a, b in ((0, cut), (cut, len(lengths))) if a < b
    ]


FILL = """
import json, sys, shutil
from pathlib import Path
from harness import faults, small_disks
from multigpu_ft import RunDir
folder, material = Path(sys.argv[1]), Path(sys.argv[2])
import os, torch, torch.distributed as dist
from multigpu_ft.checkpoints.resume import load_checkpoint
from multigpu_ft.checkpoints.writer import CheckpointWriter
from multigpu_ft.training.setup import make_strategy
from multigpu_ft.models.loss import LossModel
from multigpu_ft.models.loading import load_model, load_tokenizer
from multigpu_ft.training.step import make_optimizer
from multigpu_ft.checkpoints.progress import Progress
from multigpu_ft.run.run_dir import PARTIAL
from multigpu_ft.distributed.world import World
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
world, cfg = World(0, 0, 1, torch.device("cpu")), faults.config(material, folder / "runs", strategy="single", nproc=1)
strategy, _ = make_strategy(cfg, world, 0)
strategy.prepare(LossModel(load_model(cfg, load_tokenizer(cfg))), lambda m: make_optimizer(cfg, m))
for p in strategy.model.parameters():
    p.grad = torch.ones_like(p)
strategy.optimizer.step()
run_dir = RunDir.create(cfg)
writer = CheckpointWriter(run_dir, cfg, strategy, {})
def save(step):
    writer.start(Progress(0, 48, 1, step, step, step, step), end_of_epoch=False)
    return writer.wait()
first = save(1)
real, outcomes, needed = shutil.disk_usage, [], first.bytes
for free in range(0, first.bytes + 40960, 4096):
    small_disks.leave(folder, free)
    for looks in (True, False):  # without looking first, the disk is full in the middle of the write
        if not looks:
            shutil.disk_usage = lambda path: type(real(path))(0, 0, 2**40)
        found = save(2)
        shutil.disk_usage = real
        outcomes.append([free, looks, str(found.error) if found.error else None])
        names = [p.name for p in (run_dir.path / "checkpoints").iterdir()]
        assert not any(name.endswith(PARTIAL) for name in names), names
        assert load_checkpoint(first.path, strategy).step == 1
        if not found.error:
            assert load_checkpoint(found.path, strategy).step == 2
            shutil.rmtree(found.path)
print(json.dumps({"bytes": first.bytes, "outcomes": outcomes}))
sys.stdout.flush(); os._exit(0)
"""


def test_a_disk_that_fills_up_at_any_write_costs_only_that_checkpoint(material):
    "With each page less room the save fails, reports the sizes and leaves nothing, and the older checkpoint loads."
    with small_disk("2m") as folder:
        done = subprocess.run(
            [faults.sys.executable, "-c", FILL, folder, material],
            capture_output=True,
            text=True,
            cwd=REPO / "tests",
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    failed = [error for free, _, error in report["outcomes"] if error]
    assert len(failed) > 100 and any(not error for *_, error in report["outcomes"]), len(failed)
    for error in failed:
        assert f"It needs {report['bytes']:,} bytes" in error and "bytes free" in error
        assert "Older checkpoints are intact" in error
    blind = [error for free, looks, error in report["outcomes"] if error and not looks]
    assert len(blind) > 50 and any("No space left" in error for error in blind), blind[:3]


@pytest.mark.parametrize("save_failure", ["continue", "stop"])
def test_training_continues_or_stops_when_the_disk_is_full(material, server, save_failure):
    with small_disk("4m") as folder:
        cfg = faults.config(
            material, folder / "runs", num_epochs=6, save_failure=save_failure, keep=1
        )
        run_dir, agent = server.start(cfg)
        while not run_dir.checkpoints():
            faults.time.sleep(0.005)
        leave(folder, 0)
        if save_failure == "continue":
            while (
                not any("Training continues" in r for r in run_dir.status().get("remarks", []))
                and "Training continues" not in run_dir.log_file(0).read_text()
            ):
                assert not faults.gone(agent)
                faults.time.sleep(0.02)
            (folder / "filler").unlink()
        faults.wait_for_end(run_dir, agent)
        verify_checkpoint(run_dir.checkpoints()[0])
        if save_failure == "continue":
            assert run_dir.status()["state"] == "done" and run_dir.checkpoints()[0].name.endswith(
                "epoch-6"
            )
            assert [m["step"] for m in run_dir.metrics()] == list(range(1, 73)), (
                "lines without room on the disk are written later"
            )
        else:
            (folder / "filler").unlink()
            error = "".join(path.read_text() for path in run_dir.path.glob("logs/*.log"))
            assert "could not be written" in error and "Older checkpoints are intact" in error


def test_the_harness_notices_differences(kills):
    "The harness notices two sequences that differ in one text; otherwise the tests above would prove nothing."
    expected = kills.expected[0]
    wrong = {**expected, "texts": [*expected["texts"][:-1], expected["texts"][0]]}
    with pytest.raises(AssertionError, match="texts differ"):
        faults.assert_exact(wrong, expected)
    with pytest.raises(AssertionError, match="repeated"):
        faults.assert_exact(wrong, wrong)
    with pytest.raises(AssertionError, match="parameters"):
        faults.assert_exact({**expected, "state": {}}, expected)

"""Names that become folders, and the modes of folders that hold a user's data."""

import os
from types import SimpleNamespace

import pytest
import torch

from multigpu_ft import ConfigError, DataError, RunConfig, RunDir
from multigpu_ft.checkpoints import staging
from multigpu_ft.evaluation.api import _make_folder
from multigpu_ft.generation.api import _jsonl_path, _open
from multigpu_ft.hub.repository import is_name
from multigpu_ft.launcher import slices
from multigpu_ft.launcher.outputs import keep_outputs
from multigpu_ft.run import cache
from multigpu_ft.run.run_dir import short_name
from multigpu_ft.tracking.lineage import choose_line
from multigpu_ft.tracking.tensorboard import TensorBoard

BAD = (
    "-rf",
    "--force",
    "..",
    ".",
    "a/b",
    "a\nb",
    "a\x1b[2J",
    "\u202egnp",
    "a b",
    "$(id)",
    "x" * 300,
)


@pytest.mark.parametrize("name", BAD)
def test_a_name_that_is_no_plain_folder_is_refused_in_one_sentence(tmp_path, name):
    for kept in ("run_name", "hf_repo"):
        value = name if kept == "run_name" else f"user/{name}"
        if kept == "hf_repo" and len(name) > 200:
            continue  # the Hub says so before the run
        with pytest.raises(ConfigError, match=kept) as refused:
            RunConfig(run_root=str(tmp_path), **{kept: value})
        assert str(refused.value).count("\n") == 0
    assert not is_name(name), "nor is it a checkpoint of a repository"
    if name not in ("a b", "..", ".", "a/b", "$(id)"):
        with pytest.raises(ConfigError, match="no '-' at the beginning"):
            _jsonl_path("output", tmp_path / f"{name}.jsonl")


@pytest.mark.parametrize("model", ["/models/-rf", "/models/..", "x/.hidden", "m" * 300])
def test_a_models_name_makes_a_plain_folder(tmp_path, model):
    cfg = RunConfig(run_root=str(tmp_path), model=model, start_idx=10**9)
    for _ in range(2):
        made = RunDir.create(cfg, 2 * 10**9)
        assert made.config().run_name == made.name and made.name[0] not in "-."
    assert is_name(f"{short_name(model)}_0-100-step-3"), (
        "its checkpoints can be resumed from the Hub"
    )


def test_a_long_name_that_is_taken_gets_its_number_and_can_be_read(tmp_path):
    cfg = RunConfig(run_root=str(tmp_path), run_name="x" * 120)
    made = [RunDir.create(cfg) for _ in range(3)]
    assert [run.config().run_name for run in made] == [run.name for run in made]
    assert len({run.name for run in made}) == 3 and made[2].name.endswith("x-3")


@pytest.mark.parametrize(
    "line", ["../../planted", "/planted", "..", ".", "a/b", "a\n", 5, [], None]
)
def test_a_checkpoint_of_others_names_no_other_folder_for_trackers(tmp_path, line):
    run_dir = RunDir.create(RunConfig(run_root=str(tmp_path / "runs")))
    checkpoint = tmp_path / "runs" / "hub--a--b" / "checkpoints" / "x"
    asked = (run_dir, run_dir.config(), checkpoint)
    found, remark = choose_line(*asked, line, 3, [0, 8], 2)
    assert found.startswith(run_dir.name) and remark is None
    assert choose_line(*asked, "opt-tiny_0-8-3f9a1c", 3, [0, 8], 2)[0] == "opt-tiny_0-8-3f9a1c"


# -- modes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path):
    return path.stat().st_mode & 0o777


def test_folders_with_a_users_data_are_the_users_alone(tmp_path, umask, monkeypatch):
    root = tmp_path / "runs"
    run_dir = RunDir.create(RunConfig(run_root=str(root)))
    common = RunDir.common(RunConfig(run_root=str(root), run_name="common"))
    node = common.of_node(1)
    answers = tmp_path / "new" / "answers.jsonl.run"
    job = SimpleNamespace(output="", write=lambda run_dir: None)
    _open(answers, RunConfig(), job, None)
    board = root / "tensorboard" / "line"
    TensorBoard(board, 0, {}, lambda: [])
    kept, remarks = keep_outputs(run_dir.path, tmp_path / "out")
    assert not remarks
    report = _make_folder(tmp_path / "report")
    monkeypatch.setattr(slices, "_run_one", lambda *_: 1 / 0)
    cfg = RunConfig(run_root=str(root), end_idx=4, slice_size=2)
    with pytest.raises(ZeroDivisionError):
        slices.run_slices(cfg)
    series = slices.Slices(cfg).folder
    private = (run_dir.path, common.path, node.path, answers, board, kept, report, series)
    assert {str(path): mode(path) for path in private} == {str(path): 0o700 for path in private}
    assert mode(root) == 0o777 & ~umask, "the root has what the user's umask says"


def test_a_folder_of_the_users_keeps_its_mode(tmp_path):
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o2770)
    run_dir = RunDir.create(RunConfig(run_root=str(root), run_name="x"))
    assert root.stat().st_mode & 0o7777 == 0o2770 and mode(run_dir.path) == 0o700
    run_dir.path.chmod(0o750)
    assert mode(RunDir.common(RunConfig(run_root=str(root), run_name="x")).path) == 0o750


def test_a_checkpoints_files_follow_the_umask_and_need_no_modes(tmp_path, umask, monkeypatch):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    tensors = {"x": staging.StoredTensor.of(torch.zeros(2))}
    staging.write_tensors(folder / "rank0.safetensors", tensors, {})
    assert mode(folder / "rank0.safetensors") == 0o666 & ~umask

    def refuse(path, mode, **_):
        raise PermissionError("a mount without modes")

    monkeypatch.setattr(os, "chmod", refuse)
    staging.write_tensors(folder / "rank1.safetensors", tensors, {})
    assert (folder / "rank1.safetensors").exists()


def test_a_cache_in_the_temporary_folder_is_no_other_users(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache.os, "access", lambda path, kind: False)
    made = cache.cache_dir()
    taken = made.parent
    assert taken.parent == tmp_path and mode(taken) == 0o700 and cache.cache_dir() == made
    taken.rename(tmp_path / "elsewhere")
    taken.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="XDG_CACHE_HOME"):
        cache.cache_dir()
    if os.geteuid() == 0:
        taken.unlink()
        taken.mkdir()
        os.chown(taken, 65534, 65534)
        with pytest.raises(DataError, match="XDG_CACHE_HOME"):
            cache.cache_dir()

"""What another user of the machine tries: each attack worked once, and SECURITY.md promises that it no longer does."""

import multiprocessing
import os
import shutil
import stat
import tempfile
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from harness.runs import running

from multigpu_ft import ConfigError, DataError, RunConfig, evaluate, generate, launch
from multigpu_ft.launcher import agent
from multigpu_ft.run.cache import cache_dir

STRANGER = 65534
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root to become another user of the machine"
)


def as_stranger(attack, *arguments, seconds=60):
    """Run `attack(*arguments)` as another user of this machine, and return what it returns.

    One that takes longer than `seconds` gets no answer and returns None."""
    # a fork, because that user may be unable to read this interpreter
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def become_and_run():
        os.setgroups([])
        os.setgid(STRANGER)
        os.setuid(STRANGER)
        try:
            theirs.send(attack(*arguments))
        except Exception as error:
            theirs.send(error)

    process = context.Process(target=become_and_run)
    process.start()
    try:
        return ours.recv() if ours.poll(seconds) else None
    finally:
        process.kill()
        process.join()


def _take_a_seat(port):
    "Ask `port` for torch's key-value store, and write to it."
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=1))
    store.set("default_pg/0//cpu//0/rank_1", "mine")
    return "taken"


def _listening(pids):
    found = set()
    for pid in pids:
        try:
            found |= {
                c.laddr.port
                for c in psutil.Process(pid).net_connections("tcp")
                if c.status == psutil.CONN_LISTEN
            }
        except psutil.NoSuchProcess:
            pass
    return sorted(found)


def _read(folder):
    "Return what a stranger can list or read in `folder`."
    found, within = [], []
    with suppress(PermissionError):
        within = sorted(Path(folder).rglob("*"))
    for path in [folder, *within]:
        try:
            os.listdir(path) if Path(path).is_dir() else Path(path).read_bytes()
            found.append(str(path))
        except OSError:
            pass
    return found


def test_there_is_no_seat_to_take_in_a_run_on_one_machine(tmp_path):
    "Its ranks meet in a file that only their user can reach, not at a port of the loopback interface."
    run = launch(RunConfig(run_root=str(tmp_path), num_epochs=900, nproc=2), wait=False)
    try:
        running(tmp_path, steps=1)
        pids = run.status["pids"]
        guard = psutil.Process(pids["agent"])
        (torchrun,) = guard.children()
        (folder,) = Path(tempfile.gettempdir()).glob(f"multigpu_ft-store-{torchrun.pid}-*")
        store = folder / "store"
        ports = _listening([guard.pid, *(p.pid for p in guard.children(recursive=True))])
        assert "taken" not in [as_stranger(_take_a_seat, port, seconds=5) for port in ports]
        assert run.state == "running", "strangers don't end it either"
        assert as_stranger(_read, store.parent) == [] and store.exists()
    finally:
        run.kill()
    agent._sweep_stores()
    assert not store.parent.exists(), "what a killed agent left, the next one removes"


@pytest.fixture
def reachable():
    "Return a folder that every user can list, unlike those that pytest makes."
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_what_a_run_leaves_is_its_users_alone(reachable, umask):
    root = reachable / "runs"
    rows = reachable / "rows.jsonl"
    rows.write_text('{"question": "Why?"}\n')
    cfg = RunConfig(
        run_root=str(root),
        end_idx=16,
        eval_start_idx=16,
        eval_end_idx=24,
        nproc=1,
        tracker="tensorboard",
    )
    before = os.umask(umask)
    try:
        run = launch(cfg)
        evaluate(run, nproc=1, folder=reachable / "report")
        made = generate(
            run, dataset=str(rows), output=reachable / "answers.jsonl", nproc=1, max_new_tokens=3
        )
    finally:
        os.umask(before)
    assert (run.state, made.state) == ("done", "done")
    for folder in (run.dir.path, made.run.dir.path, reachable / "report"):
        assert as_stranger(_read, folder) == []
    # the root has the user's own mode: its names can be read, but no run
    seen = as_stranger(_read, root)
    boards = [str(root / "tensorboard")]
    assert seen == ([str(root), *boards] if umask == 0o022 else [])
    left = [root, made.run.dir.path, reachable / "report"]
    for path in (found for folder in left for found in [folder, *folder.rglob("*")]):
        assert not stat.S_IMODE(path.stat().st_mode) & umask, f"{path} is wider than the umask"


@pytest.fixture
def shared_tmp(monkeypatch):
    "Return a folder that is to everyone what /tmp is, and that this process takes for it."
    # not in pytest's folder, which the start of another pytest closes to others
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def _plant(kind, started):
    "Put what looks like the directory of a call, or of an agent that has ended, into /tmp."
    folder = Path(tempfile.mkdtemp(prefix=started))
    folder.chmod(0o755)
    status = folder / "status.json"
    if kind == "garbage":
        status.write_text('{"pids": ')
        status.chmod(0o644)
    else:
        os.mkfifo(status, 0o666)
    if kind == "link":
        away = folder.rename(folder.with_name(f"away-{folder.name}"))
        folder.symlink_to(away)
        return [str(away), str(folder)]
    return [str(folder)]


@pytest.fixture
def planted(request):
    paths = [Path(path) for path in as_stranger(_plant, *request.param)]
    yield paths
    for path in reversed(paths):
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


CALLS = [(kind, "multigpu_ft-call-") for kind in ("garbage", "fifo", "link")]


@pytest.mark.parametrize("planted", CALLS, indirect=True, ids=lambda param: param[0])
def test_a_strangers_folder_in_tmp_neither_breaks_nor_freezes_a_call(planted):
    done = []
    call = threading.Thread(target=lambda: done.append(launch(os.getpid, nproc=1)), daemon=True)
    call.start()
    call.join(90)
    assert done and all(path.exists() for path in planted)


@pytest.mark.parametrize("planted", [("garbage", f"{agent._STORES}99999999-")], indirect=True)
def test_only_own_stores_are_swept(planted):
    agent._sweep_stores()
    assert planted[0].exists(), "root could remove it"


def _listed(path):
    return sorted(p.name for p in path.rglob("*"))


def test_a_cache_in_tmp_is_never_in_a_strangers_folder(shared_tmp, monkeypatch):
    "A user without a home that can be written has it in /tmp, where another may have made it first."
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/none")

    def cached():
        return str(cache_dir())

    cache = Path(as_stranger(cached))
    own = shared_tmp / f"multigpu_ft-{STRANGER}"
    assert cache.parent == own and own.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(own)
    for name in ("multigpu_ft", own.name):  # root is the stranger of that user
        (shared_tmp / name).mkdir()
        (shared_tmp / name).chmod(0o777)
    refused = as_stranger(cached)
    assert isinstance(refused, DataError) and f"{own} can't either, or is another" in str(refused)
    assert _listed(shared_tmp) == ["multigpu_ft", own.name]


def test_compiled_code_of_a_stranger_is_not_run(shared_tmp):
    from multigpu_ft.models.loading import load_model, load_tokenizer
    from multigpu_ft.training.setup import with_loss

    def compiled():
        return with_loss(cfg, model, None)

    cfg = RunConfig(compile=True)
    model = load_model(cfg, load_tokenizer(cfg))
    compiled()
    (own,) = shared_tmp.glob("torchinductor_*")
    os.chown(own, STRANGER, STRANGER)
    with pytest.raises(ConfigError, match="which is not a folder of yours; set TMPDIR"):
        compiled()

"""What another user of the machine tries: each attack worked once, and SECURITY.md promises that it no longer does."""

import multiprocessing
import os
import stat
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from harness.runs import running

from multigpu_ft import RunConfig, launch
from multigpu_ft.launcher import agent

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
    found = []
    for path in [folder, *sorted(Path(folder).rglob("*"))]:
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
        (store,) = {
            Path(psutil.Process(pid).environ()["MULTIGPU_FT_STORE"]) for pid in pids["ranks"]
        }
        guard = psutil.Process(pids["agent"])
        ports = _listening([guard.pid, *(p.pid for p in guard.children(recursive=True))])
        assert "taken" not in [as_stranger(_take_a_seat, port, seconds=5) for port in ports]
        assert run.state == "running", "strangers don't end it either"
        assert as_stranger(_read, store.parent) == [] and store.exists()
    finally:
        run.kill()
    agent._sweep_stores()
    assert not store.parent.exists(), "what a killed agent left, the next one removes"


def test_what_a_run_leaves_is_its_users_alone(tmp_path):
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        run = launch(RunConfig(run_root=str(tmp_path / "runs"), end_idx=16, nproc=1))
    finally:
        os.umask(before)
    assert run.dir.path.stat().st_mode & 0o777 == 0o700
    parents = [p for p in tmp_path.parents if p.stat().st_uid == os.getuid()]
    modes = {p: p.stat().st_mode for p in parents if p != Path("/")}
    try:
        for path in modes:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
        assert as_stranger(_read, run.dir.path) == []
    finally:
        for path, mode in modes.items():
            path.chmod(stat.S_IMODE(mode))


def _plant(kind):
    "Put what looks like the directory of a call into /tmp."
    folder = Path(tempfile.mkdtemp(prefix="multigpu_ft-call-"))
    folder.chmod(0o755)
    if kind == "garbage":
        (folder / "status.json").write_text('{"pids": ')
        (folder / "status.json").chmod(0o644)
    else:
        os.mkfifo(folder / "status.json", 0o666)
    return str(folder)


@pytest.mark.parametrize("kind", ["garbage", "fifo"])
def test_a_strangers_folder_in_tmp_neither_breaks_nor_freezes_a_call(kind):
    planted = Path(as_stranger(_plant, kind))
    try:
        done = []
        call = threading.Thread(target=lambda: done.append(launch(os.getpid, nproc=1)), daemon=True)
        call.start()
        call.join(90)
        assert done and planted.exists()
    finally:
        for path in planted.iterdir():
            path.unlink()
        planted.rmdir()

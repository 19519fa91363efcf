"""Ranks forked by the fork server: the same as after a cold start, and gone with their kernel."""

import bisect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from harness import forks
from harness.notebooks import Kernel
from harness.runs import until

from multigpu_ft import ConfigError, RunConfig, RunDir, RunFailed, doctor, launch
from multigpu_ft.run import fork_server, warm_start
from multigpu_ft.run.processes import is_there

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux to fork")
SERVER = "multigpu_ft.run.fork_server"


@pytest.fixture(autouse=True, scope="module")
def own_server():
    "Have this process start a fork server of its own, as a user's kernel does, instead of a fork."
    before, warm_start._Client = warm_start._Client, forks.COLD_CLIENT
    started, warm_start._starts = warm_start._starts, warm_start._Starts()
    yield
    if mine := warm_start._starts.running():
        mine.close()
    warm_start._Client, warm_start._starts = before, started


def describe():
    "Return what a rank has of its surroundings."
    import resource
    import threading

    import numpy
    import torch

    limits = [n for n in dir(resource) if n.startswith("RLIMIT_")]
    umask = os.umask(0)
    return {
        "environment": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "umask": umask,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in limits},
        "signals": {n: str(signal.getsignal(n)) for n in sorted(signal.valid_signals()) if n < 32},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "streams": [
            (s.encoding, s.errors, s.write_through, s.fileno(), type(s.buffer).__name__, s.mode)
            for s in (sys.stdout, sys.stderr)
        ],
        "input": os.readlink("/proc/self/fd/0"),
        "torch": torch.get_num_threads(),
        "blas": _threads_of(lambda: numpy.ones((600, 600)) @ numpy.ones((600, 600))),
        "main": threading.current_thread() is threading.main_thread(),
        "fork of CUDA": torch.cuda._is_in_bad_fork(),
        "title": [w for w in Path("/proc/self/cmdline").read_text().split("\0") if w],
        "daemon": threading.active_count(),
    }


def _threads_of(work):
    work()
    return len(os.listdir("/proc/self/task"))


def same_words(found):
    "Return `found` without what differs between any two launches."
    text = json.dumps(found, sort_keys=True)
    for varying in (*found["argv"][1:], found["environment"]["MASTER_PORT"]):
        text = text.replace(varying, "...")
    found = json.loads(text)
    for name in ("MULTIGPU_FT_AGENT_PID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        assert found["environment"].pop(name)
    return found


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_forked_rank_is_what_a_new_process_would_have_been(tmp_path, monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("OF_THIS_TEST", "set after the server has started")
    launch(len, "ab", nproc=1)
    monkeypatch.chdir(tmp_path)
    before = os.umask(0o027)
    try:
        warm, cold = launch(describe, nproc=1), launch(describe, nproc=1, warm=False)
    finally:
        os.umask(before)
    warm, cold = same_words(warm), same_words(cold)
    # scipy, which the server has imported too, has threads of its own
    assert warm.pop("blas") >= cold.pop("blas") >= int(threads)
    for name in cold:
        assert warm[name] == cold[name], name
    assert warm["umask"] == 0o027 and warm["folder"] == str(tmp_path)


def numbers():
    import random
    import uuid

    import numpy
    import torch

    return random.random(), numpy.random.rand(), str(uuid.uuid4()), torch.rand(1).item()


def test_forks_have_random_numbers_of_their_own():
    first, second = (launch(numbers, nproc=1) for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


def agent_log(run):
    return run.dir.log_file("agent").read_text()


def losses(run):
    lines = (run.dir.path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_warm_and_cold_runs_have_the_same_losses_and_logs(tmp_path):
    cfg = RunConfig.preset("tiny").replace(run_root=str(tmp_path), end_idx=48, resume_file="none")
    warm = launch(cfg.replace(nproc=2, run_name="warm"))
    cold = launch(cfg.replace(nproc=2, run_name="cold"), warm=False)
    assert losses(warm) == losses(cold) and len(losses(warm)) > 3
    assert agent_log(warm) == agent_log(cold) == ""
    for rank in (0, 1):
        first, second = (run.logs(rank).splitlines()[0].split(", pid ") for run in (warm, cold))
        assert first[0] == second[0]


def test_a_changed_variable_makes_one_start_cold_and_the_log_says_which(tmp_path, monkeypatch):
    launch(len, "ab", nproc=1)
    cfg = RunConfig.preset("tiny").replace(run_root=str(tmp_path), end_idx=16, resume_file="none")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    before = warm_start.server_process()
    first = launch(cfg.replace(run_name="first"))
    assert (
        agent_log(first)
        == "cold start: TRANSFORMERS_VERBOSITY has changed since the fork server started\n"
    )
    second = launch(cfg.replace(run_name="second"))
    assert agent_log(second) == "" and second.state == "done"
    after = warm_start.server_process()
    assert after and after != before
    until(lambda: not is_there(before), 5, "the end of the server that is of no more use")


@pytest.mark.slow
def test_a_file_that_hides_a_module_makes_a_start_cold(tmp_path, monkeypatch):
    launch(len, "ab", nproc=1)
    shutil.copy(bisect.__file__, tmp_path)
    monkeypatch.chdir(tmp_path)
    cfg = RunConfig.preset("tiny").replace(run_root=str(tmp_path), end_idx=16, resume_file="none")
    run = launch(cfg)
    hides = f"{tmp_path}/bisect.py hides a module that the fork server has imported"
    assert agent_log(run) == f"cold start: {hides}\n" and run.state == "done"


def test_what_was_imported_is_compared_with_what_is_there(tmp_path):
    (tmp_path / "mine.py").write_text("number = 1\n")
    imported = fork_server.Imported.now(dict(os.environ), time.time_ns())
    imported.files[str(tmp_path / "mine.py")] = fork_server._stamp(str(tmp_path / "mine.py"))
    here = (dict(os.environ), imported.folder)
    assert imported.difference(*here) is None
    (tmp_path / "mine.py").write_text("number = 12\n")
    assert f"{tmp_path}/mine.py has changed" in imported.difference(*here)
    (tmp_path / "mine.py").unlink()
    assert f"{tmp_path}/mine.py has changed" in imported.difference(*here)
    earlier = fork_server.Imported.now(dict(os.environ), 0)
    assert "has changed" in earlier.difference(*here), "what changed while it was imported"


def asked(tmp_path, code, module):
    "Return what a server that imports a module with this `code` answers to a request."
    (tmp_path / f"{module}.py").write_text(code)
    ours, theirs = socket.socketpair()
    request = fork_server.request_for("json.tool", ["--help"], dict(os.environ))
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", SERVER, str(theirs.fileno()), str(os.getpid()), "0"]
        + [module, fork_server.PADDING],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        pass_fds=[theirs.fileno()],
        cwd=Path(warm_start.__file__).parents[2],
    )
    control, far = socket.socketpair()
    with open(tmp_path / "request.json", "w+") as told, open(os.devnull, "r+b") as nothing:
        request["environment"]["PYTHONPATH"] = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
        json.dump({**request, "stage": 1, "keep": []}, told)
        told.seek(0)
        files = [told.fileno(), far.fileno(), *[nothing.fileno()] * 3]
        socket.send_fds(ours, [b"?"], files)
    far.close()
    answer = json.loads(control.makefile().readline())
    for end in (ours, theirs):
        end.close()
    return answer, control, server


def test_a_server_whose_forks_would_be_something_else_is_not_forked(tmp_path):
    threads = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    answer, _, server = asked(tmp_path, threads, "starts_a_thread")
    server.wait(10)
    assert answer == {
        "refused": "a module has started threads or processes when it was imported",
        "forever": True,
    }
    cuda = "import torch\ntorch.cuda._initialized = True\n"
    answer, _, server = asked(tmp_path, cuda, "uses_cuda")
    server.wait(10)
    assert answer["refused"] == "a module has used CUDA when it was imported"
    answer, _, server = asked(tmp_path, "import no_such_module\n", "broken")
    server.wait(10)
    assert (
        answer["forever"] and "broken can't be imported: ModuleNotFoundError" in answer["refused"]
    )
    (tmp_path / "sitecustomize.py").write_text("")
    answer, _, server = asked(tmp_path, "import torch\n", "harmless")
    server.wait(10)
    assert f"Python runs {tmp_path}/sitecustomize.py in each process" in answer["refused"]


def test_a_fork_that_its_kernel_did_not_wait_for_ends(tmp_path):
    answer, control, server = asked(tmp_path, "import torch\n", "harmless")
    child = psutil.Process(answer["pid"])
    assert is_there(child)
    control.close()
    until(lambda: not is_there(child), 5, "the end of the fork")
    server.wait(10)


KERNEL = """
import time
from multigpu_ft import RunConfig, launch
from multigpu_ft.run.warm_start import server_process, warm_up
launch(len, "ab", nproc=1)
print(server_process().pid, flush=True)
{last}
"""


@pytest.mark.parametrize("last", ["time.sleep(100)", "import os\nos.fork()\ntime.sleep(100)", ""])
def test_the_server_ends_with_its_kernel(tmp_path, last):
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL.format(last=last)], stdout=subprocess.PIPE, text=True
    )
    server = psutil.Process(int(kernel.stdout.readline()))
    if last:
        children = psutil.Process(kernel.pid).children()
        begun = time.monotonic()
        kernel.kill()
    kernel.wait(30)
    until(lambda: not server.is_running(), 5, "the end of the server")
    if last:
        print(f"{time.monotonic() - begun:.2f} s")
        for child in filter(is_there, children):
            child.kill()


def test_a_run_outlives_its_kernel_and_server_if_it_may(tmp_path):
    code = (
        "from multigpu_ft import RunConfig, launch\n"
        f"cfg = RunConfig.preset('tiny').replace(run_root={str(tmp_path)!r}, end_idx=48, nproc=1)\n"
        "launch(cfg.replace(run_name='before', end_idx=16))\n"
        "launch(cfg.replace(run_name='after', resume_file='none'), detach=True)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    status = tmp_path / "after" / "status.json"
    until(lambda: json.loads(status.read_text())["state"] == "done", 60, "the run's end")
    assert not RunDir(tmp_path / "after").log_file("agent").read_text().startswith("cold start")


def test_a_launch_that_returns_at_once_does_not_wait_for_the_server(tmp_path, monkeypatch):
    starts = warm_start._Starts()
    monkeypatch.setattr(warm_start, "_starts", starts)
    cfg = RunConfig.preset("tiny").replace(run_root=str(tmp_path), end_idx=16, nproc=1)
    first = launch(cfg, wait=False)
    assert not starts.running().is_ready(2), "it was waited for"
    log = first.dir.log_file("agent").read_text()
    assert log.startswith("cold start: the fork server is still importing, and this start was not")
    assert first.wait().state == "done"
    until(lambda: starts.running().is_ready(2), 60, "the end of the imports")
    second = launch(cfg.replace(resume_file="none"), wait=False).wait()
    assert not second.dir.log_file("agent").read_text().startswith("cold start")
    starts.running().close()


def test_a_second_thread_may_launch_while_the_first_waits():
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda text: launch(len, text, nproc=1), ["a", "bc", "def"])) == [
            1,
            2,
            3,
        ]


def test_exit_codes_and_signals_of_forks_are_known(tmp_path):
    def ends(how):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)

    for how, text in (("kill", "SIGKILL"), ("exit", "exit code 7")):
        with pytest.raises(RunFailed, match=text):
            launch(ends, how, nproc=1)


def test_the_server_imports_more_while_something_runs():
    "What it has forked itself is no reason to refuse."

    def sleep():
        time.sleep(6)
        return 3

    with ThreadPoolExecutor(1) as pool:
        sleeping = pool.submit(launch, sleep, nproc=1)
        until(lambda: warm_start.server_process(), 60, "a server")
        time.sleep(1.5)
        warm_start.warm_up()
        with open(os.devnull, "w") as nothing, tempfile.TemporaryFile("w+") as errors:
            process = warm_start.start_process("json.tool", ["--help"], nothing, errors=errors)
            errors.seek(0)
            assert process.wait() == 0 and errors.read() == ""
            assert isinstance(process, warm_start.ForkedProcess)
        assert sleeping.result() == 3


def test_two_threads_may_wait_for_one_fork():
    with open(os.devnull, "w") as nothing, ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            process = warm_start.start_process("json.tool", ["--help"], nothing)
            assert list(pool.map(lambda _, p=process: p.wait(30), range(8))) == [0] * 8


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("MULTIGPU_FT_WARM", "0")
    assert warm_start.why_cold() == "MULTIGPU_FT_WARM=0 is set"
    (row,) = [row for row in doctor(bandwidth=False).rows if row.name == "warm starts"]
    assert row.state == "warn" and "MULTIGPU_FT_WARM=0" in row.found
    with open(os.devnull, "w") as nothing:
        process = warm_start.start_process("json.tool", ["--help"], nothing)
    assert isinstance(process, subprocess.Popen) and process.wait() == 0
    with pytest.raises(ConfigError):
        launch("no such script.py", nproc=1)


def test_the_server_is_small_and_has_one_thread():
    launch(len, "ab", nproc=1)
    warm_start.warm_up()
    server = warm_start.server_process()
    maps = server.memory_maps
    until(lambda: any("safetensors" in m.path for m in maps()), 60, "an imported transformers")
    with open(os.devnull, "w") as nothing:
        warm_start.start_process("json.tool", ["--help"], nothing).wait()
    held = server.memory_info().rss / 1e6
    assert server.num_threads() == 1 and held < 430, held
    (row,) = [row for row in doctor(bandwidth=False).rows if row.name == "warm starts"]
    assert row.state == "ok" and f"pid {server.pid}" in row.found


def test_a_form_that_is_shown_warms_it_up(tmp_path):
    kernel = Kernel(tmp_path, {})
    try:
        kernel.run(
            "from multigpu_ft import form\nfrom multigpu_ft.run.warm_start import server_process\nform()"
        )
        assert "fork_server" in kernel.run("print(server_process().cmdline())")
    finally:
        kernel.shutdown()

"""Kernels and commands that tests start, forked from processes that have imported what those import.

Otherwise each test with a kernel would take 8 seconds more: imports of the kernel, and of the fork server that its
first launch starts. The package's own check decides whether a fork is what a cold start would be. If a variable that
libraries read at import differs, as with a fault in a test's `sitecustomize.py`, the start is cold."""

import atexit
import fcntl
import functools
import json
import os
import runpy
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from multigpu_ft.run import warm_start
from multigpu_ft.run.fork_server import PADDING, changed_variable, request_for
from multigpu_ft.run.warm_start import Cold, ForkedProcess, environment_here

COLD_CLIENT = warm_start._Client  # whose fork server imports by itself
_SERVERS, _RANKS = "multigpu_ft.run.fork_server", warm_start._MODULES
# ipywidgets and tqdm look for a kernel when they are imported, and papermill starts a thread, so they are not here
MODULES = {
    "kernel": (
        *("ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.zmqshell"),
        *("multigpu_ft.launcher.api", "multigpu_ft.launcher.slices", "multigpu_ft.display.plots"),
        *("matplotlib.figure", "matplotlib.ticker", "matplotlib.backends.backend_agg"),
    ),
    "command": ("multigpu_ft.cli", "multigpu_ft.launcher.api"),
    "fork server": (*_RANKS, "transformers.models.opt.modeling_opt"),
}
_IN_KERNELS = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
_AT_START = "TEST_AT_START"
# the folder of caches: the package looks it up when needed, and what is imported keeps nothing there that tests see
_SET_LATER, _LATE = "TEST_SET_LATER", ("XDG_CACHE_HOME",)
_clean: dict[str, str] = {}  # this process' environment before the first test
_clean_here: dict[str, str] = {}  # and the one that the package would have given its fork server
_OWN_FILE = 900  # the number of the connection to the fork servers' server, above those that a fork may be given


class _Server(COLD_CLIENT):
    "A server of this process that forks processes of one `kind`."

    def __init__(self, kind, keep=()):
        self._connection, theirs = socket.socketpair()
        clean, here = _clean or os.environ, _clean_here or environment_here()
        more = _IN_KERNELS if kind == "kernel" else {}
        self.environment = {**(here if kind == "fork server" else clean), **more}
        number = str(theirs.fileno())
        modules = ",".join(MODULES[kind])
        tests = str(Path(__file__).parents[1])
        source = f"import sys; sys.path.append({tests!r}); from harness import forks; forks.serve()"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-c", source),
                *(number, str(os.getpid()), "0", modules, ",".join(map(str, keep)), PADDING),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self.environment,
            pass_fds=[theirs.fileno(), *keep],
            start_new_session=True,
            cwd="/",  # so that the package is found where it is found from any other folder
        )
        theirs.close()
        self.pid, self._stage, self._ready = self._process.pid, 0, 0
        self.stages = len(MODULES[kind])
        self.prepare(self.stages)

    @property
    def file(self):
        return self._connection.fileno()


def serve():
    "Be a server. What it forks asks another server for its own fork server, instead of starting one."
    # a kernel ends with its parent, which ipykernel looks up when it is imported
    os.environ["JPY_PARENT_PID"] = str(os.getpid())
    keep = sys.argv.pop(5)
    if keep:
        file = fcntl.fcntl(int(keep), fcntl.F_DUPFD_CLOEXEC, _OWN_FILE)
        os.close(int(keep))
        imported_with = environment_here()
        warm_start._Client = _client_of(lambda: (file, imported_with))
    run_module = runpy.run_module

    def with_fault(name, **how):
        os.environ.update(json.loads(os.environ.pop(_SET_LATER, "{}")))
        if path := os.environ.get(_AT_START):
            exec(compile(Path(path).read_text(), path, "exec"), {"__name__": "fault"})
        return run_module(name, **how)

    runpy.run_module = with_fault
    sys.modules[_SERVERS].main()
    os._exit(0)


def at_start(folder, code):
    """Return the variable with which each fork runs `code` first, from a file in `folder`.

    The package doesn't know about it, so it can be a fault. It finds all that ranks import imported."""
    refresh()
    path = Path(folder) / "fault.py"
    path.write_text(code)
    return {_AT_START: str(path)}


def _as_imported(environment, imported_with):
    """Return `environment` with the late variables of `imported_with`, and how to set them later.

    Raises `Cold` if another variable differs that is read at import."""
    late = {name: environment[name] for name in _LATE if name in environment}
    environment = {name: value for name, value in environment.items() if name not in _LATE}
    environment |= {name: imported_with[name] for name in _LATE if name in imported_with}
    if name := changed_variable(imported_with, environment):
        raise Cold(f"{name} differs")
    return {**environment, _SET_LATER: json.dumps(late)} if late else environment


def _client_of(server):
    """Return the class of the clients whose fork servers are forked.

    `server()` returns the open file that leads to the server that forks them, and its environment."""

    class Client(COLD_CLIENT):
        def __init__(self, nice):
            try:
                self._fork(nice)
            except Cold:
                super().__init__(nice)

        def _fork(self, nice):
            file, imported_with = server()
            environment = _as_imported(environment_here(), imported_with)
            self._connection, theirs = socket.socketpair()
            words = [str(theirs.fileno()), str(os.getpid()), str(nice), ",".join(_RANKS), " "]
            request = request_for(_SERVERS, words, environment)
            request |= {"keep": [theirs.fileno()], "stage": len(MODULES["fork server"])}
            asked = object.__new__(COLD_CLIENT)
            asked._connection = socket.socket(fileno=os.dup(file))
            with open(os.devnull, "r+b") as nothing, asked._connection, theirs:
                self._process = asked.start(request, [*[nothing.fileno()] * 3, theirs.fileno()])
            self.pid, self._stage, self._ready = self._process.pid, 0, 0

    return Client


_servers, _lock = {}, threading.Lock()


def _server(kind):
    "Return this process' server of a kind, started if necessary."
    found = _servers.get(kind)
    if not (found and found.is_running()):
        keep = () if kind == "fork server" else (_server("fork server").file,)
        found = _servers[kind] = _Server(kind, keep)
    return found


def prepare():
    "Start the servers, for a test that counts processes."
    with _lock:
        for kind in MODULES:
            _server(kind)


def refresh():
    """Replace servers that would refuse to fork, since a test has changed what they have imported.

    `pip install` does, for one. Also end this process' fork server if it had to start cold."""
    with _lock, open(os.devnull, "r+b") as nothing:
        for server in list(_servers.values()):
            request = request_for("json.tool", ["--help"], server.environment)
            try:
                request |= {"keep": [], "stage": 0}
                server.start(request, [nothing.fileno()] * 3).wait()
            except Cold:
                for each in _servers.values():  # they are connected
                    each.close()
                _servers.clear()
                break
    mine = warm_start._starts.running()
    if mine and not isinstance(mine._process, ForkedProcess):
        mine.close()
        warm_start._starts = warm_start._Starts()


def fork_own_server():
    "Have this process' fork server be a fork, too. Call it before the first test."
    _clean.update(os.environ)
    _clean_here.update(environment_here())

    def server():
        with _lock:
            found = _server("fork server")
        return found.file, found.environment

    warm_start._Client = _client_of(server)


def start(kind, module, words, *, cwd, environment, files):
    """Fork `python -m module words` with these three open `files`. Returns the process.

    Raises `Cold` where a fork would not be what a cold start is."""
    with _lock:
        server = _server(kind)
        environment = _as_imported(environment, server.environment)
        request = request_for(module, [str(word) for word in words], environment)
        request |= {"keep": [], "stage": server.stages, "folder": str(cwd)}
        return server.start(request, files)


def run(module, words, *, cwd, environment, timeout):
    "Run `python -m module words` to its end, as `subprocess.run` does with `capture_output`."
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with open(os.devnull, "rb") as nothing:
            files = [file.fileno() for file in (nothing, output, errors)]
            process = start("command", module, words, cwd=cwd, environment=environment, files=files)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess([module, *words], code, *texts)


# -- for programs that start kernels, and for shells ------------------------------------------------------------------


@functools.cache
def _places():
    "Return a folder with Jupyter's kernel, the command, and the socket on which stand-ins ask."
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "socket"))
    listening.listen(64)
    threading.Thread(target=_listen, args=(listening,), daemon=True).start()
    python = [sys.executable, "-I", "-S", str(Path(__file__).with_name("stand_in.py"))]
    kernel = [*python, str(folder / "socket"), "kernel", "ipykernel_launcher"]
    spec = {"argv": [*kernel, "-f", "{connection_file}"], "display_name": "Python 3"}
    (folder / "kernels" / "python3").mkdir(parents=True)
    spec |= {"language": "python", "metadata": {"debugger": True}}
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    (folder / "bin").mkdir()
    command = shlex.join([*python, str(folder / "socket"), "command", "harness.command"])
    (folder / "bin" / "multigpu-ft").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (folder / "bin" / "multigpu-ft").chmod(0o755)
    return folder


def jupyter():
    "Return the variable with which Jupyter and papermill start forks for kernels."
    return {"JUPYTER_PATH": str(_places())}


def command():
    "Return the path of a `multigpu-ft` for shells that runs in a fork."
    return _places() / "bin" / "multigpu-ft"


def _listen(listening):
    while True:
        connection, _ = listening.accept()
        threading.Thread(target=_stand_for, args=(connection,), daemon=True).start()


def _stand_for(connection):
    "Start what a stand-in asks for, kill it if the stand-in ends, and tell the stand-in its exit code."
    _, files, _, _ = socket.recv_fds(connection, 1, 4)
    with open(files.pop(0)) as told, connection:
        asked = json.load(told)
        how = {"cwd": asked["folder"], "environment": asked["environment"], "files": files}
        process = cold = None
        try:
            process = start(asked["kind"], asked["module"], asked["words"], **how)
        except Cold:
            command = [sys.executable, "-m", asked["module"]]
            if asked["kind"] == "command":
                command = [str(Path(sys.executable).parent / "multigpu-ft")]
            cold = [*command, *asked["words"]]
        for file in files:
            os.close(file)
        connection.sendall(f"{json.dumps([process and process.pid, cold])}\n".encode())
        while process and process.poll() is None:
            if select.select([connection], [], [], 0.02)[0]:
                process.kill()
                process.wait()
                return
        if process:
            connection.sendall(f"{process.returncode}\n".encode())

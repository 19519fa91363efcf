"""Run notebooks as papermill or a frontend does."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from harness import forks
from harness.runs import BIN
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.provisioning import LocalProvisioner


class _Forking(LocalProvisioner):
    "Starts kernels as forks, where those are what a new process would be."

    async def launch_kernel(self, cmd, **options):
        module = cmd.index("-m") + 1
        with open(os.devnull, "r+b") as nothing:
            try:
                self.process = forks.start(
                    "kernel",
                    cmd[module],
                    cmd[module + 1 :],
                    cwd=options["cwd"],
                    environment=options["env"],
                    files=[nothing.fileno()] * 3,
                )
            except forks.Cold:
                return await super().launch_kernel(cmd, **options)
        self.process.stdin = self.process.stdout = self.process.stderr = None
        self.pid = self.pgid = self.process.pid
        self.cwd = options["cwd"]
        return self.connection_info

    async def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):  # it was killed
            os.killpg(self.pgid, number)


class Kernel:
    "A notebook kernel, driven as a frontend drives it. It may be `forked`, and with it its fork server."

    def __init__(self, cwd, env, forked=False):
        self._folder = tempfile.TemporaryDirectory(prefix="kernel-")
        # sockets in a folder: a port is chosen before the kernel binds it, and another process may take it
        # in between
        self.manager = KernelManager(
            kernel_name="python3",
            transport="ipc",
            connection_file=f"{self._folder.name}/kernel.json",
            # Python itself: in tests, JUPYTER_PATH has another kernel
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
        )
        if forked:
            spec = self.manager.kernel_spec
            self.manager.provisioner = _Forking(
                kernel_id="fork", kernel_spec=spec, parent=self.manager
            )
        self.manager.start_kernel(cwd=str(cwd), env={**os.environ, **env})
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self._stacks = Path(self._folder.name, "stacks")
        register = f"faulthandler.register(signal.SIGUSR1, open({str(self._stacks)!r}, 'w'))"
        self.client.execute_interactive(
            f"import faulthandler, signal; {register}; del faulthandler, signal",
            silent=True,
            timeout=60,
        )

    def run(self, code, timeout=120):
        "Execute `code`. Returns what it printed or showed; raises `CellError` for an error that a frontend would show."
        return self.start(code).result(timeout)

    def start(self, code):
        "Execute `code` without waiting. Its `.result()` waits, and returns or raises as `run` does."
        return _Cell(self.client, self.client.execute(code), self.stacks)

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def stacks(self):
        "Return the stacks of the kernel's threads."
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(1)
        return self._stacks.read_text()

    def shutdown(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self._folder.cleanup()


class CellError(Exception):
    "The error of a cell. `shown` is what a person sees of it, in lines without colours."

    def __init__(self, name, value, output, traceback):
        super().__init__(f"{name}: {value}")
        self.name, self.value, self.output = name, value, output
        self.shown = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(traceback)).splitlines()


class _Cell:
    def __init__(self, client, message_id, stacks):
        self.client, self.id, self._stacks = client, message_id, stacks

    def result(self, timeout=60):
        end, shown, error, before = time.monotonic() + timeout, [], None, None
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"the cell is still running after {timeout} s; it showed: {shown}; its threads:\n{self._stacks()}"
                ) from None
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != self.id:
                continue
            if kind == "stream" == before:  # later output continues the same line
                shown[-1] += content["text"]
            elif kind == "stream":
                shown.append(content["text"])
            elif kind in ("display_data", "execute_result", "update_display_data"):
                shown.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                name, value, lines = (content[k] for k in ("ename", "evalue", "traceback"))
                error = CellError(name, value, "\n".join(shown), lines)
            elif kind == "status" and content["execution_state"] == "idle":
                if error:
                    raise error
                return "\n".join(shown)
            before = kind


def papermill(*arguments, cwd, env=None, timeout=300):
    return subprocess.run(
        [BIN / "papermill", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def outputs(notebook):
    "Return all text that the notebook shows."
    cells = json.loads(Path(notebook).read_text())["cells"]
    found = [o for c in cells for o in c.get("outputs", [])]
    return "\n".join(
        "".join(o.get("text", ""))
        + "".join(o.get("data", {}).get("text/plain", ""))
        + "\n".join(o.get("traceback", []))
        for o in found
    )

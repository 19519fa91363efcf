"""A notebook in a real browser, with a Jupyter server of its own: a test clicks, types and reads
as a user does.

Tests use the fixtures `lab` and `shots`."""

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import nbformat
import psutil
import pytest


def chromium():
    "Return the path of a chromium browser on this machine, or None."
    names = "chromium", "chromium-browser", "google-chrome-stable", "google-chrome"
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser_there():
    "Skip the test if the browser, Jupyter or playwright is missing."
    missing = [
        name
        for name in ("playwright", "jupyterlab", "nbclassic")
        if not importlib.util.find_spec(name)
    ] + ["chromium"] * (not chromium())
    if missing:
        pytest.skip(
            f"needs a chromium browser, playwright, jupyterlab and nbclassic; missing here: {', '.join(missing)}"
        )


@pytest.fixture
def lab(browser_there, tmp_path):
    "Return a function that starts labs, `lab(theme=..., app=..., env=...)`, each in its own folder."
    with ExitStack() as started:
        yield lambda **options: started.enter_context(
            Lab(tmp_path / f"lab{secrets.token_hex(2)}", **options)
        )


@pytest.fixture
def shots(tmp_path):
    "Return the folder for screenshots: $MULTIGPU_FT_SHOTS, which CI may keep, or one of the test's own."
    folder = Path(os.environ.get("MULTIGPU_FT_SHOTS") or tmp_path / "shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def make_notebook(path, *cells, kernel="python3"):
    "Write a notebook of these code cells. Returns its path."
    spec = {
        "kernelspec": {"name": kernel, "display_name": kernel, "language": "python"},
        "language_info": {"name": "python"},
    }
    nbformat.write(
        nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(c) for c in cells], metadata=spec
        ),
        path,
    )
    return Path(path)


class Lab:
    "A Jupyter server that serves `folder`, and a browser on it. It neither reads nor writes the user's own settings."

    def __init__(self, folder, theme="light", app="lab", env=None, size=(1200, 1000)):
        self.folder, self.app, self.token = Path(folder), app, secrets.token_hex(16)
        own = self.folder / ".jupyter"
        _settings(own, theme)
        # a short path: that of a socket has 107 characters at most
        folder_of_sockets = tempfile.TemporaryDirectory(prefix="jupyter-")
        runtime = Path(folder_of_sockets.name)
        places = {
            "JUPYTER_CONFIG_DIR": own / "config",
            "JUPYTER_DATA_DIR": own / "data",
            "JUPYTER_RUNTIME_DIR": runtime,
            "JUPYTERLAB_SETTINGS_DIR": own / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": own / "workspaces",
            "IPYTHONDIR": own / "ipython",
        }
        options = {
            "ServerApp.ip": "127.0.0.1",
            "ServerApp.port": 0,
            "IdentityProvider.token": self.token,
            "ServerApp.open_browser": False,
            "ServerApp.root_dir": self.folder,
            "ServerApp.allow_root": True,
            "ServerApp.terminals_enabled": False,
            "LabApp.expose_app_in_browser": True,
            "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
            "NotebookApp.show_banner": False,  # of nbclassic
            # if the test is killed, the server ends by itself
            "ServerApp.shutdown_no_activity_timeout": 900,
            "KernelManager.transport": "ipc",  # as in `harness.notebooks`
            "MappingKernelManager.cull_idle_timeout": 600,
            "MappingKernelManager.cull_connected": True,
        }
        with ExitStack() as ends:
            ends.enter_context(folder_of_sockets)
            browser = ends.enter_context(_browser())
            log = ends.enter_context(open(own / "server.log", "w"))
            server = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "jupyterlab",
                    *(f"--{key}={value}" for key, value in options.items()),
                ],
                cwd=self.folder,
                env={
                    **os.environ,
                    **{key: str(value) for key, value in places.items()},
                    **(env or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            ends.callback(_end, server)
            self.url = _address(server, runtime, own / "server.log")
            self.context = ends.enter_context(
                browser.new_context(viewport={"width": size[0], "height": size[1]})
            )
            self._ends = ends.pop_all()

    def open(self, notebook):
        "Show a notebook of the folder, with its kernel ready."
        path = Path(notebook).resolve().relative_to(self.folder.resolve()).as_posix()
        return (Classic if self.app == "nbclassic" else Page)(self, path)

    def close(self):
        "End the pages, the server and its kernels."
        self._ends.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _address(server, runtime, log, seconds=60):
    "Return the address: the server takes a free port, and writes it to its runtime folder."
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        for info in runtime.glob("jpserver-*.json"):
            try:
                return json.loads(info.read_text())["url"]
            except ValueError:  # still being written
                pass
        time.sleep(0.05)
    raise AssertionError(f"no Jupyter server: {log.read_text()[-3000:]}")


def _end(server):
    "End a server and its kernels. What a kernel leaves behind stays, for a test to find."
    kernels = psutil.Process(server.pid).children() if server.poll() is None else []
    server.terminate()  # shuts its kernels down
    try:
        server.wait(15)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    for kernel in psutil.wait_procs(kernels, timeout=1)[1]:
        kernel.kill()


def _settings(own, theme):
    config = own / "config" / "labconfig"
    config.mkdir(parents=True, exist_ok=True)
    (config / "default_setting_overrides.json").write_text(
        json.dumps(
            {
                "@jupyterlab/apputils-extension:themes": {"theme": f"JupyterLab {theme.title()}"},
                "@jupyterlab/apputils-extension:notification": {
                    "checkForUpdates": False,
                    "fetchNews": "false",
                    "doNotDisturbMode": True,
                },
                # also render outputs that are off screen
                "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
                # save only when the test does
                "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
            }
        )
    )
    (config / "page_config.json").write_text(
        json.dumps({"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}})
    )


_shared = {"users": 0}


@contextmanager
def _browser():
    "Return the one browser of the process: playwright allows one instance per thread."
    from playwright.sync_api import sync_playwright

    if not _shared["users"]:
        with ExitStack() as ends:
            playwright = ends.enter_context(sync_playwright())
            _shared["browser"] = ends.enter_context(
                playwright.chromium.launch(executable_path=chromium())
            )
            _shared["ends"] = ends.pop_all()
    _shared["users"] += 1
    try:
        yield _shared["browser"]
    finally:
        _shared["users"] -= 1
        if not _shared["users"]:
            _shared["ends"].close()


class Page:
    "A notebook in JupyterLab. Cells are counted from 0. For anything else, `.page` is playwright's page."

    cells = ".jp-Notebook .jp-Cell"
    outputs = ".jp-Notebook .jp-OutputArea"
    path = "lab/workspaces/{unique}/tree/{path}"
    accept = ".jp-Dialog .jp-mod-accept"
    ready = """() => {
        const app = window.jupyterapp, panel = app && app.shell.currentWidget
        if (!panel || !panel.sessionContext || !panel.context.isReady || !panel.sessionContext.isReady) return false
        app.shell.collapseLeft(); window.panel = panel; window.running = 0
        return panel.sessionContext.session.kernel.status == 'idle'
    }"""
    start = """([command, i]) => {
        if (i !== null) { window.panel.content.deselectAll(); window.panel.content.activeCellIndex = i }
        window.running++
        window.jupyterapp.commands.execute(command).finally(() => window.running--)
    }"""
    done = "() => window.running == 0"
    commands = {
        "cell": "notebook:run-cell",
        "all": "notebook:run-all-cells",
        "interrupt": "notebook:interrupt-kernel",
        "restart": "notebook:restart-kernel",
        "save": "docmanager:save",
    }

    def __init__(self, lab, path):
        self.page = lab.context.new_page()
        self.page.set_default_timeout(20_000)
        self.page.goto(
            lab.url
            + self.path.format(unique=secrets.token_hex(4), path=path)
            + f"?token={lab.token}"
        )
        self._wait(self.ready, 60, "a notebook with its kernel")

    def run_cell(self, i, wait=60):
        "Run a cell, and wait up to `wait` seconds for it to end; 0 does not wait."
        self._do("cell", i, wait)

    def run_all(self, wait=120):
        "Run all cells, as `run_cell` does."
        self._do("all", None, wait)

    def wait(self, seconds=60):
        "Wait until no cell is running."
        self._wait(self.done, seconds, "all cells done")

    def interrupt(self):
        self._do("interrupt", None, 0)

    def restart_kernel(self, wait=60):
        "Restart the kernel, and confirm it."
        self._do("restart", None, 0)
        self.page.locator(self.accept).click()
        self._wait(self.done, wait, "a kernel started again")

    def save(self):
        self._do("save", None, 20)

    def output(self, i):
        "Return the output of a cell, as a locator."
        return self.page.locator(self.cells).nth(i).locator(self.outputs.split()[-1]).first

    def wait_for_text(self, text, timeout=30, cell=None):
        """Wait until an output, or that of one cell, shows `text`.

        A string matches a part in any case; a regular expression matches as usual."""
        shown = self.page.locator(self.outputs) if cell is None else self.output(cell)
        try:
            shown.filter(has_text=text).first.wait_for(timeout=1000 * timeout)
        except Exception as e:
            raise AssertionError(
                f"not within {timeout} s: {text!r} in {shown.all_inner_texts()}"
            ) from e

    def click(self, label):
        "Press the button with this label in the outputs."
        self.page.locator(self.outputs).get_by_role("button", name=label, exact=True).click()

    def field(self, label):
        "Return the field with this label in the outputs, to `fill`, `check` or `select_option`."
        return self.page.locator(self.outputs).get_by_label(label, exact=True)

    def type(self, label, text):
        "Replace the content of the field with this label by `text`, and leave the field."
        self.field(label).fill(str(text))
        self.field(label).press("Tab")

    def theme(self, name):
        "Switch to the `light` or the `dark` theme."
        self.page.evaluate(
            "name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})",
            f"JupyterLab {name.title()}",
        )
        self._wait(
            "() => !document.getElementById('jupyterlab-splash') && "
            f"document.body.dataset.jpThemeLight == '{str(name == 'light').lower()}'",
            10,
            f"the {name} theme",
        )

    def screenshots(self, folder, name, locator=None):
        "Take a screenshot in each theme."
        for theme in ("light", "dark"):
            self.theme(theme)
            self.screenshot(folder / f"{name}-{theme}.png", locator)

    def screenshot(self, path, locator=None):
        "Take a screenshot of the page, or of the whole of one locator."
        window, box = self.page.viewport_size, locator and locator.bounding_box()
        if box and box["height"] > window["height"] - 200:  # parts out of view would be cut off
            self.page.set_viewport_size({**window, "height": int(box["height"]) + 300})
        (locator or self.page).screenshot(path=path)
        self.page.set_viewport_size(window)
        return Path(path)

    def _do(self, what, i, wait):
        self.page.evaluate(self.start, [self.commands[what], i])
        if wait:
            self.wait(wait)

    def _wait(self, condition, seconds, what):
        try:
            self.page.wait_for_function(condition, timeout=1000 * seconds)
        except Exception as e:
            raise AssertionError(
                f"not within {seconds} s: {what}; shown: {self.page.locator(self.outputs).all_inner_texts()}"
            ) from e


class Classic(Page):
    "A notebook in the classic Jupyter Notebook, which nbclassic provides."

    cells = "#notebook-container > .cell"
    outputs = "#notebook-container .output"
    path = "notebooks/{path}"
    accept = ".modal-dialog .btn-danger"
    ready = """() => {
        const notebook = window.Jupyter && Jupyter.notebook
        window.running = 0
        const kernel = notebook && notebook._fully_loaded && notebook.kernel
        return kernel && kernel.is_connected() && kernel.info_reply.language_info
            && kernel.widget_manager && !notebook.kernel_busy
    }"""
    start = "([command, i]) => { Function('notebook', 'i', command)(Jupyter.notebook, i) }"
    done = "() => window.running == 0 && Jupyter.notebook.get_cells().every(cell => cell.input_prompt_number != '*')"
    commands = {
        "cell": "notebook.execute_cells([i])",
        "all": "notebook.execute_all_cells()",
        "interrupt": "notebook.kernel.interrupt()",
        "restart": "window.running++; notebook.restart_kernel().then(() => window.running--)",
        "save": "window.running++; notebook.save_notebook().then(() => window.running--)",
    }

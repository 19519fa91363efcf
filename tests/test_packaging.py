"""The wheel and the sdist, built here and installed in an environment of their own, and the Kaggle
kernels, pushed by Kaggle's own client."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import venv
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from harness.runs import BIN, REPO

from multigpu_ft import __version__

KERNELS = ("train", "evaluate", "wheels")


def build(source, *what):
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", *what, source],
        check=True,
        capture_output=True,
    )
    return sorted((source / "dist").iterdir())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    "Return the wheel of a checkout, the sdist, and the wheel built from the sdist."
    folder = tmp_path_factory.mktemp("packages")
    copy = folder / "checkout"
    shutil.copytree(
        REPO,
        copy,
        ignore=shutil.ignore_patterns(".venv", "runs", ".git", "*.egg-info", "build", "dist"),
    )
    sdist, wheel = sorted(build(copy, "--sdist", "--wheel"), key=lambda path: path.suffix == ".whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (again,) = build(folder / f"multigpu_ft-{__version__}", "--wheel")
    return wheel, sdist, again


def content(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if not name.endswith("RECORD")
        }


def test_wheel_and_sdist_have_all_modules_and_nothing_else(wheels):
    wheel, sdist, again = wheels
    assert (
        wheel.name == f"multigpu_ft-{__version__}-py3-none-any.whl"
        and sdist.name == f"multigpu_ft-{__version__}.tar.gz"
    )
    modules = {
        str(path.relative_to(REPO)): path.read_bytes()
        for path in (REPO / "multigpu_ft").rglob("*.py")
    }
    found = content(wheel)
    assert {
        name: data for name, data in found.items() if name.startswith("multigpu_ft/")
    } == modules and found == content(again)
    assert {name.split("/")[0] for name in found} == {
        "multigpu_ft",
        f"multigpu_ft-{__version__}.dist-info",
    }
    assert f"## {__version__}\n" in (REPO / "CHANGELOG.md").read_text()


def test_the_wheel_works_in_an_environment_of_its_own(wheels, tmp_path):
    place = tmp_path / "venv"
    venv.create(place, with_pip=False)
    subprocess.run(
        [
            BIN / "pip",
            "--python",
            place,
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            wheels[0],
        ],
        check=True,
    )
    (libraries,) = place.glob("lib/python*/site-packages")
    (here,) = BIN.parent.glob("lib/python*/site-packages")
    # torch and the other requirements, which take minutes to install
    (libraries / "others.pth").write_text(f"{here}\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*command):
        return subprocess.run(
            command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True
        ).stdout

    python, command = place / "bin" / "python", place / "bin" / "multigpu-ft"
    assert said(
        python, "-c", "import multigpu_ft; print(multigpu_ft.__version__, multigpu_ft.__file__)"
    ).split() == [
        __version__,
        str(libraries / "multigpu_ft" / "__init__.py"),
    ]
    assert "deploy" in said(command, "--help")
    assert json.loads(said(command, "estimate", "--preset", "tiny", "--gpus", "2", "--json"))[
        "fits"
    ]


@pytest.fixture
def kaggle():
    "Run the part of Kaggle's server that receives kernels, and keep what it receives."

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.pushed.append((self.path, body))
            answer = json.dumps(
                {
                    "ref": f"/code/{body['slug']}",
                    "url": f"https://www.kaggle.com/code/{body['slug']}",
                    "versionNumber": 1,
                }
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.pushed = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize("kernel", KERNELS)
def test_kaggles_own_client_accepts_the_kernels(kernel, kaggle, tmp_path):
    folder = tmp_path / kernel
    shutil.copytree(REPO / "kaggle" / kernel, folder)
    metadata = folder / "kernel-metadata.json"
    metadata.write_text(metadata.read_text().replace("USERNAME", "jane"))
    # the client reaches a local server at http://localhost; the proxy gives the port
    proxy = {
        name: f"http://127.0.0.1:{kaggle.server_port}" for name in ("http_proxy", "HTTP_PROXY")
    }
    account = {
        "KAGGLE_API_ENVIRONMENT": "LOCALHOST",
        "KAGGLE_USERNAME": "jane",
        "KAGGLE_KEY": "0" * 32,
        "KAGGLE_CONFIG_DIR": str(tmp_path),
    }
    env = {**os.environ, **proxy, "no_proxy": "", "NO_PROXY": "", **account}
    done = subprocess.run(
        [BIN / "kaggle", "kernels", "push", "-p", folder], env=env, capture_output=True, text=True
    )
    assert (
        done.returncode == 0
        and "successfully pushed" in done.stdout
        and "does not resolve" not in done.stdout
    ), done.stdout + done.stderr
    ((path, sent),) = kaggle.pushed
    assert (
        path.endswith("/SaveKernel")
        and sent["slug"] == f"jane/multigpu-ft-{kernel}"
        and sent["isPrivate"]
    )
    assert sent["enableGpu"] == (kernel != "wheels") and sent.get("machineShape", "") == (
        "NvidiaTeslaT4" if sent["enableGpu"] else ""
    )
    assert sent.get("kernelDataSources", []) == (
        ["jane/multigpu-ft-train"] if kernel == "evaluate" else []
    )
    cells = json.loads(sent["text"])["cells"]
    (parameters,) = [
        cell["source"] for cell in cells if "parameters" in cell["metadata"].get("tags", [])
    ]
    assert "package = " in parameters

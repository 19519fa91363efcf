"""The wheel and the sdist, built here and installed in an environment of their own, and the Kaggle
kernels, pushed by Kaggle's own client."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import venv
import zipfile
from configparser import ConfigParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from harness.notebooks import outputs
from harness.runs import BIN, NBS, REPO, processes

from multigpu_ft import __version__
from multigpu_ft.launcher.notebooks import RECIPES, REPOSITORY

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


def test_wheel_and_sdist_have_all_modules_and_notebooks_and_nothing_else(wheels):
    wheel, sdist, again = wheels
    assert (
        wheel.name == f"multigpu_ft-{__version__}-py3-none-any.whl"
        and sdist.name == f"multigpu_ft-{__version__}.tar.gz"
    )
    expected = {
        str(path.relative_to(REPO)): path.read_bytes()
        for path in (REPO / "multigpu_ft").rglob("*.py")
    }
    for name in (*(f"{recipe}.ipynb" for recipe in RECIPES), "guides", "examples"):
        for path in [NBS / name] if name.endswith(".ipynb") else (NBS / name).iterdir():
            if path.is_file():
                place = f"multigpu_ft/notebooks/{path.relative_to(NBS)}"
                expected[place] = path.read_bytes()
    found = content(wheel)
    assert {
        name: data for name, data in found.items() if name.startswith("multigpu_ft/")
    } == expected and found == content(again)
    assert {name.split("/")[0] for name in found} == {
        "multigpu_ft",
        f"multigpu_ft-{__version__}.dist-info",
    }
    assert f"## {__version__}\n" in (REPO / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    "Return the folder with the commands of an environment in which only the wheel is installed."
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, with_pip=False)
    pip = [BIN / "pip", "--python", place, "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, wheels[0]], check=True)
    (libraries,) = place.glob("lib/python*/site-packages")
    (here,) = BIN.parent.glob("lib/python*/site-packages")
    # torch and the other requirements, which take minutes to install
    (libraries / "others.pth").write_text(f"{here}\n")
    papermill = place / "bin" / "papermill"
    papermill.write_text(
        f"#!{place / 'bin' / 'python'}\nfrom papermill.cli import papermill\npapermill()\n"
    )
    papermill.chmod(0o755)
    return place / "bin"


@pytest.fixture
def say(installed, tmp_path):
    "Return a function that runs a line of a terminal in an empty folder, and returns what it printed."
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"PATH": f"{installed}:/usr/bin:/bin", "HOME": str(tmp_path / "home")}

    def say(line, code=0):
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == code, (line, done.stdout[-2000:], done.stderr[-3000:])
        return done.stdout

    yield say
    assert not processes(tmp_path)


def labelled(shown, label):
    "Return the lines that `label` and the lines after it name, as commands to run."
    rest = shown[shown.index(f"{label:10}") :].splitlines()
    rest[0] = " " * 10 + rest[0][10:]
    return [line.strip() for line in takewhile(lambda line: line.startswith(" " * 10), rest)]


def test_the_wheel_works_in_an_environment_of_its_own(installed, say):
    found = say("python -c 'import multigpu_ft; print(multigpu_ft.__file__)'")
    assert found.startswith(str(installed.parent / "lib"))
    assert say("multigpu-ft --version") == f"multigpu-ft {__version__}\n"
    assert "deploy" in say("multigpu-ft --help")
    assert json.loads(say("multigpu-ft estimate --preset tiny --gpus 2 --json"))["fits"]
    # a folder that is not a checkout, with files of the guides
    assert say("multigpu-ft notebook guides --out g")
    deploy = "multigpu-ft deploy kubernetes --preset tiny --resources g/examples/resources.yaml"
    shown = say(f"{deploy} --out 'k 8 s'")
    assert "kubectl apply -f 'k 8 s' sends it" in shown and "--out k8s" in say(deploy)
    missing = say("multigpu-ft deploy kubernetes --preset tiny --resources none 2>&1", code=1)
    named = re.search(r"Name a YAML file; (\S+) is one", missing)[1]
    assert Path(named).is_relative_to(installed.parent)
    assert say(f"multigpu-ft deploy kubernetes --preset tiny --resources {named}")


@pytest.mark.slow
def test_printed_commands_run_where_only_the_wheel_is_installed(say, tmp_path):
    """A recipe is copied out and run, then what that prints, in a terminal and in a notebook.

    One run after the other, each as it was printed."""
    (command,) = labelled(say("multigpu-ft notebook train"), "next")
    say(command)
    shown = outputs(tmp_path / "train-out.ipynb")
    (following,) = labelled(shown, "next")
    assert following.startswith("papermill train.ipynb slice-1000.ipynb -p start_idx 1000")
    (tmp_path / "train.ipynb").unlink()
    (tmp_path / "next.py").write_text(
        "from multigpu_ft import Run, launch\n"
        "if __name__ == '__main__':\n"
        "    run = Run('runs/opt-tiny_0-1000')\n"
        "    print(run.next_slice())\n"
        "    cfg = run.next_config().replace(end_idx=1064)\n"
        "    print(launch(cfg).next_config())\n"
    )
    first, *_, then = say("python next.py").splitlines()
    assert first == "multigpu-ft train --start-idx 1000 --slice-size 1000"
    assert "start_idx=1064" in then and "slice_size=64" in then
    assert "(done)" in say("multigpu-ft runs --last")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_recipe_runs_by_the_commands_that_are_printed_with_it(say, tmp_path):
    for name in ("evaluate", "generate", "slices"):
        for command in labelled(say(f"multigpu-ft notebook {name}"), "next"):
            say(command)
    assert (tmp_path / "traj_chat.jsonl").exists()
    assert "better" in outputs(tmp_path / "evaluate-out.ipynb")
    # the next slice, by the command without a recipe, and under papermill with a copy
    run = "from multigpu_ft import Run; print(Run('runs/first').next_slice())"
    command = say(f'python -c "{run}"').strip()
    assert command.startswith("multigpu-ft train --run-name first --start-idx 1000")
    say(command)
    say("multigpu-ft notebook train")
    command = say(f'python -c "{run}"').strip()
    assert command.startswith("papermill train.ipynb ") and "-p start_idx 1000" in command
    say(command)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("guide", ["first_run", "strategies"])
def test_a_guide_runs_from_its_copy(guide, say, tmp_path):
    say("multigpu-ft notebook guides")
    say(f"cd guides && papermill {guide}.ipynb out.ipynb")


@pytest.mark.slow
def test_what_the_form_prints_runs(say, tmp_path):
    "The form's two lines: Python for a notebook, papermill for a terminal."
    form = (
        "from multigpu_ft import RunConfig, form; f = form(RunConfig(end_idx=64, run_name='007'))"
    )
    call, command = say(f'python -c "{form}; print(f.call); print(f.command)"').splitlines()
    say(command)
    (tmp_path / "call.py").write_text(
        f"from multigpu_ft import RunConfig, launch\nif __name__ == '__main__':\n    {call}\n"
    )
    say("python call.py")


@pytest.mark.slow
def test_a_stopped_run_prints_the_command_that_resumes_it(say):
    say("multigpu-ft train --end-idx 2000 --max-hours 0.003 --run-name stopped", code=75)
    last = say("multigpu-ft runs --last")
    assert "(stopped)" in last and "max_hours=0.003" in labelled(last, "why")[0]
    (command,) = labelled(last, "resume")
    say(f"{command} --max-hours 1 --max-steps 2")


RELEASE = yaml.safe_load((REPO / ".github" / "workflows" / "release.yml").read_text())


@pytest.mark.parametrize(
    "tag, reason",
    [(f"v{__version__}", None), ("v999.0", "the tag is v999.0"), (__version__, "settings.ini has")],
)
def test_a_release_needs_a_tag_with_the_version_of_settings(tag, reason):
    check = next(step["run"] for step in RELEASE["jobs"]["build"]["steps"] if "run" in step)
    env = {**os.environ, "GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-e", "-c", check], cwd=REPO, env=env, capture_output=True)
    assert (reason or "") in done.stderr.decode() and (done.returncode == 0) == (reason is None)


def test_a_release_is_published_without_a_token():
    publish = RELEASE["jobs"]["publish"]
    assert publish["needs"] == "build" and publish["permissions"] == {"id-token": "write"}
    assert publish["environment"]["name"] == "pypi" and RELEASE[True]["push"]["tags"] == ["v*"]
    assert RELEASE["permissions"] == {"contents": "read"}
    *_, last = publish["steps"]
    assert last["uses"].startswith("pypa/gh-action-pypi-publish@") and "with" not in last
    steps = [step for job in RELEASE["jobs"].values() for step in job["steps"]]
    assert all(
        re.search(r"@(v\d|release/v\d|[0-9a-f]{40})", s["uses"]) for s in steps if "uses" in s
    )


def test_the_address_in_copies_is_the_repository_of_settings():
    settings = ConfigParser(delimiters=["="])
    settings.read(REPO / "settings.ini")
    assert settings["DEFAULT"]["git_url"] == REPOSITORY


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

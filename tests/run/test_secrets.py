"""No file, name or command line of a run, a failing run or a papermill run contains a token from the environment."""

import base64
import gzip
import os
import secrets
import shutil
import subprocess
import threading
import time
import timeit
import zipfile
from urllib.parse import quote

import psutil
import pytest
from harness.hub import WRITE, Hub
from harness.hub import environment as hub_environment
from harness.notebooks import outputs
from harness.runs import BIN, NBS
from harness.secrets_scan import find_secrets
from harness.wandb_server import WandbServer

from multigpu_ft import ConfigError, RunConfig
from multigpu_ft.run.secrets import hide_secrets, refuse_secrets


def test_the_scanner_finds_planted_secrets(tmp_path):
    canary = {"HF_TOKEN": "hf_" + secrets.token_urlsafe(24) + "/+?"}
    value = canary["HF_TOKEN"]
    planted = {
        "plain.txt": f"a{value}b".encode(),
        "url.txt": quote(value, safe="").encode(),
        "hex.txt": value.encode().hex().upper().encode(),
        "packed.gz": gzip.compress(f"in {value}".encode()),
        **{
            f"base64-{shift}.txt": base64.b64encode(b"x" * shift + value.encode() + b"tail")
            for shift in range(3)
        },
        "basic.txt": base64.urlsafe_b64encode(f"api:{value}".encode()),
    }
    for name, content in planted.items():
        (tmp_path / name).write_bytes(content)
    with zipfile.ZipFile(tmp_path / "packed.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner.gz", gzip.compress(f"deep {value}".encode()))
    (tmp_path / "link").symlink_to(f"/nowhere/{value.replace('/', '')}")
    (tmp_path / "innocent.txt").write_text("hf_ and nothing else")
    found = {file.split(" ")[0].split("/")[0] for file, _, _ in find_secrets(tmp_path, canary)}
    assert found == {*planted, "packed.zip"}
    assert find_secrets(tmp_path, {"HF_TOKEN": "hf_" + secrets.token_urlsafe(24)}) == []


KINDS = {
    "password in an address": "https://user:pa55word@host/data.jsonl",
    "password of a database": "postgres://me:pa55word@db:5432/runs",
    "signed by S3": "https://b.s3.amazonaws.com/x?X-Amz-Expires=9&X-Amz-Signature=" + "0f" * 32,
    "signed by Google": "https://storage.googleapis.com/b/x?X-Goog-Signature=" + "0f" * 64,
    "signed by Azure": "https://a.blob.core.windows.net/c/b?sv=2024&sig=ab%2Fcd%2Bef0123%3D",
    "GitLab": "glpat-" + "aB3" * 7,
    "Slack": "xoxb-123456789012-abcdefghij",
    "Slack's hooks": "https://hooks.slack.com/services/T00000000/B00000000/" + "X" * 24,
    "Databricks": "dapi" + "0a" * 16,
    "Groq": "gsk_" + "a1B" * 17,
    "NVIDIA": "nvapi-" + "x_-1" * 16,
    "Replicate": "r8_" + "Ab1" * 12,
    "Google": "AIza" + "Sy0_-" * 7,
    "Google for an hour": "ya29." + "a0Af" * 10,
    "AWS for an hour": "ASIA" + "ABCDEFGH12345678",
    "Hugging Face's organizations": "api_org_" + "AbC" * 11,
    "W&B's own servers": "local-" + "0123456789" * 4,
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----\nabcd\n-----END OPENSSH PRIVATE KEY-----",
}
NAMES = ("HTTP_PROXY", "MY_PAT", "HF_AUTH", "DATABASE_URL", "SSH_PRIVATE_KEY", "WANDB_KEY", "PASS")


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_refused_as_a_parameter_and_hidden_in_a_text(kind):
    token = KINDS[kind]
    for field in ("dataset", "run_name", "dataset_revision"):
        with pytest.raises(ConfigError) as caught:
            RunConfig(**{field: token})
        assert token not in str(caught.value) and "pa55word" not in str(caught.value)
    hidden = hide_secrets(f"could not read '{token}': 403")
    secret = token.rpartition("=")[2].rpartition("/")[2] if "://" in token else token
    assert "***" in hidden and "pa55word" not in hidden and (secret not in hidden or "@" in token)
    assert hidden.startswith("could not read '") and hidden.endswith("': 403")


@pytest.mark.parametrize("name", NAMES)
def test_the_value_of_a_variable_that_is_named_like_a_secret_is_hidden(monkeypatch, name):
    value = "http://me:correct horse@proxy:80" if name == "HTTP_PROXY" else "correct horse battery"
    value = value.replace(" ", "-")
    monkeypatch.setenv(name, value)
    assert "horse" not in hide_secrets(f"login with {value} failed")
    assert name == "HTTP_PROXY" or "***" in hide_secrets(value)


def test_ordinary_names_and_values_are_no_secrets():
    names = ["pass_at_k", "max_new_tokens", "patience", "author", "tokenizer", "keep", "compass"]
    refuse_secrets(dict.fromkeys(names, "a value"))
    for value in (
        "git@github.com:me/repo",
        "hub:me/model@main",
        "s3://bucket/a:b/c",
        "10.0.0.1:29400",
        "sk-learn",
        "https://host/x?page=2",
        "runs/local-2026",
        "localhost:8080",
    ):
        refuse_secrets({"dataset": value})
        assert hide_secrets(value) == value


def test_no_text_makes_the_search_slow():
    "Each piece of a token, repeated, is searched in a time that grows with its length, not its square."
    pieces = [
        "a",
        "sk-",
        "glpat-",
        "eyJ",
        "eyJaaaaaaaa.",
        "SG.a.",
        "http://",
        "://a:",
        "?sig=",
        "_",
    ]
    pieces += ["-----BEGIN PRIVATE KEY-----", "hooks.slack.com/services/", "xoxb-", "ya29."]
    for piece in pieces:
        short, long = (
            min(timeit.repeat(lambda: hide_secrets(text), number=1, repeat=5))  # noqa: B023
            for text in (piece * (20_000 // len(piece)), piece * (320_000 // len(piece)))
        )
        assert long < 80 * short + 0.01, (piece, short, long)


class Watched:
    "Runs a command and collects all command lines that appear meanwhile."

    def __init__(self, command, **options):
        self.lines, self._over = set(), threading.Event()
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            self.done = subprocess.run(
                [str(word) for word in command],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                timeout=300,
                **options,
            )
        finally:
            self._over.set()
            watcher.join()

    def _watch(self):
        while not self._over.wait(0.1):
            for process in psutil.process_iter():
                try:
                    self.lines.add(" ".join(process.cmdline()))
                except psutil.Error:
                    pass


@pytest.fixture
def place(tmp_path, material):
    "Prepare a folder with home, temporary files, model and texts; canary tokens in the environment; a W&B server."
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir()
    shutil.copytree(material, tmp_path / "work")
    canaries = {"HF_TOKEN": "hf_" + secrets.token_hex(17), "WANDB_API_KEY": secrets.token_hex(20)}
    server = WandbServer()
    # Other tests have looked up secrets, too.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("MULTIGPU_FT_")
    }
    environment = {
        **inherited,
        **server.environment,
        **canaries,
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "WANDB_DEBUG": "true",
        "WANDB_CORE_DEBUG": "true",
    }
    yield tmp_path, canaries, environment, server
    server.close()


def assert_clean(folder, canaries, watched):
    assert find_secrets(folder, canaries) == []
    said = watched.done.stdout + watched.done.stderr + "\n".join(watched.lines)
    assert [name for name, value in canaries.items() if value in said] == []


@pytest.mark.slow
def test_a_papermill_run_its_repository_and_its_evaluation_leave_no_secret(place):
    folder, canaries, environment, server = place
    (folder / "hub").mkdir()
    hub, out = Hub(folder / "hub"), folder / "work" / "out.ipynb"
    canaries["HF_TOKEN"] = WRITE
    environment = {
        **hub_environment(hub),
        **{k: v for k, v in environment.items() if not k.startswith("HF_")},
        "HF_TOKEN": WRITE,
    }
    settings = {
        "model": "model",
        "dataset": "texts.jsonl",
        "tracker": "wandb,tensorboard",
        "histogram_every": 2,
        "log_artifacts": True,
        "max_length": 32,
        "end_idx": 24,
        "eval_start_idx": 24,
        "hf_repo": "jane/model",
        "run_name": "canary",
    }
    parameters = [word for name, value in settings.items() for word in ("-p", name, str(value))]
    watched = Watched(
        [BIN / "papermill", NBS / "train.ipynb", out, *parameters],
        cwd=folder / "work",
        env=environment,
    )
    assert watched.done.returncode == 0, watched.done.stderr[-3000:]
    assert (
        server.histories
        and server.artifacts
        and any("loss" in h for h in server.history(*server.histories))
    ), "the key was used"
    assert list((folder / "work" / "runs").glob("*/wandb/run-*/logs/debug*.log")), (
        "the scan covers W&B's own logs"
    )
    assert (
        "done" in outputs(out)
        and hub.checkpoints("jane/model")
        and b"jane/model" in hub.read("jane/model", "README.md")
    ), "the token was used"
    assert_clean(folder, canaries, watched)
    parameters = "-p hf_repo jane/model -p base model -p dataset texts.jsonl -p start_idx 24 -p samples 1".split()
    command = [
        BIN / "papermill",
        NBS / "evaluate.ipynb",
        folder / "work" / "evaluated.ipynb",
        *parameters,
    ]
    watched = Watched(command, cwd=folder / "work", env=environment)
    hub.close()
    assert watched.done.returncode == 0, watched.done.stderr[-3000:]
    assert (folder / "work" / "runs" / "evaluation_model" / "report" / "evaluation.json").exists()
    assert_clean(folder, canaries, watched)
    told = str(server.configs) + str(server.names) + str(server.groups) + str(server.histories)
    assert not any(value in told for value in canaries.values())


def test_a_failing_run_leaves_no_secret_not_even_in_its_exception(place):
    "On Colab the token comes from the notebook's secrets. A library raises an error with the token in the URL."
    folder, canaries, environment, _ = place
    store = folder / "store"
    (store / "google" / "colab").mkdir(parents=True)
    (store / "google" / "colab" / "__init__.py").write_text("")
    (store / "google" / "colab" / "userdata.py").write_text(
        "import os\ndef get(name): return bytes.fromhex(os.environ['STORE_OF_' + name.split('_')[0]]).decode()\n"
    )
    (store / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "def fail(*_):\n"
        "    try: lines = open(os.path.join(sys.argv[1], 'metrics.jsonl')).read().count(chr(10))\n"
        "    except (OSError, IndexError): return\n"
        "    if lines >= 3:\n"
        "        signal.setitimer(signal.ITIMER_REAL, 0)\n"
        "        token = os.environ['HF_TOKEN']\n"
        "        raise RuntimeError(f'401 for https://user:{token}@huggingface.co/api')\n"
        "if os.environ.get('RANK') == '0' and 'multigpu_ft.training' in sys.orig_argv:\n"
        "    signal.signal(signal.SIGALRM, fail)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.1)\n"
    )
    environment |= {
        "PYTHONPATH": f"{store}:{os.environ.get('PYTHONPATH', '')}",
        "COLAB_RELEASE_TAG": "release",
    }
    environment["STORE_OF_HF"] = environment.pop("HF_TOKEN").encode().hex()
    train = (
        f"{BIN}/multigpu-ft train --model model --dataset texts.jsonl --tracker wandb,tensorboard --run-root mine "
        "--max-length 32 --num-epochs 300"
    )
    begun = time.monotonic()
    watched = Watched(train.split(), cwd=folder / "work", env=environment)
    assert (
        watched.done.returncode == 1
        and "RuntimeError: 401 for https://user:***@huggingface.co/api" in watched.done.stderr
    ), watched.done.stderr[-3000:]
    assert time.monotonic() - begun < 200
    error = next((folder / "work" / "mine").glob("*/errors/rank0.json")).read_text()
    assert "user:***@" in error
    assert_clean(folder, canaries, watched)

"""No file, name or command line of a run, a failing run or a papermill run contains a token from the environment."""

import base64
import gzip
import json
import os
import random
import re
import secrets
import shutil
import string
import subprocess
import threading
import time
import zipfile
from urllib.parse import quote, quote_plus, unquote

import psutil
import pytest
from harness.hub import WRITE, Hub
from harness.hub import environment as hub_environment
from harness.notebooks import outputs
from harness.runs import BIN, NBS, multigpu_ft
from harness.secrets_scan import find_secrets
from harness.wandb_server import WandbServer

from multigpu_ft import ConfigError, DataError, Run, RunConfig, RunFailed, generate
from multigpu_ft.generation.completions import rewarded
from multigpu_ft.memory.fit import NoEstimate
from multigpu_ft.models.loading import PLAIN_CHAT
from multigpu_ft.run.config import plain_values
from multigpu_ft.run.failures import failure_of, tail
from multigpu_ft.run.run_dir import RunDir
from multigpu_ft.run.secrets import (
    _ADDRESSES,
    _SHAPES,
    _texts,
    hide_secrets,
    looks_like_secret,
    refuse_secrets,
)

_RANDOM = random.Random(29)
_LETTERS, _DIGITS, _HEX = string.ascii_letters + string.digits, string.digits, "0123456789abcdef"


def drawn(count, of=_LETTERS):
    return "".join(_RANDOM.choice(of) for _ in range(count))


def slack():
    return f"xoxb-{drawn(12, _DIGITS)}-{drawn(12, _DIGITS)}-{drawn(24)}"


UPPER = string.ascii_uppercase
# a text with the secret in it, and the secret
KINDS = {
    "address": (lambda s: f"https://jane:{s}@host.example/data.jsonl", drawn(12)),
    "address with @": (
        lambda s: f"postgresql://jane:{s}@host.example:5432/db",
        f"{drawn(6)}@{drawn(6)}",
    ),
    "address of a token": (lambda s: f"https://{s}@dev.example.com/org/repo", drawn(52)),
    "S3": (
        lambda s: f"https://b.s3.amazonaws.com/k?X-Amz-Expires=9&X-Amz-Signature={s}",
        drawn(64, _HEX),
    ),
    "S3 token": (
        lambda s: f"https://b.s3.amazonaws.com/k?X-Amz-Security-Token={s}&a=b",
        drawn(300) + "%2F",
    ),
    "GCS": (lambda s: f"https://storage.googleapis.com/b/o?X-Goog-Signature={s}", drawn(512, _HEX)),
    "Azure": (
        lambda s: f"https://a.blob.core.windows.net/c/b?sv=2024-11-04&sp=r&sig={s}",
        drawn(43) + "%3D",
    ),
    "CloudFront": (
        lambda s: f"https://cdn.example/f?Expires=1&Signature={s}&Key-Pair-Id=K",
        drawn(80),
    ),
    "query": (lambda s: f"https://host.example/data.jsonl?token={s}", drawn(16)),
    "GitLab": (str, f"glpat-{drawn(20)}"),
    "GitLab, routable": (str, f"glpat-{drawn(27)}.01.{drawn(9).lower()}"),
    "Slack": (str, slack()),
    "Slack hook": (
        lambda s: f"https://hooks.slack.com/services/{s}",
        f"T{drawn(8, UPPER)}/B{drawn(10, UPPER)}/{drawn(24)}",
    ),
    "Databricks": (str, f"dapi{drawn(32, _HEX)}"),
    "Groq": (str, f"gsk_{drawn(52)}"),
    "NVIDIA": (str, f"nvapi-{drawn(64)}"),
    "Replicate": (str, f"r8_{drawn(37)}"),
    "Google key": (str, f"AIza{drawn(35)}"),
    "Google login": (str, f"ya29.{drawn(68)}"),
    "AWS": (str, f"AKIA{drawn(16, UPPER)}"),
    "AWS, for a while": (str, f"ASIA{drawn(16, UPPER)}"),
    "Hugging Face": (str, f"hf_{drawn(34)}"),
    "Hugging Face organization": (str, f"api_org_{drawn(34)}"),
    "W&B, of 2025": (str, f"wandb_v1_{drawn(40)}"),
    "W&B, own server": (str, f"local-{drawn(40, _HEX)}"),
    "OpenAI": (str, f"sk-proj-{drawn(60)}"),
    "GitHub": (str, f"ghp_{drawn(36)}"),
    "key file": (
        str,
        "-----BEGIN OPENSSH PRIVATE KEY-----\n"
        + "\n".join(drawn(70) for _ in range(5))
        + "\n-----END OPENSSH PRIVATE KEY-----",
    ),
}
KINDS |= {
    "RunPod": (str, f"rpa_{drawn(46, UPPER)}"),
    "Modal": (str, f"ak-{drawn(21)}7"),
    "Fireworks": (str, f"fw_{drawn(22)}"),
    "Cerebras": (str, f"csk-{drawn(48).lower()}"),
    "Pinecone": (str, f"pcsk_{drawn(70)}"),
    "Tavily": (str, f"tvly-{drawn(32)}"),
    "Neptune": (str, f"eyJhcGlfYWRkcmVzcyI6{drawn(120)}=="),
    "Grafana": (str, f"glsa_{drawn(32)}_{drawn(8)}"),
    "Notion": (str, f"ntn_{drawn(46)}"),
    "Atlassian": (str, f"ATATT3{drawn(180)}"),
}
# what stands directly before a token in logs and files
BEFORE = [
    "\x1b[32m",
    "\x1b[1;32m",
    "\\x1b[32m",
    "\\u001b[0;31m",
    "\\033[31m",
    "\\u003c",
    "\\u0026",
    "\\x00",
]
BEFORE += ["\\n", "\\t", "\\f", "%3D", "&#39;", "'"]
# environment variables that are no shape: only their names tell
VARIABLES = {
    "MY_PAT": drawn(20),
    "HF_AUTH": drawn(20),
    "DATABASE_URL": f"host=db.example user=jane {drawn(20)}",
    "SSH_PRIVATE_KEY": f"first line, {drawn(30)}\nsecond line, {drawn(30)}",
    "WANDB_KEY": drawn(40, _HEX),
    "PASS": drawn(7),
    "OPENAI_KEY": drawn(20),
    "MYSQL_PWD": drawn(20),
}


@pytest.mark.parametrize("before", BEFORE)
def test_a_token_is_found_after_a_colour_or_an_escaped_character(before):
    secret = f"hf_{drawn(34)}"
    assert looks_like_secret(before + secret)
    assert hide_secrets(f"using {before}{secret}\x1b[0m now") == f"using {before}***\x1b[0m now"


@pytest.mark.parametrize("kind", [str.encode, lambda text: bytearray(text.encode())])
def test_a_token_in_bytes_is_refused(kind):
    "pydantic would make a text of them."
    with pytest.raises(ConfigError, match="has the shape of an access token"):
        RunConfig(run_name=kind(f"hf_{drawn(34)}"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_refused_as_a_value_and_hidden_in_texts(kind):
    around, secret = KINDS[kind]
    text = around(secret)
    assert looks_like_secret(text)
    for make in (
        lambda: RunConfig(dataset=text),
        lambda: generate(model="m", dataset="d", output="o", stop=["###", text]),
        lambda: refuse_secrets({"dataset_revision": [text]}),
    ):
        with pytest.raises(ConfigError, match="has the shape of an access token") as raised:
            make()
        assert secret not in str(raised.value)
    for said in (f"401 for {text}", f"run_{text}", f"'{text}'", f"<a href='{text}'>", f"({text})."):
        hidden = hide_secrets(said)
        assert secret not in hidden and "***" in hidden
        assert not any(line in hidden for line in secret.splitlines() if "-----" not in line)
        assert hide_secrets(hidden) == hidden
    host = re.match(r"\w+://(?:[^/]*@)?([\w.]+)", text)
    assert not host or host[1] in hide_secrets(text), "what is no secret stays"
    assert str(DataError(f"no answer from {text}")) == hide_secrets(f"no answer from {text}")


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_environment_calls_a_secret_is_hidden(name, monkeypatch):
    secret = VARIABLES[name]
    monkeypatch.setenv(name, secret)
    for said in (
        secret,
        quote(secret, safe=""),
        quote_plus(secret),
        json.dumps(secret),
        repr(secret),
    ):
        hidden = hide_secrets(f"before {said} after")
        assert hidden.replace('"', "").replace("'", "") == "before *** after"
    for line in secret.splitlines():
        assert line not in hide_secrets(f"in the middle of it: {line}")


def test_of_a_proxy_only_user_and_password_are_hidden(monkeypatch):
    password = f"{drawn(8)}%20{drawn(4)}"
    monkeypatch.setenv("HTTPS_PROXY", f"http://jane:{password}@proxy.example:3128")
    said = f"ProxyError('http://jane:{password}@proxy.example:3128'): 407 for {unquote(password)}"
    expected = "ProxyError('http://***@proxy.example:3128'): 407 for ***"
    assert hide_secrets(said) == expected
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    assert hide_secrets("no answer from http://proxy.example:3128") == (
        "no answer from http://proxy.example:3128"
    )


REFUSED = (
    "my_pat hf_auth HF_AUTH pass PASS private_key ssh_private_key database_url DATABASE_URL wandb_key myPat db_pass "
    "mysql_pwd webhook_url oauth hf_token apiKey"
)
ALLOWED = (
    "max_new_tokens pass_at_k path patience compass author tokenizer first_pass n_pass key text_key pattern dispatch "
    "keyboard monkey authority pwd bypass url base_url pass_rate keep_best"
)


@pytest.mark.parametrize("name", [*REFUSED.split(), *ALLOWED.split()])
def test_names_of_secrets_are_refused_and_others_are_not(name):
    if name in ALLOWED.split():
        return refuse_secrets({name: "a text"})
    with pytest.raises(ConfigError, match=f"'{name}' looks like a secret"):
        plain_values({name: "a text"})


def test_ordinary_values_are_no_secrets(shared_data):
    ordinary = """
        facebook/opt-1.3b  org/my-model-v2  ./runs/opt_0-1000  ~/data/train.jsonl.gz  s3://bucket/folder/file.parquet
        https://huggingface.co/datasets/org/name/resolve/main/a.jsonl?download=true  hf://datasets/org/name@v1
        http://127.0.0.1:8080/v1?user=a@b.example  ssh://git@github.com/org/repo  2026-01-31T12:00:00Z
        file:///home/jane/a.jsonl  sk-learn-baseline-run  local-run-2026  gsk_  dapi  AIza  ASIA  hf_internal_testing
        sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef  1e-4  adamw_8bit  q_proj,v_proj
        {{messages[0].content}}  https://<user>:<password>@host  https://{user}:{password}@host  user:***@host
    """.split()
    texts = [
        *ordinary,
        "Your authorization token expires; a basic understanding of bearer bonds and tokens is enough.",
        *(
            template
            for template in (PLAIN_CHAT, "{% for m in messages %}{{ m.content }}{% endfor %}")
        ),
    ]
    for name in ("questions.jsonl", "abstracts.jsonl"):
        for line in open(shared_data / name):
            texts += _texts(json.loads(line))
    assert [text for text in texts if looks_like_secret(text) or hide_secrets(text) != text] == []


def test_no_text_makes_a_pattern_slow():
    """100 kB take milliseconds of processor time; a pattern that goes back and forth takes minutes.

    The texts are the beginnings of the shapes, alone and with much of what may follow them."""
    begins = set("a-_./:@=&? \n0fA%")
    for shape in (*_SHAPES.values(), *_ADDRESSES.values()):
        plain = re.sub(r"\[[^]]*\]|\{\d+,?\d*\}|\\.|\(\?\W+", " ", shape)
        begins |= set(re.findall(r"[\w:/.?=&-]{2,}", plain))
    begins |= {
        "eyJaaaaaaaa.",
        "SG." + "a" * 16,
        "://a:",
        "sk-a-",
        "-----",
        "-----BEGIN PRIVATE KEY-----",
    }
    for begin in sorted(begins):
        for text in (
            begin * (100_000 // len(begin)),
            f"{begin} " * 20_000,
            begin + "a" * 100_000,
            begin + "a-" * 50_000,
        ):
            begun = time.process_time()
            hide_secrets(text)
            assert time.process_time() - begun < 5, text[:60]


def test_what_a_run_shows_has_no_secret(tmp_path, monkeypatch):
    "Its status, the end of its logs, its failure, and a reward function's error."
    monkeypatch.setenv("MY_PAT", VARIABLES["MY_PAT"])
    said = "\n".join([VARIABLES["MY_PAT"], *(around(secret) for around, secret in KINDS.values())])
    secret = [
        VARIABLES["MY_PAT"],
        *(line for _, s in KINDS.values() for line in s.splitlines()[1:2] or [s]),
    ]
    run_dir = RunDir.create(RunConfig(run_root=str(tmp_path)))
    run_dir.log_file(0).write_text(said)
    failure = {"rank": 0, "type": "OSError", "text": said, "traceback": said, "exitcode": 1}
    frames = [{"file": "a.py", "line": 1, "name": "f", "code": said}]
    run_dir.update_status(
        state="failed",
        message=said,
        activity=said,
        remarks=[said],
        failure={**failure, "frames": frames},
    )
    run = Run(run_dir.path)
    killed = failure_of(run_dir, {"rank": 0, "pid": 1, "exitcode": -9})
    reward = rewarded(lambda record, row: open(said), {}, {})
    shown = [
        (run_dir.path / "status.json").read_text(),
        run.logs(),
        run.logs(0, 30),
        "\n".join(tail(run_dir.log_file(0), lines) for lines in (1, 2, 5, 12)),
        str(run.failure),
        run.failure.traceback,
        "\n".join(run.failure._render_traceback_()),
        str(killed),
        str(RunFailed(said)),
        reward["reward_error"],
        repr(run),
        str(NoEstimate(said)),
    ]
    for number, text in enumerate(shown):
        assert [each for each in secret if each in text] == [], number
        assert "***" in text or number == 10


def test_the_command_line_does_not_repeat_a_secret(tmp_path):
    text = KINDS["Azure"][0](KINDS["Azure"][1])
    for flags in (
        ("--dataset", text),
        (f"--dataset={text}",),
        ("--my-pat", drawn(20)),
        ("--no-such-flag", text),
    ):
        ended = multigpu_ft("train", *flags, cwd=tmp_path)
        assert (
            ended.returncode == 1
            and "looks like a secret"
            in ended.stderr
            + ended.stderr.replace("has the shape of an access token", "looks like a secret")
        )
        assert flags[-1].rpartition("=")[2] not in ended.stdout + ended.stderr


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
        "        planted = bytes.fromhex(os.environ['PLANTED']).decode()\n"
        "        raise RuntimeError(f'401 for https://user:{token}@huggingface.co/api {planted}')\n"
        "if os.environ.get('RANK') == '0' and 'multigpu_ft.training' in sys.orig_argv:\n"
        "    signal.signal(signal.SIGALRM, fail)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.1)\n"
    )
    environment |= {
        "PYTHONPATH": f"{store}:{os.environ.get('PYTHONPATH', '')}",
        "COLAB_RELEASE_TAG": "release",
    }
    environment["STORE_OF_HF"] = environment.pop("HF_TOKEN").encode().hex()
    password = secrets.token_urlsafe(12)
    proxy = {"HTTP_PROXY": f"http://jane:{password}@127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"}
    environment |= {**VARIABLES, **proxy}
    planted = [around(secret) for around, secret in KINDS.values()]
    planted += [*VARIABLES.values(), proxy["HTTP_PROXY"], f"login of jane, {password}"]
    environment["PLANTED"] = "\n".join(planted).encode().hex()
    for name, secret in {
        **{name: secret for name, (_, secret) in KINDS.items()},
        **VARIABLES,
    }.items():
        canaries[name] = (secret.splitlines()[1:2] or [secret])[0]
    canaries["HTTP_PROXY"] = password
    train = (
        f"{BIN}/multigpu-ft train --model model --dataset texts.jsonl --tracker wandb,tensorboard --run-root mine "
        "--max-length 32 --num-epochs 300"
    )
    begun = time.monotonic()
    watched = Watched(train.split(), cwd=folder / "work", env=environment)
    assert (
        watched.done.returncode == 1
        and "RuntimeError: 401 for https://***@huggingface.co/api" in watched.done.stderr
    ), watched.done.stderr[-3000:]
    assert time.monotonic() - begun < 200
    error = next((folder / "work" / "mine").glob("*/errors/rank0.json")).read_text()
    assert "://***@" in error and error.count("***") > len(KINDS)
    assert_clean(folder, canaries, watched)

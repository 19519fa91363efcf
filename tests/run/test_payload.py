"""A function of the notebook reaches the ranks without a token, in a private file that goes once it was read."""

import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from harness.runs import processes, until

from multigpu_ft import ConfigError, RunDir, RunFailed, generate, launch
from multigpu_ft.generation.api import _open
from multigpu_ft.generation.completions import GenerationJob
from multigpu_ft.launcher import functions
from multigpu_ft.run.payload import pack

API_KEY = "hf_" + "a" * 34
WANDB_API_KEY = REVISION = "0123456789abcdef" * 2 + "01234567"
SETTINGS = {"judge": [{"key": API_KEY.encode()}]}
REMEDY = "read it from the environment inside the function instead"


class Judge:
    def __init__(self):
        self.key = API_KEY

    def rate(self, record, row):
        return 1.0


def asks(record, row):
    return len(API_KEY)


def asks_another(record, row):
    def ask():
        return asks(record, row)

    return ask()


def with_settings(record, row):
    return len(SETTINGS)


def with_wandb(record, row):
    return len(WANDB_API_KEY)


def with_default(record, row, key=API_KEY):
    return len(key)


def in_its_code(record, row):
    return len("sk-bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb")


def closed_over(secret):
    return lambda record, row: len(secret)


@pytest.fixture(autouse=True)
def this_module_is_a_notebook():
    "Have functions of this file pickled with what they use, as those of a notebook are."
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def asked(tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(f'{{"question": "What is {n}?"}}\n' for n in range(6)))
    return {
        "model": "builtin:opt-tiny",
        "dataset": str(questions),
        "output": tmp_path / "a.jsonl",
        "max_new_tokens": 4,
        "nproc": 2,
    }


HOLDERS = [
    (asks, "the global 'API_KEY'"),
    (asks_another, "the global 'API_KEY'"),
    (with_settings, "the entry 'key' of the entry 'judge' of the global 'SETTINGS'"),
    (with_wandb, "the global 'WANDB_API_KEY'"),
    (with_default, "the default of 'key' in 'with_default'"),
    (in_its_code, "a text in the code of 'in_its_code'"),
    (closed_over(API_KEY), "the variable 'secret', which '<lambda>' uses"),
    (Judge().rate, "the attribute 'key' of 'rate'"),
]


@pytest.mark.parametrize("reward, holder", HOLDERS, ids=[holder for _, holder in HOLDERS])
def test_a_token_is_refused_by_the_name_of_what_holds_it(asked, tmp_path, reward, holder):
    with pytest.raises(ConfigError) as caught:
        generate(**asked, reward=reward)
    said = str(caught.value)
    assert said.startswith(f"reward: {holder} has the shape of an access token") and REMEDY in said
    assert API_KEY not in said and WANDB_API_KEY not in said and "sk-b" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["q.jsonl"], "nothing was written"


def test_calls_refuse_tokens_too(monkeypatch, tmp_path):
    monkeypatch.setattr(functions.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(functions, "start_agent", None)
    with pytest.raises(ConfigError, match="^the global 'API_KEY' has the shape"):
        launch(asks, {}, {})
    with pytest.raises(ConfigError, match="^the argument 'key' has the shape"):
        launch(lambda key: key, [API_KEY])
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigError, match="^the argument 'words' has the shape"):
        launch(str(script), "--token", API_KEY)
    assert list(tmp_path.iterdir()) == [script]


def commit(record, row):
    return len(REVISION) + len(json.dumps(SETTINGS["model"]))


def test_what_is_not_in_the_file_is_not_refused(monkeypatch):
    "The globals of installed modules stay where they are, and a commit is no key."
    from multigpu_ft.run.payload import pack

    monkeypatch.setattr(linecache, "API_KEY", API_KEY, raising=False)
    monkeypatch.setitem(globals(), "SETTINGS", {"model": "a/b", "rows": ["text"] * 3})
    pack(linecache.getline)
    pack(commit)
    pack(Path, (b"\x00\xff" * 1_000_000,))


def _watch(path, seen, end):
    "Note the modes in which `path` exists, from its first moment on."
    while not end.is_set():
        try:
            seen.add(path.stat().st_mode & 0o777)
        except FileNotFoundError:
            pass
        time.sleep(0.0005)


def _packed(folder):
    return [path.name for path in folder.glob("*.pkl*") if path.name != "result.pkl"]


def test_the_reward_is_its_users_and_gone_when_all_ranks_have_read_it(asked, tmp_path):
    folder = tmp_path / "a.jsonl.run"
    seen, end, before = set(), threading.Event(), os.umask(0)
    watcher = threading.Thread(target=_watch, args=(folder / "reward.pkl", seen, end), daemon=True)
    watcher.start()

    def is_gone(record, row):
        return not list(folder.glob("reward.pkl*"))

    try:
        answers = generate(**asked, reward=is_gone)
    finally:
        os.umask(before)
        end.set()
        watcher.join()
    assert seen == {0o600} and folder.stat().st_mode & 0o777 == 0o700
    assert len(answers) == 6, "while the run rates, the file is gone"
    assert _packed(folder) == []


def _kill_first(folder, kind):
    "Kill the first process of `folder` that runs the module `kind`."
    (found,) = until(
        lambda: [p for p in processes(folder) if kind in p.cmdline()][:1], 60, f"a {kind}"
    )
    assert _packed(folder) == ["reward.pkl"], "the ranks have not read it yet"
    found.kill()


@pytest.mark.parametrize("kind", ["multigpu_ft.launcher.agent", "multigpu_ft.generation"])
def test_a_run_that_dies_before_it_reads_the_reward_leaves_none(asked, tmp_path, kind):
    folder = tmp_path / "a.jsonl.run"
    killer = threading.Thread(target=_kill_first, args=(folder, kind), daemon=True)
    killer.start()
    with pytest.raises(RunFailed, match="killed by signal 9"):
        generate(**asked, reward=lambda record, row: 1)
    killer.join()
    assert _packed(folder) == []


def test_the_agent_removes_what_a_killed_kernel_left_and_so_does_the_same_call(asked, tmp_path):
    folder = tmp_path / "a.jsonl.run"
    code = f"""
from pathlib import Path
from multigpu_ft import generate
settings = {json.loads(json.dumps(asked, default=str))!r}
generate(**settings, reward=lambda record, row: 1)
"""
    kernel = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        until(lambda: processes(folder), 60, "an agent")
        assert _packed(folder) == ["reward.pkl"]
    finally:
        kernel.send_signal(signal.SIGKILL)
        kernel.wait()
    until(lambda: not processes(folder), 60, "the end of agent and ranks")
    assert _packed(folder) == []

    for name in ("reward.pkl", "reward.pkl.read-0"):  # of a machine that lost its power
        (folder / name).write_text("stale")
    _open(folder, RunDir(folder).config(), GenerationJob.read(RunDir(folder)), None)
    assert _packed(folder) == []


def test_a_calls_function_is_its_users_and_gone_when_all_ranks_have_read_it():
    source = f"login('{API_KEY}')\nprint('hello')\n"
    linecache.cache["<cell>"] = (len(source), None, source.splitlines(keepends=True), "<cell>")

    def look():
        folder = Path(sys.argv[1])
        end = time.monotonic() + 60
        while list(folder.glob("call.pkl*")) and time.monotonic() < end:
            time.sleep(0.01)
        sources = json.loads((folder / "call.json").read_text())["sources"]
        return str(folder), os.listdir(folder), folder.stat().st_mode & 0o777, sources["<cell>"]

    try:
        folder, found, mode, cell = launch(look, nproc=2)
    finally:
        del linecache.cache["<cell>"]
    assert not [name for name in found if name.startswith("call.pkl")] and mode == 0o700
    assert cell == "login('***')\nprint('hello')\n", "tracebacks show the cell without the token"
    assert not Path(folder).exists()
    assert not [p for p in psutil.process_iter(["cmdline"]) if folder in (p.info["cmdline"] or [])]


def test_a_long_text_is_searched_to_its_end():
    with pytest.raises(ConfigError, match="has the shape of an access token"):
        pack(len, ("a word " * 30_000 + API_KEY,))

"""The port where node 0 hears the other machines, as an attacker finds it.

Node 0's real supervisor waits for its node 1 in each of these tests. An attacker without the run's
secret gets nowhere; one who has it, such as a broken node, does no more harm than a node can."""

import json
import os
import queue
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from harness.runs import free_port, slow, until

from multigpu_ft import RunConfig, RunDir
from multigpu_ft.launcher import admission, restarts, supervisor
from multigpu_ft.launcher.admission import MAX_STRANGERS, introduce
from multigpu_ft.launcher.rendezvous import Message, Peer
from multigpu_ft.run.errors import NodesError
from multigpu_ft.run.failures import failure_of
from multigpu_ft.run.secrets import make_run_secret, run_secret

SETTING = "a-dataset-that-nobody-else-may-know.jsonl"


class Node0:
    "The supervisor of node 0, as `launch` starts it."

    def __init__(self, folder, **settings):
        self.address = "127.0.0.1", free_port()
        rdzv = "{}:{}".format(*self.address)
        self.cfg = RunConfig(
            dataset=SETTING, run_root=str(folder), run_name="two", nnodes=2, nproc=1, **settings
        )
        self.run_dir = RunDir.common(self.cfg)
        self.run_dir.write_config(self.cfg)
        self.log = Path(folder, "node0.log")
        command = [sys.executable, "-m", "multigpu_ft.launcher.supervisor", "--node-rank", "0"]
        with self.log.open("w") as out:
            self.process = psutil.Popen(
                [*command, "--rdzv", rdzv, str(self.run_dir.path)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        until(self._listens, 60, "node 0 listens")

    def _listens(self):
        assert self.process.poll() is None, self.log.read_text()
        try:
            socket.create_connection(self.address, timeout=5).close()
        except ConnectionRefusedError:
            return False
        return True

    def connect(self, source="127.0.0.1"):
        return socket.create_connection(self.address, timeout=10, source_address=(source, 0))

    def ask(self, *lines, node_rank=1, source="127.0.0.1"):
        "Prove to be a node, and say `lines`. Returns the connection."
        connection = self.connect(source)
        introduce(connection, run_secret(), node_rank)
        for line in lines:
            connection.sendall(line)
        return connection

    def assert_deaf_to_nobody(self):
        """A node with the secret is heard within 5 s.

        It says that it is set up in another way, so node 0 has to answer and doesn't begin."""
        began, inbox = time.monotonic(), queue.Queue()
        join = supervisor._join_message(self.cfg.replace(learning_rate=0.5), 1)
        while True:
            try:
                peer = Peer(self.ask(source="127.0.0.3"), inbox, 10)
                break
            except OSError:  # displaced by strangers: a node calls again
                assert time.monotonic() - began < 5
        peer.say(join=join)
        _, answer = inbox.get(timeout=5)
        assert "learning_rate=0.5 there" in answer["refused"] and not answer["again"]
        assert time.monotonic() - began < 5
        assert self.process.poll() is None, self.log.read_text()

    def end(self):
        with suppress(psutil.NoSuchProcess):
            self.process.kill()
        self.process.wait()


@pytest.fixture
def node0(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    make_run_secret()
    found = Node0(tmp_path)
    yield found
    found.end()


def join_line(cfg, **changes):
    return Message.write({"join": {**supervisor._join_message(cfg, 1), **changes}})


def heard_back(connection):
    "Return all that node 0 says until it closes the connection."
    said = b""
    try:
        while more := connection.recv(65536):
            said += more
    except OSError:
        pass
    return said


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b'{"join": {}}\n',
        b'{"join": {"node_rank": 1, "nproc": ' + b"[" * 989 + b"]" * 989 + b"}}\n",
        b"[" * 100_000 + b"\n",
        b"\xff\xfe\n",
        b'{"node_rank": 1, "nonce": "' + b"0" * 64 + b'", "proof": "' + b"0" * 64 + b'"}\n',
    ],
    ids=["empty", "empty join", "nested", "long", "not text", "guess"],
)
def test_a_stranger_learns_nothing(node0, line):
    "Not even that there is a setting, and whatever is said."
    with node0.connect() as connection:
        try:
            connection.sendall(line)
        except OSError:
            pass
        said = heard_back(connection)
    assert SETTING.encode() not in said and b"config" not in said and len(said) < 1000, said
    assert node0.process.poll() is None
    log = node0.log.read_text()
    assert "Traceback" not in log and len(log) < 1000, log
    node0.assert_deaf_to_nobody()


def test_a_node_with_another_secret_is_told_so(node0, tmp_path, monkeypatch):
    "Even 4 seconds before the real one: the real one joins afterwards."
    cfg = node0.cfg.replace(run_root=str(tmp_path / "attacker"))
    node_dir = RunDir.common(cfg).of_node(1)
    node_dir.write_config(cfg)
    rdzv = "{}:{}".format(*node0.address)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "attackers settings"))
    make_run_secret()
    with pytest.raises(NodesError, match="don't have the same run secret"):
        supervisor.Follower(node_dir, 1, rdzv).run()
    trusting = cfg.replace(trusted_network=True)
    node_dir.write_config(trusting)
    with pytest.raises(NodesError, match="don't have the same run secret"):
        supervisor.Follower(node_dir, 1, rdzv).run()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    node0.assert_deaf_to_nobody()


def test_node_0_names_who_was_refused_when_nobody_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    make_run_secret()
    node0 = Node0(tmp_path, join_timeout_s=5)
    try:
        with node0.connect(source="127.0.0.7") as connection:
            with pytest.raises(NodesError, match="don't have the same run secret"):
                introduce(connection, b"another" * 10, 1)
        assert node0.process.wait(timeout=60) == 1
    finally:
        node0.end()
    failure = node0.run_dir.status()["failure"]["text"]
    assert failure.startswith("node 1 of 2 did not join within join_timeout_s=5 s"), failure
    assert failure.endswith(
        "127.0.0.7 called, but was refused: it has another run secret, or none."
    ), failure


def test_what_a_node_said_opens_nothing_a_second_time(node0):
    "An attacker who listens on the network repeats it to node 0, or says node 0's answer."
    with node0.connect() as honest:
        passed = {}

        class Wire:
            "A connection that remembers what passes."

            settimeout = honest.settimeout

            def recv(self, size):
                passed["heard"] = passed.get("heard", b"") + (more := honest.recv(size))
                return more

            def sendall(self, line):
                passed["said"] = line
                honest.sendall(line)

        introduce(Wire(), run_secret(), 1)
    answer = json.loads(passed["heard"].splitlines()[-1])
    again = {**json.loads(passed["said"]), "proof": answer["proof"]}
    for line in (passed["said"], json.dumps(again).encode() + b"\n"):
        with node0.connect() as attacker:
            attacker.recv(4096)
            attacker.sendall(line)
            assert b"refused" in heard_back(attacker)


def test_a_machine_that_pretends_to_be_node_0_is_told_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    make_run_secret()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        cfg = RunConfig(dataset=SETTING, run_root=str(tmp_path), run_name="two", nnodes=2, nproc=1)
        node_dir = RunDir.common(cfg).of_node(1)
        node_dir.write_config(cfg)
        rdzv = "{}:{}".format(*impostor.getsockname())
        command = [sys.executable, "-m", "multigpu_ft.launcher.supervisor", "--node-rank", "1"]
        node1 = subprocess.Popen(
            [*command, "--rdzv", rdzv, str(node_dir.main.path)], stdout=subprocess.PIPE, text=True
        )
        try:
            impostor.settimeout(60)
            connection, _ = impostor.accept()
            connection.settimeout(20)
            connection.sendall(json.dumps({"nonce": "0" * 64}).encode() + b"\n")
            said = connection.recv(65536)
            connection.sendall(json.dumps({"proof": json.loads(said)["proof"]}).encode() + b"\n")
            said += heard_back(connection)
            text, _ = node1.communicate(timeout=60)
        finally:
            node1.kill()
            node1.wait()
    assert {*json.loads(said)} == {"node_rank", "nonce", "proof"}
    assert "don't have the same run secret" in text and node1.returncode == 1


@pytest.mark.parametrize("said", [b"{", b'{"nonce": "', None])
def test_who_speaks_slowly_at_node_0s_address_holds_a_node_for_seconds_only(said, monkeypatch):
    monkeypatch.setattr(admission, "PATIENCE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        connection = socket.create_connection(impostor.getsockname())
        speaker, _ = impostor.accept()
        ended = threading.Event()

        def speak():
            while not ended.wait(0.1):
                speaker.sendall(said or b"")
                said_all.append(said)

        said_all = []
        thread = threading.Thread(target=speak)
        thread.start()
        began = time.monotonic()
        try:
            with pytest.raises(TimeoutError):
                introduce(connection, b"s" * 64, 1)
        finally:
            ended.set()
            thread.join()
            speaker.close()
            connection.close()
    assert time.monotonic() - began < 4 and len(said_all) > 5


@pytest.mark.parametrize("nonce", ["\ud800" * 64, "0" * 63, 64, "G" * 64])
def test_a_random_number_that_is_none_ends_in_one_sentence(nonce):
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        with socket.create_connection(impostor.getsockname()) as connection:
            speaker, _ = impostor.accept()
            with speaker:
                speaker.sendall(json.dumps({"nonce": nonce}).encode() + b"\n")
                with pytest.raises(NodesError, match="another version"):
                    introduce(connection, b"s" * 64, 1)


def test_a_proof_that_is_no_text_ends_in_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        with socket.create_connection(impostor.getsockname()) as connection:
            speaker, _ = impostor.accept()
            with speaker:
                speaker.sendall(json.dumps({"nonce": "0" * 64}).encode() + b"\n")
                speaker.sendall(json.dumps({"proof": "\ud800"}).encode() + b"\n")
                with pytest.raises(NodesError, match="don't have the same run secret"):
                    introduce(connection, b"s" * 64, 1)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"])
def test_silent_connections_leave_node_0_as_it_is(node0, address):
    "A thousand of them cost no thread, and a node is heard meanwhile."
    threads = node0.process.num_threads()
    flood = []
    try:
        for _ in range(1050):
            flood.append(node0.connect(address))
        node0.assert_deaf_to_nobody()
        assert node0.process.num_threads() <= threads + 4
        assert len(node0.process.net_connections("tcp")) <= MAX_STRANGERS + 8
    finally:
        for connection in flood:
            connection.close()


def test_a_slow_stranger_has_five_seconds_in_all(node0):
    "Whoever says a byte a second does not keep a place."
    with node0.connect() as connection:
        connection.recv(4096)
        began = time.monotonic()
        try:
            while time.monotonic() - began < 30:
                connection.sendall(b"[")
                time.sleep(0.5)
        except OSError:
            pass
        assert time.monotonic() - began < 20


def test_megabytes_from_a_node_that_proved_itself(node0):
    "A node with the secret is heard to the end of its longest message, and logged in short."
    cfg = node0.cfg
    for _ in range(14):
        line = join_line(cfg, config={"dataset": "x" * 2**20})
        with node0.ask() as connection:
            try:
                connection.sendall(line)
            except OSError:
                pass
    huge = join_line(cfg, config={f"setting {n}": "\x1b[2J" + "x" * 1500 for n in range(400)})
    with node0.ask(huge) as connection:
        assert b"refused" in heard_back(connection)
    node0.assert_deaf_to_nobody()
    log = node0.log.read_text()
    assert len(log) < 20_000 and "\x1b" not in log, (len(log), log[:500])


TEXTS = [
    "",
    "x",
    "\x1b[2J\x1b]0;owned\x07",
    "\x00",
    "‮",
    "x" * 5000,
    "\ud800",
    "{}",
    "‘",
    "<script>",
]
NUMBERS = [0, 1, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308]


def _value(rng, depth=0):
    kind = rng.randrange(9)
    if kind < 3:
        return rng.choice([*TEXTS, *NUMBERS, None, True, False])
    if kind < 5 and depth < 5:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind < 7 and depth < 5:
        return {rng.choice([*TEXTS, *NAMES]): _value(rng, depth + 1) for _ in range(3)}
    return rng.choice([1, 2, "DataError", "done", "failed"])


NAMES = [
    *Message.model_fields,
    *("node_rank", "host", "nproc", "versions", "config", "failure", "rank", "text", "type"),
    *("clear", "state", "nonce", "proof", "lost", "frames", "port"),
]


def _nested(rng):
    depth = rng.choice([50, 989, 3000, 100_000])
    opening = rng.choice(["[", '{"a":'])
    return (opening * depth + "1" + ("]" if opening == "[" else "}") * depth).encode()


def generated(rng, cfg):
    "Return a line that may come from an attacker: a message that has been changed, or anything."
    kind = rng.randrange(10)
    if kind == 0:
        return rng.randbytes(rng.choice([1, 10, 5000])) + b"\n"
    if kind == 1:
        return _nested(rng) + b"\n"
    if kind == 2:
        return b'{"join": {"nproc": ' + _nested(rng) + b"}}\n"
    if kind == 3:
        return b"x" * rng.choice([4095, 4096, 2**16, 2**20 + 1]) + rng.choice([b"\n", b""])
    join = supervisor._join_message(cfg, 1)
    good = [
        {"join": join},
        {"ended": {"failure": {"rank": 0, "type": "OSError", "text": "x", "clear": True}}},
        {"stop": "x"},
        {"refused": "x", "again": True},
        {"begin": {"nnodes": 2, "host": "127.0.0.1", "port": 1, "node_rank": 1, "config": {}}},
        {"over": {"state": "done"}},
        {},
        dict.fromkeys(Message.model_fields),
    ]
    message = json.loads(json.dumps(rng.choice(good)))
    for _ in range(rng.randrange(4)):
        inner = message
        while (deeper := [v for v in inner.values() if isinstance(v, dict) and v]) and (
            rng.random() < 0.7
        ):
            inner = rng.choice(deeper)
        inner[rng.choice([*inner, *NAMES])] = _value(rng)
    if isinstance(message.get("join"), dict):
        # the settings stay others than node 0's, or it would begin
        message["join"]["versions"] = {"Python": "0"}
    return json.dumps(message).encode() + b"\n"


def _strangers(node0, rng, count):
    "Say `count` generated messages to node 0, without the secret."
    for _ in range(count):
        with node0.connect(rng.choice(["127.0.0.1", "127.0.0.2"])) as connection:
            try:
                connection.sendall(generated(rng, node0.cfg))
                if rng.random() < 0.1:
                    heard_back(connection)
            except OSError:
                pass


def _nodes(node0, rng, count):
    "Say `count` generated messages to node 0, which closes the connection after a bad one."
    said = 0
    while said < count:
        try:
            connection = node0.ask(node_rank=rng.choice([1, 1, 1, 7]))
        except OSError:
            continue
        with connection:
            for _ in range(rng.randrange(1, 20)):
                said += 1
                try:
                    connection.sendall(generated(rng, node0.cfg))
                except OSError:
                    break


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [400, slow(10_000)])
def test_generated_messages(node0, count):
    "Node 0 neither crashes nor hangs, and needs no more memory and no more log than before."
    rng = random.Random(29)
    _strangers(node0, rng, count // 20)
    _nodes(node0, rng, count // 20)
    before = node0.process.memory_info().rss
    _strangers(node0, rng, count // 2)
    _nodes(node0, rng, count // 2)
    node0.assert_deaf_to_nobody()
    until(lambda: node0.process.num_threads() < 12, 20, "only few threads are left")
    assert node0.process.memory_info().rss - before < 40 * 2**20
    log = node0.log.read_text()
    assert "Traceback" not in log and not {*log} & {"\x1b", "\x00", "\x07"}, log[-3000:]
    assert len(log) < 400 * count, log[-3000:]


def _failure(rng):
    "Return a failure as a node may report it, of which each entry is missing, right or anything."
    good = {
        "rank": 1,
        "pid": 77,
        "exitcode": rng.choice([-9, 1]),
        "type": rng.choice(["os", "ConfigError", "OutOfMemoryError", "Exception"]),
        "text": rng.choice(["CUDA out of memory", "\x1b[2J", "Connection reset by peer"]),
        "traceback": "Traceback (most recent call last):",
        "frames": [_value(rng), {"file": "a.py", "line": 1, "name": "f", "code": "x"}],
        "clear": True,
        "lost": True,
        "hang": 3.0,
        "time": 1e9,
        "step": 4,
        "node_rank": 1,
        "node": "node 1 (h)",
    }
    asked = rng.sample([*good], rng.randrange(len(good)))
    return {name: _value(rng) if rng.random() < 0.1 else good[name] for name in asked}


def test_generated_failures_can_be_shown(tmp_path):
    """A node's failure is shown as one: `{'clear': True, 'type': 'os'}` once ended the display.

    It is also weighed against others, and decides about a restart."""
    run_dir, rng, shown = RunDir(tmp_path), random.Random(3), 0
    cfg = RunConfig(max_restarts=10**6, batch_size=1)
    for name in ("logs", "errors", "beats"):
        (tmp_path / name).mkdir()
    for _ in range(3000):
        ended = {"ended": {"failure": _failure(rng)}}
        try:
            failure = Message.read(json.dumps(ended).encode())["ended"].get("failure")
        except ValueError:
            continue
        if failure:
            run_dir.update_status(state="failed", remarks=[], failure=failure)
            text = str(failure_of(run_dir, failure))
            assert not {*text} & {"\x1b", "\x00", "\x07"}
            assert restarts.cause([failure, {"rank": 0, "text": "x", "time": 1.0}])
            restarts.Attempts(run_dir, cfg).again(failure)
            shown += 1
    assert shown > 1000


def test_the_secret_is_in_no_argument_environment_file_or_log(node0, tmp_path):
    value = run_secret()
    node0.assert_deaf_to_nobody()
    for process in [node0.process, *node0.process.children(recursive=True)]:
        told = Path(f"/proc/{process.pid}")
        for name in ("cmdline", "environ"):
            assert value not in (told / name).read_bytes()
    secret_file = tmp_path / "settings" / "multigpu_ft" / "run_secret"
    for path in (p for p in tmp_path.rglob("*") if p.is_file() and p != secret_file):
        assert value not in path.read_bytes(), path
    assert secret_file.stat().st_mode & 0o777 == 0o600
    assert os.fspath(secret_file) not in node0.log.read_text()

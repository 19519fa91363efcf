"""A fuzzer: each generated input is accepted correctly or refused with one typed error.

python tests/harness/fuzz.py --inputs 20000 --seed 0 --json bench/results/fuzz.json
python tests/harness/fuzz.py --only jsonl --first-seed 17 --inputs 1                    # repeats one input

A surface is a function that generates one input, in an empty folder, and passes it to the code
that receives it from a user. It returns if the input was accepted, after asserting that this was
right, and raises if it was refused."""

import argparse
import contextlib
import copy
import csv
import functools
import io
import json
import math
import os
import queue
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import typing
from pathlib import Path
from unittest import mock

import yaml

from multigpu_ft import CheckpointError, ConfigError, DataError, ModelError, RunConfig, RunDir, cli
from multigpu_ft.checkpoints.discovery import find_checkpoints, kept_checkpoints
from multigpu_ft.checkpoints.manifest import digest, fingerprint, read_progress, verify_checkpoint
from multigpu_ft.checkpoints.progress import Progress
from multigpu_ft.data.examples import evaluation_config, load_texts
from multigpu_ft.data.labels import find_label_names
from multigpu_ft.data.sources import columns, count_rows
from multigpu_ft.deploy.kubernetes import deploy_kubernetes
from multigpu_ft.deploy.kubernetes_resources import Resources
from multigpu_ft.display.plots import Curve
from multigpu_ft.distributed.deepspeed_config import read_zero_config, zero_settings
from multigpu_ft.generation import completions
from multigpu_ft.generation.fine_tuned import find_runs, newest_fine_tuned
from multigpu_ft.generation.prompts import load_questions
from multigpu_ft.hub.repository import is_name, parse_commit, parse_hub
from multigpu_ft.hub.upload import read_record
from multigpu_ft.launcher import rendezvous
from multigpu_ft.launcher import supervisor as supervisor_module
from multigpu_ft.launcher.api import runs
from multigpu_ft.launcher.commands import flags
from multigpu_ft.launcher.nodes import find_node
from multigpu_ft.launcher.run import Run
from multigpu_ft.launcher.slices import Slices
from multigpu_ft.run.config import PRESETS
from multigpu_ft.run.errors import NodesError
from multigpu_ft.run.failures import failure_of
from multigpu_ft.run.processes import is_alive, read_error, read_heartbeat
from multigpu_ft.run.run_dir import commit_digest, saved_at
from multigpu_ft.tracking.lineage import earlier_metrics, runs_of

TYPED = (ConfigError, DataError, ModelError, CheckpointError, NodesError)
LONGEST_MESSAGE, LONGEST_S = 2000, 5.0
SURFACES = {}


class Refused(Exception):
    "A refusal without an exception: a command that ends with its usage, or a peer that is turned away."


class Hang(BaseException):
    "An input that takes too long."


def surface(function):
    SURFACES[function.__name__] = function
    return function


# -- inputs ---------------------------------------------------------------------------------------------------------

NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    100,
    True,
    False,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63),
    10**400,
    0.5,
    1.5,
    -0.0,
    1e-308,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
]
TEXTS = [
    "",
    " ",
    "\t",
    "\0",
    "a\0b",
    "a\nb",
    "a\r\nb",
    "\r",
    "\ufeffx",
    "\u202etxt.exe",
    "\u2028",
    "é",
    "e\u0301",
    "模型",
    "\ud800",
    "\udc80x",
    "😀",
    "x" * 300,
    "y" * 5000,
    "模" * 100,
    "..",
    ".",
    "../..",
    "../x",
    "x/../../y",
    "a/b",
    "C:\\x",
    "~nobody-here/x",
    "/etc/passwd",
    "/dev/null",
    "none",
    "auto",
    "builtin:",
    "builtin:x",
    "hub:",
    "hub:a/b",
    "hub:a/b@c",
    "hub:../..@..",
    "%s",
    "{0}",
    "$(id)",
    "`id`",
    "²",
    "١٢",
    "NaN",
    "-Infinity",
    "1e3",
    "1e999",
    "0x10",
    "1_000",
    "9" * 5000,
    "null",
    "'",
    '"',
    '"a',
    "a,b",
    "-",
    "--json",
    "-rf",
    "<script>",
    "[" * 3000,
    '{"a":' * 3000,
    "eyJ-" * 5000,
    "_" * 5000,
    "self",
    "name",
    "cls",
    "values",
    "true",
    "2",
    "0.1",
]
OTHERS = [
    None,
    [],
    {},
    [None],
    [[]],
    {"a": 1},
    {"": {}},
    [1, "a"],
    {"role": "user"},
    functools.reduce(lambda inner, _: [inner], range(200), []),
]


def nasty(rng):
    return copy.deepcopy(rng.choice(rng.choice([NUMBERS, TEXTS, TEXTS, OTHERS])))


def mostly(rng, good, others=TEXTS):
    "Return one of `good`, or sometimes one of `others`."
    return rng.choice(good if rng.random() < 0.75 else others)


def places(value, found=None):
    "Return each container in `value` with each of its keys."
    found = [] if found is None else found
    for key in (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    ):
        found.append((value, key))
        places(value[key], found)
    return found


def changed(value, rng, times=(1, 1, 1, 2, 3)):
    "Return a copy of `value`, a JSON value, with parts replaced, removed, renamed or added."
    value = copy.deepcopy(value)
    for _ in range(rng.choice(times)):
        if not (where := places(value)):
            return nasty(rng)
        container, key = rng.choice(where)
        what = rng.randrange(8)
        if what < 5:
            container[key] = nasty(rng)
        elif what == 5:
            del container[key]
        elif isinstance(container, dict):
            container[rng.choice(TEXTS)] = container.pop(key) if what == 6 else nasty(rng)
        else:
            container.insert(key, nasty(rng))
    return value


def spoiled(content, rng):
    "Return `content` with bytes cut off, flipped, inserted or removed."
    place, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    strange = rng.choice(
        [
            b"\0",
            b"\xff",
            b"\xed\xa0\x80",
            b"\xc3",
            b'"',
            b"'",
            b",",
            b"\n",
            b"\r",
            b"\t",
            b"{",
            b"}",
            b"[",
            b"]",
            b"NaN",
            b"-",
            b"9" * 5000,
            b"[" * 5000,
        ]
    )
    return rng.choice(
        [
            b"",
            content[:place],
            content[place:],
            content[:place] + content[end:],
            content[:place] + strange + content[place:],
            content + content,
            content[:place] + strange + content[end:],
            b"\xef\xbb\xbf" + content,
            content.replace(b"\n", b"\r\n"),
            content.replace(b"\n", b"\r"),
            content.replace(b'"', b"'"),
            content.decode("utf-8", "replace").encode("utf-16"),
            b"\0" * len(content),
            content + b"\0" * 100,
            content[:-1],
            content[:place]
            + bytes(b ^ 1 << rng.randrange(8) for b in content[place : place + 1])
            + content[place + 1 :],
            b"\n\n" + content,
            strange,
        ]
    )


def as_json(value, rng):
    "Return `value` as JSON in bytes, sometimes with a duplicate key."
    text = json.dumps(value, indent=rng.choice([None, 1]), ensure_ascii=rng.random() < 0.7)
    if text.startswith("{") and len(text) > 2 and rng.random() < 0.1:
        text = '{"task": "chat", "text": "twice", "commit": 1, ' + text[1:]
    return text.encode("utf-8", "surrogatepass")


def near(field, rng):
    "Return a value that the declaration of a configuration's `field` allows, or only just forbids."
    bounds = [
        b
        for m in field.metadata
        for b in (getattr(m, "ge", None), getattr(m, "gt", None), getattr(m, "le", None))
        if b is not None
    ]
    if words := [
        word
        for kind in (field.annotation, *typing.get_args(field.annotation))
        for word in typing.get_args(kind)
        if isinstance(word, str)
    ]:
        return rng.choice([*words, *words, words[0].upper(), words[0] + "x"])
    return rng.choice(
        [
            rng.choice(bounds) + rng.choice([-1, 0, 1, 0.5])
            if bounds
            else rng.choice(["a", "a/b", "none"]),
            rng.randrange(1, 60),
            str(rng.randrange(1, 60)),
        ]
    )


VALID = [
    *PRESETS.values(),
    {"task": "classification", "label_field": "y", "text_pair_field": "b"},
    {"start_idx": 5, "end_idx": 9, "eval_start_idx": 9, "keep_best": True},
    {
        "strategy": "zero3",
        "offload": "all",
        "nproc": 2,
        "deepspeed_config": '{"zero_optimization": {"stage": 3}}',
    },
    {"tracker": "wandb,tensorboard", "histogram_every": 2},
    {"tuning": "qlora", "strategy": "ddp", "hf_repo": "me/mine", "max_hours": 1.5},
    {"resume_file": "hub:me/mine@opt_0-5-epoch-1", "resume_scope": "weights"},
]


def settings(rng):
    values = dict(rng.choice(VALID))
    for _ in range(rng.choice([0, 0, 1, 1, 1, 2, 3])):
        name = rng.choice(list(RunConfig.model_fields))
        values[name] = near(RunConfig.model_fields[name], rng) if rng.random() < 0.5 else nasty(rng)
    if rng.random() < 0.1:
        values[rng.choice([*TEXTS, "strat_idx", "START_IDX", "lr"])] = nasty(rng)
    return values


# -- settings -------------------------------------------------------------------------------------------------------


def assert_config(cfg):
    "Assert that `cfg` obeys its declarations, and is the same after being written and read."
    for name, field in RunConfig.model_fields.items():
        value = getattr(cfg, name)
        if value is None:
            continue
        for bound in field.metadata:
            assert not hasattr(bound, "ge") or value >= bound.ge, (name, value)
            assert not hasattr(bound, "gt") or value > bound.gt, (name, value)
            assert not hasattr(bound, "le") or value <= bound.le, (name, value)
        assert not isinstance(value, float) or math.isfinite(value), (name, value)
        if isinstance(value, str):
            assert "\0" not in value and value.encode() is not None, (name, value)
    assert (
        RunConfig(**json.loads(json.dumps(cfg.model_dump(), allow_nan=False)))
        == cfg
        == cfg.replace()
    )
    assert repr(cfg) and fingerprint(cfg) and flags(cfg) is not None and cfg.trackers is not None


@surface
def config(rng, folder):
    values = settings(rng)
    cfg = RunConfig(**values)
    assert_config(cfg)
    for name, value in values.items():
        assert (
            value in (getattr(cfg, name), "none", None)
            or isinstance(value, str)
            or float(value) == float(getattr(cfg, name))
        ), (name, value)


@surface
def config_file(rng, folder):
    content = as_json(changed(settings(rng), rng) if rng.random() < 0.3 else settings(rng), rng)
    if rng.random() < 0.3:
        content = spoiled(content, rng)
    path = mostly(rng, ["cfg.json"], ["missing.json", ".", *TEXTS])
    Path("cfg.json").write_bytes(content)
    cfg = cli.parse_config(["--config", path])
    assert_config(cfg)
    assert cfg == RunConfig(**json.loads(content)) and path == "cfg.json"


@surface
def preset(rng, folder):
    name = mostly(rng, list(PRESETS), [*TEXTS, "tiny ", "TINY", "qwen"])
    values = {k: v for k, v in settings(rng).items() if rng.random() < 0.3}
    if rng.random() < 0.5:
        assert_config(RunConfig.preset(name, **values))
        assert name in PRESETS
    else:
        assert_config(RunConfig.from_namespace({"preset": name, "_private": object(), **values}))


@surface
def arguments(rng, folder):
    "Try a command line, up to where it would start something."

    class Reached(Exception):
        pass

    def instead(function):
        @functools.wraps(function)
        def reached(*args, **named):
            raise Reached(args, named)

        return reached

    verb = mostly(rng, [*cli._VERBS, "train", "train", "train", "train"])
    values = settings(rng)
    words = (
        [word for k, v in values.items() for word in (f"--{k.replace('_', '-')}", str(v))][
            : rng.choice([0, 2, 4, 100])
        ]
        if verb in ("train", "estimate", "slices") or rng.random() < 0.2
        else []
    )
    if verb == "deploy":
        words = [mostly(rng, list(cli._TARGETS)), "--config", "cfg.json", "--resources", "r.yaml"]
    elif verb in ("sync", "evaluate", "generate"):
        words = rng.choice([["run"], ["--output", "o.jsonl", "--dataset", "d.jsonl"], []])
    Path("cfg.json").write_bytes(as_json(settings(rng), rng))
    extra = [
        ["--preset", "tiny"],
        ["--config", "cfg.json"],
        ["--node-rank", rng.choice(["0", "1", "²", "-1", "9" * 5000])],
        ["--rdzv", "h:1"],
        ["--force"],
        ["--json"],
        ["--as-job"],
        ["--gpus", rng.choice(["2", "²", "-", "9" * 5000])],
        ["--gpu-memory-gib", rng.choice(["16", "x", "nan"])],
        ["--size", "5"],
        ["--last"],
        ["--help"],
        ["--hf-token", "x"],
        [str(nasty(rng))],
        ["--run-root", str(nasty(rng))],
        ["--model"],
        ["--size"],
        ["--preset"],
        ["--node-rank"],
    ]
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2, 3])):
        place = rng.randrange(len(words) + 1)
        words[place:place] = rng.choice(extra)
    told = [
        io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")
    ]
    before = signal.getsignal(signal.SIGTERM)
    stubs = {
        name: instead(getattr(cli, name))
        for name in (
            "launch",
            "run_slices",
            "estimate",
            "generate",
            "evaluate",
            "runs",
            "sync",
            "doctor",
        )
    }
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                mock.patch.multiple(
                    cli, **stubs, _TARGETS={k: instead(v) for k, v in cli._TARGETS.items()}
                )
            )
            stack.enter_context(mock.patch.object(sys, "argv", ["multigpu-ft", verb, *words]))
            stack.enter_context(contextlib.redirect_stdout(told[0]))
            stack.enter_context(contextlib.redirect_stderr(told[1]))
            cli.main()
    except Reached as reached:
        for value in reached.args[0]:
            if isinstance(value, RunConfig):
                assert_config(value)
    except SystemExit as end:
        told[1].flush()
        said = end.code if isinstance(end.code, str) else told[1].buffer.getvalue().decode()
        if end.code in (0, None):
            return
        assert isinstance(end.code, str) or end.code in (2, 78), (end.code, said)
        if isinstance(end.code, str) and "unknown verb" not in said:
            assert re.match(
                rf"multigpu-ft {re.escape(verb)}: ({'|'.join(kind.__name__ for kind in TYPED)}): ",
                said,
            ), said
        # tyro's usage may be long
        raise Refused(said if isinstance(end.code, str) else said[:LONGEST_MESSAGE]) from None
    finally:
        signal.signal(signal.SIGTERM, before)


# -- data -----------------------------------------------------------------------------------------------------------

WORDS = [
    "a b",
    "Hello.",
    "",
    "  ",
    "naïve 模型 😀",
    "x" * 3000,
    "line\u2028line",
    'say "hi"',
    "it's",
    "1,5",
    "a;b",
    "NULL",
    "0",
    "-1",
    "²",
    "1.0",
    "true",
]


def word(rng):
    return rng.choice(WORDS) if rng.random() < 0.8 else rng.choice(TEXTS)


def row(rng, task):
    "Return a row that `task` reads."
    if task == "chat":
        turns = [
            {"role": role, "content": word(rng)}
            for role in rng.choice(
                [
                    ("user", "assistant"),
                    ("system", "user", "assistant"),
                    ("user",),
                    ("assistant", "tool"),
                ]
            )
        ]
        return {"messages": turns, "text": "t"}
    return {
        "text": word(rng),
        **(
            {"label": rng.choice([0, 1, 2, "pos", "neg"])}
            if task == "classification" and rng.random() < 0.05
            else {"label": rng.randrange(2)}
        ),
    }


def data_settings(rng, path, task, count):
    "Return a configuration for `count` rows of `path`, usually one that fits."
    end = rng.choice([None, None, None, count, count - 1, count + 1, 1])
    return RunConfig(
        dataset=str(path),
        task=task,
        start_idx=rng.choice([0, 0, 0, 1, -1, count]),
        end_idx=end,
        slice_size=rng.choice([5000, 5000, 1, 2]),
        eval_start_idx=None,
    )


def texts_in(example):
    "Return the parts of `example` that a tokenizer or a template reads."
    return (
        [example]
        if isinstance(example, str)
        else [text for message in example for text in message.values() if isinstance(text, str)]
    )


def assert_texts(cfg, read):
    "Assert that the texts read for `cfg`'s slice are those in the rows of the whole data, which `read` returns."
    names = find_label_names(cfg) if cfg.task == "classification" else None
    found, rows = load_texts(cfg, names), read()
    assert count_rows(cfg) == len(
        rows
    ) == found.num_rows and 0 <= found.start_idx < found.end_idx <= len(rows), (
        found.start_idx,
        found.end_idx,
        len(rows),
    )
    wanted = dict(enumerate(rows[found.start_idx : found.end_idx], found.start_idx))
    field = cfg.messages_field if cfg.task == "chat" else cfg.text_field
    kept = {i: row for i, row in wanted.items() if cfg.task == "chat" or (row[field] or "").strip()}
    assert found.rows == list(kept) and found.texts == [row[field] for row in kept.values()], (
        found.texts,
        kept,
    )
    assert found.dropped == len(wanted) - len(kept)
    if names is not None:
        assert len(set(names)) == len(names) and all(
            names[n] == str(kept[i][cfg.label_field])
            for n, i in zip(found.labels, found.rows, strict=True)
        )
    assert not found.texts or set(columns(cfg)) == set(rows[0])
    "".join(text for example in found.texts for text in texts_in(example)).encode()


class Lines:
    "The rows of a .jsonl file, read only when needed: a slice may end before a damaged line."

    def __init__(self, content):
        self._lines = [
            line for line in re.split(r"\r\n|\r|\n", content.decode("utf-8-sig")) if line.strip()
        ]

    def __len__(self):
        return len(self._lines)

    def __getitem__(self, index):
        return (
            list(map(json.loads, self._lines[index]))
            if isinstance(index, slice)
            else json.loads(self._lines[index])
        )


def json_file(rng, suffix):
    task = rng.choice(["causal-lm", "chat", "classification"])
    rows = [row(rng, task) for _ in range(rng.randrange(1, 6))]
    if rng.random() < 0.4:
        rows = changed(rows, rng)
    values = [rows] if suffix == ".json" or not isinstance(rows, list) else rows
    content = rng.choice([b"\n", b"\n", b"\r\n", b"\n\n"]).join(
        json.dumps(value, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
        for value in values
    )
    if rng.random() < 0.4:
        content = spoiled(content, rng)
    path = Path(f"data{suffix}")
    path.write_bytes(content)
    cfg = data_settings(rng, path, task, len(rows) if isinstance(rows, list) else 1)
    assert_texts(
        cfg,
        lambda: json.loads(content.decode("utf-8-sig")) if suffix == ".json" else Lines(content),
    )


@surface
def jsonl(rng, folder):
    json_file(rng, ".jsonl")


@surface
def json_list(rng, folder):
    json_file(rng, ".json")


def table(rng, suffix):
    tabs = suffix == ".tsv"
    task = rng.choice(["causal-lm", "classification"])
    rows = [
        {
            "text": word(rng),
            "label": str(rng.choice([0, 1, 1, 0, 2, "9" * 5000] if rng.random() < 0.1 else [0, 1])),
        }
        for _ in range(rng.randrange(1, 6))
    ]
    if tabs:
        # an empty line is not a row if there is only one column
        rows = [{**r, "text": re.sub(r"[\t\r\n]", " ", r["text"]) or " "} for r in rows]
    head = rng.choice(
        [
            ["text", "label"],
            ["text", "label"],
            ["label", "text"],
            ["text", "text"],
            ["", "text"],
            ["text"],
        ]
    )
    out = io.StringIO(newline="")
    ending = rng.choice(["\n", "\n", "\r\n"])
    if tabs:
        out.write(
            "".join(
                "\t".join(line) + ending
                for line in [head, *([r.get(name, "") for name in head] for r in rows)]
            )
        )
    else:
        csv.writer(out, lineterminator=ending).writerows(
            [head, *([r.get(name, "") for name in head] for r in rows)]
        )
    content, whole = out.getvalue().encode("utf-8", "surrogatepass"), True
    if rng.random() < 0.4:
        content, whole = spoiled(content, rng), False
    path = Path(f"data{suffix}")
    path.write_bytes(rng.choice([b"", b"\xef\xbb\xbf"]) + content)
    cfg = data_settings(rng, path, task, len(rows))
    if whole:
        assert_texts(cfg, lambda: [{name: r.get(name, "") for name in head} for r in rows])
        assert len(set(head)) == len(head), "two columns have the same name"
    else:
        load_texts(cfg, find_label_names(cfg) if task == "classification" else None)


@surface
def comma_separated(rng, folder):
    table(rng, ".csv")


@surface
def tab_separated(rng, folder):
    table(rng, ".tsv")


@surface
def lines_of_text(rng, folder):
    content = (
        rng.choice(["\n", "\r\n", "\r"])
        .join(word(rng) for _ in range(rng.randrange(1, 6)))
        .encode("utf-8", "surrogatepass")
    )
    content = spoiled(content, rng) if rng.random() < 0.4 else content
    path = Path("data.txt")
    path.write_bytes(content)
    rows = [
        {"text": line}
        for line in re.split(
            r"\r\n|\r|\n", re.sub(r"(\r\n|\r|\n)\Z", "", content.decode("utf-8-sig", "replace"))
        )
    ]
    assert_texts(data_settings(rng, path, "causal-lm", 3), lambda: rows)


@surface
def parquet(rng, folder):
    import pyarrow
    import pyarrow.parquet

    task = rng.choice(["causal-lm", "chat", "classification"])
    rows = [row(rng, task) for _ in range(rng.randrange(1, 6))]
    rows = changed(rows, rng) if rng.random() < 0.2 else rows
    try:
        made = pyarrow.Table.from_pylist(rows)
    except Exception:  # a table can't hold these
        rows = [
            {
                "text": rng.choice([b"bytes", "text", None, 1.5, [1]]),
                "label": rng.choice([None, 1, 0.5]),
            }
        ]
        made = pyarrow.Table.from_pylist(rows)
    out = io.BytesIO()
    try:
        pyarrow.parquet.write_table(made, out, compression=rng.choice(["snappy", "none"]))
    except pyarrow.ArrowException as error:  # an empty struct
        raise Refused(str(error)) from None
    content, whole = out.getvalue(), True
    if rng.random() < 0.5:
        content, whole = spoiled(content, rng), False
    path = Path("data.parquet")
    path.write_bytes(content)
    cfg = data_settings(rng, path, task, len(rows))
    if whole:
        assert_texts(cfg, made.to_pylist)
    else:
        load_texts(cfg, find_label_names(cfg) if task == "classification" else None)


@surface
def dataset_name(rng, folder):
    Path("data.jsonl").write_text('{"text": "a"}\n')
    Path("folder.jsonl").mkdir()
    Path("loop.jsonl").symlink_to("loop.jsonl")
    names = [
        "folder.jsonl",
        "loop.jsonl",
        "data.jsonl/x.jsonl",
        "DATA.JSONL",
        *(t + e for t in TEXTS for e in (".jsonl", ".csv", "/a/b")),
    ]
    cfg = RunConfig(
        dataset=mostly(
            rng, ["data.jsonl", "./data.jsonl", str(Path("data.jsonl").absolute())], names
        )
        if rng.random() < 0.3
        else rng.choice(names)
    )
    found = load_texts(cfg)
    assert found.texts == ["a"] and cfg.dataset.endswith("data.jsonl")


@surface
def questions(rng, folder):
    rows = []
    for _ in range(rng.randrange(1, 5)):
        rows.append(
            {"question": word(rng), "id": rng.choice([1, "a", None])}
            if rng.random() < 0.5
            else row(rng, "chat")
        )
    rows = changed(rows, rng) if rng.random() < 0.5 else rows
    content = b"\n".join(
        json.dumps(value, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
        for value in (rows if isinstance(rows, list) else [rows])
    )
    Path("q.jsonl").write_bytes(spoiled(content, rng) if rng.random() < 0.2 else content)
    found, left_out = load_questions(
        RunConfig(
            dataset="q.jsonl", start_idx=rng.choice([0, 0, 1]), slice_size=rng.choice([1, 9])
        ),
        system_prompt=rng.choice([None, "Be."]),
    )
    read = Lines(Path("q.jsonl").read_bytes())
    for question in found:
        asked = read[question.number]
        last = (
            [m for m in asked["messages"] or [] if isinstance(m, dict)]
            if "messages" in asked
            else [{"role": "user", "content": asked["question"]}]
        )
        last = last[:-1] if last[-1]["role"] == "assistant" else last
        assert question.messages[-1] == last[-1] and last[-1]["content"].strip()
        "".join(texts_in(question.messages)).encode()
    assert found and all(isinstance(n, int) for numbers in left_out.rows.values() for n in numbers)


# -- slices, names, places ------------------------------------------------------------------------------------------


@surface
def slices(rng, folder):
    count = rng.randrange(1, 12)
    Path("data.jsonl").write_text('{"text": "a"}\n' * count)

    def number(often):
        return (
            None
            if rng.random() > often
            else rng.choice(
                [
                    rng.randrange(-1, count + 2),
                    rng.randrange(count),
                    count,
                    nasty(rng) if rng.random() < 0.3 else 1,
                ]
            )
        )

    asked = {
        "start_idx": number(0.3) or 0,
        "end_idx": number(0.5),
        "slice_size": number(0.5) or 3,
        "eval_start_idx": number(0.2),
        "eval_end_idx": number(0.1),
        "schedule_end_idx": number(0.1),
        "lr_scheduler": rng.choice(["constant", "linear"]),
    }
    cfg = RunConfig(dataset=rng.choice(["data.jsonl", "data.jsonl", "user/on-the-hub"]), **asked)
    series = Slices(cfg)
    assert str(series) and series.table() and series.state == "to do"
    ends = [cfg.start_idx, *(end for _, end in series.bounds)]
    assert [start for start, _ in series.bounds] == ends[:-1] and all(
        0 < end - start <= cfg.slice_size for start, end in series.bounds
    ), series.bounds
    assert (
        series.bounds
        and series.bounds[0][0] >= 0
        and (cfg.end_idx is None or ends[-1] == cfg.end_idx)
    )
    if cfg.dataset != "data.jsonl":
        return
    assert ends[-1] <= count
    found = load_texts(cfg)
    assert (
        0 <= found.start_idx < found.end_idx <= count
        and found.end_idx - found.start_idx == len(found)
        and (found.start_idx, found.end_idx)[0] == cfg.start_idx
    )
    if held_out := evaluation_config(cfg):
        rows = load_texts(held_out).rows
        assert rows and not set(rows) & set(found.rows), "rows are both trained and evaluated on"


@surface
def names(rng, folder):
    pool = [t for t in TEXTS if not t.startswith("/")]
    cfg = RunConfig(
        run_name=mostly(rng, [None, "mine", "run.1"], pool),
        model=mostly(rng, ["a/b", "builtin:opt-tiny", "m" * 200]),
        start_idx=rng.choice([0, 5, 10**9]),
        run_root=mostly(rng, ["runs", "runs/deeper"], ["a file", *pool]),
    )
    Path("a file").touch()
    before = {p for p in folder.rglob("*")}
    made = (
        RunDir.create(cfg, rng.choice([None, 7, 10**9]))
        if rng.random() < 0.7
        else RunDir.common(cfg)
    )
    root = Path(cfg.run_root).resolve()
    assert (
        made.path.parent == root
        and (cfg.run_name is None or made.name.startswith(cfg.run_name))
        and made.path != root
    ), made
    assert ".." in cfg.run_root or all(
        p.is_relative_to(made.path) or made.path.is_relative_to(p)
        for p in set(folder.rglob("*")) - before
    )
    if (made.path / "config.json").exists():
        assert made.config() == cfg.replace(run_root=str(root), run_name=made.name)
    for end in (True, False):
        name = Progress(cfg.start_idx, 7, 1, slice_step=3).name(cfg.model, end)
        assert "/" not in name and name not in (".", "..") and len(name.encode()) < 240, name
        (made.path / "checkpoints" / f"{name}.1.partial").mkdir()


@surface
def resume_file(rng, folder):
    cfg = RunConfig(run_root="runs")
    make_checkpoint(RunDir.create(cfg), cfg)
    Path("weights.pt").touch()
    Path("folder.pt").mkdir()
    good = [
        str(next(Path("runs").glob("*/checkpoints/*"))),
        "opt-tiny_0-5000-epoch-1",
        "weights.pt",
        "auto",
        "none",
        "hub:me/mine",
        "hub:me/mine@x-1",
    ]
    strange = [
        *TEXTS,
        "folder.pt",
        "missing.pt",
        *(t + ".pt" for t in TEXTS),
        *(f"hub:{t}" for t in TEXTS),
        *(f"hub:a/b@{t}" for t in TEXTS),
        good[0] + "/..",
    ]
    value = rng.choice(good) if rng.random() < 0.3 else rng.choice(strange)
    asked = cfg.replace(resume_file=value)
    if found := parse_hub(asked.resume_file):
        repo, name = found
        assert (
            re.fullmatch(r"[\w.-]+/[\w.-]+", repo)
            and (name is None or is_name(name))
            and value == f"hub:{repo}" + (f"@{name}" if name else "")
        )
        assert not any(part in ("", ".", "..") for part in repo.split("/")), repo
    there = find_checkpoints(asked)
    assert all(path.exists() for path in there) and bool(there) == (value in good[:4]), (
        value,
        there,
    )
    assert value in good or found, value


@surface
def rdzv(rng, folder):
    hosts = [
        "10.0.0.1",
        "host",
        "a.b.c",
        "[::1]",
        "::1",
        "0.0.0.0",
        "[::]",
        "fe80::1%eth0",
        "host name",
        "-x",
        "a" * 64,
        "x" * 300,
        "",
        "[",
        "]",
        "é",
        "a..b",
        "user@host",
        "h/x",
        *TEXTS,
    ]
    ports = [
        "29400",
        "1",
        "65535",
        "0",
        "65536",
        "-1",
        "²",
        "١٢",
        "",
        " 80",
        "80 ",
        "0x50",
        "9" * 5000,
        "http",
        *TEXTS,
    ]
    address = (
        f"{mostly(rng, hosts[:5], hosts)}:{mostly(rng, ports[:3], ports)}"
        if rng.random() < 0.9
        else rng.choice(TEXTS)
    )
    node = find_node(
        RunConfig(nnodes=rng.choice([1, 2, 3])),
        mostly(rng, [0], [1, 2, -1, 10**30, None]),
        None if rng.random() < 0.05 else address,
    )
    if node is None:
        return
    host, port = rendezvous.split_address(node.rdzv)
    assert 0 < port < 2**16 and node.rdzv.endswith(f":{port}") and host
    assert re.fullmatch(r"[A-Za-z0-9._:%-]+", host) and len(host) < 254, host
    if not re.search("[:%]", host):
        host.encode("idna")  # getaddrinfo does it too


# -- run directories ------------------------------------------------------------------------------------------------


def make_checkpoint(run_dir, cfg, name="opt-tiny_0-5000-epoch-1"):
    "Make a checkpoint with a valid manifest, whose files could not be loaded. Returns its folder."
    folder = run_dir.path / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "rank0.safetensors").write_bytes(b"weights" * 9)
    progress = {
        "start_idx": 0,
        "end_idx": 5000,
        "epoch": 1,
        "position": 9,
        "num_texts": 9,
        "step": 3,
        "slice_step": 3,
        "trained": [
            {
                "start_idx": 0,
                "end_idx": 5000,
                "epochs": 1,
                "steps": 3,
                "position": 9,
                "num_texts": 9,
            }
        ],
    }
    (folder / "progress.json").write_text(json.dumps(progress))
    files = {path.name: digest(path) for path in folder.iterdir()}
    body = {"time": 1700000000.25, "fingerprint": fingerprint(cfg), "files": files}
    (folder / "commit.json").write_text(json.dumps({"commit": body, "sha256": commit_digest(body)}))
    return folder


@surface
def manifest(rng, folder):
    "Try a checkpoint's commit.json that is damaged, or forged with a valid digest."
    cfg = RunConfig(run_root="runs", resume_file=rng.choice(["auto", "opt-tiny_0-5000-epoch-1"]))
    run_dir = RunDir.create(cfg)
    checkpoint = make_checkpoint(run_dir, cfg)
    path = checkpoint / "commit.json"
    record = json.loads(path.read_text())
    Path("secret.txt").write_text("secret")
    what = rng.randrange(5)
    if what == 0:
        path.write_bytes(spoiled(path.read_bytes(), rng))
    elif what == 1:
        path.write_bytes(as_json(changed(record, rng), rng))
    elif what == 2:
        body = changed(record["commit"], rng)
        path.write_bytes(json.dumps({"commit": body, "sha256": commit_digest(body)}).encode())
    elif what == 3:
        name = rng.choice(
            [
                "../../../../secret.txt",
                str(Path("secret.txt").absolute()),
                "link",
                "sub/x",
                ".",
                "..",
                *TEXTS,
            ]
        )
        (checkpoint / "link").symlink_to(Path("secret.txt").absolute())
        body = {
            **record["commit"],
            "files": {**record["commit"]["files"], name: digest(Path("secret.txt"))},
        }
        path.write_bytes(json.dumps({"commit": body, "sha256": commit_digest(body)}).encode())
    else:
        other = rng.choice(sorted(checkpoint.iterdir()))
        content = other.read_bytes()
        other.unlink() if rng.random() < 0.2 else other.write_bytes(spoiled(content, rng))
    do = rng.randrange(4)
    assert isinstance(saved_at(checkpoint), (int, float)) and math.isfinite(saved_at(checkpoint))
    if do == 0:
        verify_checkpoint(checkpoint)
        files = json.loads(path.read_bytes())["commit"]["files"]
        for name, about in files.items():
            assert Path(name).name == name, f"{name!r} is not a file of a checkpoint"
            assert digest(checkpoint / name) == about
    elif do == 1:
        progress = read_progress(checkpoint)
        assert progress == json.loads((checkpoint / "progress.json").read_bytes()) and isinstance(
            progress, dict
        )
    elif do == 2:
        assert all(c == checkpoint for c in find_checkpoints(cfg))
    elif path.exists():
        for name in parse_commit(path.read_bytes())["files"]:
            assert re.fullmatch(r"rank\d+\.safetensors|progress\.json", name), name


STATUS = {
    "state": "done",
    "heartbeat": 1700000100.5,
    "launched": 1700000000.5,
    "host": socket.gethostname(),
    "pids": {"agent": 2**22 + 1, "ranks": [2**22 + 2], "launcher": 2**22 + 3},
    "step": 3,
    "slice_step": 3,
    "total_steps": 9,
    "epoch": 1,
    "first_step": 1,
    "line": "l-1",
    "checkpoint": "opt-tiny_0-5000-epoch-1",
    "export": "export",
    "loss_before": 2.5,
    "loss_after": 1.5,
    "eval_before": {"loss": 2.0},
    "eval_after": {"loss": 1.0},
    "best": {"loss": 1.0, "step": 3, "checkpoint": "x"},
    "remarks": ["a"],
    "skipped_steps": 0,
    "resumed_from": "runs/x/checkpoints/y",
    "resumed_saved_at": 1.5,
    "slice": [0, 5000],
    "texts_a_step": 4,
    "activity": None,
    "message": None,
    "interrupted": False,
}
FAILURE = {
    "rank": 0,
    "exitcode": 1,
    "type": "ValueError",
    "text": "no",
    "traceback": "Trace",
    "frames": [
        {"folded": 3, "of": ["multigpu_ft", "torch"]},
        {"file": "a.py", "line": 3, "name": "f", "code": "g()"},
        {"cause": "KeyError: 1"},
    ],
    "clear": False,
    "pid": 2**22 + 1,
    "node": "node 1",
    "node_rank": 1,
}
METRIC = {
    "step": 1,
    "epoch": 1,
    "loss": 2.5,
    "learning_rate": 1e-3,
    "grad_norm": 1.0,
    "tokens_per_second": 100.0,
    "samples_seen": 4,
    "time": 1700000001.5,
}


@surface
def run_directory(rng, folder):
    "Try status.json, metrics.jsonl, config.json and others as another process or a broken disk may leave them."
    cfg = RunConfig(run_root="runs", hf_repo=rng.choice([None, "me/mine"]))
    run_dir = RunDir.create(cfg)
    make_checkpoint(run_dir, cfg)
    status = {
        **STATUS,
        "state": rng.choice(["done", "done", "failed", "running", "stopped", "starting"]),
    }
    if status["state"] == "failed":
        status["failure"] = {
            k: v
            for k, v in FAILURE.items()
            if rng.random() < 0.8 or k in ("text", "pid", "traceback")
        }
    files = {
        "status.json": status,
        "estimate.json": {"needed": 1, "remarks": []},
        "hub.json": {
            "repo": "me/mine",
            "url": None,
            "uploaded": {},
            "pending": [],
            "error": None,
            "attempts": 0,
        },
        "config.json": json.loads((run_dir.path / "config.json").read_text()),
        "generation.json": {"output": "o.jsonl", "stop": []},
        "errors/rank0.json": {
            "message": {
                "message": "m",
                "extraInfo": {
                    "type": "ValueError",
                    "text": "no",
                    "clear": False,
                    "time": 1.5,
                    "py_callstack": "x",
                },
            }
        },
    }
    for name, value in files.items():
        (run_dir.path / name).write_text(json.dumps(value))
    lines_now = [
        json.dumps({**METRIC, "step": step, "loss": rng.choice([2.5, None])}).encode()
        for step in range(1, 4)
    ]
    (run_dir.path / "beats/rank0").write_text("1 2 step\n")
    damaged = rng.choice(
        [*files, "status.json", "status.json", "metrics.jsonl", "metrics.jsonl", "beats/rank0"]
    )
    if damaged == "metrics.jsonl":
        place = rng.randrange(3)
        lines_now[place] = rng.choice(
            [
                spoiled(lines_now[place], rng),
                as_json(changed(METRIC, rng), rng).replace(b"\n", b""),
                b"",
                lines_now[place][:20] + lines_now[place],
            ]
        )
    (run_dir.path / "metrics.jsonl").write_bytes(
        b"\n".join(lines_now) + rng.choice([b"\n", b"\n", b"", b'\n{"step": 4, '])
    )
    if damaged == "beats/rank0":
        (run_dir.path / damaged).write_bytes(
            rng.choice(
                [
                    spoiled(b"1 2 step\n", rng),
                    rng.choice(TEXTS).encode("utf-8", "surrogatepass"),
                    b"a b c",
                ]
            )
        )
    elif damaged in files and rng.random() < 0.5:
        (run_dir.path / damaged).write_bytes(spoiled((run_dir.path / damaged).read_bytes(), rng))
    elif damaged in files:
        (run_dir.path / damaged).write_bytes(as_json(changed(files[damaged], rng), rng))
    use = rng.choice(list(READERS))
    found = READERS[use](run_dir, cfg)
    if use == "status":
        assert isinstance(found, dict) and found == json.loads(
            (run_dir.path / "status.json").read_bytes()
        )
    if use in ("metrics", "recent_metrics") and damaged != "metrics.jsonl":
        assert [m["step"] for m in found][:2] == [1, 2]


def _panel_line(run_dir, cfg):
    run = Run(run_dir)
    return repr(run), run.state, run.failure, cli.describe(run)


READERS = {
    "status": lambda run, cfg: run.status(),
    "metrics": lambda run, cfg: run.metrics(),
    "recent_metrics": lambda run, cfg: run.recent_metrics(20),
    "config": lambda run, cfg: run.config(),
    "plan": lambda run, cfg: run.plan(),
    "run": _panel_line,
    "runs": lambda run, cfg: (repr(runs("runs")), runs("runs")._repr_html_()),
    "is_alive": lambda run, cfg: is_alive(run),
    "kept": lambda run, cfg: kept_checkpoints(run),
    "curve": lambda run, cfg: Curve(run.path / "metrics.jsonl").read(),
    "earlier": lambda run, cfg: earlier_metrics(run, 3),
    "line": lambda run, cfg: runs_of("l-1", Path("runs")),
    "found": lambda run, cfg: find_checkpoints(cfg),
    "uploads": lambda run, cfg: read_record(run),
    "assignment": lambda run, cfg: completions.GenerationJob.read(run),
    "error": lambda run, cfg: read_error(run.error_file(0)),
    "beat": lambda run, cfg: read_heartbeat(run.beat_file(0)),
    "subject": lambda run, cfg: newest_fine_tuned(run),
    "evaluated": lambda run, cfg: find_runs(run.path),
    "failure": lambda run, cfg: failure_of(run, {**FAILURE, **(run.status().get("failure") or {})}),
}


@surface
def shards(rng, folder):
    "Try answers on their way to a file, and the name of a reward."
    Path("s").mkdir()
    lines_now = [
        json.dumps({"key": k, "time": t, "record": {"a": 1}}).encode()
        for k, t in (("a", 1.0), ("b", 2.0), ("a", 3.0))
    ]
    place = rng.randrange(3)
    lines_now[place] = rng.choice(
        [
            spoiled(lines_now[place], rng),
            as_json(changed(json.loads(lines_now[place]), rng), rng).replace(b"\n", b""),
        ]
    )
    Path("s/rank0.jsonl").write_bytes(b"\n".join(lines_now) + b"\n")
    found = completions.read_shards(Path("s"))
    assert all(record["key"] == key for key, record in found.items()) and (
        place == 1 or "b" in found
    )
    share, numbers = (
        rng.choice([0, 0.1, 0.5, 1]),
        [rng.randrange(50) for _ in range(rng.randrange(5))],
    )
    chosen = completions.validation_questions(numbers, share, rng.randrange(9))
    assert chosen <= set(numbers) and (len(chosen) < len(set(numbers)) or not numbers)
    if rng.random() < 0.7:
        name = rng.choice(
            [
                "json:dumps",
                "json:nosuch",
                "nosuch:f",
                ":",
                "json:",
                ":f",
                "json:dumps:x",
                "..:f",
                ".a:f",
                *TEXTS,
                *(t + ":f" for t in TEXTS),
            ]
        )
        assert callable(completions.load_reward(name)) and name == "json:dumps"


# -- clusters -------------------------------------------------------------------------------------------------------

TOKEN = "hf_" + "Ab1" * 10
RESOURCES = {
    "image": f"registry.example/multigpu-ft@sha256:{'0' * 64}",
    "replicas": 2,
    "resources": {
        "gpu": {"accelerator_count": 1, "accelerator": "h100", "memory": "64Gi", "cpu": 8}
    },
    "config_map": {"NCCL_DEBUG": "WARN"},
    "shared_volume": {"size": "200Gi"},
    "secret": "tokens",
    "restarts": 3,
    "node_selector": {"a": "b"},
    "tolerations": [{"key": "k"}],
}
YAMLS = [
    "a: &a [x, x]\n"
    + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(9)
    ),
    "a: &a [*a]",
    "a: *nowhere",
    "&a {*a : 1}",
    "x: !!python/object/apply:os.system [id]",
    "x: !!python/name:os.system",
    "!!python/object:os.X {}",
    "x: !!timestamp x",
    "x: 2024-13-45",
    "x: !!bool maybe",
    "x: !!int ''",
    "x: !!float x",
    "x: !!binary é",
    "x: !!set {1, 2}",
    "x: !!omap 1",
    "{[1]: 2}",
    "{{}: 1}",
    "- a\n- b",
    "--- a\n--- b",
    "%YAML 9.9\n---\na",
    "a: b: c",
    "\ta: 1",
    "a: 'x",
    "[" * 2000,
    "a: 1\na: 2",
    "? a",
    "!",
    "<<: 1",
    "<<: *x",
    "null: 1",
    "1: 2",
    "true: 1",
    "a: 0x",
    "a: 1__0",
    "a: 1:2:3",
    "a: .inf",
    "a: " + "9" * 5000,
    "- " * 2000,
    "{" * 2000,
    "self: 1",
    "a: |\n" + " x\n" * 3000,
    "# " + "x" * 50000,
    "values: {}",
    f"config_map: {{HF_TOKEN: {TOKEN}}}",
    f"name: {TOKEN}",
    "a: \x07",
    "config_map: {A: yes}",
    "replicas: '2'",
    "<<: {a: 1}",
]


@surface
def resources(rng, folder):
    "Try a resources.yaml, and make the manifests of a run from it."
    what = rng.randrange(4)
    if what == 0:
        good = yaml.safe_dump(RESOURCES)
        content = rng.choice(
            [rng.choice(YAMLS), good + rng.choice(YAMLS), rng.choice(YAMLS) + "\n" + good]
        ).encode("utf-8", "surrogatepass")
    else:
        values = changed(RESOURCES, rng) if what < 3 or rng.random() < 0.7 else RESOURCES
        try:
            content = yaml.safe_dump(values, allow_unicode=rng.random() < 0.5).encode(
                "utf-8", "surrogatepass"
            )
        except (yaml.YAMLError, RecursionError):
            content = json.dumps(values).encode()
        if what == 2:
            content = spoiled(content, rng)
    Path("r.yaml").write_bytes(content)
    source = "r.yaml" if rng.random() < 0.95 else rng.choice([".", "missing", *TEXTS])
    try:
        found = Resources.read(source)
    except ConfigError as error:
        assert TOKEN not in str(error), "a token is shown"
        raise
    assert (
        Resources(**found.model_dump()) == found and TOKEN not in repr(found) and source == "r.yaml"
    )
    cfg = RunConfig(
        model="a/b",
        dataset="c/d",
        run_name=rng.choice([None, "Mine_1", "..x", "é", "1"]),
        start_idx=rng.choice([0, 10**9]),
    )
    for rendered in deploy_kubernetes(cfg, found, target=rng.choice(["job", "trainjob"])).manifests:
        assert yaml.safe_load(yaml.safe_dump(rendered)) == rendered
        assert (
            re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", rendered["metadata"]["name"])
            and len(rendered["metadata"]["name"]) <= 63
        ), rendered["metadata"]


@surface
def deepspeed(rng, folder):
    "Try a DeepSpeed JSON, in a file or as text."
    good = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "fp16": {"enabled": "auto"},
        "steps_per_print": 5,
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "reduce_bucket_size": 10**6,
            "offload_optimizer": {"device": "none", "pin_memory": True},
        },
    }
    keys = [
        "optimizer",
        "scheduler",
        "aio",
        "zero_optimisation",
        "amp",
        "bf16",
        "gradient_clipping",
        "train_batch_size",
        "comms_logger",
    ]
    values = (
        changed(good, rng)
        if rng.random() < 0.6
        else {**good, rng.choice([*keys, "steps_per_print"]): mostly(rng, ["auto"], OTHERS)}
    )
    content = as_json(values, rng) if rng.random() < 0.7 else spoiled(as_json(values, rng), rng)
    Path("ds.json").write_bytes(content)
    given = mostly(
        rng,
        ["ds.json", content.decode("utf-8", "replace")],
        ["ds.json", "missing.json", ".", *TEXTS],
    )
    cfg = RunConfig(
        strategy=rng.choice(["zero1", "zero2", "zero2", "zero2", "zero3"]), deepspeed_config=given
    )
    own = read_zero_config(cfg, rng.choice([None, 2]), rng.choice([None, "bf16"]))
    told = zero_settings(cfg, 2, "bf16", [10, 20])
    assert (
        told["zero_optimization"]["stage"] == cfg.zero_stage
        and told["train_batch_size"] == 8
        and not {"optimizer", "scheduler", "fp16"} & own.keys()
    )
    json.dumps(told, allow_nan=False)


class _Silent:
    "A peer without anything at its other end."

    heard, there, node_rank = 0.0, "10.0.0.9", 1

    def __init__(self):
        self.said = []

    def say(self, **message):
        self.said.append(message)

    def close(self):
        pass

    part = close


@surface
def supervisor(rng, folder):
    "Try messages from another machine, which may not be a node at all."
    cfg = RunConfig(run_root="runs", nnodes=3, nproc=1, strategy="ddp")
    run_dir = RunDir.create(cfg)
    join = {
        "node_rank": 1,
        "host": "h",
        "nproc": 1,
        "versions": {"torch": "2"},
        "config": supervisor_module._comparable(cfg),
    }
    message = rng.choice(
        [
            {"join": join},
            {"join": join},
            {"ended": {"failure": None}},
            {"lost": "x"},
            {"stop": ""},
            {},
        ]
    )
    message = message if rng.random() < 0.2 else changed(message, rng)
    content = as_json(message, random.Random(0)).replace(b"\n", b"")
    content = spoiled(content, rng) if rng.random() < 0.2 else content
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here = listener.accept()[0]
    inbox, died = queue.Queue(), []
    with here, there, mock.patch.object(threading, "excepthook", died.append):
        peer = rendezvous.Peer(here, inbox, 2.0)
        there.sendall(content + b"\n")
        there.shutdown(socket.SHUT_WR)
        heard = []
        while not heard or "lost" not in heard[-1] or heard[-1] == message:
            heard.append(inbox.get(timeout=3)[1])
        peer.close()
    assert not died and all(isinstance(m, dict) for m in heard)
    members = supervisor_module._Members(run_dir, cfg)
    stranger = _Silent()
    for said in heard[:-1]:
        members._inbox.put((stranger, said))
    with (
        contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")),
        mock.patch.object(supervisor_module, "_versions", lambda: join["versions"]),
    ):
        for _ in heard[:-1]:
            list(members.messages())
    if stranger.said:
        assert not members.joined
        raise Refused(stranger.said[0]["refused"])
    if members.joined:
        joined = heard[0]["join"]
        assert (
            list(members.joined) == [joined["node_rank"]]
            and {k: joined["config"].get(k) for k in join["config"]} == join["config"]
        )
    elif not heard[:-1]:
        raise Refused(heard[-1]["lost"])


# -- running --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(seconds):
    "Raise `Hang` if the body takes longer."

    def late(*_):
        raise Hang

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, late)
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        # pytest's own limit
        signal.setitimer(
            signal.ITIMER_REAL, max(0.1, before - time.monotonic() + began) if before else 0
        )
        signal.signal(signal.SIGALRM, handler)


def assert_message(said):
    assert said.strip(), "the message is empty"
    assert len(said) <= LONGEST_MESSAGE, f"the message has {len(said):,} characters: {said[:300]!r}"
    assert "Traceback" not in said, f"the message shows a traceback: {said[:300]!r}"
    assert not re.search("[\ud800-\udfff]", said), f"the message cannot be printed: {said[:300]!r}"


def trial(name, seed, seconds=LONGEST_S):
    "Try one input. Returns `accepted`, `refused`, or what was wrong."
    rng, back = random.Random(f"{name} {seed}"), Path.cwd()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-")).resolve()
    here = folder / "1" / "2" / "3"  # so that ../.. stays inside
    here.mkdir(parents=True)
    os.chdir(here)
    try:
        with limited(seconds):
            SURFACES[name](rng, here)
        return "accepted"
    except Hang:
        return f"it took more than {seconds:g} s"
    except (*TYPED, Refused) as error:
        if type(error) not in (*TYPED, Refused):
            return "".join(traceback.format_exception(error))
        try:
            assert_message(str(error))
        except AssertionError as wrong:
            return f"{type(error).__name__}: {wrong}"
        return "refused"
    except Exception as error:  # any other error is a bug in the code, or a failed assertion
        return "".join(traceback.format_exception(error))
    finally:
        os.chdir(back)
        shutil.rmtree(folder, ignore_errors=True)


def fuzz(names, inputs, first_seed, seconds=LONGEST_S):
    "Try `inputs` inputs of each surface. Returns how many were accepted and refused, and failures by seed."
    report = {}
    for name in names:
        counts, begun = {"inputs": inputs, "accepted": 0, "refused": 0}, time.monotonic()
        failures = {}
        for seed in range(first_seed, first_seed + inputs):
            end = trial(name, seed, seconds)
            if end in counts:
                counts[end] += 1
            else:
                failures[seed] = end
        report[name] = {
            **counts,
            "failures": failures,
            "seconds": round(time.monotonic() - begun, 1),
        }
    return report


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20000, help="of all surfaces together")
    parser.add_argument(
        "--seed",
        "--first-seed",
        type=int,
        default=0,
        dest="first_seed",
        help="of the first input of each surface",
    )
    parser.add_argument("--only", choices=SURFACES)
    parser.add_argument("--shown", type=int, default=3, help="failures of a surface that are shown")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = [options.only] if options.only else list(SURFACES)
    print(
        f"{'surface':16} {'inputs':>7} {'accepted':>9} {'refused':>8} {'failures':>9} {'seconds':>8}"
    )
    report = {}
    for name in names:
        counted = fuzz([name], -(-options.inputs // len(names)), options.first_seed)[name]
        failures = counted.pop("failures")
        report[name] = {**counted, "failures": len(failures)}
        print(
            f"{name:16} {counted['inputs']:7} {counted['accepted']:9} {counted['refused']:8} "
            f"{len(failures):9} {counted['seconds']:8}",
            flush=True,
        )
        for seed, what in list(failures.items())[: options.shown]:
            print(f"--only {name} --first-seed {seed} --inputs 1\n{what[-3000:]}", flush=True)
    total = {
        key: sum(counted[key] for counted in report.values())
        for key in ("inputs", "accepted", "refused", "failures", "seconds")
    }
    print(
        f"{'all':16} {total['inputs']:7} {total['accepted']:9} {total['refused']:8} "
        f"{total['failures']:9} {total['seconds']:8.1f}"
    )
    if options.json:
        options.json.write_text(
            json.dumps({"first_seed": options.first_seed, **total, "surfaces": report}, indent=1)
            + "\n"
        )
    sys.exit(total["failures"] > 0)


if __name__ == "__main__":
    main()

"""Generated inputs are accepted correctly or refused with one typed error.

The harness, fuzz.py, also runs at full size."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import fuzz

from multigpu_ft import ConfigError


@pytest.mark.parametrize("name", list(fuzz.SURFACES))
def test_each_input_is_accepted_correctly_or_refused_with_one_typed_error(name):
    found = fuzz.fuzz([name], inputs=92, first_seed=0)[name]
    failures = [
        f"--only {name} --first-seed {seed} --inputs 1\n{what[-2000:]}"
        for seed, what in found["failures"].items()
    ]
    assert not failures, "\n".join(failures[:3])
    assert found["accepted"] and found["refused"], "no inputs of one kind"


def unbounded(rng, folder):
    while True:
        time.sleep(0.001)


def raising(error):
    def surface(rng, folder):
        raise error

    return surface


@pytest.mark.parametrize(
    "planted,told",
    [
        (lambda rng, folder: {}["planted"], "KeyError: 'planted'"),
        (unbounded, "it took more than 0.2 s"),
        (raising(ValueError("of no type of ours")), "ValueError: of no"),
        (raising(ConfigError("")), "the message is empty"),
        (raising(ConfigError("a Traceback of something")), "shows a traceback"),
    ],
)
def test_a_planted_bug_is_reported_with_the_seed_that_repeats_it(monkeypatch, planted, told):
    sometimes = {
        "planted": lambda rng, folder: planted(rng, folder) if rng.random() < 0.5 else None
    }
    monkeypatch.setattr(fuzz, "SURFACES", sometimes)
    here = Path.cwd()
    found = fuzz.fuzz(["planted"], inputs=8, first_seed=3, seconds=0.2)["planted"]
    assert (
        0 < len(found["failures"]) < 8
        and found["accepted"] == 8 - len(found["failures"])
        and Path.cwd() == here
    )
    for seed, what in found["failures"].items():
        assert told in what
        again = fuzz.fuzz(["planted"], inputs=1, first_seed=seed, seconds=0.2)["planted"]
        assert list(again["failures"]) == [seed]


def test_the_command_repeats_one_input(tmp_path):
    "Its exit code says that nothing was wrong."
    words = [
        "--only",
        "rdzv",
        "--first-seed",
        "5",
        "--inputs",
        "1",
        "--json",
        str(tmp_path / "r.json"),
    ]
    done = subprocess.run(
        [sys.executable, fuzz.__file__, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "rdzv" in done.stdout, done.stdout + done.stderr
    assert '"inputs": 1' in (tmp_path / "r.json").read_text()

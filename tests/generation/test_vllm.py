"""Real vLLM, in an environment that has it: `make test-vllm`."""

import contextlib
import importlib.util
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness.leftovers import WAYS, Leftovers, at_work, end, seconds_until_gone
from harness.runs import until
from harness.word_models import WORDS, asked, make_models

from multigpu_ft import RunConfig, generate, launch
from multigpu_ft.run.run_dir import RunDir

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
    pytest.mark.skipif(
        not importlib.util.find_spec("vllm"), reason="needs vLLM: make test-vllm installs it"
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    "Return an environment in which vLLM writes to a folder of its own."
    return {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("vllm"))}


@pytest.fixture
def folder(environment, run_root, monkeypatch):
    "Return the root of runs, for a vLLM that writes to a folder of its own."
    run_root.mkdir()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return run_root


def engines(leftovers):
    "Return the names of vLLM's processes among what is left."
    names = []
    for process in leftovers.now():
        with contextlib.suppress(psutil.NoSuchProcess):
            names += [word for word in process.cmdline()[:1] if word.startswith("VLLM::")]
    return names


def shared_memory(leftovers):
    "Return the files of shared memory that are in use by what is left."
    found = set()
    for process in leftovers.now():
        with contextlib.suppress(psutil.Error):
            found |= {m.path for m in process.memory_maps() if m.path.startswith("/dev/shm/")}
    return {Path(path) for path in found if Path(path).exists()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", WAYS)
def test_no_engine_is_left(way, kernel, models, environment, run_root):
    run_root.mkdir()
    number = 200 if way == "done" else 20_000
    settings = asked(models, "vllm", num_questions=4, num_sequences_per_question=number)
    with Leftovers() as leftovers:
        k = kernel(OMP_NUM_THREADS="1", **environment)
        leftovers.ignore(k.pid)
        output = str(run_root / "a.jsonl")
        k.start(
            "from multigpu_ft import generate\n"
            f"generate(**{settings!r}, engine='vllm', nproc=1, output={output!r})"
        )
        run_dir = at_work(run_root, 400)
        assert "VLLM::EngineCore" in (names := engines(leftovers))
        segments = shared_memory(leftovers)
        end(way, k, run_dir)
        print(f"{names}, {way}: gone {seconds_until_gone(leftovers):.2f} s later")
        assert segments and not [path for path in segments if path.exists()]


@pytest.fixture(scope="module")
def fine_tuned(models, tmp_path_factory):
    "Return the runs of the tiny model: everything trained, and an adapter."
    folder = tmp_path_factory.mktemp("runs")
    rng = random.Random(1)
    texts = [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(30)) for _ in range(32)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    about = {"model": str(models / "vllm"), "dataset": str(folder / "texts.jsonl"), "nproc": 1}
    about |= {"max_length": 64, "max_steps": 4, "learning_rate": 1e-2, "run_root": str(folder)}
    return {
        "base": {},
        "export": {"run": str(launch(RunConfig(**about, run_name="full")).dir.path)},
        "adapter": {"run": str(launch(RunConfig(**about, run_name="a", tuning="lora")).dir.path)},
    }


def told(answers):
    return [
        (r["question_id"], r["sample_id"], r["messages"][-1]["content"], r["finish_reason"])
        for r in answers
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("subject", ["base", "export", "adapter"])
def test_greedy_answers_are_those_of_transformers(subject, models, fine_tuned, folder):
    "In fp32, with stop strings, and on two ranks, each with an engine."
    settings = asked(models, "vllm", num_questions=40, num_sequences_per_question=1)
    settings |= {"temperature": 0, "dtype": "fp32", "stop": ["w7", "w8 w9"], "nproc": 2}
    if fine_tuned[subject]:
        settings |= {"model": None, **fine_tuned[subject]}
    made = {}
    for engine in ("transformers", "vllm"):
        answers = generate(**settings, engine=engine, output=folder / f"{engine}.jsonl")
        made[engine] = told(answers)
        print(engine, answers.about)
    assert made["vllm"] == made["transformers"] and len(made["vllm"]) == 40
    assert len({text for _, _, text, _ in made["vllm"]}) > 20
    assert {reason for *_, reason in made["vllm"]} == {"stop", "length"}
    assert answers.about["start_seconds"] > answers.about["seconds"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_prompts_at_once_than_a_step_takes(models, folder):
    "40 prompts of 150 tokens are more than vLLM's 2,048 or 4,096 a step, so one would be split."
    rng, questions = random.Random(1), folder / "long.jsonl"
    texts = [" ".join(f"w{rng.randrange(WORDS)}" for _ in range(150)) for _ in range(40)]
    questions.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    settings = asked(models, "vllm", num_questions=40, num_sequences_per_question=1)
    settings |= {"dataset": str(questions), "engine": "vllm", "batch_size": 40, "nproc": 1}
    answers = generate(**settings, temperature=1.0, output=folder / "a.jsonl")
    assert len(told(answers)) == 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_interrupted_generation_goes_on(models, folder):
    "A sequence's seed decides it: not the other sequences, nor the ranks, nor the interruption."
    settings = asked(models, "vllm", num_questions=40, num_sequences_per_question=50)
    settings |= {"dtype": "fp32", "engine": "vllm", "batch_size": 8}
    whole = generate(**settings, nproc=1, output=folder / "whole.jsonl")
    assert whole.about["made"] == 2000 and len({text for _, _, text, _ in told(whole)}) > 1500
    output = folder / "a.jsonl"
    code = f"from multigpu_ft import generate; generate(**{settings!r}, nproc=1, output={str(output)!r})"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        at_work(folder / "a.jsonl.run", 400)
        process.send_signal(signal.SIGINT)
    assert not output.exists()
    resumed = generate(**settings, nproc=2, output=output)
    made = resumed.about["made"]
    same = sum(a == b for a, b in zip(told(resumed), told(whole), strict=True))
    print(f"{made:,} of 2,000 made after the interrupt; {same:,} are the same")
    assert 0 < made < 2000 and same == 2000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupt_does_not_wait_for_an_engine_that_starts(
    models, kernel, environment, run_root
):
    run_root.mkdir()
    settings = asked(models, "vllm")
    with Leftovers() as leftovers:
        k = kernel(OMP_NUM_THREADS="1", **environment)
        leftovers.ignore(k.pid)
        output = str(run_root / "a.jsonl")
        k.start(
            "from multigpu_ft import generate\n"
            f"generate(**{settings!r}, engine='vllm', nproc=2, output={output!r})"
        )
        until(lambda: len(engines(leftovers)) >= 2, 200, "two engines that start")
        status = RunDir(run_root / "a.jsonl.run").status()
        assert (status["state"], status["activity"]) == ("starting", "starting vLLM")
        begun = time.monotonic()
        end("interrupt", k, run_root / "a.jsonl.run")
        seconds = time.monotonic() - begun
        print(f"stopped after {seconds:.1f} s, gone {seconds_until_gone(leftovers):.2f} s later")
        assert seconds < 15

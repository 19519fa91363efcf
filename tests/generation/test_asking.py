"""`run.ask`: an answer that grows, from a process that keeps the model and ends when it should."""

import gc
import json
import os
import signal
import time

import psutil
import pytest
from harness import faults
from harness.runs import until

from multigpu_ft import CheckpointError, ConfigError, DataError, Run, RunConfig, generate
from multigpu_ft.run.answering import end_answering
from multigpu_ft.run.run_dir import RunDir

QUESTION = "What is the sum of two and three?"


@pytest.fixture(scope="module")
def runs(material, server, tmp_path_factory):
    "Return the directories of a chat run, one that continues text, and a classifier."
    root = tmp_path_factory.mktemp("asked")
    chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Five."}]
    (root / "chats.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    common = {"run_root": str(root), "strategy": "single", "nproc": 1, "learning_rate": 3e-3}
    tiny = RunConfig(**common, end_idx=40, max_steps=3, run_name="text")
    configs = {
        "text": tiny,
        "chat": tiny.replace(
            task="chat", dataset=str(root / "chats.jsonl"), tuning="lora", run_name="chat"
        ),
        "labels": faults.config(
            material, root, task="classification", run_name="labels", max_steps=2
        ),
    }
    found = {}
    for name, cfg in configs.items():
        found[name] = server.finish(cfg)
        log = found[name].log_file(0).read_text()[-2000:]
        assert found[name].status()["state"] in ("done", "stopped"), log
    return found


@pytest.fixture
def asked(runs):
    yield lambda name: Run(runs[name])
    end_answering()


def test_the_text_grows_and_the_model_is_loaded_once(asked, capsys):
    run = asked("text")
    parts, told = [], []
    settings = {"max_new_tokens": 24, "temperature": None, "seed": 0}
    answer = run._answering.ask("Return a copy of", False, parts.append, told.append, **settings)
    assert len(parts) > 3 and "".join(parts) == answer.text and answer.tokens == 24
    assert "was loaded on the" in told[-1] and run.name in told[0]
    process = run._answering.process
    began = time.monotonic()
    again = run.ask("Return a copy of", max_new_tokens=24)
    assert again.text == answer.text and time.monotonic() - began < 5
    assert run._answering.process is process, "the second question finds the model"
    printed = capsys.readouterr()
    assert printed.out == f"{again.text}\n" and "load" not in printed.err
    assert again.text not in repr(again) and "24 tokens, cut at max_new_tokens" in repr(again)
    base = run.ask("Return a copy of", base=True, max_new_tokens=24)
    assert base.text != answer.text and base.model == "builtin:opt-tiny"
    sampled = [run.ask("Return", max_new_tokens=9, temperature=1, seed=s).text for s in (1, 2, 1)]
    assert sampled[0] == sampled[2] != sampled[1]


def test_it_answers_as_generate_does(asked, tmp_path, capsys):
    run = asked("chat")
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    for temperature in (0, 1):
        settings = {"max_new_tokens": 12, "temperature": temperature}
        output = tmp_path / f"{temperature}.jsonl"
        made = generate(run, dataset=tmp_path / "q.jsonl", output=output, nproc=1, **settings)
        answer = run.ask(QUESTION, **settings)
        assert answer.text == made[0]["messages"][-1]["content"]
        assert answer.finish_reason == made[0]["finish_reason"]
    assert run.ask(QUESTION, base=True, max_new_tokens=12).model == "builtin:opt-tiny"


def test_a_classifier_names_a_label(asked, capsys):
    run = asked("labels")
    answer = run.ask("w1 w2 w3")
    assert answer.text in answer.probabilities and answer.finish_reason == "label"
    assert sum(answer.probabilities.values()) == pytest.approx(1)
    assert answer.probabilities[answer.text] == max(answer.probabilities.values())
    assert capsys.readouterr().out.startswith(f"{answer.text} (")
    with pytest.raises(ConfigError, match="no classification head"):
        run.ask("w1", base=True)
    assert run.ask("w1").finish_reason == "label", "an error leaves the process usable"


def test_what_cannot_be_answered(asked, tmp_path):
    run = asked("text")
    for wrong in ({"question": ""}, {"max_new_tokens": 0}, {"temperature": -1}, {"seed": "x"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            run.ask(**{"question": "Why?", **wrong})
    assert run._answering.process is None, "a typo starts nothing"
    with pytest.raises(DataError, match="512 positions"):
        run.ask("why " * 600)
    empty = RunDir.create(RunConfig(run_root=str(tmp_path)))
    empty.update_status(state="stopped")
    with pytest.raises(CheckpointError, match="has neither an export nor a checkpoint"):
        Run(empty).ask("Why?")


def test_the_process_ends_with_the_handle_and_before_ranks_start(asked, capsys):
    run = asked("text")
    run.ask("Return", max_new_tokens=2)
    process = run._answering.process
    end_answering()
    assert process.poll() is not None
    run.ask("Return", max_new_tokens=2)
    process = run._answering.process
    assert process.poll() is None, "the next question starts another"
    del run
    gc.collect()
    assert process.poll() is not None
    run = asked("text")
    run.ask("Return", max_new_tokens=2)
    os.kill(run._answering.process.pid, signal.SIGKILL)
    run._answering.process.wait()
    assert run.ask("Return", max_new_tokens=2).text, "one that was killed is started again"


def test_an_interrupt_ends_the_answer_and_the_kernel_ends_the_process(runs, kernel):
    notebook = kernel()
    notebook.run(f"from multigpu_ft import Run\nrun = Run({str(runs['text'].path)!r})")
    pid = int(
        notebook.run(
            "run.ask('Return', max_new_tokens=1)\nprint(run._answering.process.pid)"
        ).split()[-1]
    )
    # one answer may take less than a second
    cell = notebook.start("while True:\n    run.ask('Return', max_new_tokens=500)")
    time.sleep(1)
    notebook.manager.interrupt_kernel()
    with pytest.raises(Exception, match="KeyboardInterrupt"):
        cell.result(30)
    began = time.monotonic()
    shown = notebook.run(
        "answer = run.ask('Return', max_new_tokens=2)\nprint(run._answering.process.pid)"
    )
    assert int(shown.split()[-1]) == pid and time.monotonic() - began < 10
    notebook.manager.shutdown_kernel(now=True)
    until(lambda: not psutil.pid_exists(pid), 10, "the process ends with its kernel")

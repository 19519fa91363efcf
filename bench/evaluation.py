"""Evaluate on real data, and compute the same numbers by hand.

A tiny model of Python's documentation learns abstracts in two slices. The models before and after
each slice are compared on held-out abstracts, and on documentation, to see what was forgotten.

python bench/evaluation.py --dataset abstracts.jsonl

The comparison is nbs/evaluate.ipynb under papermill. By hand means a loop over the texts, one at a
time without padding, with only transformers and torch. Writes bench/results/evaluation.json and
bench/results/evaluate.ipynb."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from gpus import hide_gpus

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
SLICES, HELD_OUT, FORGETTING, MAX_LENGTH = (700, 1400), (1600, 2000), (6000, 6400), 256


def train(root, dataset):
    "Train a base model, and two slices from it. Returns the folders of the base model and of the slices."
    from multigpu_ft import RunConfig, launch, run_slices

    common = {"run_root": str(root), "max_length": MAX_LENGTH, "nproc": 2, "learning_rate": 1e-3}
    run = launch(RunConfig(run_name="docs", end_idx=FORGETTING[0], num_epochs=2, **common))
    base = shutil.copytree(run.status["export"], root.parent / "opt-docs")
    os.chdir(ROOT / "nbs")
    series = run_slices(
        RunConfig(
            model=str(base),
            dataset=str(dataset),
            end_idx=SLICES[-1],
            slice_size=SLICES[0],
            num_epochs=2,
            batch_size=2,
            **common,
        )
    )
    return base, series.folder


def by_hand(model_folder, texts):
    "Return the token-weighted mean loss of `texts` (nats), the number of targets, and each text's summed loss."
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model_folder).eval(),
        AutoTokenizer.from_pretrained(model_folder),
    )
    sums, targets = [], 0
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        ids = torch.tensor([*ids, tokenizer.eos_token_id][:MAX_LENGTH])
        with torch.no_grad():
            sums.append(
                F.cross_entropy(
                    model(input_ids=ids[None]).logits[0, :-1].double(), ids[1:], reduction="sum"
                ).item()
            )
        targets += len(ids) - 1
    return sum(sums) / targets, targets, sums


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dataset", type=Path, default=ROOT.parent / "shared" / "data" / "abstracts.jsonl"
    )
    options = parser.parse_args()
    hide_gpus()
    from multigpu_ft.data.builtin import builtin_rows

    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as tmp:
        base, series = train(Path(tmp) / "runs", options.dataset.resolve())
        parameters = {
            "run": series,
            "start_idx": HELD_OUT[0],
            "end_idx": HELD_OUT[1],
            "forgetting_dataset": "builtin:python-docs",
            "forgetting_start_idx": FORGETTING[0],
            "forgetting_end_idx": FORGETTING[1],
            "samples": 3,
            "nproc": 2,
        }
        begun = time.perf_counter()
        subprocess.run(
            [
                Path(sys.executable).parent / "papermill",
                ROOT / "nbs" / "evaluate.ipynb",
                RESULTS / "evaluate.ipynb",
                "--no-progress-bar",
                *(word for name, value in parameters.items() for word in ("-p", name, str(value))),
            ],
            check=True,
            cwd=tmp,
            stdin=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - begun
        notebook = (RESULTS / "evaluate.ipynb").read_text()
        for folder, name in (
            (tmp, "."),
            (str(options.dataset.resolve().parent), "."),
            (str(ROOT), "."),
        ):
            notebook = notebook.replace(folder, name)
        (RESULTS / "evaluate.ipynb").write_text(notebook)
        said = json.loads((series / "report" / "evaluation.json").read_text())

        abstracts = [json.loads(line)["text"] for line in options.dataset.read_text().splitlines()][
            slice(*HELD_OUT)
        ]
        docs = [row["text"] for row in builtin_rows("builtin:python-docs")[slice(*FORGETTING)]]
        rows, sums = [], {}
        for model in said["models"]:
            for name, texts in (("target", abstracts), ("forgetting", docs)):
                mean, targets, sums[model["name"], name] = by_hand(model["path"], texts)
                loss = model[name]["loss"]
                rows.append(
                    {
                        "model": model["name"],
                        "set": name,
                        "by_hand": mean,
                        "evaluate": loss["value"],
                        "gap": abs(mean - loss["value"]),
                        "low": loss["low"],
                        "high": loss["high"],
                        "targets_by_hand": targets,
                        "targets": said["sets"][name]["targets"],
                    }
                )
        fell = np.array(sums[said["models"][-1]["name"], "target"]) < np.array(
            sums["base", "target"]
        )
        found = {
            "dataset": options.dataset.name,
            "slices": [[0, SLICES[0]], list(SLICES)],
            "held_out": HELD_OUT,
            "forgetting": ["builtin:python-docs", *FORGETTING],
            "max_length": MAX_LENGTH,
            "verdict": said["verdict"],
            "seconds": round(seconds, 1),
            "losses": rows,
            "largest_gap": max(row["gap"] for row in rows),
            "abstracts_whose_loss_fell_by_hand": float(fell.mean()),
            "evaluation": said,
            "notebook_bytes": len(notebook.encode()),
        }
        text = (
            json.dumps(found, indent=1)
            .replace(tmp, ".")
            .replace(str(options.dataset.resolve().parent), ".")
        )
        (RESULTS / "evaluation.json").write_text(text + "\n")
        for row in rows:
            print(row)
        assert (
            found["largest_gap"] < 1e-4
            and found["verdict"] == "better"
            and found["notebook_bytes"] < 600_000
        ), found


if __name__ == "__main__":
    main()

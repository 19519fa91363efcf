"""Train, resume and export with every kind of tuning under every strategy, for five architectures.

python tests/harness/adapters.py --json bench/results/adapters.json
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import faults  # noqa: E402

from multigpu_ft import RunConfig
from multigpu_ft.run.errors import ConfigError

_DECODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": faults.MAX_LENGTH,
}
_GROUPED = {"intermediate_size": 64, "num_key_value_heads": 1}
ARCHITECTURES = {
    "opt": {
        **_DECODER,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_function": "gelu",
    },
    "qwen3": {**_DECODER, **_GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    "llama": {**_DECODER, **_GROUPED},
    "bert": {
        **_DECODER,
        "intermediate_size": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "distilbert": {
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 2,
        "max_position_embeddings": faults.MAX_LENGTH,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
}
TUNINGS, STRATEGIES = ("full", "lora", "qlora", "lora8bit"), ("single", "ddp", "fsdp")


def make_models(folder):
    "Make tiny models of all architectures, with a tokenizer of words."
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    faults.make_material(folder)
    for name, settings in ARCHITECTURES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            name,
            vocab_size=4 + faults.WORDS + faults.TEXTS,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
            **settings,
        )
        model = (
            AutoModel.from_config(config)
            if is_classifier(name)
            else AutoModelForCausalLM.from_config(config)
        )
        model.save_pretrained(folder / name)
        for path in (folder / "model").glob("*token*"):
            shutil.copy(path, folder / name)
    return folder


def is_classifier(architecture):
    return "bert" in architecture


def config(material, root, architecture, tuning, strategy, **settings):
    workers = (
        {"nproc": 1, "batch_size": 4} if strategy == "single" else {"nproc": 2, "batch_size": 2}
    )
    kind = {"task": "classification"} if is_classifier(architecture) else {}
    return faults.config(
        material,
        root,
        tuning=tuning,
        strategy=strategy,
        num_epochs=1,
        save_every=None,
        learning_rate=1e-2,
        **{
            "model": str(material / architecture),
            "lora_dropout": 0.0,
            "merge_adapter": tuning != "full",
            **workers,
            **kind,
            **settings,
        },
    )


def losses(run_dir):
    return [m["loss"] for m in run_dir.metrics()]


def refused(architecture, tuning, strategy):
    "Return why `RunConfig` refuses the combination; None if it does not."
    try:
        RunConfig(tuning=tuning, strategy=strategy)
    except ConfigError as error:
        return str(error)


def try_cell(server, material, root, architecture, tuning, strategy, **settings):
    "Return what to compare of a whole run, and of one in two parts."
    whole = config(
        material, root / "whole", architecture, tuning, strategy, resume_file="none", **settings
    )
    parts = whole.replace(run_root=str(root / "parts"), resume_file="auto")
    begun, runs = (
        time.perf_counter(),
        [server.finish(whole), server.finish(parts.replace(max_steps=5)), server.finish(parts)],
    )
    for run in runs:
        logs = "\n".join(
            path.read_text()[-2000:] for path in sorted(run.path.glob("logs/rank*.log"))
        )
        assert run.status()["state"] == "done", f"{architecture} {tuning} {strategy}\n{logs}"
    first, first_part, second_part = map(losses, runs)
    frozen = [
        json.loads(path.read_text())
        for run in runs
        for path in sorted(run.path.glob("frozen*.json"))
    ]
    status = runs[0].status()
    return {
        "architecture": architecture,
        "tuning": tuning,
        "strategy": strategy,
        "losses": first,
        "resumed": max(map(difference, first, first_part + second_part)),
        "frozen_stay": all(before == after for before, after in frozen),
        "quantization": status["quantization"],
        "trainable": status["trainable_parameters"],
        "exports": [status[key] for key in ("export", "merged") if key in status],
        "seconds": round(time.perf_counter() - begun, 2),
        "checkpoint_bytes": status["save"]["bytes"],
        "eval_after": status.get("eval_after"),
    }


def difference(a, b):
    return abs(a - b) / abs(a)


RELOAD = """
import json, sys
from pathlib import Path
import numpy as np, torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig

for folder in json.load(sys.stdin):
    check, adapter = json.loads((Path(folder) / "check.json").read_text()), Path(folder) / "adapter_config.json"
    cls = AutoModelForSequenceClassification if check["task"] == "classification" else AutoModelForCausalLM
    if adapter.exists():
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        in_4_bit = {"load_in_4bit": True, **nf4, "bnb_4bit_compute_dtype": torch.float32}
        in_8_bit = BitsAndBytesConfig(load_in_8bit=True)
        packed = {"4bit": BitsAndBytesConfig(**in_4_bit), "8bit": in_8_bit}.get(check["quantization"])
        if packed and check["task"] == "classification":
            packed.llm_int8_skip_modules = ["classifier", "pre_classifier"]
        settings = {"quantization_config": packed, "device_map": {"": "cpu"}} if packed else {}
        base = json.loads(adapter.read_text())["base_model_name_or_path"]
        model = PeftModel.from_pretrained(cls.from_pretrained(base, dtype=torch.float32, **settings), folder)
    else:
        model = cls.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    for module in model.modules():  # in evaluation mode a CPU would pack them anew
        module.training = type(module).__module__.startswith("bitsandbytes")
    ids = torch.tensor(np.random.default_rng(0).integers(0, model.get_input_embeddings().num_embeddings, 24))[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    is_classifier = check["task"] == "classification"
    targets = (logits, torch.tensor([0])) if is_classifier else (logits[0, :-1], ids[0, 1:])
    loss = F.cross_entropy(*targets)
    print(json.dumps([folder, loss.item(), check["loss"]]))
"""


def reload(folders):
    "Return the loss of each export in a process with only transformers and peft, and the trained model's."
    done = subprocess.run(
        [sys.executable, "-c", RELOAD], input=json.dumps(folders), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        folder: (found, expected)
        for folder, found, expected in map(
            json.loads, filter(lambda line: line.startswith("["), done.stdout.splitlines())
        )
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architectures", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--tunings", nargs="*", default=list(TUNINGS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all ranks are on the CPU
    with tempfile.TemporaryDirectory() as tmp:
        material = make_models(Path(tmp) / "material")
        server, cells = (
            faults.Server(
                material / "opt", "peft", "bitsandbytes", "torch.distributed.checkpoint.state_dict"
            ),
            [],
        )
        for architecture in options.architectures:
            for tuning in options.tunings:
                for strategy in STRATEGIES:
                    if refused(architecture, tuning, strategy):
                        continue
                    cell = try_cell(
                        server,
                        material,
                        Path(tmp) / architecture / tuning / strategy,
                        architecture,
                        tuning,
                        strategy,
                    )
                    alike = next(
                        (
                            c
                            for c in cells
                            if (c["architecture"], c["tuning"]) == (architecture, tuning)
                        ),
                        cell,
                    )
                    cell["from_single"] = max(map(difference, cell["losses"], alike["losses"]))
                    cells.append(cell)
        server.close()
        loaded = reload([folder for cell in cells for folder in cell["exports"]])
    for cell in cells:
        cell["reloaded"] = [
            abs(found - expected)
            for found, expected in (loaded[folder] for folder in cell.pop("exports"))
        ]
        columns = ("from_single", "resumed", "frozen_stay", "seconds", "trainable")
        shown = {
            k: f"{v:.1e}" if isinstance(v, float) else v for k, v in cell.items() if k in columns
        }
        print(
            f"{cell['architecture']:10} {cell['tuning']:8} {cell['strategy']:6} "
            f"{cell['losses'][0]:.3f} -> {cell['losses'][-1]:.3f}",
            shown,
            "reloaded",
            " ".join(f"{d:.1e}" for d in cell["reloaded"]),
        )
    if options.json:
        options.json.write_text(json.dumps(cells, indent=1))


if __name__ == "__main__":
    main()

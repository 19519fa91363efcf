"""The spine against a bare loop: tokens/s of ddp and fsdp, time from launch to the end of the first step, time to import.

python bench/spine.py [--dataset FILE.jsonl] [--repeats 5] [--steps 12]

All arms train the same model (OPT, hidden 384, 6 layers, vocabulary 8,192) on the same batches (micro-batch 4, length 512) with 2 gloo ranks of one
thread. Arms are interleaved and their order rotates; ratios are taken inside a round, so that a machine that slows down slows both.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def prepare(folder, dataset, steps):
    "Model, tokenizer and the batches of each rank, on disk."
    import numpy as np
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

    from multigpu_ft import RunConfig
    from multigpu_ft.data import epoch_steps, load_texts

    cfg = RunConfig(dataset=dataset, batch_size=4, max_length=512, end_idx=8 * steps)
    texts = load_texts(cfg.replace(end_idx=None))
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts.texts, vocab_size=8192, special_tokens=["<s>", "<pad>", "</s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>")
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    OPTForCausalLM(OPTConfig(
        vocab_size=8192, hidden_size=384, word_embed_proj_dim=384, ffn_dim=1536, num_hidden_layers=6, num_attention_heads=6,
        max_position_embeddings=512, dropout=0.0, attention_dropout=0.0, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    )).save_pretrained(folder / "model")
    tokens = []
    for rank in range(2):
        arrays, tokens = {}, []
        for i, step in enumerate(epoch_steps(load_texts(cfg), tokenizer, cfg, 1, 0, rank, 2)):
            batch, tokens = step.micro_batches[0], [*tokens, step.tokens]
            arrays.update({f"ids{i}": batch["input_ids"], f"mask{i}": batch["attention_mask"], f"labels{i}": batch["labels"]})
        np.savez(folder / f"batches{rank}.npz", **arrays)
    return cfg.replace(model=str(folder / "model"), learning_rate=1e-4, weight_decay=0.01), tokens


def bare(strategy, folder, steps):
    started = time.time()
    done = subprocess.run(
        [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", HERE / "bare.py", strategy, str(folder), str(steps)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return started, json.loads(done.stdout.splitlines()[-1])


def alternating(strategy, dataset, steps=24):
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", HERE / "alternating.py", strategy, dataset, str(steps)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def ours(strategy, cfg, root):
    from multigpu_ft import launch

    started = time.time()
    metrics = launch(cfg.replace(strategy=strategy, run_root=str(root), resume_file="none", max_steps=None), wait=False).wait().metrics
    return started, {"times": [m["time"] for m in metrics], "losses": [m["loss"] for m in metrics]}


def seconds_to_import(statement):
    code = f"import time; t = time.perf_counter(); {statement}; s = time.perf_counter() - t; import sys; print(s, 'torch' in sys.modules)"
    seconds, torch_loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert torch_loaded == "False"
    return float(seconds)


def spread(values):
    return {"median": round(statistics.median(values), 4), "min": round(min(values), 4), "max": round(max(values), 4), "n": len(values)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="builtin:python-docs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    arms = [(who, strategy) for strategy in ("ddp", "fsdp") for who in ("bare", "ours")]
    speed, first_step, step_s, reference = {arm: [] for arm in arms}, {arm: [] for arm in arms}, {arm: [] for arm in arms}, None
    with tempfile.TemporaryDirectory() as tmp:
        cfg, tokens = prepare(Path(tmp), args.dataset, args.steps)
        for repeat in range(args.repeats + 1):  # the first round warms the disk cache and is not counted
            for arm in arms[repeat % 4 :] + arms[: repeat % 4]:
                who, strategy = arm
                started, result = bare(strategy, tmp, args.steps) if who == "bare" else ours(strategy, cfg, Path(tmp) / "runs")
                times = result["times"]
                reference = reference or result["losses"][0]
                assert abs(result["losses"][0] - reference) < 1e-4, "not the same batch or model"
                if repeat:
                    speed[arm].append(sum(tokens[2:]) / (times[-1] - times[1]))
                    first_step[arm].append(times[0] - started)
                    step_s[arm] += [b - a for a, b in zip(times[1:], times[2:], strict=False)]
                    print(f"round {repeat} {who} {strategy}: {speed[arm][-1]:.0f} tokens/s, first step after {first_step[arm][-1]:.2f} s", flush=True)
        imports = {s: [seconds_to_import(s) for _ in range(10)] for s in ("import multigpu_ft", "from multigpu_ft import RunConfig, launch")}
    ratio = {
        s: {
            "step_ours_over_bare_alternating_in_the_same_processes": spread(alternating(s, args.dataset)),
            "tokens_per_second_ours_over_bare": spread([a / b for a, b in zip(speed["ours", s], speed["bare", s], strict=True)]),
            # the same steps compared one by one over all rounds: a spike of the machine spoils a step, not a round
            "speed_of_single_steps_ours_over_bare": spread([b / a for a, b in zip(step_s["ours", s], step_s["bare", s], strict=True)]),
            "first_step_ours_over_bare": spread([a / b for a, b in zip(first_step["ours", s], first_step["bare", s], strict=True)]),
        }
        for s in ("ddp", "fsdp")
    }
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, CPU only, torch {version('torch')}", "dataset": Path(args.dataset).name,
        "tokens_per_second": {" ".join(arm): spread(v) for arm, v in speed.items()},
        "first_step_s": {" ".join(arm): spread(v) for arm, v in first_step.items()},
        "ratios": ratio, "import_s": {k: spread(v) for k, v in imports.items()},
    }
    out = HERE / "results" / "spine.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Train a tiny model of every causal architecture of transformers on two ranks, and compare.

python tests/harness/architectures.py [ARCHITECTURE ...]

It writes bench/results/architectures.json and bench/architectures.md, which shows users what works.
Without names it tries all that transformers has; with names, only these are replaced. One pair of
processes takes one after the other, because importing takes longer than the steps; an error ends
the pair, and a new one goes on behind it."""

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from multigpu_ft import RunConfig, RunDir
from multigpu_ft.checkpoints.export import export_model
from multigpu_ft.data.batches import epoch_steps
from multigpu_ft.data.order import SampleOrder
from multigpu_ft.data.tokenization import tokenize_texts
from multigpu_ft.distributed.world import join_world
from multigpu_ft.generation.decoding import (
    ContinuousBatchDecoder,
    GroupedDecoder,
    Request,
    Rules,
    choose_decoder,
)
from multigpu_ft.generation.sampling import Sampling
from multigpu_ft.memory.fit import simulations
from multigpu_ft.run.environment import GPU
from multigpu_ft.tracking.metrics import Stopwatch
from multigpu_ft.training.packing import settle_packing
from multigpu_ft.training.setup import prepare_model
from multigpu_ft.training.step import make_optimizer, train_step

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness.exactness import Words, everybodys  # noqa: E402

STEPS, TEXTS_A_STEP, MAX_LENGTH, VOCABULARY = 4, 8, 48, 512
SMALL = {  # under all names that the architectures have for a size
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 64),
    "moe_intermediate_size": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    "index_n_heads": 2,
    "hidden_size_per_layer_input": 8,
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), 0.0),
    "is_decoder": True,  # encoders, which are refused without
    "vocab_size_per_layer_input": VOCABULARY,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    # states computed on a CPU take the square of this for each head
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop")
DROPOUTS += ("attn_pdrop", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
DROPOUTS += ("resid_dropout", "embed_dropout", "embedding_dropout", "residual_dropout", "layerdrop")
OWN = {  # sizes that depend on each other
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"]}),
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"layers_block_type": ["mamba", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8},
        **{"indexer_budget": 16, "indexer_compress_ratio": 4},
    },
}
CAUSAL = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(name):
    "Return a small configuration of the architecture `name`, from the names that its defaults have."
    default = AutoConfig.for_model(name).get_text_config()
    known = {**default.to_dict(), **getattr(default, "attribute_map", {})}
    settings = {key: value for key, value in SMALL.items() if key in known}
    settings |= {key: 0.0 for key in DROPOUTS if key in known}
    settings |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    if "kv_lora_rank" in known and "num_key_value_heads" in known:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if "qk_rope_head_dim" in known and "head_dim" in known:
        settings["head_dim"] = settings["qk_rope_head_dim"]
    if kinds := list(dict.fromkeys(default.to_dict().get("layer_types") or [])):
        # each kind of layer once
        settings["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        settings["num_hidden_layers"] = len(settings["layer_types"])
    return type(default)(**{**settings, **OWN.get(default.model_type, {})})


def make_model(name, folder):
    "Save a tiny model with random weights, larger than usual, so that its losses tell them apart."
    torch.manual_seed(0)
    config = tiny_config(name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > 3e7:
        raise ValueError(f"still {parameters / 1e6:.0f}M parameters")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="3")
    special = {"bos_token": "0", "pad_token": "1", "eos_token": "2"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)


class Tokens(Words):
    "A tokenizer that has what a run asks one for, and saves nothing."

    def __len__(self):
        return VOCABULARY

    def save_pretrained(self, folder):
        pass


def some_texts():
    rng = np.random.default_rng(0)
    texts = [
        " ".join(map(str, rng.integers(3, VOCABULARY, rng.integers(6, MAX_LENGTH))))
        for _ in range(STEPS * TEXTS_A_STEP)
    ]
    return tokenize_texts(texts, Tokens(), MAX_LENGTH)


def config(folder, strategy="ddp", **settings):
    return RunConfig(
        model=str(folder),
        strategy=strategy,
        max_length=MAX_LENGTH,
        batch_size=TEXTS_A_STEP // 2,
        learning_rate=1e-3,
        lora_target_modules="all-linear",
        lora_dropout=0.0,
        resume_file="none",
        **settings,
    )


def plain_loss(model, ids):
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    return F.cross_entropy(logits, ids[1:], reduction="sum")


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def plain_loop(folder, texts):
    "Return the losses of the steps as everybody would write them, text by text, and the model."
    cfg, model = config(folder), plain_model(folder).train()
    optimizer, losses = make_optimizer(cfg, model), []
    order = SampleOrder.of(cfg, len(texts), 2).epoch(1, texts.lengths)
    for first in range(0, len(order), TEXTS_A_STEP):
        chosen = [torch.as_tensor(texts[i].ids).long() for i in order[first : first + TEXTS_A_STEP]]
        targets = sum(len(ids) - 1 for ids in chosen)
        optimizer.zero_grad()
        total = 0.0
        for ids in chosen:
            loss = plain_loss(model, ids) / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses, model.eval()


def train(cfg, texts, world):
    "Return the losses of the steps, the packing, and the strategy with the trained model."
    prepared = prepare_model(cfg, world, Tokens(), None, None, lambda text: None)
    strategy = prepared.strategy
    packing, _, chunked = settle_packing(cfg, strategy, texts)
    order, losses = SampleOrder.of(cfg, len(texts), world.size), []
    watch = Stopwatch(world.device)
    for step in epoch_steps(texts, order, cfg, packing, 1, 0, world.rank, world.size):
        loss, _ = train_step(strategy, step, cfg.learning_rate, 1.0, watch)
        losses.append(world.sum(loss.item())[0] / step.targets)
    return losses, {"packing": packing, "chunked": chunked}, strategy


def deviation(losses, reference):
    return max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))


def exported_deviation(strategy, run_dir, reference, texts, world):
    "Return how far the export's loss, read by plain transformers, is from the plain loop's model."
    found = export_model(run_dir, strategy, Tokens())

    def compare():
        exported = plain_model(found["export"])
        ids = torch.as_tensor(texts[0].ids).long()
        with torch.no_grad():
            mine, theirs = (plain_loss(model, ids).item() for model in (exported, reference))
        return abs(mine - theirs) / theirs

    return on_main(world, compare)


def generates(model):
    """Return how questions are decoded: batched (continuously), cached (question by question) or uncached.

    Raises `ValueError` if a greedy answer isn't that of a plain loop without a cache."""
    prompt, length = tuple(range(5, 17)), 6
    rules = Rules(Sampling(0), frozenset())
    kind, why = choose_decoder(model, 64, torch.device("cpu"))
    decoder = kind(model, rules, 2, 64, torch.device("cpu"))
    done = decoder.admit([Request((0, sample), prompt, sample, length) for sample in range(2)])
    while len(done) < 2:
        done += decoder.step()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    if any(list(answer.tokens) != ids[len(prompt) :] for answer in done):
        raise ValueError("answers differ from those without a cache")
    if kind is ContinuousBatchDecoder:
        return "batched"
    return "cached" if kind is GroupedDecoder else f"uncached: {why.rpartition('fails: ')[2]}"


def on_main(world, do):
    "Return what `do()` returns on rank 0, to both ranks. They both raise its error."
    found, error = None, None
    if world.is_main:
        try:
            found = do()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    found, error = everybodys((found, error))[0]
    if error:
        raise ValueError(error)
    return found


def try_architecture(name, texts, world, report):
    "Add what was found to `report`, stage by stage; an error ends it."
    folder = Path(sys.argv[1]) / "models" / name
    with tempfile.TemporaryDirectory() as own:
        root = Path(everybodys(own)[0])
        on_main(world, lambda: make_model(name, folder))
        reference, model = plain_loop(folder, texts)
        report["parameters"] = sum(p.numel() for p in model.parameters())
        for strategy in ("ddp", "fsdp"):
            cfg = config(folder, strategy)
            losses, about, trained = train(cfg, texts, world)
            report |= about | {strategy: deviation(losses, reference)}
        run_dir = RunDir(root / "run")
        run_dir.path.mkdir(exist_ok=True)
        report["export"] = exported_deviation(trained, run_dir, model, texts, world)
        curves = [
            train(config(folder, strategy, tuning="lora", quantization="none"), texts, world)[0]
            for strategy in ("ddp", "fsdp")
        ]
        report["lora"] = deviation(*curves)
        report["generates"] = generates(plain_model(folder))
        dist.barrier()
    if world.is_main:  # an estimate needs none
        for weights in folder.glob("*.safetensors"):
            weights.unlink()


def on_ranks():
    "Try the architectures that the command line names, up to the first error."
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    world, texts = join_world(RunConfig()), some_texts()
    for name in sys.argv[2:]:
        begun, report = time.perf_counter(), {}
        file = Path(sys.argv[1]) / f"{name}.{world.rank}"
        try:
            try_architecture(name, texts, world, report)
        except Exception as error:
            text = str(error).replace(f"{sys.argv[1]}/models/", "")
            lines = text.splitlines() or [""]
            file.write_text(
                json.dumps({**report, "error": f"{type(error).__name__}: {lines[0][:300]}"})
            )
            time.sleep(1)  # the other rank may have the reason, and this one its consequence
            os._exit(1)
        report["seconds"] = round(time.perf_counter() - begun, 1)
        file.write_text(json.dumps(report))
    os._exit(0)


def reports_of(names, folder):
    "Return what two ranks found for each of `names`."
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", __file__, str(folder)]
    found, left = {}, list(names)
    while left:
        done = subprocess.run(
            [Path(sys.executable).with_name(command[0]), *command[1:], *left],
            env={**os.environ, _ON_RANKS: "1"},
            capture_output=True,
            text=True,
        )
        before = len(left)
        for name in list(left):
            files = sorted(folder.glob(f"{name}.[01]"))
            if not files:
                break
            ranks = [json.loads(file.read_text()) for file in files]
            # that the other rank has ended is a consequence
            ranks.sort(key=lambda rank: ("error" not in rank, "gloo" in rank.get("error", "")))
            found[name] = ranks[0]
            left.remove(name)
            print(name, found[name], flush=True)
        if len(left) == before:
            found[left.pop(0)] = {"error": f"crash: {done.stderr[-300:]}"}
    return found


def estimate_all(found, folder):
    "Add to each report whether its memory could be estimated, with all its parameters."
    gpu = GPU("Tesla T4", 15360, (7, 5))
    with simulations() as simulate:
        for name, report in found.items():
            if "parameters" not in report:
                continue
            try:
                cfg = config(folder / "models" / name, "fsdp", dtype="fp16")
                parameters = simulate(cfg, gpu, 2)["parameters"]
                report["estimated"] = parameters == report["parameters"]
            except Exception as error:
                report["estimated"] = f"{type(error).__name__}: {error}"[:300]
            print(name, report["estimated"], flush=True)


def find_out(names):
    "Return what was found for each architecture in `names`."
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no estimate of an earlier state
        found = reports_of(names, Path(folder))
        estimate_all(found, Path(folder))
    return found


REPO = Path(__file__).resolve().parents[2]
RECORD, PAGE = (
    REPO / "bench" / "results" / "architectures.json",
    REPO / "bench" / "architectures.md",
)
CLOSE = 1e-4  # of the reference, relative: rounding grows from step to step


def is_right(report):
    "Return whether the architecture trains, saves and answers as it does in plain transformers."
    compared = [report.get(name, 1.0) for name in ("ddp", "fsdp", "lora", "export")]
    return "error" not in report and max(compared) < CLOSE


def _row(name, report):
    if not is_right(report):
        if "parameters" not in report:
            reason = "not tried: a tiny one can't be made"
        elif "reads a text in both directions" in report.get("error", ""):
            reason = "refused: it sees the word that it has to predict"
        else:
            reason = report.get("error", "its losses are not those of plain transformers")
        return f"| {name} | {reason} | | | |"
    answers = report["generates"].partition(":")[0]
    loss = "in chunks" if report["chunked"] else "whole"
    estimated = "yes" if report["estimated"] is True else "no"
    return f"| {name} | {report['packing']} | {loss} | {answers} | {estimated} |"


_PAGE = """# Architectures

Each of the {tried} causal architectures of transformers {transformers} was tried with a tiny model on two ranks. For
{right} of them all of this is right:

- four steps under ddp and under fsdp have the losses of a plain loop that takes the texts one by one, within {close:g};
- the export, read by plain transformers, has the loss of that loop's model;
- LoRA on all linear layers has the same losses under ddp and under fsdp;
- greedy answers are those of a loop without a cache.

Look for the `model_type` of a model's config.json.

- **texts**: `packed` in rows without padding; `bucketed` by length, where the texts of a row would see each other;
  `padded`, with a mask, where padding would be seen.
- **loss**: in chunks, without the `[tokens, vocabulary]` logits, or whole, where the head does more than a product.
- **answers**: `batched`, many questions at once; `cached`, one question at a time; `uncached`, where the cache can't be
  used. vLLM has its own list.
- **estimate**: whether `estimate` knows its memory.

Mixtures of experts train without the auxiliary loss that balances experts, as transformers does by default. That loss
depends on which texts share a micro-batch, so with it the curve would depend on the number of GPUs. If config.json asks
for it (`output_router_logits`), the run says that it is left out.

An encoder such as BERT reads in both directions. It is refused as a language model, unless its config.json says
`is_decoder` (as those in this table do), and is made for `task="classification"`. Encoder-decoders (T5) are refused.

`python tests/harness/architectures.py` makes this table with the transformers that is installed. `make test-slow` tries
the best known architectures, and those that a newer transformers has and this table hasn't.

| `model_type` | texts | loss | answers | estimate |
|---|---|---|---|---|
{rows}
"""


def page(record):
    "Return the Markdown page of a record."
    found = record["architectures"]
    right = {name for name, report in found.items() if is_right(report)}
    rows = [_row(name, found[name]) for name in sorted(found, key=lambda n: (n not in right, n))]
    return _PAGE.format(
        tried=len(found),
        right=len(right),
        close=CLOSE,
        transformers=record["versions"]["transformers"],
        rows="\n".join(rows),
    )


_ON_RANKS = "ARCHITECTURES_ON_RANKS"


def main():
    if _ON_RANKS in os.environ:
        return on_ranks()
    names = sys.argv[1:]
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    kept = json.loads(RECORD.read_text())["architectures"] if names else {}
    found = dict(sorted({**kept, **find_out(names or CAUSAL)}.items()))
    record = {"versions": versions, "architectures": found}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    PAGE.write_text(page(record))


if __name__ == "__main__":
    main()

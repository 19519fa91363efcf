"""Tiny models of the architectures that people bring do what plain transformers does."""

import json

import pytest
import torch
from harness import architectures
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from multigpu_ft import RunConfig, RunFailed

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
WELL_KNOWN = """
llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gemma3n_text phi phi3 olmo2 olmo3 smollm3
granite granitemoe gpt2 gpt_neo gpt_neox gptj gpt_oss opt bloom mpt falcon stablelm starcoder2
cohere cohere2 mixtral qwen3_moe qwen3_next olmoe deepseek_v3 nemotron glm4 ernie4_5 seed_oss
hunyuan_v1_dense exaone4 arcee llama4_text mamba mamba2 falcon_mamba jamba bamba zamba2 lfm2 ctrl
""".split()


def test_the_page_shows_the_record():
    record = json.loads(architectures.RECORD.read_text())
    assert architectures.PAGE.read_text() == architectures.page(record)
    right = [
        name for name, report in record["architectures"].items() if architectures.is_right(report)
    ]
    assert set(WELL_KNOWN) <= set(right) and len(right) >= 150


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_well_known_and_new_architectures():
    "Those that the transformers in use has, and the record hasn't, are new."
    record = json.loads(architectures.RECORD.read_text())["architectures"]
    new = [name for name in architectures.CAUSAL if name not in record]
    found = architectures.find_out([*WELL_KNOWN, *new])
    wrong = {name: report for name, report in found.items() if not architectures.is_right(report)}
    assert not wrong, f"wrong: {wrong}; new, for bench/architectures.md: {new}"
    assert all(found[name]["estimated"] is True for name in WELL_KNOWN)


@pytest.fixture
def tiny(material, run_root):
    "Return a function that makes a tiny model of an architecture, and returns the configuration of a run."
    tokenizer = AutoTokenizer.from_pretrained(material / "model")

    def make(name, **settings):
        torch.manual_seed(0)
        sizes = {**SIZES, **settings, "vocab_size": len(tokenizer)}
        folder = run_root.parent / f"{name}-{settings}"
        AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)).save_pretrained(
            folder
        )
        tokenizer.save_pretrained(folder)
        about = {"model": str(folder), "dataset": str(material / "texts.jsonl"), "nproc": 1}
        return RunConfig(**about, max_length=32, max_steps=2, run_root=str(run_root))

    return make


@pytest.mark.slow
def test_a_model_that_sees_what_it_predicts_is_refused(tiny, train):
    cfg = tiny("bert")
    with pytest.raises((AssertionError, RunFailed), match="reads a text in both directions, so it"):
        train(cfg)
    assert train(tiny("bert", is_decoder=True)).state == "done"


def test_experts_are_trained_without_the_loss_that_balances_them(tiny, train):
    "As a plain loop, which the table of architectures compares with. The run says so if config.json asks for it."
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    plain, asked = (
        train(tiny("mixtral", output_router_logits=asked, **experts)) for asked in (False, True)
    )
    losses = [
        [line["loss"] for line in run.dir.metrics() if "loss" in line] for run in (plain, asked)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    said = [" ".join(run.status.get("remarks", [])) for run in (plain, asked)]
    assert "output_router_logits" not in said[0]
    assert (
        "the loss that balances experts (output_router_logits in config.json) is left out"
        in said[1]
    )

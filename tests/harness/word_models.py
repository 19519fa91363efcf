"""Tiny models of the words w0, w1, ..., without a chat template, and questions for them."""

import json
import random

WORDS = 40


def make_models(folder):
    "Save tiny models that sometimes end a sequence, with a tokenizer of words, and a file of questions."
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    names = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        "user:",
        "assistant:",
        "system:",
        *(f"w{i}" for i in range(WORDS)),
    ]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(names)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    common = {
        "vocab_size": len(names),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 96,
    }
    common |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    qwen3 = {**common, "intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
    # vLLM's kernels have no narrower heads
    vllm = {**qwen3, "hidden_size": 128, "head_dim": 64, "max_position_embeddings": 4096}
    kinds = {
        "opt": ("opt", {**common, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
        "qwen3": ("qwen3", qwen3),
        "vllm": ("qwen3", vllm),
        "sliding": (
            "qwen3",
            {**qwen3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        ),
    }
    for name, (kind, settings) in kinds.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
        for parameter in model.parameters():
            # else all tokens are about equally likely
            parameter.data *= 2
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = random.Random(0)
    rows = [
        {
            "question": " ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.randint(1, 30))),
            "answer": i % 3,
        }
        for i in range(40)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def asked(models, name="opt", **settings):
    common = {"num_questions": 12, "num_sequences_per_question": 5, "max_new_tokens": 40}
    return {
        "model": str(models / name),
        "dataset": str(models / "questions.jsonl"),
        **common,
        **settings,
    }

"""Conversations: only the assistant's text is trained on, token by token."""

import json
import re

import numpy as np
import pytest

from multigpu_ft import RunConfig, launch, load_export
from multigpu_ft.data.examples import Texts
from multigpu_ft.data.tokenization import tokenize, tokenize_chats

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CHATML_MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant
{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}"""
LLAMA3 = """{{ '<|begin_of_text|>' }}{% for m in messages %}\
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}\
{{ m.content | trim + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
# like Qwen3's: it drops the thoughts of earlier turns, and puts an empty thought before the last answer
THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>

</think>

{% endif %}{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
)
TEMPLATES = {  # the texts that open and close an assistant's turn
    "ChatML": (CHATML, "<|im_start|>assistant\n", "<|im_end|>"),
    "ChatML with generation tags": (CHATML_MARKED, "<|im_start|>assistant\n", "<|im_end|>"),
    "Llama 3": (LLAMA3, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "Qwen3": (THINKING, "<|im_start|>assistant\n", "<|im_end|>"),
    "no special tokens": (PLAIN, "### assistant: ", "</s>"),
}


@pytest.fixture(scope="module")
def chat_tokenizer():
    from multigpu_ft.models.loading import load_tokenizer

    tokenizer = load_tokenizer(RunConfig())
    marks = [
        "<|im_start|>",
        "<|im_end|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    return tokenizer


def by_hand(text, opening, closing):
    "Return the characters of the assistant's text, found by the text before and after it."
    said = np.zeros(len(text), bool)
    for found in re.finditer(re.escape(opening) + "(.*?" + re.escape(closing) + ")", text, re.S):
        said[found.start(1) : found.end(1)] = True
    return said


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_the_assistants_text_is_learnt_token_by_token(name, chat_tokenizer, shared_data):
    template, opening, closing = TEMPLATES[name]
    singles = [json.loads(line)["messages"] for line in open(shared_data / "questions.jsonl")][:300]
    system = [
        {"role": "system", "content": "Answer briefly. You are the assistant: it says so here."}
    ]
    chats = [
        *singles[:200],
        *(
            [*system, *a, *b, *c]
            for a, b, c in zip(singles[200::3], singles[201::3], singles[202::3], strict=False)
        ),
    ]
    chat_tokenizer.chat_template = template
    texts, wrong = tokenize_chats(chats, chat_tokenizer, 4096), 0
    for number, messages in enumerate(chats):
        text = chat_tokenizer.apply_chat_template(messages, tokenize=False)
        made = chat_tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        said = by_hand(text, opening, closing)
        expected = [bool(said[start:end].any()) for start, end in made["offset_mapping"]]
        assert texts[number].ids.tolist() == made["input_ids"]
        wrong += int((texts[number].loss_mask != np.array(expected)).sum())
        answers = [m["content"].strip() for m in messages if m["role"] == "assistant"]
        loss_mask = chat_tokenizer.decode(texts[number].ids[texts[number].loss_mask])
        assert loss_mask.count(closing) == len(answers) and all(
            answer in loss_mask for answer in answers
        )
    assert wrong == 0 and texts.targets.sum() > 20_000


def test_a_conversation_cut_before_its_answer_has_no_targets(chat_tokenizer):
    from multigpu_ft import DataError

    chat_tokenizer.chat_template = CHATML
    talk = [{"role": "user", "content": "why " * 50}, {"role": "assistant", "content": "Because."}]
    short = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "Because."}]
    cfg = RunConfig(task="chat", max_length=32)
    both = tokenize(cfg, Texts([talk, short], 0, 2, 2, 0), chat_tokenizer)
    assert both.targets.tolist()[0] == 0 < both.targets.tolist()[1]
    with pytest.raises(DataError, match="max_length=32"):
        tokenize(cfg, Texts([talk], 0, 1, 1, 0), chat_tokenizer)


@pytest.mark.slow
def test_a_chat_model_learns_real_conversations(shared_data, run_root):
    run = launch(
        RunConfig(
            run_root=str(run_root),
            task="chat",
            dataset=str(shared_data / "questions.jsonl"),
            end_idx=160,
            tuning="lora",
            learning_rate=1e-2,
        )
    )
    assert run.status["loss_after"] < run.status["loss_before"] - 0.1
    model, tokenizer = load_export(run.status["export"])
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )

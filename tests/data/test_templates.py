"""A chat template that never ends, or wants all of the memory, ends a run with one sentence that names the row."""

import json
import shutil
import signal
import subprocess
import sys

import pytest

from multigpu_ft import ConfigError, RunConfig, generate, launch
from multigpu_ft.data import tokenization
from multigpu_ft.data.tokenization import asking, closing_token, tokenize_chats
from multigpu_ft.models.loading import load_tokenizer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
COMPARING = (  # in one operation of C, which looks at no signals
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)
TIME, MEMORY, LENGTH = "processor time", "GiB of memory", "characters"
BOMBS = {
    "nested loops": (ENDLESS, TIME),
    "a macro that calls itself twice": (MACRO, TIME),
    "a power, when it is compiled": ("{{ 7 ** (10 ** 9) }}", TIME),
    "a power": ("{{ (messages | length + 5) ** (10 ** 9) }}", TIME),
    "loops that write": (ENDLESS.replace("{% endfor %}", "word {% endfor %}", 1), "template of"),
    "a text, when it is compiled": ("{{ 'a' * 10 ** 12 }}", MEMORY),
    "a text of some GB, when it is compiled": ("{{ 'a' * 5 * 10 ** 9 }}", MEMORY),
    "a text": ("{{ messages[0].content * 10 ** 10 }}", MEMORY),
    "a format": ("{{ '%5000000000d' | format(1) }}", MEMORY),
    "a list": ("{{ [0] * 10 ** 10 }}", MEMORY),
    "a long text": ("{{ messages[0].content * 2 * 10 ** 6 }}", LENGTH),
    "a long text that is marked": (
        "{% generation %}{{ messages[0].content * 2 * 10 ** 6 }}{% endgeneration %}",
        LENGTH,
    ),
    "nested loops that are marked": ("{% generation %}" + ENDLESS + "{% endgeneration %}", TIME),
}
GOOD = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ONLY_ROW_3 = GOOD + "{% if 'id3' in messages[0].content %}" + ENDLESS + "{% endif %}"


def chat(number):
    return [
        {"role": "user", "content": f"id{number} w1 w2"},
        {"role": "assistant", "content": "w3 w4"},
    ]


@pytest.fixture
def tokenizer(material):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(material / "model")


@pytest.fixture
def model(material, tmp_path):
    "Return a function that makes a model with a chat template, and the file of conversations."

    def make(template):
        folder = tmp_path / "evil"
        shutil.copytree(material / "model", folder)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
        data = tmp_path / "chats.jsonl"
        data.write_text("".join(json.dumps({"messages": chat(i)}) + "\n" for i in range(8)))
        return {"model": str(folder), "dataset": str(data)}

    return make


@pytest.mark.parametrize("name", BOMBS)
def test_each_kind_of_bomb_is_named_with_row_and_model(name, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenization, "_SECONDS", 0.5)
    tokenizer.chat_template, what = BOMBS[name]
    with pytest.raises(ConfigError) as raised:
        tokenize_chats([chat(0)], tokenizer, 512, rows=[41])
    assert str(raised.value).startswith("row 41: the chat template of ") and what in str(
        raised.value
    )
    assert tokenizer.name_or_path in str(raised.value)
    for ask in (lambda: asking(chat(0)[:1], tokenizer), lambda: closing_token(tokenizer)):
        with pytest.raises(ConfigError, match="the chat template of "):
            ask()
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == signal.getitimer(signal.ITIMER_PROF)


def test_a_long_conversation_and_a_recursion_without_end_are_not_bombs(tokenizer):
    tokenizer.chat_template = GOOD
    long = [{"role": "user", "content": "w1 " * 700_000}, {"role": "assistant", "content": "w2"}]
    many = chat(0) * 150
    assert len(tokenize_chats([long, many], tokenizer, 100_000)) == 2
    tokenizer.chat_template = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    with pytest.raises(ValueError, match="conversation 0 .* rejected it .*recursion"):
        tokenize_chats([chat(0)], tokenizer, 512)


def test_what_a_template_marks_is_what_transformers_finds(tokenizer):
    "The text is rendered and tokenized here, which must be what `apply_chat_template` does."
    marked = GOOD.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    tokenizer.chat_template = marked
    talk = [{"role": "system", "content": "w9", "name": None}, *chat(0), *chat(1)]
    texts = tokenize_chats([talk, chat(2)], tokenizer, 512)
    for number, messages in enumerate((talk, chat(2))):
        made = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
        assert texts[number].ids.tolist() == made["input_ids"]
        assert texts[number].loss_mask.tolist() == list(map(bool, made["assistant_masks"]))
    assert texts.targets.all()


@pytest.mark.parametrize("marked", [False, True])
def test_a_template_that_prints_the_date_prints_the_same_one_tomorrow(marked):
    tokenizer = load_tokenizer(RunConfig.preset("tiny"))
    said = "{% generation %}{{ m.content }}{% endgeneration %}" if marked else "{{ m.content }}"
    tokenizer.chat_template = (
        "{{ strftime_now('%d %B %Y') }} {{ date_string }}{% for m in messages %} "
        + said
        + "{% endfor %}"
    )
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    (text,) = tokenize_chats([chat], tokenizer, 64)
    assert tokenizer.decode(text.ids).startswith("26 July 2024 26 Jul 2024")
    assert asking(chat[:1], tokenizer) == "26 July 2024 26 Jul 2024 x"


def test_a_conversation_of_many_messages_has_a_minute_at_most(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenization, "_MOST_SECONDS", 0.5)
    tokenizer.chat_template = ENDLESS
    with pytest.raises(ConfigError, match="takes more than 0 s of processor time"):
        asking([{"role": "user", "content": ""}] * 1000, tokenizer)


def test_what_no_signal_interrupts_ends_its_process(model, tmp_path):
    program = (
        "import sys\n"
        "from transformers import AutoTokenizer\n"
        "from multigpu_ft.data import tokenization\n"
        "tokenization._SECONDS = 0.2\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "tokenization.asking([{'role': 'user', 'content': 'w1'}], tokenizer)\n"
    )
    command = [sys.executable, "-c", program, model(COMPARING)["model"]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ended.returncode == -signal.SIGPROF and 'File "<template>"' in ended.stderr


def test_training_and_its_preview_end_with_one_sentence(model, run_root):
    from multigpu_ft.display.preview import preview_html

    cfg = RunConfig(
        **model(ONLY_ROW_3), task="chat", run_root=str(run_root), nproc=2, strategy="ddp"
    )
    said = "row 3: the chat template of .*evil' takes more than 10 s of processor time"
    with pytest.raises(ConfigError, match=said):
        launch(cfg)
    with pytest.raises(ValueError, match=said):
        preview_html(cfg.replace(end_idx=4, start_idx=3))


def test_generating_ends_with_one_sentence(model, tmp_path):
    settings = model(ONLY_ROW_3)
    with pytest.raises(ConfigError, match="row 3: the chat template of .*evil' takes more than"):
        generate(**settings, nproc=1, max_new_tokens=4, output=tmp_path / "a.jsonl")

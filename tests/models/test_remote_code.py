"""Code that comes with a model does not run, and nobody is asked whether it may: a "y" would run it."""

import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, modeling_flash_attention_utils, modeling_utils
from transformers.integrations import hub_kernels

from multigpu_ft import CheckpointError, ModelError, RunConfig, load_export
from multigpu_ft.models.loading import load_config, load_model, load_shell, load_tokenizer

CODE = """
from pathlib import Path
from transformers import OPTConfig, OPTForCausalLM, OPTForSequenceClassification, PreTrainedTokenizerFast

Path({marker!r}).touch()


class Config(OPTConfig):
    model_type = "mystery"


class Model(OPTForCausalLM):
    config_class = Config


class Classifier(OPTForSequenceClassification):
    config_class = Config


class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "the code ran"


@pytest.fixture
def model(material, marker, tmp_path):
    "Return a folder with a model and a tokenizer, either of which needs code in the folder."
    folder = tmp_path / "model"
    shutil.copytree(material / "model", folder)
    (folder / "code.py").write_text(CODE.format(marker=str(marker)))
    auto = {"AutoConfig": "Config", "AutoModelForCausalLM": "Model"}
    auto["AutoModelForSequenceClassification"] = "Classifier"
    _change(folder / "config.json", "mystery", {k: f"code.{name}" for k, name in auto.items()})
    return folder


@pytest.fixture
def model_with_a_tokenizer(model):
    auto = {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}
    _change(model / "tokenizer_config.json", "Tokenizer", auto)
    return model


def _change(path, kind, auto):
    name = "model_type" if path.name == "config.json" else "tokenizer_class"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: kind, "auto_map": auto}))


@pytest.fixture(autouse=True)
def questions(monkeypatch):
    "Answer yes to every question, and return the questions."
    asked = []

    def yes(text=""):
        asked.append(text)
        return "y"

    monkeypatch.setattr(builtins, "input", yes)
    return asked


def _export_of(folder):
    (folder / "check.json").write_text(
        json.dumps({"dtype": "float32", "task": "causal-lm", "loss": 1.0, "quantization": "none"})
    )
    return folder


LOADERS = {
    "config": load_config,
    "shell": lambda cfg, own: load_shell(cfg, own, None, torch.float32),
    "model": load_model,
    "classifier": lambda cfg, own: load_model(cfg.replace(task="classification"), own, ["a", "b"]),
    "export": lambda cfg, own: load_export(_export_of(Path(cfg.model))),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_model_with_code_is_refused(material, model, marker, questions, name):
    own = load_tokenizer(RunConfig(model=str(material / "model"), max_length=16))
    with pytest.raises((ModelError, CheckpointError), match="needs Python code .* never run"):
        LOADERS[name](RunConfig(model=str(model), max_length=16), own)
    assert not questions and not marker.exists()


def test_a_tokenizer_with_code_is_refused(model_with_a_tokenizer, marker, questions):
    folder = model_with_a_tokenizer
    with pytest.raises(ModelError, match="the tokenizer of .* needs Python code"):
        load_tokenizer(RunConfig(model=str(folder), max_length=16))
    with pytest.raises(CheckpointError, match="needs Python code"):
        load_export(_export_of(folder))
    assert not questions and not marker.exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_that_a_model_names_is_not_fetched(material, tmp_path, monkeypatch, key):
    "A kernel is code from the Hub, which `trust_remote_code=False` doesn't keep out."
    fetched = []

    def fetch(*args, **settings):
        fetched.append(args)
        raise ValueError

    for module in (hub_kernels, modeling_utils, modeling_flash_attention_utils):
        if hasattr(module, "is_kernels_available"):
            monkeypatch.setattr(module, "is_kernels_available", lambda *args, **settings: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", fetch)
    folder = tmp_path / "model"
    shutil.copytree(material / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: "kernels-community/a@main"}))
    with pytest.raises(ValueError):
        AutoModelForCausalLM.from_pretrained(folder)
    assert fetched, "this test no longer sees a kernel that is fetched"
    fetched.clear()
    own = load_tokenizer(RunConfig(model=str(folder), max_length=16))
    LOADERS["model"](RunConfig(model=str(folder), max_length=16), own)
    with pytest.raises(CheckpointError, match="doesn't reproduce the trained model's loss"):
        load_export(_export_of(folder))
    assert not fetched


def test_an_adapter_that_names_a_module_is_refused(material, marker, tmp_path, monkeypatch):
    "peft imports it, before 0.20 whatever it is."
    folder = tmp_path / "adapter"
    own = load_tokenizer(RunConfig(model=str(material / "model"), max_length=16))
    base = load_model(RunConfig(model=str(material / "model"), max_length=16), own)
    get_peft_model(base, LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    own.save_pretrained(folder)
    monkeypatch.syspath_prepend(str(tmp_path))  # as in a notebook beside the folder
    (folder / "code_of_the_adapter.py").write_text(CODE.format(marker=str(marker)))
    path = folder / "adapter_config.json"
    evil = {"megatron_config": {"x": 1}, "megatron_core": "adapter.code_of_the_adapter"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **evil}))
    with pytest.raises(CheckpointError, match="Megatron's code, which is never run"):
        load_export(_export_of(folder))
    assert not marker.exists()

"""`estimate`: its results, its errors, and its callers.

`bench/memory.py` compares it with real runs; a few of those are here, too."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from harness import forks
from harness.runs import REPO, until

from multigpu_ft import ConfigError, ModelError, RunConfig, estimate, launch
from multigpu_ft.launcher.functions import start_agent
from multigpu_ft.memory import fit
from multigpu_ft.memory.api import Estimate, Machine, gpus_here, plan_memory, too_slow_here
from multigpu_ft.memory.fit import (
    NoEstimate,
    Simulations,
    decide,
    lighter,
    remedies,
    simulations,
)
from multigpu_ft.models.shapes import ARCHITECTURES
from multigpu_ft.run.config import PRESET_NEEDS
from multigpu_ft.run.environment import GPU, find_gpu

sys.path.insert(0, str(REPO / "bench"))
import memory as bench  # noqa: E402

OPT = {
    "model": "facebook/opt-1.3b",
    "dataset": "user/abstracts",
    "dtype": "fp16",
    "batch_size": 4,
    "max_length": 512,
    "activation_checkpointing": "none",
}
SMALL = {"dataset": "user/abstracts", "max_length": 64, "dtype": "fp16"}
T4 = find_gpu("T4")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    "Give this file a cache of its own, so that no answer comes from elsewhere."
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def opt():
    return estimate(RunConfig(strategy="fsdp", **OPT), gpus=2, gpu_memory_gib="T4")


@pytest.fixture(scope="module")
def ask():
    with simulations() as found:
        yield found


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    "Return OPT's vocabulary on two narrow blocks: half a GiB of weights, gradients and moments."
    folder = tmp_path_factory.mktemp("little")
    (folder / "config.json").write_text(
        json.dumps(
            {
                **bench.OPT,
                "vocab_size": 50272,
                "hidden_size": 512,
                "word_embed_proj_dim": 512,
                "ffn_dim": 2048,
                "num_hidden_layers": 2,
            }
        )
    )
    return RunConfig(
        model=str(folder),
        dataset="user/abstracts",
        strategy="ddp",
        dtype="fp16",
        batch_size=4,
        max_length=256,
        activation_checkpointing="none",
    )


def start_agent_without_smi(run_dir, **how):
    "Start the agent of `run_dir` where GPUs are hidden, unlike in this process."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return start_agent(run_dir, **how)


def fake_smi(tmp_path, monkeypatch, gpus, processes="", listed="", about=""):
    "Make nvidia-smi print these texts for --query-gpu, --query-compute-apps, -L and -q."
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, text in (("gpus", gpus), ("apps", processes), ("L", listed), ("q", about)):
        (folder / name).write_text(text)
    script = folder / "nvidia-smi"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in\n--query-gpu*) cat {folder}/gpus;;\n'
        f"--query-compute*) cat {folder}/apps;;\n-L) cat {folder}/L;;\n-q) cat {folder}/q;;\nesac\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# -- results ----------------------------------------------------------------------------------------------------------


def test_opt_13b_on_two_t4_matches_a_calculation_by_hand(opt):
    half = 1_315_758_080 / 2 * 4 / 2**30  # GiB of fp32 on each of two
    assert opt.categories["parameters"] == pytest.approx(half, abs=0.01) and opt.categories[
        "optimizer"
    ] == pytest.approx(2 * half, abs=0.02)
    assert list(opt.phases) == ["load", "first step", "later step", "save"]
    assert opt.simulation.found["peaks"][1]["categories"]["gradients"] / 2**30 == pytest.approx(
        half, abs=0.02
    ), "all of them are there before the first update"
    assert sum(opt.categories.values()) == pytest.approx(
        opt.peak_gib
    ) and opt.limit_gib == pytest.approx(15109 / 1024)
    assert opt.fits and opt.fit() is opt.config and opt.settings()["parameters"] == 1_315_758_080
    assert opt.disk_gib["checkpoint"] == pytest.approx(6 * half) and opt.disk_gib[
        "export"
    ] == pytest.approx(half), "fp32 with two moments; fp16"
    assert opt.host_gib["load"] > 2 * half, "rank 0 reads all of it in fp32"
    assert opt.hours and opt.hours == pytest.approx(5000 * 512 / opt.tokens_per_second / 3600)
    assert opt.checkpoints == 1, "a slice of a quarter of an hour saves once"
    assert opt.verdict == "fits closely" and "first batch_size=1" in " ".join(opt.remarks)


def test_the_disk_holds_what_is_kept_the_best_and_what_is_written(opt):
    each, export = opt.disk_gib["checkpoint"], opt.disk_gib["export"]
    held_out = {"eval_start_idx": 6000, "keep_best": True}

    def at_once(**changes):
        found = Estimate(opt.config.replace(**changes), opt.simulation, [], opt.machine)
        assert found.disk_gib["kept"] == pytest.approx(found.checkpoints * each + export)
        return found

    several = at_once(num_epochs=9)
    assert several.checkpoints == 3 and at_once(num_epochs=9, keep=4).checkpoints == 5
    assert at_once(num_epochs=9, **held_out).checkpoints == 4, "the best beside the newest two"
    assert at_once(save_every=1).checkpoints == 3 and at_once(save_minutes=1).checkpoints == 3
    assert at_once(start_idx=5000).checkpoints == 2, "the one that it continues from"
    assert at_once(start_idx=5000, resume_file="none").checkpoints == 1
    said = next(remark for remark in several.remarks if "disk" in remark)
    assert "3 checkpoints and the export take up to 46.6 GiB, Kaggle has 19.5 GiB" in said
    assert "keep=2" in said and "3 checkpoints" in str(several)
    elsewhere = Machine(find_gpu("A100"), 2, is_here=False)
    said = " ".join(Estimate(several.config, opt.simulation, [], elsewhere).remarks)
    assert "disk" not in said, "nobody knows the disk of other machines"


def test_an_estimate_without_gpus_says_what_it_is_for(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    cfg = RunConfig(max_length=64)
    found, note = estimate(cfg), "no GPU here: estimated for 2 x T4"
    assert found.note == note and found.line.startswith(f"{note}. Fits: ")
    assert str(found).startswith(note) and note in found.plot().axes[0].get_title()
    html = found._repr_html_()
    assert html.index(note) < html.index("<img") and html.count(note) > 1
    record = found.record()
    assert (record["note"], record["gpus_are_here"], record["gpu"]) == (note, False, "T4")
    named = estimate(cfg, gpu_memory_gib="T4")
    assert not named.note and named.line.startswith("fits: ") and "2 x T4" in named.line
    assert "2 x T4" in named.plot().axes[0].get_title()


def test_an_estimate_says_why_rows_make_so_many_steps(tmp_path):
    data = tmp_path / "x.jsonl"
    data.write_text(('{"text": "' + "some words " * 8 + '"}\n') * 1000)
    found = estimate(RunConfig(dataset=str(data), batch_size=16, accum_steps=2), 2, "T4")
    said = str(found.amounts)
    assert re.fullmatch(
        r"1,000 rows are (about )?[\d,]+ tokens; 64 texts a step, about [\d,]+ tokens, make 16 steps",
        said,
    ), said
    assert said in str(found) and said in found._repr_html_()
    assert found.record()["steps"] == found.amounts.steps


def test_hours_end_with_max_steps(opt):
    five = Estimate(opt.config.replace(max_steps=5), opt.simulation, [], opt.machine)
    assert five.hours == pytest.approx(5 * 8 * 512 / opt.tokens_per_second / 3600)
    assert five.amounts.steps == 5 and "max_steps=5" in str(five)
    many = Estimate(opt.config.replace(max_steps=10**6), opt.simulation, [], opt.machine)
    assert many.hours == opt.hours


def test_hours_count_texts_as_long_as_they_are(opt, tmp_path):
    assert "at most" in opt.line and "each counted as max_length" in str(opt)
    data = tmp_path / "x.jsonl"
    data.write_text(('{"text": "' + "some words " * 8 + '"}\n') * 5000)
    cfg = opt.config.replace(dataset=str(data))
    short = Estimate(cfg, opt.simulation, [], opt.machine)
    tokens = short.amounts.tokens
    assert 5000 * 10 < tokens < 5000 * 40
    assert short.hours == pytest.approx(tokens / opt.tokens_per_second / 3600)
    assert short.hours < opt.hours / 10
    assert "; about " in short.line and "at most" not in short.line
    assert f"about {tokens / 5000:,.0f} tokens each" in str(short)
    twice = Estimate(cfg.replace(num_epochs=2), opt.simulation, [], opt.machine)
    assert twice.hours == pytest.approx(2 * short.hours)


def test_only_a_session_that_ends_is_too_short(opt, monkeypatch):
    long = Estimate(opt.config.replace(num_epochs=100), opt.simulation, [], opt.machine)
    assert long.hours > 12 and not any("session" in remark for remark in long.remarks)
    limited = Estimate(long.config.replace(max_hours=3), opt.simulation, [], opt.machine)
    assert any("longer than a session of 3 h" in remark for remark in limited.remarks)
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert any("longer than a session" in remark for remark in long.remarks)


def test_what_fits_closely_says_what_to_change_first(ask, little):
    fit = decide(ask, little, T4, 2)
    tight = decide(ask, little, GPU("tight", fit.peak * 1.02 / 2**20, (7, 5)), 2)
    assert tight.verdict == "fits closely"
    found = Estimate(little, tight, [], Machine(tight.gpu, 2, is_here=False))
    first, *others = lighter(tight)
    assert first == {"batch_size": 1, "accum_steps": 4} and {"optimizer": "adamw_8bit"} in others
    assert any("first batch_size=1, accum_steps=4; then " in remark for remark in found.remarks)
    for change in lighter(fit):
        less = decide(ask, little.replace(**change), T4, 2)
        assert less.used < fit.used, change


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt-1.3b-arxiv", "qwen3-14b-qlora"])
def test_the_large_presets_fit_on_kaggle_and_say_what_to_change_first(ask, name):
    found = estimate(RunConfig.preset(name), gpus=2, gpu_memory_gib="T4")
    assert found.fits and not any("disk" in remark for remark in found.remarks)
    first, second, *_ = lighter(found.simulation)
    for change in (first, second):
        for setting, value in change.items():
            assert f"{setting}={value!r}" in PRESET_NEEDS[name]
    assert decide(ask, found.decided.replace(**first), T4, 2).used < found.simulation.used


def test_an_estimate_shows_in_a_notebook_and_as_text(opt):
    html, text = opt._repr_html_(), str(opt)
    assert "data:image/png;base64," in html and "CUDA context" in html and "<table" in html
    for words in ("14.75", "optimizer", "checkpoint", "assumed:", "tokens/s", "peak on each GPU"):
        assert words in text, words
    assert repr(opt).startswith("Estimate(fits") and "\n" not in opt.line
    axes = opt.plot().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(opt.phases)


@pytest.mark.slow
def test_an_estimate_that_does_not_fit_names_changes_that_do(little):
    found = estimate(little, gpus=2, gpu_memory_gib=1.2)
    assert found.verdict == "does not fit" and not found.fits and found.remedies
    fitting = found.fit()
    assert fitting != found.config and estimate(fitting, gpus=2, gpu_memory_gib=1.2).fits
    assert (fitting.batch_size * fitting.accum_steps, fitting.max_length, fitting.model) == (
        4,
        256,
        little.model,
    ), "the global batch stays"
    assert f"cfg.replace({next(iter(found.remedies[0].changes))}=" in found._repr_html_()


@pytest.mark.slow
def test_changes_are_offered_in_the_order_of_speed(ask, little):
    t4 = GPU("T4 of which little is left", 1300, T4.capability, T4.flops, T4.bandwidth, T4.link)
    found = remedies(ask, decide(ask, little, t4, 2))
    speeds = [r.tokens_per_second for r in found if "tuning" not in r.changes]
    assert (
        len(speeds) > 1
        and speeds == sorted(speeds, reverse=True)
        and any(r.changes.get("strategy") == "fsdp" for r in found)
    )


@pytest.mark.slow
def test_an_estimate_says_if_nothing_fits(little):
    found = estimate(
        little.replace(
            tuning="qlora", batch_size=1, strategy="fsdp", activation_checkpointing="full"
        ),
        gpus=2,
        gpu_memory_gib=0.66,
    )
    assert (
        not found.remedies
        and "nothing that was tried would fit" in str(found)
        and found.tokens_per_second is None
        and found.hours is None
    )
    with pytest.raises(ConfigError, match="None of the changes that were tried"):
        found.fit()


QWEN = {
    **{"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 18},
}
WINDOWS = {"model_type": "gemma2", **QWEN}
EXPERTS = {
    **{"model_type": "qwen3_moe", **QWEN, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 128, "mlp_only_layers": [0, 1, 2]},
}


def saved(folder, shape):
    "Save the configuration of a model in `folder`, and return its path."
    from transformers import AutoConfig

    AutoConfig.for_model(**shape).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "shape, changes",
    [
        pytest.param(None, {}, marks=pytest.mark.slow),
        pytest.param(None, {"activation_checkpointing": "full"}, marks=pytest.mark.slow),
        (None, {"strategy": "fsdp"}),
        pytest.param(None, {"tuning": "lora", "quantization": "none"}, marks=pytest.mark.slow),
        pytest.param(None, {"strategy": "zero2"}, marks=pytest.mark.slow),
        pytest.param(
            WINDOWS, {"strategy": "fsdp", "activation_checkpointing": 3}, marks=pytest.mark.slow
        ),
        pytest.param(EXPERTS, {"strategy": "fsdp"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: (
        ", ".join(map(str, value.values())) if value and "model_type" not in value else None
    ),
)
def test_few_blocks_stand_for_all(tmp_path, shape, changes):
    from multigpu_ft.memory.simulation import simulate

    model = saved(tmp_path, shape) if shape else "facebook/opt-125m"
    cfg = RunConfig(**{**OPT, "model": model, "accum_steps": 2, "strategy": "ddp", **changes})
    few, every = (simulate(cfg, T4, 2, whole=whole) for whole in (False, True))
    torch.distributed.destroy_process_group()  # the simulated one
    assert few["peaks"] == every["peaks"], "bytes of each category at the peak of each phase"
    assert few["reserved"] == pytest.approx(every["reserved"], rel=0.002)
    assert few["seconds"] == pytest.approx(every["seconds"], rel=0.001)
    sums = ("host", "disk", "parameters", "trainable", "blocks", "parameters_in_blocks", "tokens")
    for name in (*sums, "communication", "packing", "checkpointed_blocks", "flops_per_token"):
        assert few[name] == pytest.approx(every[name]) if name in sums else few[name] == every[name]


@pytest.mark.parametrize(
    "shape, changes, few",
    [
        ({"model_type": "llama", **QWEN}, {}, (3, 1)),
        (WINDOWS, {}, (4, 2)),
        (WINDOWS, {"activation_checkpointing": 3}, None),  # a repetition of 6 is too much of 18
        ({**WINDOWS, "num_hidden_layers": 40}, {"activation_checkpointing": 3}, (10, 6)),
        (EXPERTS, {}, (6, 1)),
        ({**EXPERTS, "mlp_only_layers": [1, 4, 9]}, {}, None),  # irregular
        ({"model_type": "llama", **QWEN, "num_hidden_layers": 6}, {}, None),
        ({"model_type": "llama", **QWEN}, {"strategy": "zero3"}, None),
        ({"model_type": "llama", **QWEN}, {"lora_target_modules": "layers.3.q_proj"}, None),
    ],
)
def test_how_few_blocks_stand_for_all(tmp_path, shape, changes, few):
    from multigpu_ft.memory.simulation import _few_blocks, _read_shape

    cfg = RunConfig(
        **{**OPT, "model": saved(tmp_path, shape), "strategy": "ddp", "tuning": "lora", **changes}
    )
    assert _few_blocks(cfg, _read_shape(cfg)) == few


def test_hybrid_sharding_takes_as_much_as_sharding_over_one_node(ask, little):
    full = little.replace(strategy="fsdp")
    hybrid = full.replace(sharding="hybrid_shard", nnodes=2)

    def kept(cfg, gpus):
        return next(p for p in ask(cfg, T4, gpus)["peaks"] if p["phase"] == "save")["categories"]

    assert kept(hybrid, 4) == kept(full, 2)
    # some sizes do not divide by four
    assert kept(full.replace(nnodes=2), 4)["optimizer"] == pytest.approx(
        kept(full, 2)["optimizer"] / 2, rel=0.02
    )
    with pytest.raises(ConfigError, match="cannot be shared out evenly over nnodes=2"):
        estimate(hybrid, gpus=3, gpu_memory_gib="T4")


def test_auto_is_ddp_if_it_fits(ask, little):
    "Each GPU has everything, or half of it."
    auto = little.replace(strategy="auto")
    assert (
        decide(ask, auto, T4, 2).cfg.strategy == "ddp"
        and decide(ask, auto, GPU("less", 1300, (7, 5)), 2).cfg.strategy == "fsdp"
    )
    assert decide(ask, auto, T4, 1).cfg.strategy == "single"


@pytest.mark.slow
def test_auto_recomputes_as_few_blocks_as_fit(ask):
    cfg = RunConfig(strategy="ddp", dtype="fp16", dataset="a/b", batch_size=64, max_length=128)
    none, full = (
        decide(ask, cfg.replace(activation_checkpointing=way), T4, 2) for way in ("none", "full")
    )
    assert full.peak < none.peak and decide(ask, cfg, T4, 2).found["every"] == 0

    def on(tensors, way="auto"):
        "Decide on a GPU with room for `tensors` bytes of them, where little is left as slack."
        gpu = GPU("tight", (none.context + tensors) / 2**20, (7, 5))
        return decide(ask, cfg.replace(activation_checkpointing=way), gpu, 2)

    some, all_of_them = 0.15 * full.used + 0.85 * none.used, 0.7 * full.used + 0.3 * none.used
    assert on(some).fits and on(some).found["every"] in (2, 3, 4) and not on(some, "none").fits
    assert on(all_of_them).fits and on(all_of_them).found["every"] == 1
    assert not on(all_of_them, 2).fits


def test_a_t4_does_not_use_bf16(ask, little):
    auto = little.replace(dtype="auto")
    assert (
        decide(ask, auto, T4, 2).cfg.dtype == "fp16"
        and decide(ask, auto, find_gpu("H100"), 2).cfg.dtype == "bf16"
    )
    assert any(
        "emulation" in remark
        for remark in estimate(little.replace(dtype="bf16"), gpus=2, gpu_memory_gib="T4").remarks
    )


@pytest.mark.parametrize(
    "kind, gpus, memory, settings, words",
    [
        (ConfigError, 2, "T5", {}, "known names: T4"),
        (ConfigError, 2, -3, {}, "unknown GPU"),
        (ConfigError, 2, 0, {}, "not a GPU size"),
        (ConfigError, 0, "T4", {}, "gpus=0"),
        (ConfigError, True, "T4", {}, "gpus=True"),
        (ConfigError, 2, "T4", {"strategy": "single"}, "cannot run on 2 GPUs"),
        (
            ModelError,
            2,
            "T4",
            {"model": "nobody/has-this"},
            "the shape of 'nobody/has-this' is not known",
        ),
        (ModelError, 2, "T4", {"model": "facebook/opt-125m", "max_length": 4096}, "2048 positions"),
        (
            ModelError,
            2,
            "T4",
            {"tuning": "lora", "quantization": "none", "lora_target_modules": "q_porj"},
            "q_proj",
        ),
    ],
)
def test_impossible_requests_raise(kind, gpus, memory, settings, words, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(kind, match=words):
        estimate(RunConfig(**{"max_length": 64, **settings}), gpus=gpus, gpu_memory_gib=memory)


@pytest.mark.slow
def test_a_model_in_a_folder_without_weights(tmp_path):
    "Only `config.json` is needed."
    cfg = RunConfig(
        model=str(tmp_path),
        tuning="qlora",
        strategy="ddp",
        activation_checkpointing="none",
        **SMALL,
    )
    (tmp_path / "config.json").write_text(json.dumps({**bench.QWEN, "num_hidden_layers": 2}))
    found = estimate(cfg, gpus=2, gpu_memory_gib="T4")
    assert found.settings()["quantization"] == "4bit" and found.fits
    (tmp_path / "config.json").write_text(json.dumps({**bench.QWEN, "num_hidden_layers": 3}))
    other = estimate(cfg, gpus=2, gpu_memory_gib="T4")
    assert other.settings()["parameters"] > found.settings()["parameters"], (
        "another model in the same folder is another model"
    )


def test_all_blocks_are_recomputed_if_no_fewer_suffice():
    asked = []

    def ask(cfg, gpu, gpus):
        asked.append(cfg.activation_checkpointing)
        size = {"none": 40.0, "full": 13.0}.get(asked[-1])
        if size is None:
            size = 13 + 27 * (1 - 1 / asked[-1])
        peaks = [{"phase": "later step", "bytes": size * 2**30}]
        return {"peaks": peaks, "reserved": size * 2**30, "seconds": None}

    cfg = RunConfig(strategy="ddp", dtype="fp16")
    found = decide(ask, cfg, find_gpu("T4"), 2)
    assert found.fits and found.cfg.activation_checkpointing == "full" and asked[0] == "none"


def test_ddp_is_not_simulated_where_the_weights_alone_are_too_much():
    asked = []

    def ask(cfg, gpu, gpus):
        asked.append(cfg.strategy)
        return {
            "peaks": [{"phase": "later step", "bytes": 2**30}],
            "reserved": 2**30,
            "seconds": None,
        }

    cfg = RunConfig(model="facebook/opt-1.3b", dataset="none/none")
    assert decide(ask, cfg, find_gpu("T4"), 2).cfg.strategy == "fsdp" and asked == ["fsdp"]
    assert decide(ask, cfg.replace(tuning="lora"), find_gpu("T4"), 2).cfg.strategy == "ddp"
    assert decide(ask, cfg, find_gpu("H100"), 2).cfg.strategy == "ddp"


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_packed_rows_take_no_mask(tmp_path, dtype):
    "A block more takes what it takes in buckets, and the results of attention in the order of the rows."
    from multigpu_ft.memory.simulation import simulate

    more = {}
    shape = ARCHITECTURES["facebook/opt-125m"]
    models = [saved(tmp_path / str(n), {**shape, "num_hidden_layers": n}) for n in (2, 6)]
    for packing in ("packed", "bucketed"):
        few, many = (
            next(
                peak["categories"]["activations"]
                for peak in simulate(
                    RunConfig(
                        **{"model": model, "packing": packing, "activation_checkpointing": "none"},
                        **{
                            "strategy": "single",
                            "dtype": dtype,
                            "batch_size": 2,
                            "max_length": 1024,
                        },
                    ),
                    find_gpu("T4"),
                    1,
                )["peaks"]
                if peak["phase"] == "later step"
            )
            for model in models
        )
        more[packing] = (many - few) / 4
    torch.distributed.destroy_process_group()  # the simulated one
    ordered = 2 * 1024 * 768 * (2 if dtype == "fp16" else 4)  # bytes
    assert more["packed"] - more["bucketed"] == pytest.approx(ordered, rel=0.01)


def test_the_loss_takes_its_weights_gradient_once():
    "No chunk's product is made beside the sum, which is the size of the weight in fp32."
    from torch._subclasses.fake_tensor import FakeTensorMode

    from multigpu_ft.memory.tracker import MemoryTracker, read_peaks
    from multigpu_ft.models.loss import chunked_cross_entropy

    tokens, vocabulary, width = 512, 2**18, 2048
    weight = 2 * vocabulary * width  # bytes
    tracker = MemoryTracker()
    with FakeTensorMode(), tracker:
        tracker.begin("loss")
        head = torch.nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
        hidden = torch.zeros(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.int64)
        chunked_cross_entropy(hidden, head, targets, kind="cuda")[0].backward()
    (peak,) = read_peaks(tracker)
    # weight, sum, its copy in bf16, and a chunk's logits
    assert 4 * weight < peak.bytes < 4.6 * weight


@pytest.mark.slow
def test_answers_outlive_the_process(monkeypatch):
    cfg, t4 = RunConfig(strategy="ddp", **SMALL), find_gpu("T4")
    with simulations(keep=False) as ask:
        first = ask(cfg, t4, 2)
        process = ask._worker.process
        assert ask.asked in (0, 1)
    assert process is None or process.poll() is not None
    monkeypatch.setattr(Simulations, "_known", {})
    with simulations() as ask:
        assert ask(cfg, t4, 2) == first and ask.asked == 0
    with simulations() as ask:
        with pytest.raises(NoEstimate, match="without an answer"):
            ask(cfg.replace(max_length=65), t4, 2)  # starts it
            ask._worker.process.kill()
            ask._worker.process.wait()
            ask(cfg.replace(max_length=66), t4, 2)


@pytest.mark.slow
def test_the_process_is_kept_for_the_next_estimate(monkeypatch):
    spare = fit._Spare()
    monkeypatch.setattr(fit, "_spare", spare)
    monkeypatch.setattr(fit, "_KEPT_S", 3.0)
    cfg, t4 = RunConfig(strategy="ddp", **SMALL), find_gpu("T4")
    processes = []

    def ask_for(length):
        with simulations() as ask:
            ask(cfg.replace(max_length=length), t4, 2)
            processes.append(ask._worker.process)

    ask_for(70)
    with pytest.raises(ConfigError), simulations() as ask:
        raise ConfigError("an answer like another")
    ask_for(71)
    assert processes[0] is processes[1] and processes[0].poll() is None
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    ask_for(72)
    assert processes[2] is not processes[1] and processes[1].poll() is not None
    until(lambda: processes[2].poll() is not None, 10, "the end of the process")
    with pytest.raises(KeyboardInterrupt), simulations() as ask:
        ask(cfg.replace(max_length=73), t4, 2)
        processes.append(ask._worker.process)
        raise KeyboardInterrupt
    assert processes[3].poll() is not None


def test_an_estimate_can_be_stopped(monkeypatch):
    monkeypatch.setattr(fit, "_spare", fit._Spare())
    cfg, t4 = RunConfig(**OPT, strategy="ddp"), find_gpu("T4")
    with simulations() as ask, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, cfg.replace(max_length=509), t4, 2)
        process = until(lambda: ask._worker.process, 10, "a process that simulates")
        (fork,) = until(psutil.Process(process.pid).children, 60, "its fork, at work on few blocks")
        ask.stop()
        with pytest.raises(NoEstimate):
            waiting.result(10)
        until(lambda: not fork.is_running(), 5, "the end of the fork")
        with pytest.raises(NoEstimate, match="stopped"):
            ask(cfg.replace(max_length=508), t4, 2)
    assert ask._worker.process is None


def test_the_kernel_side_imports_no_torch():
    code = (
        "import sys; from multigpu_ft import estimate, RunConfig; "
        "print(estimate(RunConfig(max_length=64), 2, 'T4').line); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- compared with real runs ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora, fsdp", "qlora"])
def test_an_estimate_is_close_to_a_real_run(name, tmp_path):
    "Compare with the bytes of torch's CPU allocator in 2 real ranks. bench/memory.py has 27 configurations."
    predicted, measured, _ = bench.compare(name)
    assert predicted == pytest.approx(measured, rel=0.03)


# -- callers -------------------------------------------------------------------------------------------------------


def test_command_line(monkeypatch):
    arguments = [
        forks.command(),
        "estimate",
        "--preset",
        "opt-1.3b-arxiv",
        "--gpus",
        "2",
        "--json",
    ]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (
        found["fits"] is True
        and 8 < found["peak_gib"] < 14.75
        and found["gpu"] == "T4"
        and found["gpus"] == 2
    )
    assert (
        sum(found["categories"].values()) == pytest.approx(found["peak_gib"], abs=0.02)
        and found["verdict"] == "fits"
    )
    for wrong, words in (
        (["--gpus", "0"], "gpus=0"),
        (["--gpus", "two"], "not a number of GPUs"),
        (["--gpu-memory-gib", "T5"], "T5"),
    ):
        done = subprocess.run(
            [forks.command(), "estimate", *wrong], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 1 and "ConfigError" in done.stderr and words in done.stderr


def test_launch_refuses_a_run_that_cannot_fit(two_t4, tmp_path, little):
    cfg = little.replace(batch_size=2048, run_root=str(tmp_path / "runs"))
    with pytest.raises(
        ConfigError,
        match=r"does not fit: .* of 14.8 GiB on each of 2 x T4.* This would: cfg.replace\(.*force=True",
    ):
        launch(cfg)
    assert not list((tmp_path / "runs").glob("*")), "before anything is made"
    for lets_pass in ({"force": True}, {"cfg": cfg.replace(memory_check="warn")}):
        plan, said = plan_memory(**{"cfg": cfg, **lets_pass})
        assert said and said[0].startswith("does not fit") and plan["decided"]["strategy"] == "ddp"
    assert plan_memory(cfg.replace(memory_check="off")) == ({}, [])
    plan, said = plan_memory(cfg.replace(model="nobody/has-this"))
    assert plan == {} and "not known beforehand" in said[0]


def test_launch_says_that_a_model_is_too_large_for_a_cpu(tmp_path, monkeypatch, capfd):
    "Before anything starts, and as a remark only: the user decides."
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    monkeypatch.setattr("multigpu_ft.launcher.api.start_agent", lambda run_dir, **how: 1 / 0)
    data = tmp_path / "x.jsonl"
    data.write_text('{"text": "some words"}\n' * 640)
    cfg = RunConfig.preset(
        "opt-1.3b-arxiv", dataset=str(data), run_root=str(tmp_path / "runs"), resume_file="none"
    )
    with pytest.raises(ZeroDivisionError):
        launch(cfg)
    said = " ".join(capfd.readouterr().err.split())
    assert "opt-1.3b has 1.3B parameters and would train on the CPU" in said
    assert "a step and up to" in said and "builtin:opt-tiny" in said
    assert too_slow_here(cfg.replace(model="builtin:opt-tiny")) is None
    assert plan_memory(cfg.replace(memory_check="off")) == ({}, [])


def test_a_model_with_gpus_is_not_too_slow(two_t4):
    assert too_slow_here(RunConfig.preset("opt-1.3b-arxiv")) is None


def test_a_run_follows_the_plan_on_the_gpus_it_was_made_for(two_t4, tmp_path, monkeypatch):
    # torch sees no T4 here, which would be refused in the agent
    monkeypatch.setattr("multigpu_ft.launcher.api.start_agent", start_agent_without_smi)
    run = launch(
        RunConfig(run_root=str(tmp_path / "runs"), end_idx=40, max_length=64, num_epochs=1)
    )
    plan = run.dir.plan()
    assert (
        plan["gpu"] == "T4"
        and plan["gpus"] == 2
        and plan["decided"] == {"strategy": "ddp", "activation_checkpointing": "none"}
    )
    assert run.status["strategy_reason"] == "2 processes on a CPU", "there is no T4 after all"
    from multigpu_ft.distributed.world import World
    from multigpu_ft.training.setup import _as_planned

    there = SimpleNamespace(total_memory=plan["memory_mib"] * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    plan["decided"] = {"strategy": "fsdp", "activation_checkpointing": 2}
    on_gpu = World(0, 0, 2, torch.device("cuda", 0))
    cfg, reason = _as_planned(RunConfig(), plan, on_gpu)
    assert (cfg.strategy, cfg.activation_checkpointing, reason) == ("fsdp", 2, plan["line"])
    cfg, reason = _as_planned(RunConfig(strategy="ddp"), plan, on_gpu)
    assert (cfg.strategy, cfg.activation_checkpointing, reason) == ("ddp", 2, None), (
        "settings that are not auto stay"
    )
    assert _as_planned(RunConfig(), plan, World(0, 0, 4, torch.device("cuda", 0))) == (
        RunConfig(),
        None,
    )
    there.total_memory *= 2
    assert _as_planned(RunConfig(), plan, on_gpu) == (RunConfig(), None)


def test_the_gpus_of_this_machine(two_t4):
    found = estimate(RunConfig(max_length=64))
    assert (
        found.gpus == 2
        and found.gpu.name == "T4"
        and found.limit_gib == pytest.approx(15109 / 1024)
    )
    assert estimate(RunConfig(max_length=64, nproc=1)).gpus == 1


def test_gpus_here_are_those_that_a_run_would_use(two_t4, tmp_path, monkeypatch):
    smi = tmp_path / "bin" / "nvidia-smi"
    lines = (
        "0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, 0, 550.1, 8.0",
        "1, GPU-b, Tesla T4, 15360, 0, 550.1, 7.5",
        "2, GPU-c, Tesla T4, 15360, 0, 550.1, 7.5",
    )
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    for visible, names in (
        ("2,1", ["T4", "T4"]),
        ("GPU-b", ["T4"]),
        ("1,0", ["T4", "A100"]),
        ("7,0", []),
        ("1,-1,0", ["T4"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [gpu.name for gpu in gpus_here()] == names, visible
    smi.write_text("#!/bin/sh\nexec sleep 9\n")
    monkeypatch.setattr("multigpu_ft.run.environment._ANSWER_S", 0.1)
    assert gpus_here() == [], "a driver that does not answer does not delay launch"


HALF_FULL = "".join(
    f"{i}, GPU-{i}, Tesla T4, 15360, {used}, 550.1, 7.5\n" for i, used in enumerate((3, 8000))
)


def test_what_other_processes_hold_is_not_there_for_the_run(tmp_path, monkeypatch):
    pids = f"4711, GPU-1\n{os.getpid()}, GPU-1\n12, GPU-9\n[N/A], GPU-1\n"
    fake_smi(tmp_path, monkeypatch, HALF_FULL, pids)
    cfg = RunConfig(max_length=64)
    found = estimate(cfg)
    assert found.gpu.held_mib == 8000 and found.limit_gib == pytest.approx((15109 - 8000) / 1024)
    assert "of 6.9 GiB that are free of 14.8" in found.line
    said = " ".join(found.remarks)
    who = f"GPU 1: 7.8 GiB are held by this and other processes (pid 4711, {os.getpid()})"
    assert who in said and "torch.cuda.empty_cache()" in said and "kill 4711" in said
    assert who in str(found) and found.record()["held_gib"] == 7.812
    assert found.settings()["strategy"] == "ddp"
    # GPU 0 is empty, and a run with one process uses only that
    alone = estimate(cfg, gpus=1)
    assert alone.limit_gib == pytest.approx(15109 / 1024) and "held" not in str(alone)
    named = estimate(cfg, gpu_memory_gib="T4")
    assert named.limit_gib == pytest.approx(15109 / 1024) and "held" not in str(named)
    plan, remarks = plan_memory(cfg)
    assert plan["memory_mib"] == 15109 and who in remarks[0]
    assert plan["free_mib"] == pytest.approx(15109 - 8000 - T4.context_mib(2))


def test_a_run_that_only_fits_on_empty_gpus_is_refused(little, tmp_path, monkeypatch):
    fake_smi(tmp_path, monkeypatch, HALF_FULL.replace("8000", "14000"))
    cfg = little.replace(strategy="ddp", run_root=str(tmp_path / "runs"))
    assert estimate(cfg, gpus=2, gpu_memory_gib="T4").fits
    with pytest.raises(
        ConfigError, match=r"does not fit.* GPU 1: 13\.7 GiB are held by other processes\. .*force"
    ):
        plan_memory(cfg)


ABOUT_MIG = """
GPU 00000000:07:00.0
    MIG Mode
        Current                           : Enabled
    MIG Device
        Index                             : 0
        FB Memory Usage
            Total                         : 40320 MiB
            Reserved                      : 0 MiB
            Used                          : 1200 MiB
            Free                          : 39120 MiB
        BAR1 Memory Usage
            Total                         : 65535 MiB
    MIG Device
        Index                             : 1
        FB Memory Usage
            Total                         : N/A
    GPU UUID                              : GPU-a
    FB Memory Usage
        Total                             : 81920 MiB
        Used                              : 1287 MiB
"""
LISTED_MIG = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-a)
  MIG 3g.40gb     Device  0: (UUID: MIG-b1)
  MIG 1g.10gb     Device  1: (UUID: MIG-b2)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-c)
"""
A100S = "".join(
    f"{i}, {uuid}, NVIDIA A100-SXM4-80GB, {memory}, 550.1, 8.0\n"
    for i, (uuid, memory) in enumerate((("GPU-a", "[N/A], [N/A]"), ("GPU-c", "81920, 0")))
)


def test_a_mig_slice_is_not_the_whole_gpu(tmp_path, monkeypatch):
    fake_smi(tmp_path, monkeypatch, A100S, listed=LISTED_MIG, about=ABOUT_MIG)
    first = "A100 MIG 3g.40gb"
    for visible, name, memory, held in (
        (None, first, 40320 * 0.98, 1216),
        ("0", first, 40320 * 0.98, 1216),
        ("MIG-b1,MIG-b2", first, 40320 * 0.98, 1216),
        ("MIG-b2", "A100 MIG 1g.10gb", 9728 * 0.98, 0),
        ("1", "A100", 81038, 0),
        ("GPU-c", "A100", 81038, 0),
    ):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        (gpu,) = gpus_here()
        assert (gpu.name, gpu.held_mib) == (name, held), visible
        assert gpu.memory_mib == pytest.approx(memory), visible
        whole = find_gpu("A100")
        if "MIG" in name:
            assert gpu.flops == pytest.approx(whole.flops * (3 if "3g" in name else 1) / 7)
            assert gpu.bandwidth < whole.bandwidth and gpu.link == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-other")
    assert gpus_here() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b2")
    found = estimate(RunConfig(max_length=64))
    assert found.gpus == 1 and found.limit_gib == pytest.approx(9728 * 0.98 / 1024)


def test_an_estimate_names_what_it_assumes_besides_tensors():
    found = estimate(RunConfig(max_length=64), gpus=8, gpu_memory_gib="H100")
    said = " ".join(found.assumptions)
    for words in ("overhead, uncertain", "cuBLAS workspaces 64 MiB", "NVLS buffers 256 MiB"):
        assert words in said
    parts = found.record()["overhead_mib"]
    assert sum(parts.values()) == pytest.approx(found.gpu.context_mib(8))


def test_a_run_on_empty_gpus_measures_the_overhead(two_t4, tmp_path, monkeypatch):
    from multigpu_ft.tracking.metrics import note_overhead

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (9 * gib, 14.75 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * gib)
    plan, gpu = {"gpu": "T4", "gpus": 2, "held_mib": 0}, torch.device("cuda", 0)
    assumed = estimate(RunConfig(max_length=64)).simulation.context / 2**20
    for changed, device, ranks in (({"held_mib": 64}, gpu, 2), ({}, gpu, 1), ({}, "cpu", 2)):
        note_overhead({**plan, **changed}, torch.device(device), ranks)
    note_overhead({}, gpu, 2)
    assert not list((tmp_path / "cache").rglob("overheads.json")), "nothing that is others'"
    note_overhead(plan, gpu, 2)
    found = estimate(RunConfig(max_length=64))
    assert assumed < 600 and found.simulation.context / 2**20 == pytest.approx(768 + 16.25)
    assert "measured by a run on this machine" in " ".join(found.assumptions)
    assert "assumed" in " ".join(estimate(RunConfig(max_length=64), gpus=1).assumptions)
    assert "assumed" in " ".join(estimate(RunConfig(max_length=64), 2, "T4").assumptions)
    (tmp_path / "cache" / "multigpu_ft" / "overheads.json").write_text("[1")
    assert estimate(RunConfig(max_length=64)).simulation.context / 2**20 == assumed


def test_ranks_choose_by_what_is_free(monkeypatch):
    from multigpu_ft.distributed.world import World
    from multigpu_ft.training import setup

    free = {"bytes": 14.0 * 2**30}
    monkeypatch.setattr(setup, "free_bytes", lambda device: free["bytes"])
    monkeypatch.setattr(World, "max", lambda self, value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    chosen = {name: lambda cfg, world, name=name: name for name in ("DDP", "FSDP")}
    for name, make in chosen.items():
        monkeypatch.setattr(setup, name, make)
    on_gpu = World(0, 0, 2, torch.device("cuda", 0))
    half_a_billion = 400_000_000  # 22 bytes each: 8.2 GiB
    assert setup.make_strategy(RunConfig(), on_gpu, half_a_billion)[0] == "DDP"
    free["bytes"] = 7.0 * 2**30
    strategy, why = setup.make_strategy(RunConfig(), on_gpu, half_a_billion)
    assert strategy == "FSDP" and why.endswith("a GPU has 7.0 GiB free")
    plan = {"gpus": 2, "memory_mib": 15109, "free_mib": 14000, "line": "fits", "decided": {}}
    there = SimpleNamespace(total_memory=15109 * 2**20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: there)
    assert setup._as_planned(RunConfig(), plan, on_gpu, 13900 * 2**20)[1] == "fits"
    assert setup._as_planned(RunConfig(), plan, on_gpu, 9000 * 2**20) == (RunConfig(), None)


def test_a_driver_that_hangs_is_waited_for_once(tmp_path, monkeypatch):
    fake_smi(tmp_path, monkeypatch, HALF_FULL)
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\nexec sleep 9\n")
    monkeypatch.setattr("multigpu_ft.run.environment._ANSWER_S", 0.5)
    assert gpus_here() == gpus_here() == [] and too_slow_here(RunConfig()) is None
    assert len((tmp_path / "calls").read_text().split()) == 1


def test_the_bench_has_results():
    results = json.loads((Path(bench.RESULTS) / "memory.json").read_text())
    assert (
        len(results["rows"]) >= 12
        and results["median_error"] <= 0.03
        and results["worst_error"] <= 0.08
    )

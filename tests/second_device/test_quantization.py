"""4-bit weights that are packed on the second device and kept in host memory, as rank 0 does under fsdp."""

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from multigpu_ft import RunConfig
from multigpu_ft.distributed.world import World
from multigpu_ft.models.loading import load_model, load_tokenizer
from multigpu_ft.models.quantization import packed_layers
from multigpu_ft.training.setup import load_base

pytestmark = pytest.mark.second_device

DEVICE, HOST = torch.device("second", 0), torch.device("cpu")


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    "Return the settings for a model of 24 equal blocks, saved in another dtype than it is loaded in."
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_hidden_layers=24, **sizes))
    model.to(torch.bfloat16).save_pretrained(folder)
    return RunConfig(model=str(folder), tuning="qlora", strategy="fsdp", dtype="fp16")


@pytest.fixture(scope="module")
def of_device(cfg):
    "Return the model packed on the device, where it stays, as under single and ddp."
    tokenizer = load_tokenizer(RunConfig())
    return load_model(cfg, tokenizer, None, torch.float16, "4bit", DEVICE)


def parts_of(layer):
    "Return the bytes of a packed weight, and its quantization state."
    assert layer.weight.module is layer
    state = layer.weight.quant_state.as_dict(packed=True)
    return {"weight": layer.weight.detach().view(torch.uint8), **state}


def pairs(model, expected):
    "Return the parts of the packed layers of two models, with the name of each."
    found, layers = packed_layers(model), packed_layers(expected)
    assert len(found) == 24 * 7 and found.keys() == layers.keys()
    for name, layer in found.items():
        assert layer.weight.dtype == layers[name].weight.dtype
        parts, others = parts_of(layer), parts_of(layers[name])
        assert parts.keys() == others.keys()
        for part in parts:
            assert parts[part].device == HOST
            yield f"{name}.{part}", parts[part], others[part].cpu()


def test_weights_are_packed_on_the_device_one_at_a_time(cfg, of_device):
    tokenizer = load_tokenizer(RunConfig())
    before = torch.second.memory_allocated(DEVICE)
    torch.second.reset_peak_memory_stats(DEVICE)
    model = load_model(cfg, tokenizer, None, torch.float16, "4bit", HOST, DEVICE)
    weights = [layer.in_features * layer.out_features for layer in packed_layers(model).values()]
    peak = torch.second.max_memory_allocated(DEVICE) - before
    # here bitsandbytes packs with several copies in fp32, on CUDA with none
    assert 2 * max(weights) < peak < 40 * max(weights) < sum(weights) / 2
    assert torch.second.memory_allocated(DEVICE) == before
    for name, found, expected in pairs(model, of_device):
        assert found.equal(expected), name


def test_the_device_packs_the_weights_that_the_host_packs(cfg):
    """bitsandbytes' code for each kind of device rounds a scale that lies between two numbers in its own way."""
    tokenizer = load_tokenizer(RunConfig())
    model = load_model(cfg, tokenizer, None, torch.float16, "4bit", HOST, DEVICE)
    scales = differ = 0
    for name, found, expected in pairs(
        model, load_model(cfg, tokenizer, None, torch.float16, "4bit", HOST, HOST)
    ):
        if name.endswith(".absmax"):
            distance = (found.float() - expected.float()).abs()
            assert distance.max() <= 1, name
            scales, differ = scales + len(distance), differ + distance.count_nonzero().item()
        else:
            assert found.equal(expected), name
    assert differ < scales / 100


def test_rank_0_packs_a_model_that_is_to_be_sharded_on_its_device(cfg, of_device):
    "A group of one rank stands for two: what rank 0 does before it sends anything."
    tokenizer = load_tokenizer(RunConfig())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.second.reset_peak_memory_stats(DEVICE)
        before = torch.second.max_memory_allocated(DEVICE)
        world = World(0, 0, 2, DEVICE)
        model, streamed = load_base(cfg, world, tokenizer, None, torch.float16, "4bit", True)
    finally:
        dist.destroy_process_group()
    assert streamed and torch.second.max_memory_allocated(DEVICE) > before
    assert all(found.equal(expected) for _, found, expected in pairs(model, of_device))

"""Attention text by text: exact, for models with windows too, and nothing of one text reaches another."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness.exactness import SHAPE, build, slice_of
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

from multigpu_ft.data.batches import collate, text_blocks
from multigpu_ft.data.tokenization import Text, TokenizedTexts
from multigpu_ft.distributed.world import to_device
from multigpu_ft.models.attention import TextLayout, attention_by_text
from multigpu_ft.models.loss import LossModel
from multigpu_ft.training.packing import check_chunks, self_check

CPU = torch.device("cpu")
WINDOW = {"sliding_window": 7}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"], **WINDOW}
PACKED = {
    "mistral": WINDOW,
    "phi3": WINDOW,
    "starcoder2": WINDOW,
    "qwen2": {**LAYERS, "use_sliding_window": True},
    "qwen3": {**LAYERS, "use_sliding_window": True, "head_dim": 16},
    "gemma3_text": {**LAYERS, "head_dim": 16},
    "olmo3": LAYERS,
    "cohere2": {**LAYERS, "head_dim": 16},
    "smollm3": {},
    "gpt_neox": {},
    "granite": {},
}
NOT_PACKED = {
    "phimoe": {**WINDOW, "num_local_experts": 2},
    "qwen2_moe": {**LAYERS, "use_sliding_window": True, "num_experts": 2, "num_experts_per_tok": 1},
    "stablelm": {},  # doesn't pass the layout on
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},  # asks for the name `sdpa`
}


def made(name, settings):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SHAPE, **settings})
    return AutoModelForCausalLM.from_config(config).eval()


def texts_of(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [Text(rng.integers(3, 300, n).astype(np.int32)) for n in lengths]


def losses_and_gradients(model, batches):
    "Return each target's loss, and the gradients of their sum, over `batches`."
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        loss, each = model(**to_device(batch, CPU))
        loss.backward()
        losses.append(each)
    return torch.cat(losses), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", PACKED)
def test_packed_texts_learn_as_they_would_alone(name):
    alone, packed = (LossModel(made(name, PACKED[name])) for _ in range(2))
    assert packed.packs
    alone.model.set_attn_implementation("sdpa")
    a, b, c, d = texts_of(30, 11, 24, 9)
    expected = losses_and_gradients(alone, [collate([[t]], 1, "padded") for t in (a, b, c, d)])
    found = losses_and_gradients(packed, [collate([[a, b], [c, d]], 1, "packed")])
    assert torch.allclose(found[0], expected[0], atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for parameter, gradient in expected[1].items():
        error = (found[1][parameter] - gradient).norm() / (gradient.norm() + 1e-6)
        assert error < 1e-5, (parameter, error)


@pytest.mark.parametrize("name", NOT_PACKED)
def test_what_attention_by_text_would_not_do_is_not_packed(name):
    model = LossModel(made(name, NOT_PACKED[name]))
    how = (TokenizedTexts.of(texts_of(40, 30), 1), torch.float32, 64, CPU)
    assert check_chunks(model, *how)
    assert self_check(model, *how) == {"bucketed": True, "packed": False}
    model(**to_device(collate([[text] for text in texts_of(9, 5)], 1, "bucketed"), CPU))
    assert model.model.config._attn_implementation == "sdpa"


def test_eager_attention_is_not_packed():
    config = build("llama").config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert not LossModel(model).packs and model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["opt", "llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("way", ["float32", "bfloat16", "autocast"])
def test_nothing_reaches_another_text(name, way):
    "Not even a NaN, which a mask would let through; and its own text has the bits that it has with others."
    model = LossModel(build(name).eval())
    if way == "bfloat16":
        model.to(torch.bfloat16)
    a, b, c = (Text(np.arange(first, first + n)) for first, n in ((3, 20), (50, 17), (100, 26)))
    batch = to_device(collate([[a, b], [c]], 1, "packed"), CPU)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        _, before = model(**batch)
        embedding = model.model.get_input_embeddings().weight
        head = model.model.get_output_embeddings().weight
        if head is embedding:
            model.model.get_output_embeddings().weight = torch.nn.Parameter(head.detach().clone())
        with torch.no_grad():
            embedding[60] = float("nan")  # the middle of the second text
        _, after = model(**batch)
    ends = np.cumsum([0, 19, 16, 25])
    parts = [slice(*pair) for pair in zip(ends[:-1], ends[1:], strict=True)]
    assert torch.equal(before[parts[0]], after[parts[0]])
    assert torch.equal(before[parts[2]], after[parts[2]])
    assert after[parts[1]][10:].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mistral", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_packed_texts_on_a_gpu(name, dtype):
    "Whatever kernels torch takes there, packed texts have the losses that they have alone."
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU computes bf16 in software")
    device, texts = torch.device("cuda", 0), texts_of(30, 11, 24, 9)
    model = LossModel(made(name, PACKED[name]).to(device, dtype))
    assert model.packs

    def losses_of(rows, packing):
        loss, each = model(**to_device(collate(rows, 1, packing), device))
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        return each

    packed = losses_of([texts[:2], texts[2:]], "packed")
    alone = torch.cat([losses_of([[text]], "padded") for text in texts])
    assert (packed - alone).abs().max() < (1e-4 if dtype == torch.float32 else 5e-2)


class Calls(TorchFunctionMode):
    "Notes the shapes and masks of torch's attention."

    def __init__(self):
        super().__init__()
        self.shapes, self.masks = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            self.shapes.append(tuple(args[0].shape))
            self.masks.append(kwargs["attn_mask"])
        return func(*args, **(kwargs or {}))


def test_only_pairs_of_one_text_are_computed():
    model, texts = LossModel(build("llama").eval()), texts_of(20, 19, 18, 7, 6, 5, 5, 30)
    with Calls() as calls:
        model(**to_device(collate([texts[:7], texts[7:]], 1, "packed"), CPU))
    computed = sum(n * length**2 for n, _, length, _ in calls.shapes) / 2  # of two layers
    needed = sum(len(text) ** 2 for text in texts) + 50**2  # and the padding of the second row
    assert computed <= needed * 1.2 and set(calls.masks) == {None}
    assert computed < 0.7 * (2 * 80**2)


def test_blocks_of_random_rows():
    rng = np.random.default_rng(0)
    for _ in range(200):
        rows, length = rng.integers(1, 5), rng.integers(1, 60)
        documents = np.full((rows, length), -1)
        for row in documents:
            at = number = 0
            while at < length and rng.random() < 0.9:
                step = rng.integers(1, 20)
                row[at : at + step] = number
                at, number = at + step, number + 1
        found = text_blocks(documents)
        gather, scatter, groups = found["gather"], found["scatter"], found["groups"]
        assert (gather[scatter] == np.arange(documents.size)).all()
        assert sum(texts * width for texts, width in groups) == len(gather) <= documents.size / 0.9
        assert [width for _, width in groups] == sorted((w for _, w in groups), reverse=True)
        numbers, first = (np.arange(rows)[:, None] * 1000 + documents).ravel()[gather], 0
        for texts, width in groups:
            block = numbers[first : first + texts * width].reshape(texts, width)
            assert (block == block[:, :1]).all(), "a block holds one text"
            places = gather[first : first + texts * width].reshape(texts, width)
            ahead = np.diff(places, axis=1)
            # its tokens in order, then padding, which is its first token
            assert ((ahead == 1) | (places[:, 1:] == places[:, :1])).all()
            first += texts * width


@pytest.mark.parametrize("packed", [True, False])
def test_heads_are_repeated_where_the_kernel_takes_no_fewer(packed):
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True
    query, key, value = (torch.randn(2, h, 12, 8, requires_grad=True) for h in (4, 2, 2))
    blocks = text_blocks(np.array([[0] * 7 + [1] * 5, [0] * 12]))
    layout = None
    if packed:
        layout = TextLayout(
            torch.from_numpy(blocks["gather"]),
            torch.from_numpy(blocks["scatter"]),
            blocks["groups"],
        )
    found = []
    for fewer_heads in (True, False):
        with Calls() as calls:
            out, _ = attention_by_text(
                module, query, key, value, None, layout=layout, fewer_heads=fewer_heads
            )
        assert set(calls.masks) == {None}
        found.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_compiled_blocks_are_compiled_once_for_all_layouts():
    torch._dynamo.reset()
    model = LossModel(build("llama").eval())
    for block in model.model.model.layers:
        block.compile(backend="eager")
    texts, frames = slice_of(12, seed=3), []
    with torch._dynamo.config.patch(error_on_recompile=False):
        for first in range(0, 12, 3):
            rows = [[texts[first].cut(20), texts[first + 1].cut(9 + first)]]
            rows[0].append(Text(np.arange(3, 64 - sum(map(len, rows[0])))))
            model(**to_device(collate(rows, 1, "packed"), CPU))
            frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert frames[0] > 0 and len(set(frames[1:])) == 1, frames

"""The self-check: whatever lets one text see another is found, in any precision and however little it is."""

import numpy as np
import pytest
import torch
from harness.exactness import SHAPE, build
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from multigpu_ft import RunConfig
from multigpu_ft.data.tokenization import Text, TokenizedTexts
from multigpu_ft.models.loss import LossModel
from multigpu_ft.training.packing import check_chunks, choose_packing, self_check

CPU = torch.device("cpu")
LENGTH = 64  # of the check: 38 tokens of the first text, 25 of the second
BOTH, BUCKETS = {"packed": True, "bucketed": True}, {"packed": False, "bucketed": True}
DTYPES = [torch.float32, torch.bfloat16]


def texts_of(*lengths, first_target=0):
    rng = np.random.default_rng(0)
    masks = [np.arange(n) >= first_target if first_target else None for n in lengths]
    ids = [rng.integers(3, 300, n).astype(np.int32) for n in lengths]
    return TokenizedTexts.of([Text(*both) for both in zip(ids, masks, strict=True)], 1)


def checked(model, dtype=torch.float32, texts=None):
    return self_check(
        LossModel(model.eval().to(dtype)), texts or texts_of(50, 40, 9), dtype, LENGTH, CPU
    )


def blocks_of(model):
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def at_the_seam(change):
    "A hook that changes the output of a block in a packed row, at the second text's first token."

    def hook(_block, _inputs, output):
        if output.shape[1] <= 38:
            return output
        changed = torch.zeros_like(output)
        changed[:, 38] = change(output)
        return output + changed

    return hook


def one_token(model):
    "One token sees a thousandth of the token before it."
    blocks_of(model)[0].register_forward_hook(at_the_seam(lambda output: output[:, 37] / 1000))


def one_layer(model):
    "In one layer, every token sees a little of the mean of all before it."

    def hook(_block, _inputs, output):
        before = output.cumsum(1) / torch.arange(1, output.shape[1] + 1)[:, None]
        return output + (1e-3 * before).to(output.dtype)

    blocks_of(model)[-1].register_forward_hook(hook)


def convolution(model):
    "A short convolution along the row."
    blocks_of(model)[0].register_forward_hook(
        lambda _block, _inputs, output: output + 1e-2 * nn.functional.pad(output, (0, 0, 1, -1))
    )


def state(model):
    "A state that decays along the row."

    def hook(_block, _inputs, output):
        kept, states = torch.zeros_like(output[:, 0]), []
        for token in output.unbind(1):
            kept = 0.5 * kept + 1e-2 * token
            states.append(kept)
        return output + torch.stack(states, 1)

    blocks_of(model)[0].register_forward_hook(hook)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["opt", "llama", "qwen3", "gpt2"])
def test_an_exact_model_may_do_both(name, dtype):
    assert checked(build(name), dtype) == BOTH


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [one_token, one_layer, convolution, state])
def test_what_leaks_along_a_row_takes_buckets(fault, dtype):
    model = build("llama")
    fault(model)
    assert checked(model, dtype) == BUCKETS


def test_the_losses_alone_would_not_show_it():
    "A thousandth of one token changes them by less than kernels do."
    plain, leaking = build("llama").eval(), build("llama").eval()
    one_token(leaking)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 300, (1, 63)))
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(m(ids).logits[0, :-1], ids[0, 1:], reduction="none")
            for m in (plain, leaking)
        ]
    assert 0 < (losses[0] - losses[1]).norm() / 62**0.5 < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name, settings",
    [
        (
            "jamba",
            {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 4},
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_real_states_and_convolutions_take_buckets(name, settings, dtype):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE, **settings)
    assert checked(AutoModelForCausalLM.from_config(config), dtype) == BUCKETS


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_sees_padding_takes_a_mask(dtype):
    "BERT looks to the right as well."
    torch.manual_seed(0)
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    config = AutoConfig.for_model("bert", **{name: SHAPE[name] for name in names})
    exact = checked(AutoModelForCausalLM.from_config(config), dtype)
    assert exact == {"packed": False, "bucketed": False}
    assert choose_packing(RunConfig(), exact, None)[0] == "padded"


def deaf(forward):
    "A decoder's forward that takes position ids and counts through the row all the same."
    return lambda input_ids=None, position_ids=None, **inputs: forward(
        input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **inputs
    )


def blabbing(forward):
    "A decoder's forward that ignores masks and layouts: every token sees all before it."
    return lambda attention_mask=None, layout=None, **inputs: forward(**inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, fault", [("opt", deaf), ("gpt2", deaf), ("opt", blabbing)])
def test_a_model_that_ignores_positions_or_layout_takes_buckets(name, fault, dtype):
    model = build(name)
    decoder = model.model.decoder if name == "opt" else model.base_model
    decoder.forward = fault(decoder.forward)
    exact = checked(model, dtype)
    assert exact == BUCKETS
    packing, why = choose_packing(RunConfig(packing="packed"), exact, model)
    assert packing == "bucketed" and "texts would see each other" in why


def test_a_chat_whose_beginning_is_not_learnt_is_checked_all_the_same():
    model = build("llama")
    one_token(model)
    assert checked(model, texts=texts_of(60, 50, first_target=45)) == BUCKETS


@pytest.mark.parametrize("lengths", [(30,), (30, 1), (2, 2), (200, 200)])
def test_few_and_short_and_long_texts_are_checked(lengths):
    assert checked(build("llama"), texts=texts_of(*lengths)) == BOTH


@pytest.mark.parametrize("trained", [True, False])
def test_embeddings_may_be_frozen_and_scaled_in_place(trained):
    model = build("llama").requires_grad_(trained)
    model.model.layers[0].register_forward_pre_hook(
        lambda _block, inputs: (inputs[0].mul_(2), *inputs[1:])
    )
    assert checked(model) == BOTH


def test_a_model_without_gradients_of_its_embeddings_is_not_called_exact():
    model = build("llama")
    model.model.layers[0].register_forward_pre_hook(
        lambda _block, inputs: (inputs[0].detach(), *inputs[1:])
    )
    assert checked(model) == {"packed": False, "bucketed": False}


def test_the_check_leaves_no_gradients():
    model = build("llama")
    checked(model)
    assert all(p.grad is None for p in model.parameters())
    assert not model.get_input_embeddings()._forward_hooks


class Capped(nn.Module):
    "A head after which logits are scaled, as in some architectures."

    def __init__(self, model):
        super().__init__()
        self.model, self.config, self.base_model = model, model.config, model.base_model

    def get_output_embeddings(self):
        return self.model.get_output_embeddings()

    def forward(self, **inputs):
        found = self.model(**inputs)
        found.logits = found.logits * 0.5
        return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loss_in_chunks_that_misses_something_is_noticed(dtype):
    model = build("llama").eval().to(dtype)
    how = (texts_of(50, 40), dtype, LENGTH, CPU)
    assert check_chunks(LossModel(model), *how)
    assert not check_chunks(LossModel(Capped(model)), *how)

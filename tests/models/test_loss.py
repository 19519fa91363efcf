"""The chunked loss equals plain cross-entropy, and needs less memory."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from harness.exactness import build, slice_of
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from multigpu_ft.data.batches import collate
from multigpu_ft.models import loss as loss_module
from multigpu_ft.models.loss import LossModel, chunked_cross_entropy


def gradients(model, batch, chunked):
    model.zero_grad(set_to_none=True)
    model.chunked = chunked
    loss, _ = model(**batch, scale=1 / max(1, len(batch["targets"])))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["opt", "llama"], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "kind",
    ["plain", "frozen head", "lora", "lora on the head", "no targets", "a chunk without targets"],
)
def test_chunked_is_plain_cross_entropy(name, kind):
    from peft import LoraConfig, get_peft_model

    model, texts = build(name), slice_of(32, seed=3)
    torch.manual_seed(0)
    if kind.startswith("lora"):
        modules = ["q_proj", "v_proj"] + (["lm_head"] if "head" in kind else [])
        model = get_peft_model(
            model,
            LoraConfig(r=4, target_modules=modules, init_lora_weights=False, task_type="CAUSAL_LM"),
        )
    if kind == "frozen head":
        model.get_output_embeddings().weight.requires_grad_(False)
    batch = {
        k: torch.from_numpy(v)
        for k, v in collate([[texts[i]] for i in range(32)], 1, "padded").items()
    }
    if kind == "no targets":
        batch |= {"predictors": batch["predictors"][:0], "targets": batch["targets"][:0]}
    # like labels of -100: the first 300 of about 700 tokens are not predicted
    if kind == "a chunk without targets":
        batch |= {"predictors": batch["predictors"][300:], "targets": batch["targets"][300:]}
    (plain, expected), (chunked, found) = (
        gradients(LossModel(model), batch, how) for how in (False, True)
    )
    assert abs(plain - chunked) <= 1e-6 * abs(plain) and found.keys() == expected.keys() and found
    for parameter, gradient in expected.items():
        assert (gradient - found[parameter]).norm() <= 1e-6 * gradient.norm() + 1e-9, parameter


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_chunked_in_half_precision(dtype, tolerance):
    """With a loss scale and a token that is the target of every other position, nothing overflows or
    underflows, and gradients are as good as the dtype."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 32) + 1, torch.randn(1000, 32) * 0.3
    targets = torch.where(torch.arange(600) % 2 == 0, 7, torch.randint(1000, (600,)))
    expected = []
    for kind, scale in ((torch.float32, 1 / 600), (dtype, torch.tensor(65536 / 600))):
        head = nn.Linear(32, 1000, bias=False)
        head.weight = nn.Parameter(weight.to(dtype).to(kind))
        inputs = hidden.to(dtype).to(kind).requires_grad_()
        loss, _ = chunked_cross_entropy(inputs, head, targets, scale)
        loss.backward()
        expected.append(
            [g.float() / (scale * 600) for g in (loss.detach(), inputs.grad, head.weight.grad)]
        )
    for plain, half in zip(*expected, strict=True):
        assert (plain - half).norm() < tolerance * plain.norm()


class NewTensors(TorchDispatchMode):
    "Notes the sizes of the tensors that are made while it is active, in elements."

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {id(t) for t in tree_leaves((args, kwargs))}
        if not func.is_view:
            self.elements += [
                t.numel()
                for t in tree_leaves(made)
                if isinstance(t, torch.Tensor) and id(t) not in known
            ]
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["cpu", "xpu", "cuda"])
def test_the_weights_gradient_is_summed_in_place(dtype, kind, monkeypatch):
    """The sum over chunks and its rounded copy are all that is as large as the weight. A GPU's way
    runs on fake tensors."""
    monkeypatch.setattr(loss_module, "_PRODUCT_BYTES", 2**16, raising=False)
    monkeypatch.setattr(loss_module, "_GPU_CHUNK_BYTES", 0)
    vocabulary, width = 4000, 32
    torch.manual_seed(0)
    with FakeTensorMode() if kind == "cuda" else nullcontext():
        head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        hidden = torch.randn(600, width, dtype=dtype, requires_grad=True)
        targets = torch.randint(vocabulary, (600,))
        with NewTensors() as made:
            loss, _ = chunked_cross_entropy(hidden, head, targets, 1 / 600, kind)
        loss.backward()
    assert sum(n == vocabulary * width for n in made.elements) == 1 + (dtype != torch.float32)
    if kind == "cuda":
        return
    found, head.weight.grad = head.weight.grad.float(), None
    plain = F.cross_entropy(head.double()(hidden.double()), targets)
    plain.backward()
    error = (found - head.weight.grad).norm() / head.weight.grad.norm()
    assert error < 8 * torch.finfo(dtype).eps


def test_memory_of_the_chunked_loss_does_not_grow_with_tokens_times_vocabulary():
    "No tensor as large as a quarter of the logits is ever made."

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            Largest.elements = max(
                [
                    Largest.elements,
                    *(
                        t.numel()
                        for t in (out if isinstance(out, tuple) else (out,))
                        if isinstance(t, torch.Tensor)
                    ),
                ]
            )
            return out

    tokens, vocabulary = 4096, 4000
    hidden, head = (
        torch.randn(tokens, 16, requires_grad=True),
        nn.Linear(16, vocabulary, bias=False),
    )
    with Largest():
        chunked_cross_entropy(hidden, head, torch.randint(vocabulary, (tokens,)))[0].backward()
    assert Largest.elements < tokens * vocabulary / 4
    # the plain loss makes one
    F.cross_entropy(head(hidden), torch.zeros(tokens, dtype=torch.long)).backward()

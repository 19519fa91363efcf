"""The chunked loss equals plain cross-entropy, and needs less memory."""

import pytest
import torch
import torch.nn.functional as F
from harness.exactness import build, slice_of
from torch import nn

from multigpu_ft.data.batches import collate
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


def test_memory_of_the_chunked_loss_does_not_grow_with_tokens_times_vocabulary():
    "No tensor as large as a quarter of the logits is ever made."
    from torch.utils._python_dispatch import TorchDispatchMode

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

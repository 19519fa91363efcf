"""Steps of a batch recorded as graphs, on the second device, whose recordings refuse waits as CUDA's do."""

import contextlib
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from multigpu_ft.generation import decoding
from multigpu_ft.generation.decoding import ContinuousBatchDecoder, Request, Rules, can_be_placed
from multigpu_ft.generation.sampling import Sampling, sequence_seed

pytestmark = pytest.mark.second_device

CPU, DEVICE = torch.device("cpu"), torch.device("second", 0)
CAPACITY = 128
SIZES = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"num_hidden_layers": 2, "pad_token_id": 1, "initializer_range": 0.2},
}


def llama(**rope):
    return LlamaForCausalLM(
        LlamaConfig(
            **SIZES, max_position_embeddings=CAPACITY, rope_parameters={"rope_theta": 1e4, **rope}
        )
    )


def phi3():
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)]}
    return Phi3ForCausalLM(
        Phi3Config(
            **{**SIZES, "max_position_embeddings": 256},
            original_max_position_embeddings=CAPACITY,
            rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
        )
    )


MODELS = {
    "plain": lambda: llama(rope_type="default"),
    "dynamic": lambda: llama(rope_type="dynamic", factor=4.0),
    "longrope": phi3,
}


@pytest.fixture(autouse=True)
def forget_failures():
    "A recording that fails ends all recording in its process."
    decoding._recorder.cache_clear()
    yield
    decoding._recorder.cache_clear()


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().eval()


def answers(model, device, rows=5):
    "Return the answers to six questions, three samples each, and the decoder."
    words = random.Random(0)
    prompts = [[words.randrange(4, 96) for _ in range(n)] for n in (40, 33, 17, 9, 5, 1)]
    waiting = [
        Request((q, s), tuple(prompt), sequence_seed(0, q, s), 80)
        for q, prompt in enumerate(prompts)
        for s in range(3)
    ]
    rules = Rules(Sampling(), frozenset({2, 3}))
    decoder, found = ContinuousBatchDecoder(model, rules, rows, CAPACITY, device), []
    with torch.no_grad():
        while waiting or decoder.in_flight:
            taken, waiting = waiting[: decoder.free], waiting[decoder.free :]
            found += decoder.admit(taken) if taken else []
            found += decoder.step() if decoder.in_flight else []
    return {a.request.key: a.tokens for a in found}, decoder


@pytest.mark.parametrize("name", MODELS)
def test_graphs_write_the_answers_of_the_cpu(name, capsys):
    expected, _ = answers(make(name), CPU)
    model = make(name).to(DEVICE)
    found, decoder = answers(model, DEVICE)
    assert found == expected
    assert sorted(decoder._batch.graphs._recorded) == [64, 128], "one for each width"
    assert not capsys.readouterr().out
    placed, why = can_be_placed(model, CAPACITY + 1, DEVICE)
    assert placed == (name == "plain"), why


def test_one_stream_records_all_graphs(monkeypatch):
    made, stream = [], torch.second.Stream
    monkeypatch.setattr(
        torch.second, "Stream", lambda *a, **k: made.append(stream(*a, **k)) or made[-1]
    )
    model = make("plain").to(DEVICE)
    for _ in range(2):
        _, decoder = answers(model, DEVICE)
        assert len(decoder._batch.graphs._recorded) == 2
    assert len(made) == 1


class Waiting(torch.nn.Module):
    "A model that looks at its logits."

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, **inputs):
        found = self.model(**inputs)
        assert found.logits.sum().item() is not None
        return found


second_graph = getattr(getattr(torch, "second", None), "graph", None)


@contextlib.contextmanager
def cudas_graph(recorded, pool, stream):
    """Record as `torch.cuda.graph` does: the end of a recording that failed is an error of its own, and its stream
    stays the current one."""
    try:
        with second_graph(recorded, pool, stream):
            yield
    except RuntimeError as error:
        torch.second.set_stream(stream)
        raise RuntimeError("operation failed due to a previous error during capture") from error


def test_a_recording_that_fails_is_told_once_and_leaves_its_stream(capsys, monkeypatch):
    monkeypatch.setattr(torch.second, "graph", cudas_graph)
    expected, _ = answers(make("plain"), CPU)
    model, usual = Waiting(make("plain").to(DEVICE)), torch.second.current_stream()
    for _ in range(2):
        found, decoder = answers(model, DEVICE)
        assert found == expected and not decoder._batch.graphs._recorded
        assert torch.second.current_stream() == usual
    told = capsys.readouterr().out.splitlines()
    assert len(told) == 1, told
    assert told[0].startswith("Graphs are not used") and "captur" in told[0]
    assert "previous error" not in told[0], "the first error says why"

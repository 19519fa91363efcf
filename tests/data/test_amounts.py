"""`read_amounts`: what the rows of a slice make, on data that is here, elsewhere, or broken."""

import json

import pytest

from multigpu_ft import RunConfig
from multigpu_ft.data.amounts import read_amounts


def amounts(tmp_path, rows, **settings):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_amounts(RunConfig(dataset=str(path), **settings), processes=2)


def test_a_step_takes_texts_however_long_they_are(tmp_path):
    rows = [{"text": "a word " * 20}] * 1500
    found = amounts(tmp_path, rows, batch_size=2, accum_steps=3, max_length=256, num_epochs=2)
    assert (found.rows, found.rows_are_known, found.a_step) == (1500, True, 12)
    assert not found.bound and not found.exact, "a sample of 1,000"
    assert found.steps == 2 * 125
    said = str(found)
    assert said.startswith("1,500 rows are about ") and "; 12 texts a step, about " in said
    assert said.endswith(" tokens, make 250 steps in 2 epochs")


def test_a_text_counts_up_to_max_length(tmp_path):
    found = amounts(tmp_path, [{"text": "words " * 10_000}] * 30, max_length=100)
    assert found.tokens == 30 * 100 and found.steps == 4
    assert str(found).endswith("3,000 tokens; 8 texts a step, about 800 tokens, make 4 steps")


def test_max_steps_ends_a_run(tmp_path):
    found = amounts(tmp_path, [{"text": "a"}] * 90, batch_size=1, max_steps=3)
    assert found.steps == 3 and "max_steps=3 ends the run" in str(found)


@pytest.mark.parametrize(
    "rows, settings",
    [
        ([{"text": ""}] * 9, {}),
        ([{"other": "a"}] * 9, {}),
        ([{"text": 3}] * 9, {}),
        ([{"messages": 7}, {"messages": [{"content": None}, 5]}], {"task": "chat"}),
        ([[1, 2]], {}),
    ],
)
def test_data_that_launch_will_refuse_does_not_end_an_estimate(tmp_path, rows, settings):
    assert read_amounts(RunConfig(dataset="user/texts", **settings), 2).bound
    assert amounts(tmp_path, rows, **settings).steps >= 1


def test_conversations_and_pairs_are_counted(tmp_path):
    turns = [{"role": "user", "content": "a question?"}, {"role": "assistant", "content": "yes"}]
    short = amounts(tmp_path, [{"messages": turns}] * 8, task="chat")
    long = amounts(tmp_path, [{"messages": turns * 9}] * 8, task="chat")
    assert 8 * 10 < short.tokens < long.tokens and "about" in str(long)
    one = {"task": "classification"}
    rows = [{"text": "some words", "other": "some more words", "label": 1}] * 8
    alone = amounts(tmp_path, rows, **one)
    pair = amounts(tmp_path, rows, text_pair_field="other", **one)
    assert alone.tokens < pair.tokens and alone.steps == pair.steps == 1

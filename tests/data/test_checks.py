"""Errors of files, columns and rows, before anything is trained."""

import json
import os

import pytest

from multigpu_ft import RunConfig
from multigpu_ft.data import checks
from multigpu_ft.data.checks import data_errors


@pytest.fixture
def rows(tmp_path):
    "Return a function that writes rows to a file of the test's folder; it returns the path."

    def write(name, *rows):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_good_data_has_no_errors(rows):
    path = rows("a.jsonl", *[{"text": "one", "label": "x"}] * 9)
    assert data_errors(RunConfig(dataset=path)) == {}
    assert data_errors(RunConfig(dataset=path, task="classification", end_idx=9)) == {}
    held_out = {"end_idx": 5, "eval_start_idx": 5, "eval_end_idx": 9}
    assert data_errors(RunConfig(dataset=path, **held_out)) == {}
    assert data_errors(RunConfig(dataset="someone/something", start_idx=10**6)) == {}


@pytest.mark.parametrize(
    "field, settings, words",
    [
        ("dataset", {"dataset": "nowhere/to/a.jsonl"}, "file not found"),
        ("text_field", {"text_field": "Text"}, "did you mean 'text'"),
        ("label_field", {"task": "classification", "label_field": "lable"}, "did you mean 'label'"),
        ("text_pair_field", {"task": "classification", "text_pair_field": "b"}, "'b' is not a"),
        ("messages_field", {"task": "chat"}, "its columns: text, label, n"),
        ("text_field", {"text_field": "n"}, "must be text, got int"),
        ("start_idx", {"start_idx": 9}, "the highest start_idx is 8"),
        ("start_idx", {"start_idx": -1}, "cannot be negative"),
        ("end_idx", {"end_idx": 10}, "use end_idx=9"),
        ("end_idx", {"start_idx": 4, "end_idx": 4}, "the slice is empty"),
        ("eval_start_idx", {"eval_start_idx": 9}, "the highest eval_start_idx is 8"),
        ("eval_end_idx", {"eval_start_idx": 8, "eval_end_idx": 12}, "use eval_end_idx=9"),
        ("eval_split", {"eval_split": "test"}, "has no splits"),
        ("eval_dataset", {"eval_dataset": "nowhere/to/b.jsonl"}, "file not found"),
    ],
)
def test_each_error_is_told_at_its_field(rows, field, settings, words):
    path = rows("a.jsonl", *[{"text": "one", "label": "x", "n": 1}] * 9)
    errors = data_errors(RunConfig(**{"dataset": path, **settings}))
    assert errors.keys() == {field} and words in errors[field], errors


def test_columns_are_those_of_the_slices_first_row(rows):
    path = rows("a.jsonl", {"body": "one"}, {"text": "two"}, {"text": "three"})
    assert data_errors(RunConfig(dataset=path)).keys() == {"text_field"}
    assert data_errors(RunConfig(dataset=path, start_idx=1)) == {}


def test_an_empty_and_a_broken_file(rows, tmp_path):
    assert "has no rows" in data_errors(RunConfig(dataset=rows("a.jsonl")))["dataset"]
    broken = tmp_path / "b.parquet"
    broken.write_bytes(b"PAR1 no")
    assert "not a complete Parquet file" in data_errors(RunConfig(dataset=str(broken)))["dataset"]


def test_a_file_is_read_once_until_it_changes(rows, monkeypatch):
    path, read = rows("a.jsonl", {"text": "one"}), []
    real = checks.Source
    monkeypatch.setattr(checks, "Source", lambda cfg: read.append(cfg) or real(cfg))
    for length in range(5):
        data_errors(RunConfig(dataset=path, max_length=10 + length))
    assert len(read) == 1
    rows("a.jsonl", {"text": "one"}, {"text": "two"})
    os.utime(path, ns=(1, 1))
    assert data_errors(RunConfig(dataset=path, end_idx=2)) == {} and len(read) == 2


def test_a_file_of_gigabytes_is_left_to_the_run(rows, monkeypatch):
    path = rows("a.jsonl", {"text": "one"})
    monkeypatch.setattr(checks, "_COUNTED_BYTES", 3)
    assert data_errors(RunConfig(dataset=path, start_idx=50, text_field="no")) == {}

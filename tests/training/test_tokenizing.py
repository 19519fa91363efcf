"""A run that tokenizes a large slice shows how far it is, can be stopped, and keeps what is done."""

import json
import re
import time

from harness.runs import until

from multigpu_ft import RunConfig, launch
from multigpu_ft.data.builtin import builtin_rows
from multigpu_ft.data.tokenized_slices import tokenize_slice
from multigpu_ft.display.panel import progress_line
from multigpu_ft.models.loading import load_tokenizer
from multigpu_ft.run.cache import tokens_folder

ROWS = 16_000


def large_file(path):
    words = " ".join(row["text"] for row in builtin_rows("builtin:python-docs")).split()
    with open(path, "w") as file:
        for row in range(ROWS):
            first = row * 7 % 200_000
            text = " ".join(words[first : first + 120])
            file.write(json.dumps({"text": f"{text} {row}"}) + "\n")
    return path


def parts():
    return {path.name for path in tokens_folder().glob("*.parts/*.npz")}


def test_tokenizing_is_shown_can_be_stopped_and_resumes(run_root, tmp_path, own_cache):
    data = large_file(tmp_path / "large.jsonl")
    cfg = RunConfig(run_root=str(run_root), dataset=str(data), end_idx=ROWS, max_steps=1)
    run = launch(cfg, wait=False, panel=False)
    seen = until(lambda: run.status.get("tokenizing"), 60, "the progress of tokenizing")
    assert seen["total"] == ROWS and 0 <= seen["done"] < ROWS and seen["rows"] == "rows"
    shown = progress_line(run.name, {**run.status, "tokenizing": seen}, [])
    words = f"tokenizing {seen['done']:,} of {ROWS:,} rows"
    assert re.search(rf"{words}(, \d+:\d\d left)?$", shown), shown
    begun = time.monotonic()
    run.stop()
    assert run.state == "stopped" and time.monotonic() - begun < 10
    assert run.status["message"] == "before the first step"
    kept = parts()
    assert kept
    again = launch(cfg, panel=False)
    assert again.status["state"] == "done" and again.status["texts"] == ROWS
    assert again.status["tokenizing"] is None and not parts()

    def report(done, total):
        raise AssertionError("it was tokenized again")

    assert len(tokenize_slice(cfg, load_tokenizer(cfg), report=report).texts) == ROWS

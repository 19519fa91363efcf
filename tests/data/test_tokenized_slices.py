"""Each text of a slice is tokenized once per machine, and the tokens in the cache are never stale or damaged."""

import fcntl
import json
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
from harness.small_disks import leave, small_disk

from multigpu_ft import DataError, RunConfig
from multigpu_ft.data import sources, token_files, tokenized_slices
from multigpu_ft.data.examples import load_texts
from multigpu_ft.data.tokenization import tokenize
from multigpu_ft.data.tokenized_slices import tokenize_slice
from multigpu_ft.models.loading import load_tokenizer
from multigpu_ft.run.cache import tokens_folder
from multigpu_ft.run.config import BUILTIN_CHATS

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(RunConfig())


@pytest.fixture
def tokenized_rows(monkeypatch):
    "Return the row numbers of all examples that this process tokenizes, in their order."
    rows, of_part = [], tokenized_slices.tokenize_part

    def tokenize_and_note(cfg, part, tokenizer):
        rows.extend(part.rows)
        return of_part(cfg, part, tokenizer)

    monkeypatch.setattr(tokenized_slices, "tokenize_part", tokenize_and_note)
    return rows


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def a_file(folder, count=350, name="rows.jsonl"):
    rng = random.Random(count)
    return write(folder / name, [" ".join(rng.choices("abcdefgh", k=12)) for _ in range(count)])


def in_parts(cfg):
    "Return the folder of parts of the only slice that is being tokenized."
    (folder,) = tokens_folder().glob("*.parts")
    return folder


def slices():
    return [path for path in tokens_folder().iterdir() if not path.suffix]


LABELLED = [f"{text}\t{i % 2}" for i, text in enumerate("red green blue white black".split() * 60)]
TASKS = {
    "texts": ({"end_idx": 330}, None),
    "chats": (
        {"task": "chat", "dataset": BUILTIN_CHATS, "messages_field": "messages", "end_idx": 230},
        None,
    ),
    "labels": ({"task": "classification", "text_field": "sentence"}, ["0", "1"]),
    "pairs": (
        {"task": "classification", "text_field": "sentence", "text_pair_field": "label"},
        ["0", "1"],
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_slice_has_the_tokens_of_its_texts(task, tokenizer, tmp_path, tokenized_rows):
    settings, labels = TASKS[task]
    if labels:
        path = tmp_path / "labelled.tsv"
        path.write_text("\n".join(["sentence\tlabel", *LABELLED]) + "\n")
        settings = {**settings, "dataset": str(path)}
    cfg = RunConfig(max_length=48, **settings)
    tokenizer = load_tokenizer(cfg)
    texts = load_texts(cfg, labels)
    whole = tokenize(cfg, texts, tokenizer)
    for _ in range(2):
        found = tokenize_slice(cfg, tokenizer, labels)
        assert found.texts.digest == whole.digest and found.rows.tolist() == texts.rows
        assert found.texts.targets.tolist() == whole.targets.tolist()
        assert (found.start_idx, found.end_idx) == (texts.start_idx, texts.end_idx)
        assert (found.num_rows, found.dropped, found.remarks) == (
            texts.num_rows,
            texts.dropped,
            [],
        )
        for index in (0, len(texts) - 1):
            one, other = found.texts[index], whole[index]
            assert one.ids.tolist() == other.ids.tolist() and one.label == other.label
    assert tokenized_rows == texts.rows  # once
    assert [path.suffix for path in tokens_folder().iterdir()] == [""]
    assert tokens_folder().stat().st_mode & 0o777 == 0o700


def test_empty_texts_are_dropped(tokenizer, tmp_path):
    path = write(tmp_path / "rows.jsonl", [""] * 120 + ["one", " ", "two"] + [""] * 120)
    found = tokenize_slice(RunConfig(dataset=str(path)), tokenizer)
    assert found.rows.tolist() == [120, 122] and found.dropped == 241
    with pytest.raises(DataError, match="only empty texts"):
        tokenize_slice(RunConfig(dataset=str(path), end_idx=120), tokenizer)
    assert len(slices()) == 1


def test_conversations_without_anything_to_learn_are_refused_and_not_kept(tmp_path):
    cfg = RunConfig(task="chat", dataset=BUILTIN_CHATS, max_length=4, end_idx=40)
    with pytest.raises(DataError, match="max_length=4"):
        tokenize_slice(cfg, load_tokenizer(cfg))
    assert not slices()


SHARE = """
import json, sys, time
from multigpu_ft import RunConfig
from multigpu_ft.data import tokenized_slices
from multigpu_ft.models.loading import load_tokenizer
rows, of_part = [], tokenized_slices.tokenize_part
def slow(cfg, part, tokenizer):
    rows.extend(part.rows)
    time.sleep(0.02)
    return of_part(cfg, part, tokenizer)
tokenized_slices.tokenize_part = slow
cfg = RunConfig(**json.loads(sys.argv[1]))
tokenizer = load_tokenizer(cfg)
print("ready", flush=True)
input()
found = tokenized_slices.tokenize_slice(cfg, tokenizer)
print(json.dumps([rows, found.texts.digest]))
"""


def start_rank(settings, local_rank, world=2):
    process = subprocess.Popen(
        [sys.executable, "-c", SHARE, json.dumps(settings)],
        env={**os.environ, "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(world)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_ranks_and_runs_share_the_work(tokenizer, tmp_path):
    settings = {"dataset": str(a_file(tmp_path, 3200))}
    cfg = RunConfig(**settings)
    # two runs of two ranks
    processes = [start_rank(settings, rank) for rank in (0, 1, 0, 1)]
    found = []
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        with process:
            found.append(json.loads(process.stdout.read()))
    whole = tokenize(cfg, load_texts(cfg), tokenizer)
    assert {digest for _, digest in found} == {whole.digest}
    assert sorted(row for rows, _ in found for row in rows) == list(range(3200))
    assert all(rows for rows, _ in found)


def test_what_a_killed_process_had_done_is_kept(tokenizer, tmp_path, tokenized_rows):
    settings = {"dataset": str(a_file(tmp_path, 3200))}
    with start_rank(settings, 0) as process:
        process.stdin.write("\n")
        process.stdin.flush()
        while len([*tokens_folder().glob("*.parts/*.npz")]) < 3:
            time.sleep(0.01)
        process.kill()
    kept = 100 * len([*in_parts(settings).glob("*.npz")])
    cfg = RunConfig(**settings)
    found = tokenize_slice(cfg, tokenizer)
    assert tokenized_rows == list(range(kept, 3200)) and 300 <= kept < 3200
    assert found.texts.digest == tokenize(cfg, load_texts(cfg), tokenizer).digest
    assert not [*tokens_folder().glob("*.parts")]


def test_a_process_that_hangs_is_not_waited_for_forever(tokenizer, tmp_path, monkeypatch):
    cfg = RunConfig(dataset=str(a_file(tmp_path)))
    monkeypatch.setattr(tokenized_slices, "_PATIENCE_S", 0.3)
    first = {}

    def take_the_next_part(done, total):
        "Do as a process does that takes a part and is stopped, and one that joins the parts."
        if not first:
            first["part"] = open(in_parts(cfg) / "2.npz.partial", "wb")
            first["join"] = open(in_parts(cfg) / "join.lock", "wb")
            for file in first.values():
                fcntl.flock(file, fcntl.LOCK_EX)

    found = tokenize_slice(cfg, tokenizer, report=take_the_next_part)
    assert found.texts.digest == tokenize(cfg, load_texts(cfg), tokenizer).digest
    for file in first.values():
        file.close()


def test_a_damaged_part_is_made_again(tokenizer, tmp_path, tokenized_rows):
    cfg = RunConfig(dataset=str(a_file(tmp_path)))

    def damage_the_first_part(done, total):
        if done == 300:
            path = in_parts(cfg) / "0.npz"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)

    found = tokenize_slice(cfg, tokenizer, report=damage_the_first_part)
    assert tokenized_rows == [*range(350), *range(100)] and not found.remarks
    assert found.texts.digest == tokenize(cfg, load_texts(cfg), tokenizer).digest


@pytest.mark.parametrize("name", [token_files.FILE, token_files.ABOUT])
def test_one_flipped_bit_is_noticed(name, tokenizer, tmp_path):
    cfg = RunConfig(dataset=str(a_file(tmp_path)))
    digest = tokenize_slice(cfg, tokenizer).texts.digest
    rng = random.Random(name)
    for _ in range(20):
        (folder,) = slices()
        content = bytearray((folder / name).read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (folder / name).write_bytes(content)
        found = tokenize_slice(cfg, tokenizer)
        assert found.texts.digest == digest and "damaged" in found.remarks[0]
    assert len(slices()) == 1 and not tokenize_slice(cfg, tokenizer).remarks


def test_tokens_are_never_stale(tokenizer, tmp_path, tokenized_rows):
    path = a_file(tmp_path)
    cfg, times = RunConfig(dataset=str(path)), path.stat()

    def counts(cfg, tokenizer, labels=None):
        before = len(tokenized_rows)
        found = tokenize_slice(cfg, tokenizer, labels)
        assert found.texts.digest == tokenize(cfg, load_texts(cfg, labels), tokenizer).digest
        return len(tokenized_rows) - before

    assert counts(cfg, tokenizer) == 350
    # neither size nor time tells that the content has changed
    content = path.read_text()
    path.write_text(content.replace("a", "h"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert counts(cfg, tokenizer) == 350
    path.write_text(content)
    assert counts(cfg, tokenizer) == 0  # the first content again
    assert counts(cfg.replace(end_idx=349), tokenizer) == 349
    assert counts(cfg.replace(max_length=5), tokenizer) == 350
    assert counts(cfg.replace(num_epochs=7, batch_size=3, seed=1), tokenizer) == 0
    other = load_tokenizer(RunConfig())
    assert counts(cfg, other) == 0
    other.add_tokens(["a b"])
    assert counts(cfg, other) == 350


def test_another_template_makes_other_tokens(tokenized_rows):
    cfg = RunConfig(task="chat", dataset=BUILTIN_CHATS, end_idx=20)
    tokenizer = load_tokenizer(cfg)
    first = tokenize_slice(cfg, tokenizer).texts.digest
    tokenizer.chat_template = tokenizer.chat_template.replace("content", "content + '.'")
    assert tokenize_slice(cfg, tokenizer).texts.digest != first
    assert tokenized_rows == [*range(20), *range(20)]


@pytest.mark.parametrize("form", ["parquet", "hub"])
def test_a_slice_of_arrow_rows_is_known_by_their_content(
    form, tokenizer, tmp_path, monkeypatch, tokenized_rows
):
    datasets = pytest.importorskip("datasets")
    texts = [f"text {i}" for i in range(300)]

    def data(texts, column="text"):
        found = datasets.Dataset.from_dict({column: texts, "other": texts[::-1]})
        if form == "parquet":
            found.to_parquet(str(tmp_path / "rows.parquet"), batch_size=50)
            return RunConfig(dataset=str(tmp_path / "rows.parquet"), start_idx=100, end_idx=250)
        monkeypatch.setattr(sources, "_load_hub", lambda cfg: found)
        return RunConfig(dataset="user/name", start_idx=100, end_idx=250)

    found = tokenize_slice(data(texts), tokenizer)
    assert found.rows.tolist() == tokenized_rows == list(range(100, 250))
    # rows and columns that aren't in the slice don't matter
    tokenize_slice(data(["another", *texts[1:]]), tokenizer)
    assert len(tokenized_rows) == 150
    tokenize_slice(data([*texts[:100], "another", *texts[101:]]), tokenizer)
    assert len(tokenized_rows) == 300
    with pytest.raises(DataError, match="no field 'text'"):
        tokenize_slice(data(texts, "words"), tokenizer)


def test_a_malformed_row_costs_nothing_that_is_done(tokenizer, tmp_path, tokenized_rows):
    path = a_file(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:240], "{", *lines[241:]]))
    for _ in range(2):
        with pytest.raises(DataError, match="line 241: not valid JSON"):
            tokenize_slice(RunConfig(dataset=str(path)), tokenizer)
    assert tokenized_rows == list(range(200))


def test_a_cache_that_cannot_be_written_costs_only_time(
    tokenizer, tmp_path, own_cache, tokenized_rows
):
    cfg = RunConfig(dataset=str(a_file(tmp_path)))
    (own_cache / "tokens").write_text("a file where the folder belongs")
    for _ in range(2):
        found = tokenize_slice(cfg, tokenizer)
        assert "the cache can't keep tokens (File exists)" in found.remarks[0]
        assert found.texts.digest == tokenize(cfg, load_texts(cfg), tokenizer).digest
    assert len(tokenized_rows) == 700


def test_a_machine_without_a_cache_costs_only_time(tokenizer, tmp_path, monkeypatch):
    cfg = RunConfig(dataset=str(a_file(tmp_path)))

    def refuse():
        raise DataError("no folder for the cache")

    monkeypatch.setattr(tokenized_slices, "tokens_folder", refuse)
    found = tokenize_slice(cfg, tokenizer)
    assert "no folder that can be written" in found.remarks[0]
    assert found.texts.digest == tokenize(cfg, load_texts(cfg), tokenizer).digest


def test_a_full_disk_costs_only_time(tokenizer, tmp_path, monkeypatch):
    cfg = RunConfig(dataset=str(a_file(tmp_path, 2000)))
    whole = tokenize(cfg, load_texts(cfg), tokenizer)
    with small_disk(2_000_000) as disk:
        monkeypatch.setenv("XDG_CACHE_HOME", str(disk))
        for free in (0, 20_000, 60_000):
            leave(disk, free)
            found = tokenize_slice(cfg, tokenizer)
            assert "No space left" in found.remarks[0] and found.texts.digest == whole.digest
        leave(disk, 1_500_000)
        found = tokenize_slice(cfg, tokenizer)
        assert found.texts.digest == whole.digest and not found.remarks
        del found  # its file is on the disk


def test_the_tokens_in_use_survive_their_removal(tokenizer, tmp_path):
    cfg = RunConfig(dataset=str(a_file(tmp_path)))
    found = tokenize_slice(cfg, tokenizer)
    whole = tokenize(cfg, load_texts(cfg), tokenizer)
    (folder,) = slices()
    token_files.shutil.rmtree(folder)
    assert np.array_equal(found.texts[349].ids, whole[349].ids)


def test_a_file_that_changes_meanwhile_is_not_kept(tokenizer, tmp_path):
    path = a_file(tmp_path)
    cfg, content, times = RunConfig(dataset=str(path)), path.read_text(), path.stat()

    def change(done, total):
        if done in (200, 300):
            path.write_text(content.replace("a", "h"))

    def change_unseen(done, total):
        change(done, total)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    for report in (change, change_unseen):
        path.write_text(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(DataError, match="was changed while it was tokenized"):
            tokenize_slice(cfg, tokenizer, report=report)
        assert not slices()
    path.write_text(content)
    found = tokenize_slice(cfg, tokenizer)
    assert found.texts.digest == tokenize(cfg, load_texts(cfg), tokenizer).digest

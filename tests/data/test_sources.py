"""Rows of files: those of a slice, and no others."""

import random

import pytest

from multigpu_ft import DataError, RunConfig
from multigpu_ft.data.sources import Source

pyarrow = pytest.importorskip("pyarrow")


@pytest.fixture
def file(tmp_path):
    "Return a Parquet file of 45 rows in groups of 10, and their texts."
    import pyarrow.parquet

    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=200)) for _ in range(45)]
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), path, row_group_size=10, use_dictionary=False
    )
    return path, texts


def read(path, start, end):
    return [row["text"] for _, row in Source(RunConfig(dataset=str(path))).rows(start, end)]


@pytest.mark.parametrize("start, end", [(0, 45), (0, 1), (9, 11), (10, 20), (23, 44), (44, 45)])
def test_rows_are_those_of_the_slice(file, start, end):
    path, texts = file
    assert read(path, start, end) == texts[start:end]


def test_what_lies_before_a_slice_of_parquet_is_not_read(file):
    import pyarrow.parquet

    path, texts = file
    column = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0)
    with open(path, "r+b") as damaged:
        damaged.seek(column.data_page_offset)
        damaged.write(b"\xff" * column.total_compressed_size)
    assert read(path, 25, 32) == texts[25:32]
    with pytest.raises(DataError, match="not a complete Parquet file"):
        read(path, 5, 8)

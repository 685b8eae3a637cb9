"""A row with images is refused by file and row, wherever it is."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.data.prompt_files import ChunkReader, first_row_with_images, open_prompt_files
from sluice.data.prompt_rows import PromptColumns
from sluice.errors import DataError
from tests.support.prompt_parquet import prompt_rows

STRUCTS = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
PATHS = pa.list_(pa.string())


def write(path: Path, images: list[object], kind: pa.DataType) -> str:
    table = pa.table({"images": pa.array(images, kind), "n": range(len(images))})
    pq.write_table(table, path, row_group_size=20)
    return str(path)


@pytest.mark.parametrize("place", [0, 19, 20, 57])
@pytest.mark.parametrize(
    ("kind", "images"),
    [
        (STRUCTS, [{"bytes": b"png", "path": None}]),
        (STRUCTS, [{"bytes": None, "path": "a.png"}] * 2),
        (PATHS, ["a.png"]),
    ],
)
def test_a_row_with_images_is_found_wherever_it_is(
    tmp_path: Path, kind: pa.DataType, images: object, place: int
) -> None:
    rows: list[object] = [[] if i % 2 else None for i in range(60)]
    rows[place] = images
    path = write(tmp_path / "a.parquet", rows, kind)
    assert first_row_with_images([path], "images") == f"{path}, row {place}"


@pytest.mark.parametrize("kind", [STRUCTS, PATHS, pa.null()])
def test_a_column_of_empty_lists_holds_no_images(tmp_path: Path, kind: pa.DataType) -> None:
    rows: list[object] = [[] if i % 2 and not pa.types.is_null(kind) else None for i in range(60)]
    path = write(tmp_path / "a.parquet", rows, kind)
    assert first_row_with_images([path], "images") is None
    assert first_row_with_images([path], "others") is None


def test_a_later_line_with_images_is_refused_when_it_is_taken(tmp_path: Path) -> None:
    rows = prompt_rows(["a", "<image> which?", "c"])
    rows[0]["images"], rows[1]["images"] = [], ["a.png"]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    columns = PromptColumns(refused_images="images")
    files = open_prompt_files([str(path)], columns, config_key="data.train_files")
    (chunk,) = ChunkReader().read(files.blocks[0])
    assert chunk.decode(0, columns).messages[0].content == "a"
    with pytest.raises(DataError, match="row 1 holds images \\(column 'images'\\)"):
        chunk.decode(1, columns)
    assert chunk.decode(2, columns).messages[0].content == "c"


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("column", ["videos", "audios"])
def test_a_row_with_other_media_is_refused_whatever_the_run_reads(
    tmp_path: Path, column: str, suffix: str
) -> None:
    rows = prompt_rows(["a", "b"])
    rows[0][column], rows[1][column] = [], [{"path": "a"}]
    path = tmp_path / f"a.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def read(columns: PromptColumns) -> None:
        files = open_prompt_files([str(path)], columns, config_key="data.train_files")
        (chunk,) = ChunkReader().read(files.blocks[0])
        assert chunk.decode(0, columns).messages[0].content == "a"
        chunk.decode(1, columns)

    for columns in (PromptColumns(images="images"), PromptColumns(refused_images="images")):
        with pytest.raises(DataError, match=f"row 1 holds {column}, and no run reads them"):
            read(columns)

"""Files of JSON lines: rows found by block, blank lines skipped, bad lines named."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.data.inspection import inspect_files
from sluice.data.prompt_files import ChunkReader, open_prompt_files
from sluice.data.prompt_rows import PromptColumns
from sluice.data.row_files import ROWS_PER_READ
from sluice.errors import DataError
from tests.support.prompt_parquet import prompt_rows

COLUMNS = PromptColumns()


def write_lines(path: Path, rows: list[Any], between: str = "\n") -> Path:
    path.write_text(between.join(json.dumps(row) for row in rows) + between, encoding="utf-8")
    return path


def read_truths(path: Path, selected: list[int] | None = None) -> list[int]:
    files = open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")
    chosen = None if selected is None else np.asarray(selected, np.int64)
    return [
        int(chunk.decode(index, COLUMNS).ground_truth)
        for block in files.blocks
        for chunk in ChunkReader().read(block, chosen)
        for index in range(len(chunk))
    ]


@pytest.mark.parametrize("between", ["\n", "\r\n", "\n\n"])
def test_every_row_comes_once_whatever_parts_the_lines(tmp_path: Path, between: str) -> None:
    count = 2 * ROWS_PER_READ + 7
    path = write_lines(tmp_path / "a.jsonl", prompt_rows([f"é {i}" for i in range(count)]), between)
    assert read_truths(path) == list(range(count))


def test_a_last_line_without_its_end_is_a_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.json", prompt_rows(["a", "b"]))
    path.write_bytes(path.read_bytes().rstrip())
    assert read_truths(path) == [0, 1]


def test_the_byte_order_mark_of_an_editor_belongs_to_no_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", prompt_rows(["a", "b"]))
    path.write_bytes(BOM_UTF8 + path.read_bytes())
    assert read_truths(path) == [0, 1]


def test_only_selected_rows_are_given(tmp_path: Path) -> None:
    count = ROWS_PER_READ + 10
    path = write_lines(tmp_path / "a.jsonl", prompt_rows([f"{i}" for i in range(count)]))
    chosen = [0, 5, ROWS_PER_READ - 1, ROWS_PER_READ, ROWS_PER_READ + 9]
    assert read_truths(path, chosen) == chosen


def test_a_selected_row_that_is_bad_has_the_number_it_has_in_the_file(tmp_path: Path) -> None:
    rows: list[Any] = prompt_rows([f"{i}" for i in range(10)])
    rows[7] = ["not", "an", "object"]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=r"a\.jsonl, row 7: no JSON object"):
        read_truths(path, [2, 7])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{}]", r"a\.jsonl, row 0: the file is one JSON array; write one object a line"),
        ("{broken", r"a\.jsonl, row 0: no JSON object"),
        ('{"prompt": []}', r"a\.jsonl: no column 'data_source' \(found: prompt\)"),
        (
            '{"question": "?"}',
            r"no column 'prompt' \(found: question\).* name yours with data\.prompt_key",
        ),
        ("\n\n", r"a\.jsonl has no rows"),
        ("", r"a\.jsonl is empty \(0 bytes\)"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_once(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message) as error:
        open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")
    assert str(error.value).startswith("data.train_files: ")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prompt", "a question", "'prompt' is a str, not a list of messages"),
        ("prompt", [{"role": "user", "content": ["a"]}], "without role or content as text"),
        (
            "prompt",
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
            "a message with tool_calls, and only role and content are read",
        ),
        ("reward_model", {"ground_truth": None}, r"ground_truth' is None, not a string"),
        ("data_source", 3, "'data_source' is 3, not a name"),
        ("extra_info", [1], r"'extra_info' is \[1\], not a mapping"),
    ],
)
def test_a_cell_of_another_type_is_named_by_file_and_row(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    rows = prompt_rows(["a", "b"])
    rows[1][field] = value
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=message) as error:
        read_truths(path)
    assert f"{path}, row 1: " in str(error.value)


@pytest.mark.parametrize("depth", [900, 960, 100_000])
@pytest.mark.parametrize("field", ["prompt", "data_source", "extra_info", "reward_model"])
def test_a_deeply_nested_line_is_a_bad_row_and_no_defect(
    tmp_path: Path, field: str, depth: int
) -> None:
    good = prompt_rows(["a", "b"])
    deep = "[" * depth + "]" * depth
    bad = json.dumps(good[1] | {field: "DEEP"}).replace('"DEEP"', deep)
    path = tmp_path / "a.jsonl"
    path.write_text(f"{json.dumps(good[0])}\n{bad}\n", encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_truths(path)
    assert str(error.value).startswith(f"{path}, row 1: ")
    found = inspect_files(open_prompt_files([str(path)], COLUMNS, config_key="file"))
    assert found.num_bad == 1
    assert f"{path}, row 1: " in found.problems[0]


def test_a_first_line_that_is_deeply_nested_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl, row 0: no JSON object"):
        open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")


def test_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", prompt_rows(["a", "b", "c"]))
    files = open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")
    write_lines(path, prompt_rows(["a"]))
    with pytest.raises(DataError, match=r"a\.jsonl: is shorter than at the start"):
        list(ChunkReader().read(files.blocks[0]))

"""verl's column `agent_name` reaches the prompt, from both file formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sluice.data.prompt_files import ChunkReader, open_prompt_files
from sluice.data.prompt_rows import PromptColumns
from sluice.errors import DataError
from tests.support.prompt_parquet import prompt_rows

COLUMNS = PromptColumns()


def written(path: Path, names: list[Any]) -> Path:
    rows: list[dict[str, Any]] = prompt_rows([f"{i}" for i in range(len(names))])
    for row, name in zip(rows, names, strict=True):
        row["agent_name"] = name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[object]:
    files = open_prompt_files([str(path)], COLUMNS, config_key="data.train_files")
    (block,) = files.blocks
    return [
        chunk.decode(index, COLUMNS).extra_info.get("agent_name")
        for chunk in ChunkReader().read(block, None)
        for index in range(len(chunk))
    ]


@pytest.mark.parametrize("file", ["a.parquet", "a.jsonl"])
def test_a_row_names_its_agent_or_none(tmp_path: Path, file: str) -> None:
    assert read(written(tmp_path / file, ["tool_agent", None, ""])) == ["tool_agent", None, None]


def test_a_name_of_another_type_is_refused_with_the_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ["tool_agent", 7])
    with pytest.raises(DataError, match=r"row 1: 'agent_name' is 7, not a name; repair the row"):
        read(path)

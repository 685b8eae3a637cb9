"""Files of prompts, Parquet or JSON lines: checked at once, read piece by piece, never whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sluice.data.json_lines import json_line_blocks, read_lines
from sluice.data.parquet_rows import open_parquet, parquet_blocks, read_parquet
from sluice.data.prompt_rows import PromptColumns
from sluice.data.row_blocks import RowBlock, RowIndexes, Rows, Slab
from sluice.errors import DataError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MAX_OPEN_FILES = 8
PARQUET_SUFFIX = ".parquet"
JSON_SUFFIXES = (".json", ".jsonl")


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """Files in order, with their blocks and the columns to read.

    `kept` are the rows to use, ascending over all files; ``None``: all of them.
    """

    blocks: tuple[RowBlock, ...]
    columns: PromptColumns
    num_rows: int
    kept: RowIndexes | None = None


def open_prompt_files(
    paths: Sequence[str], columns: PromptColumns, *, config_key: str
) -> PromptFiles:
    """Check every file's columns and list its blocks; keeps no row.

    Args:
        paths: ``.parquet``, ``.json`` or ``.jsonl`` files; the latter have one object a line.
        columns: what to read.
        config_key: the key that named them, for errors.

    Raises:
        DataError: a file is missing, empty, of another format, lacks a column, or none has rows.
    """
    blocks: list[RowBlock] = []
    num_rows = 0
    for path in paths:
        found = _blocks(path, columns, num_rows, config_key)
        num_rows += sum(block.num_rows for block in found)
        blocks += found
    if num_rows == 0:
        raise DataError(f"{config_key}: {', '.join(paths)} hold no rows; name a file with rows")
    return PromptFiles(tuple(blocks), columns, num_rows)


class SlabReader:
    """Reads blocks; keeps the Parquet files used last open, since their index is slow to parse."""

    def __init__(self) -> None:
        self._open: dict[str, pq.ParquetFile] = {}

    def read(
        self,
        block: RowBlock,
        selected: RowIndexes | None = None,
        names: tuple[str, ...] | None = None,
    ) -> Iterator[Slab]:
        """The rows of one block in order.

        Args:
            block: what to read.
            selected: ascending row numbers over all files; only these are read. ``None``: all.
            names: columns to read; ``None``: all the block has.

        Raises:
            DataError: the file is damaged.
        """
        start = block.start
        for rows in self._rows(block, names or block.columns):
            slab = _selected(block, rows, start, selected)
            start += len(rows)
            if len(slab):
                yield slab

    def _rows(self, block: RowBlock, names: tuple[str, ...]) -> Iterator[Rows]:
        if _suffix(block.path) in JSON_SUFFIXES:
            return read_lines(block)
        return read_parquet(self._file(block.path), block, names)

    def _file(self, path: str) -> pq.ParquetFile:
        file = self._open.pop(path, None)
        if file is None:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            file = open_parquet(path)
        self._open[path] = file  # at the end: the first is the one not used for longest
        return file


def _selected(block: RowBlock, rows: Rows, start: int, selected: RowIndexes | None) -> Slab:
    numbers = np.arange(start, start + len(rows), dtype=np.int64)
    if selected is not None:
        low, high = np.searchsorted(selected, (start, start + len(rows)))
        numbers = selected[low:high]
        if numbers.size < len(rows):
            rows = rows.take(numbers - start)
    return Slab(block.path, numbers - block.file_start, rows)


def _blocks(path: str, columns: PromptColumns, start: int, config_key: str) -> list[RowBlock]:
    if not Path(path).is_file():
        raise DataError(f"{config_key}: no file {path}; give the path of a data file")
    suffix = _suffix(path)
    if suffix != PARQUET_SUFFIX and suffix not in JSON_SUFFIXES:
        raise DataError(
            f"{config_key}: {path} ends in '{suffix}'; give a .parquet, .json or .jsonl file"
        )
    if Path(path).stat().st_size == 0:
        raise DataError(f"{config_key}: {path} is empty (0 bytes); write it or download it again")
    read = parquet_blocks if suffix == PARQUET_SUFFIX else json_line_blocks
    try:
        return list(read(path, columns, start))
    except DataError as error:
        raise DataError(f"{config_key}: {error}") from error


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()

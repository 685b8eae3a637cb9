"""Files of prompts, Parquet or JSON lines: checked at once, read block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from sluice.data.prompt_rows import UNREAD_MEDIA, PromptColumns, images_error, media_error
from sluice.data.row_files import (
    PARQUET_SUFFIX,
    RowBlock,
    RowChunk,
    RowIndexes,
    batches_of,
    is_parquet,
    json_line_blocks,
    lines_of,
    open_parquet,
    parquet_blocks,
    parse_line,
    read_lines,
    read_parquet,
)
from sluice.errors import DataError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

MAX_OPEN_FILES = 8
IMAGE_ROWS_PER_READ = 16
"""Few, since a row with images is large."""

Digests = npt.NDArray[np.uint64]


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
    """Check every file's columns and list its blocks. Keep no row.

    Args:
        paths: ``.parquet``, ``.json`` or ``.jsonl`` files; ``.jsonl`` files have one object a line.
        columns: what to read.
        config_key: the key that names them, for errors.

    Raises:
        DataError: a file is missing, empty, of another format, lacks a column, or holds images
            that are refused, videos or sound; or none has rows.
    """
    blocks: list[RowBlock] = []
    num_rows = 0
    for path in paths:
        of_file = _blocks(path, columns, num_rows, config_key)
        num_rows += sum(block.num_rows for block in of_file)
        blocks += of_file
    if num_rows == 0:
        have = "has" if len(paths) == 1 else "have"
        raise DataError(f"{config_key}: {', '.join(paths)} {have} no rows; name a file with rows")
    if columns.refused_images is not None:
        found_at = first_row_with_images(paths, columns.refused_images)
        if found_at is not None:
            raise images_error(f"{config_key}: {found_at}", columns.refused_images)
    for name in UNREAD_MEDIA:
        if name != columns.images and (found_at := first_row_with_images(paths, name)) is not None:
            raise media_error(f"{config_key}: {found_at}", name)
    return PromptFiles(tuple(blocks), columns, num_rows)


class ChunkReader:
    """Reads blocks. It keeps the last Parquet files open, since their index is slow to parse."""

    def __init__(self) -> None:
        self._open: dict[str, pq.ParquetFile] = {}

    def read(
        self,
        block: RowBlock,
        selected: RowIndexes | None = None,
        names: tuple[str, ...] | None = None,
    ) -> Iterator[RowChunk]:
        """Yield the rows of one block in order.

        Args:
            block: what to read.
            selected: ascending row numbers over all files; only these are read. ``None``: all.
            names: columns to read; ``None``: all that the block has.

        Raises:
            DataError: the file is damaged.
        """
        start = block.start
        for chunk in self._read_chunks(block, names or block.columns):
            selected_rows = chunk
            if selected is not None:
                low, high = np.searchsorted(selected, (start, start + len(chunk)))
                if high - low < len(chunk):
                    selected_rows = chunk.take(selected[low:high] - start)
            start += len(chunk)
            if len(selected_rows):
                yield selected_rows

    def _read_chunks(self, block: RowBlock, names: tuple[str, ...]) -> Iterator[RowChunk]:
        if block.path.lower().endswith(PARQUET_SUFFIX):
            return read_parquet(self._open_file(block.path), block, names)
        return read_lines(block)

    def _open_file(self, path: str) -> pq.ParquetFile:
        file = self._open.pop(path, None)
        if file is None:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            file = open_parquet(path)
        self._open[path] = file  # at the end, so that the first is the least recently used
        return file


def _blocks(path: str, columns: PromptColumns, start: int, config_key: str) -> list[RowBlock]:
    try:
        list_blocks = parquet_blocks if is_parquet(path) else json_line_blocks
        return list(list_blocks(path, columns, start))
    except DataError as error:
        raise DataError(f"{config_key}: {error}") from error


def first_row_with_images(paths: Iterable[str], column: str) -> str | None:
    """Return file and row (from 0) of the first row found to hold images; ``None``: none was found.

    Of a Parquet file, only the column is read. Of JSON lines, only the first row is read:
    `decode_row` refuses others when the data set reaches them.

    Args:
        paths: Parquet files, or files of JSON lines.
        column: the images' column, ``data.image_key``, or one of other media.

    Raises:
        DataError: a file is damaged.
    """
    for path in paths:
        row = (
            _parquet_row_with_images(path, column)
            if is_parquet(path)
            else _json_row_with_images(path, column)
        )
        if row is not None:
            return f"{path}, row {row}"
    return None


def _json_row_with_images(path: str, column: str) -> int | None:
    first_line = next((line for line in lines_of(path) if line.strip()), None)
    return 0 if first_line is not None and parse_line(path, 0, first_line).get(column) else None


def _parquet_row_with_images(path: str, column: str) -> int | None:
    row = 0
    with open_parquet(path) as file:
        if column not in file.schema_arrow.names:
            return None
        for batch in batches_of(path, file, IMAGE_ROWS_PER_READ, columns=[column]):
            for images in batch.column(0):
                if images.as_py():
                    return row
                row += 1
    return None


def row_digests(files: PromptFiles) -> Digests:
    """Return the digest of every row: [num_rows]. Read all files once and hold 8 bytes a row."""
    digests = np.empty(files.num_rows, dtype=np.uint64)
    reader, columns = ChunkReader(), files.columns
    names = (columns.prompt, columns.reward_model)
    row = 0
    for block in files.blocks:
        with_images = (columns.images,) if columns.images in block.columns else ()
        for chunk in reader.read(block, names=(*names, *with_images)):
            for digest in chunk.digests(columns):
                digests[row] = digest
                row += 1
    return digests


def without_duplicates(files: PromptFiles) -> PromptFiles:
    """Return the same files, with only the first of equal rows to use."""
    first_rows = np.unique(row_digests(files), return_index=True)[1]
    return replace(files, kept=np.sort(first_rows).astype(np.int64))

"""Parquet files of prompts: checked at once, read piece by piece, never whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from services.reward.prompt_rows import PromptColumns, PromptRow, check_columns, decode_row
from sluice.errors import DataError

ROWS_PER_READ = 1024
MAX_OPEN_FILES = 8
_READ_BUFFER_BYTES = 1 << 20

RowIndexes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group. Rows ``[start, start + num_rows)`` of all files counted together."""

    path: str
    index: int
    columns: tuple[str, ...]
    file_start: int
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Slab:
    """Some rows of one row group in Arrow's form."""

    path: str
    rows: RowIndexes  # [rows], index within the file
    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.rows.size)

    def slice(self, start: int, stop: int) -> Slab:
        """Rows ``[start, stop)`` without copying them."""
        return Slab(self.path, self.rows[start:stop], self.batch.slice(start, stop - start))

    def decode(self, index: int, columns: PromptColumns) -> PromptRow:
        """Row `index` of this slab; `DataError` if it is malformed."""
        values = self.batch.slice(index, 1).to_pylist()[0]
        return decode_row(values, columns, path=self.path, row=int(self.rows[index]))


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """Files in order, with their row groups and the columns to read."""

    row_groups: tuple[RowGroup, ...]
    columns: PromptColumns
    num_rows: int


def open_prompt_files(
    paths: Sequence[str], columns: PromptColumns, *, config_key: str
) -> PromptFiles:
    """Check every file's columns and list its row groups; reads no row.

    Args:
        paths: parquet files.
        columns: what to read.
        config_key: the key that named them, for errors.

    Raises:
        DataError: a file is missing, is no parquet file, lacks a column, or all are empty.
    """
    groups: list[RowGroup] = []
    num_rows = 0
    for path in paths:
        found = list(_row_groups(path, columns, num_rows, config_key))
        num_rows += sum(group.num_rows for group in found)
        groups += found
    if num_rows == 0:
        raise DataError(f"{config_key}: {', '.join(paths)} hold no rows; name a file with rows")
    return PromptFiles(tuple(groups), columns, num_rows)


class SlabReader:
    """Reads row groups; keeps the files used last open, since a file's index is slow to parse."""

    def __init__(self) -> None:
        self._open: dict[str, pq.ParquetFile] = {}

    def read(self, group: RowGroup, selected: RowIndexes | None) -> Iterator[Slab]:
        """The rows of one row group in order.

        Args:
            group: what to read.
            selected: ascending row numbers over all files; only these are read. ``None``: all.

        Raises:
            DataError: the file is damaged.
        """
        start = group.start
        try:
            for batch in self._file(group.path).iter_batches(
                ROWS_PER_READ,
                row_groups=[group.index],
                columns=list(group.columns),
                use_threads=False,
            ):
                slab = _selected(group, batch, start, selected)
                start += batch.num_rows
                if len(slab):
                    yield slab
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{group.path}: cannot be read: {error}; restore the file") from error

    def _file(self, path: str) -> pq.ParquetFile:
        file = self._open.pop(path, None)
        if file is None:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            file = pq.ParquetFile(path, buffer_size=_READ_BUFFER_BYTES, pre_buffer=False)
        self._open[path] = file  # at the end: the first is the one not used for longest
        return file


def _selected(
    group: RowGroup, batch: pa.RecordBatch, start: int, selected: RowIndexes | None
) -> Slab:
    rows = np.arange(start, start + batch.num_rows, dtype=np.int64)
    if selected is not None:
        low, high = np.searchsorted(selected, (start, start + batch.num_rows))
        rows = selected[low:high]
        if rows.size < batch.num_rows:
            batch = batch.take(pa.array(rows - start))
    return Slab(group.path, rows - group.file_start, batch)


def _row_groups(
    path: str, columns: PromptColumns, file_start: int, config_key: str
) -> Iterator[RowGroup]:
    if not Path(path).is_file():
        raise DataError(f"{config_key}: no file {path}; give the path of a parquet file")
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = check_columns(path, file.schema_arrow, columns)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{config_key}: {path} is no readable parquet file ({error}); convert it to parquet"
        ) from error
    start = file_start
    for index, size in enumerate(sizes):
        yield RowGroup(path, index, names, file_start, start, size)
        start += size

"""Parquet files: row groups listed from the footer, rows read a little at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.data.image_sources import ImageSource, usable_images
from sluice.data.prompt_rows import GROUND_TRUTH, PromptColumns, check_columns
from sluice.data.row_blocks import ROWS_PER_READ, PromptAndTruth, RowBlock, RowIndexes
from sluice.errors import DataError

READ_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """Rows in Arrow's form."""

    batch: pa.RecordBatch

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def slice(self, start: int, stop: int) -> ArrowRows:
        """Rows ``[start, stop)`` without copying them."""
        return ArrowRows(self.batch.slice(start, stop - start))

    def take(self, indexes: RowIndexes) -> ArrowRows:
        """These rows."""
        return ArrowRows(self.batch.take(pa.array(indexes)))

    def values(self, index: int) -> Mapping[str, object]:
        """Columns of one row."""
        row: Mapping[str, object] = self.batch.slice(index, 1).to_pylist()[0]
        return row

    def prompts_and_truths(self, columns: PromptColumns) -> Iterator[PromptAndTruth]:
        """Of each row what tells it from others.

        Reads children as whole columns, which is many times faster.
        """
        turns = self.batch.column(columns.prompt)
        offsets = turns.offsets.to_pylist()
        roles = turns.values.field("role").to_pylist()
        contents = turns.values.field("content").to_pylist()
        truths = self.batch.column(columns.reward_model).field(GROUND_TRUTH).to_pylist()
        for row, truth in enumerate(truths):
            part = slice(offsets[row], offsets[row + 1])
            images = self._images(row, columns.images)
            yield PromptAndTruth(roles[part], contents[part], truth, images)

    def _images(self, row: int, column: str | None) -> tuple[ImageSource, ...]:
        """Of one row, since those of all may be large."""
        if column is None or column not in self.batch.schema.names:
            return ()
        return usable_images(self.batch.column(column)[row].as_py())


def parquet_blocks(path: str, columns: PromptColumns, start: int) -> Iterator[RowBlock]:
    """The row groups of a file whose first row is number `start` of all.

    Raises:
        DataError: a column is missing or of another type, or the file is damaged.
    """
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = check_columns(path, file.schema_arrow, columns)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is no readable parquet file ({error}); convert it to parquet"
        ) from error
    file_start = start
    for index, size in enumerate(sizes):
        yield RowBlock(path, index, names, file_start, start, size)
        start += size


def read_parquet(
    file: pq.ParquetFile, block: RowBlock, names: tuple[str, ...]
) -> Iterator[ArrowRows]:
    """The rows of a block in order; `DataError` if the file is damaged."""
    try:
        for batch in file.iter_batches(
            ROWS_PER_READ, row_groups=[block.index], columns=list(names), use_threads=False
        ):
            yield ArrowRows(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{block.path}: cannot be read: {error}; restore the file") from error


def open_parquet(path: str) -> pq.ParquetFile:
    """A file that reads what it is asked for only; `DataError` if there is none any more."""
    try:
        return pq.ParquetFile(path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}; restore the file") from error

"""The two file formats: find the blocks of a Parquet or JSON-lines file, and read rows of a
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.data.image_sources import ImageSource, usable_images
from sluice.data.prompt_rows import (
    GROUND_TRUTH,
    PromptColumns,
    PromptRow,
    check_column_names,
    check_columns,
    decode_row,
)
from sluice.errors import DataError

ROWS_PER_READ = 1024

RowIndexes = npt.NDArray[np.int64]


class PromptAndTruth(NamedTuple):
    """Return what identifies a row; ``None`` if it holds no text, which no usable row does."""

    roles: Sequence[str | None]
    contents: Sequence[str | None]
    truth: str | None
    images: Sequence[ImageSource] = ()


class Rows(Protocol):
    """Some rows of a file, not converted yet."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def slice(self, start: int, stop: int) -> Self:
        """Rows ``[start, stop)`` without copying them."""
        ...

    def take(self, indexes: RowIndexes) -> Self:
        """These rows."""
        ...

    def values(self, index: int) -> Mapping[str, object]:
        """Columns of one row; `DataError` if the row cannot be read."""
        ...

    def prompts_and_truths(self, columns: PromptColumns) -> Iterator[PromptAndTruth]:
        """Of each row its messages, its ground truth, and its images where they are read."""
        ...


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of a file that are found without reading those before them.

    A row group of a Parquet file, or some lines of JSON. Rows are ``[start, start + num_rows)`` of
    all files counted together, and the file's first row is `file_start`.
    """

    path: str
    index: int  # of the row group; for lines their first byte
    columns: tuple[str, ...]
    file_start: int
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Slab:
    """Some rows of one block."""

    path: str
    numbers: RowIndexes  # [rows], index within the file
    rows: Rows

    def __len__(self) -> int:
        return int(self.numbers.size)

    def slice(self, start: int, stop: int) -> Slab:
        """Rows ``[start, stop)`` without copying them."""
        return Slab(self.path, self.numbers[start:stop], self.rows.slice(start, stop))

    def decode(self, index: int, columns: PromptColumns) -> PromptRow:
        """Row `index` of this slab; `DataError` if it is malformed."""
        number = int(self.numbers[index])
        return decode_row(self.rows.values(index), columns, path=self.path, row=number)


LONGEST_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LineRows:
    """Rows as lines of text, each with its path and number for messages."""

    path: str
    first: int
    lines: tuple[bytes, ...]
    numbers: tuple[int, ...] | None = None  # of the rows in the file, where they have gaps

    def __len__(self) -> int:
        return len(self.lines)

    def slice(self, start: int, stop: int) -> LineRows:
        """Rows ``[start, stop)``."""
        numbers = None if self.numbers is None else self.numbers[start:stop]
        return LineRows(self.path, self.first + start, self.lines[start:stop], numbers)

    def take(self, indexes: RowIndexes) -> LineRows:
        """These rows."""
        chosen = [int(index) for index in indexes]
        numbers = tuple(self._number(index) for index in chosen)
        return LineRows(self.path, 0, tuple(self.lines[i] for i in chosen), numbers)

    def values(self, index: int) -> Mapping[str, object]:
        """Columns of one row; `DataError` if the line is no JSON object."""
        return parse_line(self.path, self._number(index), self.lines[index])

    def prompts_and_truths(self, columns: PromptColumns) -> Iterator[PromptAndTruth]:
        """Return for each row the key that identifies it."""
        for index in range(len(self)):
            values = self.values(index)
            turns = values.get(columns.prompt)
            turns = turns if isinstance(turns, list) else []
            truth = _text(values.get(columns.reward_model), GROUND_TRUTH)
            roles = tuple(_text(turn, "role") for turn in turns)
            contents = tuple(_text(turn, "content") for turn in turns)
            images = usable_images(values.get(columns.images)) if columns.images else ()
            yield PromptAndTruth(roles, contents, truth, images)

    def _number(self, index: int) -> int:
        return self.first + index if self.numbers is None else self.numbers[index]


def json_line_blocks(path: str, columns: PromptColumns, start: int) -> Iterator[RowBlock]:
    """Blocks of lines of a file whose first row is number `start` of all; reads the file once.

    Blank lines are no rows.

    Raises:
        DataError: a line is too long, or the first is no JSON object with the columns needed.
    """
    names: tuple[str, ...] = ()
    file_start, offset, first_byte, num_rows = start, 0, 0, 0
    for line in lines_of(path):
        if line.strip():
            if not names:
                row = parse_line(path, 0, line)
                names = check_column_names(path, list(row), columns)
            num_rows += 1
        offset += len(line)
        if num_rows == ROWS_PER_READ:
            yield RowBlock(path, first_byte, names, file_start, start, num_rows)
            start, first_byte, num_rows = start + num_rows, offset, 0
    if num_rows:
        yield RowBlock(path, first_byte, names, file_start, start, num_rows)


def read_lines(block: RowBlock) -> Iterator[LineRows]:
    """The rows of a block; `DataError` if the file has changed since it was indexed."""
    rows = (line for line in lines_of(block.path, block.index) if line.strip())
    lines = tuple(islice(rows, block.num_rows))
    if len(lines) < block.num_rows:
        raise DataError(f"{block.path}: is shorter than at the start; restore the file")
    yield LineRows(block.path, block.start - block.file_start, lines)


def parse_line(path: str, row: int, line: bytes) -> dict[str, object]:
    """The object on a line; `DataError` naming file and row otherwise."""
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if row == 0 and line.lstrip().startswith(b"["):
            problem = "the file is one JSON array; write one object a line (jq -c '.[]')"
        else:
            problem = f"no JSON object ({error}); write one object a line"
        raise DataError(f"{path}, row {row}: {problem}") from error


def lines_of(path: str, first_byte: int = 0) -> Iterator[bytes]:
    """Lines from a byte on, with their ends; `DataError` if one is too long to be a row."""
    try:
        with open(path, "rb") as file:
            file.seek(first_byte)
            while line := file.readline(LONGEST_LINE_BYTES + 1):
                if len(line) > LONGEST_LINE_BYTES:
                    raise DataError(
                        f"{path}: a line of more than {LONGEST_LINE_BYTES} bytes; "
                        "write one object a line"
                    )
                yield line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}; restore the file") from error


def _text(found: object, key: str) -> str | None:
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else None


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
        """Return for each row the key that identifies it.

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

"""Blocks and rows of the two file formats, Parquet and JSON lines.

A block is found without reading the rows before it, and read as chunks: rows that are not converted
yet. Raw rows have all columns of a file, whatever its format; `read_rows` has those of a struct.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Self, TypeVar

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
    truth_of,
    truth_text,
)
from sluice.errors import DataError
from sluice.json_objects import DECODE_ERRORS

PARQUET_SUFFIX = ".parquet"
JSON_SUFFIXES = (".json", ".jsonl")
ROWS_PER_READ = 1024
RAW_ROWS_PER_READ = 256
LONGEST_LINE_BYTES = 64 << 20
READ_BUFFER_BYTES = 1 << 20
DIGEST_BYTES = 8

RowIndexes = npt.NDArray[np.int64]
RowT = TypeVar("RowT", bound=msgspec.Struct)


def is_parquet(path: str) -> bool:
    """Return whether a file with rows is of Parquet, or else of JSON lines, by its name.

    Raises:
        DataError: there is no such file, it is empty, or its name is neither's.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if file.is_dir():
        raise DataError(f"{path} is a folder; name its files, such as {file / '*.parquet'}")
    if not file.is_file():
        raise DataError(f"no file {path}; give the path of a data file")
    if suffix not in (PARQUET_SUFFIX, *JSON_SUFFIXES):
        raise DataError(
            f"{path} ends in '{suffix}'; give a .parquet, .json or .jsonl file, unpacked"
        )
    if file.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes); write it or download it again")
    return suffix == PARQUET_SUFFIX


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A row group of a Parquet file, or some lines of JSON.

    Its rows are ``[start, start + num_rows)`` of all files counted together, and the file's first
    row is `file_start`.
    """

    path: str
    index: int  # of the row group; for lines their first byte
    columns: tuple[str, ...]
    file_start: int
    start: int
    num_rows: int


def digest_of(
    roles: Sequence[str | None],
    contents: Sequence[str | None],
    truth: str | None,
    images: Sequence[ImageSource] = (),
) -> int:
    """Return a digest that copies of a row share: roles, contents, truth and images agree.

    64 bits of BLAKE2b: of two million different rows, two share a digest once in 10^7 files.

    Args:
        roles: of the messages in order; ``None``: no text.
        contents: of the same messages.
        truth: what the scorer compares with.
        images: their bytes, or their paths, which are compared as they stand.
    """
    # The length before each text keeps a content from looking like the border between two.
    texts = ("-" if text is None else f"{len(text)}:{text}" for text in (*roles, *contents, truth))
    digest = blake2b("".join(texts).encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES)
    for image in images:
        data = image if isinstance(image, bytes) else image.encode("utf-8", "surrogatepass")
        digest.update(b"i%d:" % len(data) + data)
    return int.from_bytes(digest.digest(), "little")


@dataclass(frozen=True, slots=True)
class RowChunk(ABC):
    """Some rows of one block, not converted yet."""

    path: str
    numbers: RowIndexes  # [rows], index within the file

    def __len__(self) -> int:
        return int(self.numbers.size)

    def decode(self, index: int, columns: PromptColumns) -> PromptRow:
        """Return row `index` of this chunk. Raise DataError if it is malformed."""
        number = int(self.numbers[index])
        return decode_row(self.values(index), columns, path=self.path, row=number)

    @abstractmethod
    def slice(self, start: int, stop: int) -> Self:
        """Return the rows ``[start, stop)``, which share the memory of this chunk."""

    @abstractmethod
    def take(self, indexes: RowIndexes) -> Self:
        """Return a copy of the rows at these indexes of this chunk."""

    @abstractmethod
    def values(self, index: int) -> Mapping[str, object]:
        """Return the columns of one row. Raise DataError if it cannot be read."""

    @abstractmethod
    def digests(self, columns: PromptColumns) -> Iterator[int]:
        """Yield the `digest_of` each row, with its images where they are read."""


@dataclass(frozen=True, slots=True)
class LineChunk(RowChunk):
    """Rows as lines of JSON."""

    lines: tuple[bytes, ...]

    def slice(self, start: int, stop: int) -> LineChunk:
        return LineChunk(self.path, self.numbers[start:stop], self.lines[start:stop])

    def take(self, indexes: RowIndexes) -> LineChunk:
        lines = tuple(self.lines[index] for index in indexes.tolist())
        return LineChunk(self.path, self.numbers[indexes], lines)

    def values(self, index: int) -> Mapping[str, object]:
        return parse_line(self.path, int(self.numbers[index]), self.lines[index])

    def digests(self, columns: PromptColumns) -> Iterator[int]:
        for index in range(len(self)):
            values = self.values(index)
            turns = values.get(columns.prompt)
            turns = turns if isinstance(turns, list) else []
            yield digest_of(
                [_text(turn, "role") for turn in turns],
                [_text(turn, "content") for turn in turns],
                truth_text(truth_of(values.get(columns.reward_model)), sorts_keys=True),
                usable_images(values.get(columns.images)) if columns.images else (),
            )


def json_line_blocks(path: str, columns: PromptColumns, start: int) -> Iterator[RowBlock]:
    """Yield the blocks of a file whose first row is number `start` of all. Read the file once.

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


def read_lines(block: RowBlock) -> Iterator[RowChunk]:
    """Yield the rows of a block. Raise DataError if the file has changed since it was indexed."""
    rows = (line for line in lines_of(block.path, block.index) if line.strip())
    lines = tuple(islice(rows, block.num_rows))
    if len(lines) < block.num_rows:
        raise DataError(f"{block.path}: is shorter than at the start; restore the file")
    first_row = block.start - block.file_start
    yield LineChunk(block.path, np.arange(first_row, first_row + len(lines)), lines)


def parse_line(path: str, row: int, line: bytes) -> dict[str, object]:
    """Return the object on a line. Raise DataError, which names file and row, if it is none."""
    line = line.removeprefix(BOM_UTF8) if row == 0 else line
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except DECODE_ERRORS as error:
        if row == 0 and line.lstrip().startswith(b"["):
            problem = "the file is one JSON array; write one object a line (jq -c '.[]')"
        else:
            problem = f"no JSON object ({error}); write one object a line"
        raise DataError(f"{path}, row {row}: {problem}") from error


def lines_of(path: str, first_byte: int = 0) -> Iterator[bytes]:
    """Yield lines from a byte on, with their ends. Raise DataError if one is too long."""
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
        raise _unreadable_error(path, error) from error


def _text(mapping: object, key: str) -> str | None:
    value = mapping.get(key) if isinstance(mapping, Mapping) else None
    return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class ArrowChunk(RowChunk):
    """Rows in Arrow's form."""

    batch: pa.RecordBatch

    def slice(self, start: int, stop: int) -> ArrowChunk:
        batch = self.batch.slice(start, stop - start)
        return ArrowChunk(self.path, self.numbers[start:stop], batch)

    def take(self, indexes: RowIndexes) -> ArrowChunk:
        return ArrowChunk(self.path, self.numbers[indexes], self.batch.take(pa.array(indexes)))

    def values(self, index: int) -> Mapping[str, object]:
        row: Mapping[str, object] = self.batch.slice(index, 1).to_pylist()[0]
        return row

    def digests(self, columns: PromptColumns) -> Iterator[int]:
        # Children are read as whole columns, which is many times faster than row by row.
        turns = self.batch.column(columns.prompt)
        offsets = turns.offsets.to_pylist()
        roles = turns.values.field("role").to_pylist()
        contents = turns.values.field("content").to_pylist()
        truths = self.batch.column(columns.reward_model).field(GROUND_TRUTH).to_pylist()
        with_images = columns.images in self.batch.schema.names
        for row, truth in enumerate(truths):
            part = slice(offsets[row], offsets[row + 1])
            # Images of one row at a time: together they may be large.
            images = self.batch.column(columns.images)[row].as_py() if with_images else None
            text = truth_text(truth, sorts_keys=True)
            yield digest_of(roles[part], contents[part], text, usable_images(images))


def parquet_blocks(path: str, columns: PromptColumns, start: int) -> Iterator[RowBlock]:
    """Yield the row groups of a file whose first row is number `start` of all.

    Raises:
        DataError: a column is missing or of another type, or the file is damaged.
    """
    try:
        with pq.ParquetFile(path, pre_buffer=False) as file:
            names = check_columns(path, file.schema_arrow, columns)
            sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is no readable parquet file ({error}); write it or download it again"
        ) from error
    file_start = start
    for index, size in enumerate(sizes):
        yield RowBlock(path, index, names, file_start, start, size)
        start += size


def read_parquet(
    file: pq.ParquetFile, block: RowBlock, names: tuple[str, ...]
) -> Iterator[RowChunk]:
    """Yield the rows of a block in order. Raise DataError if the file is damaged."""
    first_row = block.start - block.file_start
    for batch in batches_of(
        block.path, file, ROWS_PER_READ, row_groups=[block.index], columns=list(names)
    ):
        yield ArrowChunk(block.path, np.arange(first_row, first_row + batch.num_rows), batch)
        first_row += batch.num_rows


def batches_of(
    path: str,
    file: pq.ParquetFile,
    num_rows: int,
    *,
    row_groups: list[int] | None = None,
    columns: list[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield batches of at most `num_rows` rows of these row groups and columns; ``None``: all.

    Raise DataError, which names `path`, if the file is damaged.
    """
    try:
        yield from file.iter_batches(
            num_rows, row_groups=row_groups, columns=columns, use_threads=False
        )
    except (pa.ArrowException, OSError) as error:
        raise _unreadable_error(path, error) from error


def open_parquet(path: str) -> pq.ParquetFile:
    """Return a file that reads only what is requested. Raise DataError if there is none."""
    try:
        return pq.ParquetFile(path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable_error(path, error) from error


def _unreadable_error(path: str, error: Exception) -> DataError:
    return DataError(f"{path}: cannot be read: {error}; restore the file")


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row, and its file and number; `values` raises DataError if it cannot be read."""

    place: str
    values: Callable[[], Mapping[str, object]]


def check_raw_file(path: Path) -> list[str]:
    """Return the columns of a file; for JSON lines, of the first row.

    Raises:
        DataError: there is no such file, it is empty, damaged or of another format.
    """
    if is_parquet(str(path)):
        with open_parquet(str(path)) as file:
            return list(file.schema_arrow.names)
    first_line = next((line for line in lines_of(str(path)) if line.strip()), None)
    if first_line is None:
        raise DataError(f"{path} holds blank lines alone; write it or download it again")
    return list(parse_line(str(path), 0, first_line))


def raw_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a file in order. Hold `RAW_ROWS_PER_READ` of them."""
    for index, values in enumerate(_readers(path)):
        yield RawRow(f"{path}, row {index}", values)


def _readers(path: Path) -> Iterator[Callable[[], Mapping[str, object]]]:
    if not is_parquet(str(path)):
        lines = (line for line in lines_of(str(path)) if line.strip())
        for index, line in enumerate(lines):
            yield partial(parse_line, str(path), index, line)
        return
    with open_parquet(str(path)) as file:
        for batch in batches_of(str(path), file, RAW_ROWS_PER_READ):
            for values in batch.to_pylist():
                yield partial(dict[str, object], values)


def read_rows(file: Path, kind: type[RowT], needs: str) -> list[tuple[str, RowT]]:
    """Return all rows of a file as `kind`, each with its place ("line 3", "row 2") for messages.

    Args:
        file: a .parquet file, or one JSON object per line; empty lines are skipped.
        kind: a struct; other fields of a row are ignored.
        needs: what a row must hold, for messages.

    Raises:
        DataError: with the file, the place and the problem.
    """
    if not file.is_file():
        raise DataError(
            f"{file}: no such file; give a file with one JSON object a line, or parquet"
        )
    is_parquet = file.suffix == ".parquet"
    places = _parquet_places(file) if is_parquet else _json_places(file)
    rows: list[tuple[str, RowT]] = []
    for place, content in places:
        try:
            row = (
                msgspec.json.decode(content, type=kind)
                if isinstance(content, bytes)
                else msgspec.convert(content, kind)
            )
        except DECODE_ERRORS as error:
            unit = "row" if is_parquet else "line"
            raise DataError(f"{file}, {place}: {error}; a {unit} needs {needs}") from error
        rows.append((place, row))
    if not rows:
        raise DataError(f"{file}: holds no row; write one JSON object a line")
    return rows


def _json_places(file: Path) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if line.strip():
            yield f"line {number}", line


def _parquet_places(file: Path) -> Iterator[tuple[str, object]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            number = 0
            for batch in parquet.iter_batches():
                for row in batch.to_pylist():
                    yield f"row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as parquet ({error})") from error

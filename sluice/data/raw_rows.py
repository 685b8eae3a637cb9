"""Rows of any Parquet or JSON-lines file with all their columns, read in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.data.prompt_files import JSON_SUFFIXES, PARQUET_SUFFIX
from sluice.data.row_files import lines_of, open_parquet, parse_line
from sluice.errors import DataError

ROWS_PER_READ = 256


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row and where it comes from; `values` raises `DataError` if it cannot be read."""

    place: str
    values: Callable[[], Mapping[str, object]]


def check_raw_file(path: Path) -> list[str]:
    """The columns of a file; those of the first row for JSON lines.

    Raises:
        DataError: there is no such file, it is empty, damaged or of another format.
    """
    if not path.is_file():
        raise DataError(f"no file {path}; give the path of a data file")
    if path.suffix not in (PARQUET_SUFFIX, *JSON_SUFFIXES):
        raise DataError(
            f"{path} ends in '{path.suffix}'; give a .parquet, .json or .jsonl file, unpacked"
        )
    if path.suffix == PARQUET_SUFFIX:
        with open_parquet(str(path)) as file:
            return list(file.schema_arrow.names)
    first = next((line for line in lines_of(str(path)) if line.strip()), None)
    if first is None:
        raise DataError(f"{path} is empty; write it or download it again")
    return list(parse_line(str(path), 0, first))


def raw_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a file in order; holds `ROWS_PER_READ` of them."""
    if path.suffix == PARQUET_SUFFIX:
        yield from _parquet_rows(path)
        return
    lines = (line for line in lines_of(str(path)) if line.strip())
    for index, line in enumerate(lines):
        yield RawRow(_place(path, index), _parsed(str(path), index, line))


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    with open_parquet(str(path)) as file:
        index = 0
        for batch in _batches(path, file):
            for values in batch.to_pylist():
                yield RawRow(_place(path, index), _known(values))
                index += 1


def _batches(path: Path, file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    try:
        yield from file.iter_batches(ROWS_PER_READ, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}; restore the file") from error


def _place(path: Path, index: int) -> str:
    return f"{path}, row {index}"


def _known(values: Mapping[str, object]) -> Callable[[], Mapping[str, object]]:
    return lambda: values


def _parsed(path: str, index: int, line: bytes) -> Callable[[], Mapping[str, object]]:
    return lambda: parse_line(path, index, line)

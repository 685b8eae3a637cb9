"""Rows of any Parquet or JSON-lines file with all their columns, read in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sluice.data.prompt_files import JSON_SUFFIXES, PARQUET_SUFFIX
from sluice.data.row_files import batches_of, lines_of, open_parquet, parse_line
from sluice.errors import DataError

ROWS_PER_READ = 256


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row, and its file and number; `values` raises DataError if it cannot be read."""

    place: str
    values: Callable[[], Mapping[str, object]]


def check_raw_file(path: Path) -> list[str]:
    """Return the columns of a file; those of the first row for JSON lines.

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
    """Yield the rows of a file in order. Hold `ROWS_PER_READ` of them."""
    for index, values in enumerate(_readers(path)):
        yield RawRow(f"{path}, row {index}", values)


def _readers(path: Path) -> Iterator[Callable[[], Mapping[str, object]]]:
    if path.suffix != PARQUET_SUFFIX:
        lines = (line for line in lines_of(str(path)) if line.strip())
        for index, line in enumerate(lines):
            yield partial(parse_line, str(path), index, line)
        return
    with open_parquet(str(path)) as file:
        for batch in batches_of(str(path), file, ROWS_PER_READ):
            for values in batch.to_pylist():
                yield partial(dict[str, object], values)

"""Rows of a user's file: JSON lines, or parquet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from sluice.errors import DataError
from sluice.json_objects import DECODE_ERRORS

RowT = TypeVar("RowT", bound=msgspec.Struct)


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
    places = _parquet_rows(file) if is_parquet else _json_lines(file)
    rows: list[tuple[str, RowT]] = []
    for place, found in places:
        try:
            row = (
                msgspec.json.decode(found, type=kind)
                if isinstance(found, bytes)
                else msgspec.convert(found, kind)
            )
        except DECODE_ERRORS as error:
            unit = "row" if is_parquet else "line"
            raise DataError(f"{file}, {place}: {error}; a {unit} needs {needs}") from error
        rows.append((place, row))
    if not rows:
        raise DataError(f"{file}: holds no row; write one JSON object a line")
    return rows


def _json_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if line.strip():
            yield f"line {number}", line


def _parquet_rows(file: Path) -> Iterator[tuple[str, object]]:
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

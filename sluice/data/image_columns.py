"""Whether a data set comes with images, found out from the first row of each file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq


def first_file_with_images(paths: Iterable[str], column: str) -> str | None:
    """The first readable file whose first row holds something in `column`; ``None``: none does.

    Args:
        paths: Parquet files, or files of JSON lines.
        column: the images' column, ``data.image_key``.
    """
    return next((path for path in paths if _first_row_has(Path(path), column)), None)


def _first_row_has(path: Path, column: str) -> bool:
    if path.suffix.lower() == ".parquet":
        with pq.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                return False
            first = next(file.iter_batches(batch_size=1, columns=[column]), None)
            return first is not None and first.num_rows > 0 and bool(first.column(0)[0].as_py())
    with path.open(encoding="utf-8", errors="replace") as lines:
        try:
            row = json.loads(next(lines, "null"))
        except json.JSONDecodeError:
            return False  # told with its place when the rows are read
    return isinstance(row, dict) and bool(row.get(column))

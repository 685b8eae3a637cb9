"""Whether a data set comes with images, found out before the first row is drawn.

Parquet: the footer counts, for every row group, the values of the images' column and the empty
ones among them. Only row groups that hold a value are read, to name the row; so are those of files
written without these counts. JSON lines: the first row; `decode_row` refuses the others as they
are drawn, since they are read whole anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.data.json_lines import lines_of, parse_line
from sluice.data.parquet_rows import open_parquet
from sluice.data.prompt_files import PARQUET_SUFFIX
from sluice.errors import DataError

ROWS_PER_READ = 16
"""Few, since a row with images is large."""


def first_row_with_images(paths: Iterable[str], column: str) -> str | None:
    """File and row (from 0) of the first row found to hold images; ``None``: none was found.

    Args:
        paths: Parquet files, or files of JSON lines, of which the first row is read.
        column: the images' column, ``data.image_key``.

    Raises:
        DataError: a file is damaged.
    """
    for path in paths:
        is_parquet = Path(path).suffix.lower() == PARQUET_SUFFIX
        row = _parquet_row(path, column) if is_parquet else _json_row(path, column)
        if row is not None:
            return f"{path}, row {row}"
    return None


def _json_row(path: str, column: str) -> int | None:
    first = next((line for line in lines_of(path) if line.strip()), None)
    return 0 if first is not None and parse_line(path, 0, first).get(column) else None


def _parquet_row(path: str, column: str) -> int | None:
    with open_parquet(path) as file:
        if column not in file.schema_arrow.names:
            return None
        start = 0
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            if _may_hold_values(group, column):
                row = _first_filled(path, file, index, column)
                if row is not None:
                    return start + row
            start += group.num_rows
    return None


def _may_hold_values(group: pq.RowGroupMetaData, column: str) -> bool:
    """Whether a leaf of `column` has a value that is not null, or its footer does not tell."""
    leaves = [group.column(i) for i in range(group.num_columns)]
    for leaf in leaves:
        if leaf.path_in_schema == column or leaf.path_in_schema.startswith(f"{column}."):
            statistics = leaf.statistics
            if statistics is None or not statistics.has_null_count:
                return True
            if statistics.null_count < leaf.num_values:
                return True
    return False


def _first_filled(path: str, file: pq.ParquetFile, group: int, column: str) -> int | None:
    row = 0
    try:
        for batch in file.iter_batches(
            ROWS_PER_READ, row_groups=[group], columns=[column], use_threads=False
        ):
            for images in batch.column(0):
                if images.as_py():
                    return row
                row += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read: {error}; restore the file") from error
    return None

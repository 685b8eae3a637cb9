"""Convert published data sets into Parquet files of verl's format, a few rows at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.data.image_sources import usable_images
from sluice.data.prompt_rows import GROUND_TRUTH
from sluice.data.published_rows import PUBLISHED_SETS, PublishedSet, Row, VerlRow, Wishes
from sluice.data.row_files import check_raw_file, digest_of, raw_rows
from sluice.errors import DataError

ROWS_PER_GROUP = 1024
"""Small row groups: the shuffle visits them in random order, and a reader holds one."""

MAX_PROBLEMS_KEPT = 5
_TEXT = pa.string()
_FIELDS: Mapping[str, pa.DataType] = {
    "data_source": _TEXT,
    "prompt": pa.list_(pa.struct([("role", _TEXT), ("content", _TEXT)])),
    "ability": _TEXT,
    "reward_model": pa.struct([("style", _TEXT), ("ground_truth", _TEXT)]),
    "images": pa.list_(pa.struct([("bytes", pa.binary()), ("path", _TEXT)])),
}


@dataclass(frozen=True, slots=True)
class Preparation:
    """The conversion to do.

    Attributes:
        name: a key of `PUBLISHED_SETS`.
        inputs: files as downloaded, read in order.
        output: the file to write; one that exists is replaced.
        wishes: split, data source, wording.
        limit: rows to write at most; ``None``: all.
        deduplicate: leave out rows that repeat the messages and ground truth of an earlier one.
        skip_bad: leave out rows that cannot be used, instead of ending.
    """

    name: str
    inputs: tuple[Path, ...]
    output: Path
    wishes: Wishes
    limit: int | None = None
    deduplicate: bool = False
    skip_bad: bool = False


@dataclass(slots=True)
class Prepared:
    """The result of a conversion, in rows."""

    num_read: int = 0
    num_written: int = 0
    num_duplicates: int = 0
    num_bad: int = 0
    problems: list[str] = field(default_factory=list)  # the first few of the bad ones


def prepare(order: Preparation, on_rows: Callable[[int], None] | None = None) -> Prepared:
    """Convert files. The output appears only when it is complete.

    Args:
        order: the conversion.
        on_rows: called with the number of rows read so far.

    Raises:
        DataError: a file or a row cannot be used; names file, row and column. Nothing is written.
    """
    published = PUBLISHED_SETS[order.name]
    for path in order.inputs:
        _check_names(order.name, published, path, check_raw_file(path))
    made = Prepared()
    rows = islice(_converted(order, published, made, on_rows), order.limit)
    part = order.output.with_name(f"{order.output.name}.part")
    order.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(part, rows, made)
        if not made.num_written:
            why = made.problems[0] if made.problems else "the files are empty"
            raise DataError(f"{', '.join(map(str, order.inputs))}: no usable row; {why}")
        os.replace(part, order.output)
    finally:
        part.unlink(missing_ok=True)
    return made


def _check_names(name: str, published: PublishedSet, path: Path, columns: Sequence[str]) -> None:
    if not any(set(wanted) <= set(columns) for wanted in published.columns):
        wanted = " or ".join(", ".join(names) for names in published.columns)
        raise DataError(
            f"{path}: columns {', '.join(columns)} are not those of {name} ({wanted}); give the "
            "file as it was published, or prepare it as 'jsonl' with --prompt-field and "
            "--answer-field"
        )


def _converted(
    order: Preparation,
    published: PublishedSet,
    made: Prepared,
    on_rows: Callable[[int], None] | None,
) -> Iterator[tuple[str, VerlRow]]:
    """Yield places and rows to write."""
    seen: set[int] = set()
    index = 0
    for row in chain.from_iterable(map(raw_rows, order.inputs)):
        made.num_read += 1
        if on_rows is not None:
            on_rows(made.num_read)
        try:
            converted = published.convert(row.values(), row.place, index, order.wishes)
        except DataError as error:
            if not order.skip_bad:
                raise DataError(f"{error}; repair the row or use --skip-bad") from error
            made.num_bad += 1
            made.problems += [str(error)] if len(made.problems) < MAX_PROBLEMS_KEPT else []
            continue
        if order.deduplicate:
            digest = _digest(converted)
            if digest in seen:
                made.num_duplicates += 1
                continue
            seen.add(digest)
        index += 1
        yield row.place, converted


def _digest(row: Row) -> int:
    turns, reward_model = row["prompt"], row["reward_model"]
    assert isinstance(turns, list)
    assert isinstance(reward_model, dict)
    roles, contents = ([turn[key] for turn in turns] for key in ("role", "content"))
    return digest_of(roles, contents, reward_model[GROUND_TRUTH], usable_images(row.get("images")))


def _write(path: Path, rows: Iterator[tuple[str, VerlRow]], made: Prepared) -> None:
    """Write row groups one by one. The first decides which columns and further fields there are."""
    writer: pq.ParquetWriter | None = None
    try:
        while chunk := list(islice(rows, ROWS_PER_GROUP)):
            schema = _schema(chunk) if writer is None else writer.schema
            for place, row in chunk:
                _check_fields(place, row, schema)
            table = _table(chunk, schema)
            writer = writer or pq.ParquetWriter(path, schema, compression="zstd")
            writer.write_table(table)
            made.num_written += len(chunk)
    finally:
        if writer is not None:
            writer.close()


def _schema(chunk: list[tuple[str, VerlRow]]) -> pa.Schema:
    with_images = any("images" in row for _, row in chunk)
    fields = [(name, kind) for name, kind in _FIELDS.items() if name != "images" or with_images]
    extra = _inferred([row["extra_info"] for _, row in chunk], chunk[0][0])
    return pa.schema([*fields, ("extra_info", extra)])


def _inferred(extra: list[object], place: str) -> pa.DataType:
    try:
        kind = pa.array(extra).type
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(
            f"{place} and those after it: fields of extra_info change their type ({error}); give "
            "each field one type, and numbers within 64 bits"
        ) from error
    parts = [kind.field(i) for i in range(kind.num_fields)]
    return pa.struct([(p.name, _TEXT if pa.types.is_null(p.type) else p.type) for p in parts])


def _check_fields(place: str, row: Row, schema: pa.Schema) -> None:
    """Refuse fields that the schema does not know, which Arrow would omit silently."""
    extra, kind = row["extra_info"], schema.field("extra_info").type
    known = {kind.field(i).name for i in range(kind.num_fields)}
    assert isinstance(extra, dict)
    unknown = [*(row.keys() - set(schema.names)), *(extra.keys() - known)]
    if unknown:
        raise DataError(
            f"{place}: field {', '.join(sorted(unknown))} is in none of the first "
            f"{ROWS_PER_GROUP} rows; give every row the same fields"
        )


def _table(chunk: list[tuple[str, VerlRow]], schema: pa.Schema) -> pa.Table:
    try:
        return pa.Table.from_pylist([row for _, row in chunk], schema=schema)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise DataError(
            f"{chunk[0][0]} and the {len(chunk) - 1} rows after it: extra_info changes its types "
            f"({error}); give each field one type, and numbers within 64 bits"
        ) from error

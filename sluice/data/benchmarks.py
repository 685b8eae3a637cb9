"""Find the files of benchmarks that are named on a command line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from sluice.data.prepare import PUBLISHED_SETS
from sluice.data.row_files import JSON_SUFFIXES, PARQUET_SUFFIX
from sluice.errors import DataError

SPLIT = "test"
_ANY_ROWS = "jsonl"
_SUFFIXES = (PARQUET_SUFFIX, *JSON_SUFFIXES)


def benchmark_files(benchmarks: str, folder: Path) -> Mapping[str, Path]:
    """Return the file of each benchmark by its name, in order.

    Args:
        benchmarks: names of published sets and paths of files, separated by commas. A set is the
            file ``<name>-test.parquet`` that ``sluice data prepare`` writes.
        folder: where prepared sets are.

    Raises:
        DataError: a name is unknown, a file is missing, or as `files_by_name`; says what to prepare
            and how.
    """
    files: list[tuple[str, Path]] = []
    for entry in filter(None, (part.strip() for part in benchmarks.split(","))):
        name, file = (
            (Path(entry).stem, Path(entry))
            if _is_path(entry)
            else (entry, _prepared_file(entry, folder))
        )
        if not file.is_file():
            raise DataError(f"benchmark {entry}: no file {file}; give the path of a data file")
        files.append((name, file))
    if not files:
        raise DataError(f"benchmark {benchmarks!r}: names none; give one or more, such as math-500")
    return files_by_name(files)


def files_by_name(files: Sequence[tuple[str, Path]]) -> Mapping[str, Path]:
    """Return files by their names; equal names get the folder's before them, in verl's layout
    (``gsm8k/test.parquet``, ``math/test.parquet``).

    Raises:
        DataError: a file is given twice, or two have equal names and folders of equal names.
    """
    counts = Counter(name for name, _ in files)
    by_name: dict[str, Path] = {}
    for label, file in files:
        name = label if counts[label] == 1 else f"{file.absolute().parent.name}-{label}"
        if file.resolve() in (present.resolve() for present in by_name.values()):
            raise DataError(f"benchmark {label}: {file} is given twice; leave one out")
        if name in by_name:
            raise DataError(
                f"benchmark {label}: {by_name[name]} has the name {name} already; rename {file} or "
                "its folder"
            )
        by_name[name] = file
    return by_name


def _is_path(text: str) -> bool:
    return text.endswith(_SUFFIXES) or "/" in text


def _prepared_file(name: str, folder: Path) -> Path:
    set_names = [set_name for set_name in PUBLISHED_SETS if set_name != _ANY_ROWS]
    if name not in set_names:
        raise DataError(
            f"benchmark {name}: is unknown; give one of {', '.join(set_names)}, or a "
            f"{', '.join(_SUFFIXES)} file in verl's format ('sluice data prepare' converts files)"
        )
    file = folder / f"{name}-{SPLIT}.parquet"
    if not file.is_file():
        raise DataError(
            f"benchmark {name}: no file {file}; download its {SPLIT} split as it was published and "
            f"prepare it: sluice data prepare {name} --split {SPLIT} --input DOWNLOADED --output "
            f"{folder}; or name another folder with --data-dir"
        )
    return file

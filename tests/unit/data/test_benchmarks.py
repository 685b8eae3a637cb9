"""Benchmarks by name: prepared files, or a message that says what to prepare and how."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.data.benchmarks import benchmark_files
from sluice.errors import DataError


def test_names_are_prepared_files_and_paths_are_files(tmp_path: Path) -> None:
    for name in ("math-500-test.parquet", "mine.jsonl"):
        (tmp_path / name).touch()
    mine = tmp_path / "mine.jsonl"
    assert benchmark_files(f"math-500, {mine}", tmp_path) == {
        "math-500": tmp_path / "math-500-test.parquet",
        "mine": mine,
    }


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            "math500",
            "benchmark math500: is unknown; give one of dapo-math-17k, aime-2024, math-500",
        ),
        ("aime-2024", "sluice data prepare aime-2024 --split test --input DOWNLOADED --output"),
        ("other.parquet", "benchmark other.parquet: no file other.parquet"),
        ("", "names none; give one or more"),
    ],
)
def test_what_is_not_there_is_named_with_the_remedy(
    tmp_path: Path, wanted: str, message: str
) -> None:
    with pytest.raises(DataError) as refusal:
        benchmark_files(wanted, tmp_path)
    assert message in str(refusal.value)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "rows.parquet", tmp_path / "b" / "rows.parquet"]
    for path in paths:
        path.parent.mkdir()
        path.touch()
    with pytest.raises(DataError, match="has the name rows already"):
        benchmark_files(",".join(map(str, paths)), tmp_path)

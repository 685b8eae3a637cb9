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


def touched(*files: Path) -> str:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return ",".join(map(str, files))


def test_files_of_one_name_have_their_folders_names_before_it(tmp_path: Path) -> None:
    files = [tmp_path / one / "test.parquet" for one in ("gsm8k", "math")]
    wanted = touched(*files, tmp_path / "math" / "hard.parquet")
    assert list(benchmark_files(wanted, tmp_path)) == ["gsm8k-test", "math-test", "hard"]


def test_files_and_folders_of_one_name_are_refused(tmp_path: Path) -> None:
    wanted = touched(*(tmp_path / one / "math" / "rows.parquet" for one in "ab"))
    with pytest.raises(DataError, match="has the name math-rows already; rename"):
        benchmark_files(wanted, tmp_path)


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    wanted = touched(tmp_path / "math-500-test.parquet")
    with pytest.raises(DataError, match=r"math-500-test\.parquet is given twice; leave one out"):
        benchmark_files(f"math-500,{wanted}", tmp_path)

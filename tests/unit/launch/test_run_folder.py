"""Which folders sluice may clear."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.run.quickstart import MARKER, mark_run_folder, remove_results
from sluice.errors import ConfigError

RESULTS = ("metrics.jsonl", "logs/*.log")


def write(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("mine", encoding="utf-8")
    return file


def test_a_new_folder_is_claimed_and_may_be_claimed_and_cleared_again(tmp_path: Path) -> None:
    run = tmp_path / "a" / "run"
    mark_run_folder(run)
    old, kept = (
        [write(run / name) for name in ("metrics.jsonl", "logs/x.log")],
        write(run / "notes"),
    )
    mark_run_folder(run)
    remove_results(run, RESULTS)
    assert not any(file.exists() for file in old)
    assert kept.exists()
    assert (run / MARKER).is_file()


def test_an_empty_folder_is_claimed(tmp_path: Path) -> None:
    mark_run_folder(tmp_path)
    assert (tmp_path / MARKER).is_file()


def test_a_folder_of_somebody_else_is_refused_with_the_remedy_and_stays_as_it_is(
    tmp_path: Path,
) -> None:
    theirs = write(tmp_path / "metrics.jsonl")
    with pytest.raises(
        ConfigError, match=r"holds 'metrics\.jsonl' and no \.sluice-run.*give a fold"
    ):
        mark_run_folder(tmp_path)
    with pytest.raises(ConfigError, match="nothing is deleted there"):
        remove_results(tmp_path, RESULTS)
    assert list(tmp_path.iterdir()) == [theirs]


def test_a_file_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a file"):
        mark_run_folder(write(tmp_path / "run"))


def test_a_link_among_the_results_is_deleted_and_not_what_it_leads_to(tmp_path: Path) -> None:
    outside, run = write(tmp_path / "outside"), tmp_path / "run"
    mark_run_folder(run)
    (run / "metrics.jsonl").symlink_to(outside)
    remove_results(run, RESULTS)
    assert outside.exists()
    assert not (run / "metrics.jsonl").is_symlink()

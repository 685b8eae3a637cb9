"""Where Prometheus finds a process: written while it lives, gone at an ordered end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sluice.telemetry.metrics import FOLDER, EventCounts, forget_targets, scrape_target

LABELS = {"service": "rollout", "name": "a/b", "run": "r"}


def test_the_file_is_what_file_sd_reads_and_goes_with_the_block(tmp_path: Path) -> None:
    with scrape_target(tmp_path, "a/b", "127.0.0.1:9", LABELS):
        (file,) = (tmp_path / FOLDER).iterdir()
        assert file.name == "a_b.json"
        reported = json.loads(file.read_text(encoding="utf-8"))
        assert reported == [{"targets": ["127.0.0.1:9"], "labels": LABELS}]
    assert list((tmp_path / FOLDER).iterdir()) == []


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (RuntimeError("broken"), True),
        (ExceptionGroup("a task", [RuntimeError("broken")]), True),
        (asyncio.CancelledError(), False),  # as the trainer's run, on SIGTERM
    ],
)
def test_the_file_of_a_process_that_failed_stays(
    tmp_path: Path, error: BaseException, stays: bool
) -> None:
    with pytest.raises(type(error)), scrape_target(tmp_path, "a", "127.0.0.1:9", LABELS):
        raise error
    assert (tmp_path / FOLDER / "a.json").exists() is stays


def test_a_file_that_a_later_process_wrote_stays(tmp_path: Path) -> None:
    with (
        scrape_target(tmp_path, "a", "127.0.0.1:9", {}),
        scrape_target(tmp_path, "a", "127.0.0.1:10", {}),
    ):
        pass
    with scrape_target(tmp_path, "a", "127.0.0.1:9", {}):
        file = tmp_path / FOLDER / "a.json"
        file.write_text("another", encoding="utf-8")
    assert file.read_text(encoding="utf-8") == "another"


def test_a_run_that_begins_forgets_the_targets_of_an_earlier_one(tmp_path: Path) -> None:
    forget_targets(tmp_path)
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "killed.json").write_text("[]", encoding="utf-8")
    forget_targets(tmp_path)
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_tally_counts_by_kind() -> None:
    tally = EventCounts()
    tally.add("a", "b")
    tally.add("a", "b")
    tally.add("c", "d")
    assert tally.counts() == {("a", "b"): 2, ("c", "d"): 1}

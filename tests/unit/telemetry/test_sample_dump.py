"""Samples are dumped as a verl user expects to read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.telemetry.samples import DumpedSample, write_dump


def test_a_row_has_verls_columns_first_and_the_scorers_after_them(tmp_path: Path) -> None:
    samples = [
        DumpedSample("1 + 1 = ?", "2 ✓\n", "2", 1.0, {"acc": True, "pred": "2"}),
        DumpedSample("1 + 2 = ?", "2", "3", -1.0, {"acc": False, "pred": None}),
    ]
    file = write_dump(tmp_path / "rollouts", samples, 7)
    assert file == tmp_path / "rollouts" / "7.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [list(row) for row in rows] == [
        ["input", "output", "gts", "score", "step", "acc", "pred"]
    ] * 2
    assert rows[0] == {
        "input": "1 + 1 = ?",
        "output": "2 ✓\n",
        "gts": "2",
        "score": 1.0,
        "step": 7,
        "acc": True,
        "pred": "2",
    }
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["7.jsonl"]


def test_a_step_dumped_again_replaces_the_file(tmp_path: Path) -> None:
    write_dump(tmp_path, [DumpedSample("a", "b", None, 0.0)] * 3, 1)
    write_dump(tmp_path, [DumpedSample("a", "b", None, 0.0)], 1)
    assert len((tmp_path / "1.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_every_reader_can_parse_what_is_no_number(tmp_path: Path) -> None:
    extras = {"a": float("nan"), "nested": {"b": [float("inf"), 1.0]}, "path": Path("x")}
    file = write_dump(tmp_path, [DumpedSample("i", "o", "g", float("nan"), extras)], 1)
    row = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert row["score"] is None
    assert row["a"] is None
    assert row["nested"] == {"b": [None, 1.0]}
    assert row["path"] == "x"


def test_an_extra_named_like_a_column_of_the_dump_does_not_replace_it(tmp_path: Path) -> None:
    file = write_dump(tmp_path, [DumpedSample("i", "o", "g", 0.5, {"score": 9, "step": 9})], 3)
    row = json.loads(file.read_text(encoding="utf-8"))
    assert (row["score"], row["step"]) == (0.5, 3)

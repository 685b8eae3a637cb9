"""Recovery after kills misses its bar by kind, also where it was not seen."""

from __future__ import annotations

from unittest import mock

from benchmarks.devices import recovery
from benchmarks.parts import missed

BACK = {
    "replica": {"p50": 2.0, "p95": 9.0, "not_seen": 0},
    "reward": {"p50": 2.0, "p95": 11.0, "not_seen": 0},
    "trainer": {"p50": 2.0, "p95": 3.0, "not_seen": 1},
}


def test_a_kind_that_is_late_or_was_not_seen_to_recover_misses_its_bar() -> None:
    with mock.patch.object(recovery, "last_json", return_value={"back_s": BACK}):
        report = recovery.measure()
    assert report == {"recovery_s": {"replica": 9.0, "reward": 11.0, "trainer": None}}
    assert missed(report, recovery.MOST) == ["recovery_s.reward", "recovery_s.trainer"]
    with mock.patch.object(recovery, "last_json", return_value={"back_s": {}}):
        assert missed(recovery.measure(), recovery.MOST) == list(recovery.MOST)


def test_a_part_that_did_not_run_misses_nothing() -> None:
    assert missed({"recovery_s": None}, recovery.MOST) == []

"""The bars of a benchmark of several parts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

import pytest

from benchmarks.devices.__main__ import KEYS, KEYS_OF, PARTS
from benchmarks.parts import missed, run_parts


def test_each_of_several_figures_of_a_key_has_its_own_bar() -> None:
    report = {"speedup": {"one": 1.5, "other": 0.9}}
    assert missed(report, {}, {"speedup.one": 1.2, "speedup.other": 0.98}) == ["speedup.other"]


def test_a_part_that_fails_ends_no_other_and_its_keys_say_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(_: argparse.Namespace) -> Mapping[str, object]:
        raise SystemExit("ended with code 3")

    parts = {"one": broken, "other": lambda _: {"seconds": 2.0}}
    parsed = argparse.Namespace(parts=list(parts))
    status = run_parts(parsed, parts, ("ratio", "seconds"), lambda _: [], {"one": ("ratio",)})
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 1
    assert report["seconds"] == 2.0
    assert report["ratio"] == report["failed"]["one"] == "failed: SystemExit: ended with code 3"


def test_every_key_of_the_devices_has_a_part_of_its_own() -> None:
    assert KEYS_OF.keys() == PARTS.keys()
    assert len(set(KEYS)) == len(KEYS)

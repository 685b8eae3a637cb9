"""The bars of a benchmark of several parts."""

from __future__ import annotations

from benchmarks.parts import missed


def test_each_of_several_figures_of_a_key_has_its_own_bar() -> None:
    report = {"speedup": {"one": 1.5, "other": 0.9}}
    assert missed(report, {}, {"speedup.one": 1.2, "speedup.other": 0.98}) == ["speedup.other"]

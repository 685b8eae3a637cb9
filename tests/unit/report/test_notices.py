"""Notices about a step: a filter that drops nearly everything."""

from __future__ import annotations

import pytest

from sluice.report.progress import groups_since, low_yield_notice


def step(kept: float, right: float, wrong: float) -> dict[str, float]:
    return {
        "train/groups_kept": kept,
        "train/groups_all_right": right,
        "train/groups_all_wrong": wrong,
    }


@pytest.mark.parametrize(
    ("kept", "right", "wrong", "notice"),
    [
        (
            16,
            1947,
            0,
            "only 0.8% of the groups are mixed (99% all right, 0% all wrong): the data"
            " has become too easy",
        ),
        (2, 10, 300, "the data is too hard"),
        (2, 100, 100, "most of the sampled tokens train nothing"),
    ],
)
def test_a_yield_below_five_per_cent_is_noticed_with_its_reason(
    kept: float, right: float, wrong: float, notice: str
) -> None:
    assert notice in low_yield_notice(step(kept, right, wrong))


@pytest.mark.parametrize("metrics", [{}, step(64, 200, 100), step(1, 30, 20)])
def test_a_usual_yield_or_a_handful_of_groups_is_none(metrics: dict[str, float]) -> None:
    assert low_yield_notice(metrics) == ""


def test_a_step_that_finds_no_mixed_group_is_noticed_before_it_ends() -> None:
    before = {"submitted": 500, "filtered_all_right": 100}
    now = {"submitted": 900, "filtered_all_right": 400}
    found = groups_since(before, now, kept=2)
    assert low_yield_notice(found).startswith("only 0.7% of the groups are mixed (99% all right")

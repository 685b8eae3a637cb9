"""When one trainer rank and four have learned alike."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.quickstart.accuracy_plot import accuracy_plot
from benchmarks.quickstart.parallel import compared
from sluice.report.run_record import AccuracyPoint


def curve(*accuracies: float) -> list[AccuracyPoint]:
    return [AccuracyPoint(4 * index, value) for index, value in enumerate(accuracies)]


@pytest.mark.parametrize(
    ("one", "four", "lost", "points", "passed"),
    [
        ((0.3, 0.8, 0.95), (0.3, 0.7, 0.94), 0, 1.0, True),
        ((0.3, 0.8, 0.95), (0.3, 0.7, 0.92), 0, 3.0, False),
        ((0.3, 0.8, 0.92), (0.3, 0.7, 0.95), 0, 3.0, False),
        ((0.3, 0.31), (0.3, 0.3), 0, 1.0, False),
        ((0.3, 0.9), (0.3, 0.9), 1, 0.0, False),
    ],
)
def test_both_must_learn_and_end_within_two_points_without_losing_a_prompt(
    one: tuple[float, ...], four: tuple[float, ...], lost: int, points: float, passed: bool
) -> None:
    found = compared(curve(*one), curve(*four), lost)
    assert found["difference_points"] == points
    assert found["passed"] is passed


def test_the_plot_shows_every_validation_of_each_curve() -> None:
    plot = ElementTree.fromstring(
        accuracy_plot({"one < all": curve(0.0, 1.0), "four": curve(0.0, 0.5)})
    )
    name = "{http://www.w3.org/2000/svg}"
    lines = [line.get("points", "").split() for line in plot.iter(f"{name}polyline")]
    assert [len(line) for line in lines] == [2, 2]
    assert lines[0][0] == lines[1][0]
    assert lines[0][1] != lines[1][1]
    texts = [text.text for text in plot.iter(f"{name}text")]
    assert "one < all: 1.000" in texts

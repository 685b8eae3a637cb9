"""Charts of estimates with their standard errors, as pictures inside a page (SVG)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.evaluation.markup import Markup, element, joined
from sluice.evaluation.statistics import Estimate

STYLES = ("ink", "orange dashed", "cyan", "purple dashed", "olive", "grey dashed")
"""Evaluations differ in colour and in dashes; classes of the dashboard's style sheet."""
_WIDTH, _HEIGHT = 600, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 34
_NUM_TICKS, _MOST_MARKS = 4, 24
_RADIUS, _CAP = 4, 5
_LEAST_SPAN = 0.01  # of the vertical axis


@dataclass(frozen=True, slots=True)
class Series:
    """One line: estimates by their place on the horizontal axis, and its name and style."""

    name: str
    style: str
    points: Mapping[float, Estimate]


def estimates_figure(
    caption: str, series: Sequence[Series], marks: Mapping[float, str], axis: str
) -> Markup:
    """Return a figure of lines with error bars of one standard error.

    Args:
        caption: what the values are.
        series: lines; each point is its estimate.
        marks: texts on the horizontal axis, by place.
        axis: what they are.
    """
    points = [(place, one) for line in series for place, one in line.points.items()]
    if not points:
        return joined()
    scale = _Scale.of([place for place, _ in points], [one for _, one in points])
    values = scale.ticks()
    shapes = [
        *(_grid_line(scale, value) for value in values),
        *_mark_texts(scale, marks),
        element(
            "text",
            axis,
            class_="axis",
            x=(_LEFT + _WIDTH - _RIGHT) / 2,
            y=_HEIGHT - 3,
            text_anchor="middle",
        ),
        *(_line(scale, line) for line in series),
    ]
    summary = f"{caption} of {len(series)} evaluations; the tables have all values"
    picture = element(
        "svg", *shapes, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=summary
    )
    return element(
        "figure", element("figcaption", caption), picture, _legend(series), class_="chart"
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    """From values to places in the picture."""

    left: float
    right: float
    low: float
    high: float

    @classmethod
    def of(cls, places: Sequence[float], estimates: Sequence[Estimate]) -> _Scale:
        bounds = [
            one.value + sign * (one.standard_error or 0.0) for one in estimates for sign in (-1, 1)
        ]
        step = _step(max(max(bounds) - min(bounds), _LEAST_SPAN))
        low, high = math.floor(min(bounds) / step), math.ceil(max(bounds) / step)
        return cls(min(places), max(places), low * step, max(high, low + 1) * step)

    def ticks(self) -> list[float]:
        step = _step(self.high - self.low)
        first, last = round(self.low / step), round(self.high / step)
        return [number * step for number in range(first, last + 1)]

    def x(self, place: float) -> float:
        share = 0.5 if self.left == self.right else (place - self.left) / (self.right - self.left)
        inner = 24  # no mark sticks out at the sides
        return round(_LEFT + inner + share * (_WIDTH - _LEFT - _RIGHT - 2 * inner), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that some ticks cover `span`."""
    rough = span / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def _grid_line(scale: _Scale, value: float) -> Markup:
    y = scale.y(value)
    return joined(
        element("line", class_="grid", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y),
        element("text", f"{value:.3g}", class_="axis", x=_LEFT - 6, y=y + 4, text_anchor="end"),
    )


def _mark_texts(scale: _Scale, marks: Mapping[float, str]) -> list[Markup]:
    every = math.ceil(len(marks) / _MOST_MARKS) or 1
    return [
        element(
            "text",
            text,
            class_="axis",
            x=scale.x(place),
            y=_HEIGHT - _BOTTOM + 16,
            text_anchor="middle",
        )
        for place, text in list(marks.items())[::every]
    ]


def _line(scale: _Scale, series: Series) -> Markup:
    places = sorted(series.points.items())
    path = " ".join(f"{scale.x(place)},{scale.y(one.value)}" for place, one in places)
    return element(
        "g",
        element("polyline", points=path, class_="curve"),
        *(_point(scale, place, one) for place, one in places),
        class_=series.style,
    )


def _point(scale: _Scale, place: float, one: Estimate) -> Markup:
    x, y = scale.x(place), scale.y(one.value)
    parts = [element("title", estimate_text(one))]
    if one.standard_error:
        low, high = (scale.y(one.value + sign * one.standard_error) for sign in (-1, 1))
        ends = f"M{x} {low}V{high}M{x - _CAP} {low}h{2 * _CAP}M{x - _CAP} {high}h{2 * _CAP}"
        parts.append(element("path", d=ends, class_="error-bar"))
    parts.append(element("circle", cx=x, cy=y, r=_RADIUS, class_="point"))
    return element("g", *parts)


def _legend(series: Sequence[Series]) -> Markup:
    if len(series) == 1:
        return joined()
    return element("ul", *map(_legend_entry, series), class_="legend")


def _legend_entry(series: Series) -> Markup:
    sample = element("line", x1=0, x2=28, y1=7, y2=7, class_="curve")
    return element(
        "li",
        element("svg", sample, viewBox="0 0 28 14", class_=series.style, aria_hidden="true"),
        series.name,
    )


def estimate_text(one: Estimate | None, *, signed: bool = False) -> str:
    """Return a value with its standard error, as people read them; ``-`` for none."""
    if one is None:
        return "-"
    value = f"{one.value:{'+' if signed else ''}.3f}"
    return value if one.standard_error is None else f"{value} ± {one.standard_error:.3f}"

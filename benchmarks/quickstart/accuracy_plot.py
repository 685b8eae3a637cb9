"""Draw held-out accuracy over steps as an SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from sluice.report.run_record import AccuracyPoint

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 16, 16, 44
_COLOURS = ("#1f6feb", "#d9480f", "#2b8a3e", "#862e9c")
_LEGEND_PX = 18


def accuracy_plot(curves: Mapping[str, Sequence[AccuracyPoint]]) -> str:
    """Return an SVG of up to four curves with a legend; accuracy from 0 to 1, steps from 0."""
    last = max(curve[-1].step for curve in curves.values())

    def x(step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / last, 1)

    def y(accuracy: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1.0 - accuracy), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#333">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts += [
            f'<path d="M{x(0)} {y(tick)}H{x(last)}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{tick:.1f}</text>',
        ]
    for point in next(iter(curves.values())):
        parts.append(
            f'<text x="{x(point.step)}" y="{y(0) + 18}" text-anchor="middle">{point.step}</text>'
        )
    parts.append(
        f'<text x="{(x(0) + x(last)) / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        "held-out accuracy after a step</text>"
    )
    for index, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[index]
        line = " ".join(f"{x(point.step)},{y(point.accuracy)}" for point in curve)
        below = y(0) - 16 - _LEGEND_PX * (len(curves) - 1 - index)
        label = f"{name}: {curve[-1].accuracy:.3f}"
        parts += [
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
            *(
                f'<circle cx="{x(point.step)}" cy="{y(point.accuracy)}" r="3" fill="{colour}"/>'
                for point in curve
            ),
            f'<path d="M{x(last) - 250} {below - 4}h20" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{x(last) - 222}" y="{below}">{escape(label)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"

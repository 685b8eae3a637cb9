"""A small matplotlib figure as SVG text that can stand inside a page."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sluice.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (5.6, 3.0)
_STYLE: dict[Any, object] = {
    "svg.fonttype": "none",  # text stays text: smaller, and read out by screen readers
    "svg.hashsalt": "sluice",  # the same run gives the same bytes
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
}


def figure_svg(draw: Callable[[Axes], None]) -> str:
    """Draws on one pair of axes.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("reports need matplotlib; install sluice[train]") from error
    with rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]

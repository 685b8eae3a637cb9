"""The rows of the table of metrics as patterns of names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

from sluice.telemetry.metric_names import Metric, metrics

ROWS: tuple[Metric, ...] = tuple(row for section in metrics().values() for row in section)


def expanded(name: str) -> Iterator[str]:
    """Every name that ``{a,b}`` stands for; ``<x>`` stays."""
    parts = re.split(r"\{([^}]*)\}", name)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ("".join(chosen) for chosen in itertools.product(*choices))


NAMES: dict[str, Metric] = {name: row for row in ROWS for name in expanded(row.name)}
_PATTERN = re.compile(
    "|".join(
        re.sub(r"<\w+>", ".+", re.escape(name)) for name, row in NAMES.items() if not row.absent
    )
)


def without_row(names: Iterable[str]) -> list[str]:
    """Names that no row lets anything emit."""
    return sorted(name for name in names if not _PATTERN.fullmatch(name))

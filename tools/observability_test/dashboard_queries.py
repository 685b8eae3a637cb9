"""What the dashboards ask, and what of it may find nothing in a run in which nothing fails."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["ONLY_AFTER_A_FAILURE", "ONLY_WITH_TLS", "DashboardQueries", "shipped_queries"]

ONLY_AFTER_A_FAILURE = frozenset({"sluice_rpc_errors_total", "sluice_quota_refusals_total"})
"""Counters with labels that the first failure names: until then they have no series."""
ONLY_WITH_TLS = frozenset({"sluice_certificate_end_seconds"})
"""What a run without certificates has nothing to tell of."""

Answer = Sequence[tuple[Mapping[str, str], float]]


def shipped_queries(folder: Path, run: str) -> list[str]:
    """Every query of every dashboard in a folder, asked of one run."""
    return [
        query.replace("$run", run)
        for file in sorted(folder.glob("*.json"))
        for query in _expressions(json.loads(file.read_text("utf-8")))
    ]


class DashboardQueries:
    """Queries that are asked until each has found something.

    Args:
        queries: of the dashboards.
        ask: one of them.

    Attributes:
        empty: those that found nothing so far.
    """

    def __init__(self, queries: Sequence[str], ask: Callable[[str], Answer]) -> None:
        self._ask = ask
        self.empty = list(queries)

    def unanswered(self) -> list[str]:
        """Asks the empty ones; those still empty that a run in which nothing fails answers."""
        self.empty = [query for query in self.empty if not _has_number(self._ask(query))]
        return [query for query in self.empty if not _may_be_empty(query)]


def _has_number(answer: Answer) -> bool:
    return any(not math.isnan(value) for _, value in answer)


def _may_be_empty(query: str) -> bool:
    return any(metric in query for metric in ONLY_AFTER_A_FAILURE)


def _expressions(dashboard: Any) -> Iterator[str]:  # noqa: ANN401  JSON
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))

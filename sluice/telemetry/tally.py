"""Events, counted by what they are."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

__all__ = ["EventCounts"]


class EventCounts:
    """Counts since the process's start; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *labels: str, count: int = 1) -> None:
        """So many more events of this kind; there must be few kinds in all."""
        with self._lock:
            self._counts[labels] += count

    def counts(self) -> Mapping[tuple[str, ...], int]:
        """Events so far, by kind."""
        with self._lock:
            return dict(self._counts)

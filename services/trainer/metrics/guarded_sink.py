"""Keeps a sink that fails (disk full, network gone) from ending the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from services.trainer.metrics.generations import Generation

logger = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Takes metrics and keeps or shows them."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers by metric name."""
        ...

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        """Validation samples of the version after `step`, for reading along."""
        ...

    def close(self) -> None:
        """Everything written is on disk afterwards."""
        ...


class GuardedSink:
    """Passes on to `sink`; the first failure is a warning, later ones are counted.

    Args:
        name: the logger's, for the warning.
        sink: may raise anything.
    """

    def __init__(self, name: str, sink: MetricSink) -> None:
        self._name, self._sink = name, sink
        self.num_dropped = 0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes a step on."""
        self._attempt(lambda: self._sink.write(step, metrics))

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        """Passes samples on."""
        self._attempt(lambda: self._sink.write_generations(step, generations))

    def close(self) -> None:
        """Closes, and says how much was lost."""
        self._attempt(self._sink.close)
        if self.num_dropped:
            logger.warning("logger %s: %d writes failed", self._name, self.num_dropped)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the boundary to vendors: a curve is no run
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning(
                    "logger %s failed and the run goes on without what it drops: %s: %s",
                    self._name,
                    type(error).__name__,
                    error,
                )

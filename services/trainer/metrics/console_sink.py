"""A log line a step."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from services.trainer.metrics.generations import Generation

if TYPE_CHECKING:
    from services.trainer.metrics.sinks import SinkTarget

logger = logging.getLogger(__name__)


class ConsoleSink:
    """verl's form: ``step:N - key:value - ...``."""

    def __init__(self, target: SinkTarget | None = None) -> None:
        del target  # the same for every run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the line."""
        parts = [f"{name}:{value:.6g}" for name, value in sorted(metrics.items())]
        logger.info("%s", " - ".join([f"step:{step}", *parts]))

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        """Logs a line a sample, with line ends written as ``\\n``."""
        for one in generations:
            logger.info(
                "step:%d - input:%r - output:%r - score:%g", step, one.input, one.output, one.score
            )

    def close(self) -> None:
        """Nothing is held."""

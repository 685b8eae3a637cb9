"""Metric sinks: JSONL, TensorBoard, console. Each takes one step's numbers at a time."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from sluice.errors import ConfigError

logger = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Takes metrics and keeps or shows them."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers by metric name."""
        ...

    def close(self) -> None:
        """Everything written is on disk afterwards."""
        ...


class JsonlSink:
    """One JSON object a line, flushed at once; not-a-number becomes null."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line."""
        finite = {k: (v if math.isfinite(v) else None) for k, v in sorted(metrics.items())}
        self._file.write(json.dumps({"step": step, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoardSink:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "trainer.logger: tensorboard is not installed; install sluice[train] or remove it"
            ) from error
        self._writer = SummaryWriter(log_dir=str(folder))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes."""
        self._writer.close()


class ConsoleSink:
    """One log line a step, in verl's form: ``step:N - key:value - ...``."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the line."""
        parts = [f"{name}:{value:.6g}" for name, value in sorted(metrics.items())]
        logger.info("step:%d - %s", step, " - ".join(parts))

    def close(self) -> None:
        """Nothing is held."""


def open_sinks(names: Sequence[str], run_dir: Path) -> tuple[MetricSink, ...]:
    """The sinks that `trainer.logger` names, writing below `run_dir`.

    Raises:
        ConfigError: a sink's package is not installed.
    """
    builders: Mapping[str, Callable[[], MetricSink]] = {
        "console": ConsoleSink,
        "jsonl": lambda: JsonlSink(run_dir / "metrics.jsonl"),
        "tensorboard": lambda: TensorBoardSink(run_dir / "tensorboard"),
    }
    return tuple(builders[name]() for name in dict.fromkeys(names))

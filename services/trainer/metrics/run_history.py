"""The last rows of a run, and how long its steps took, for scrapes of the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from services.trainer.metrics.generations import Generation
from sluice.telemetry.histogram import Histogram
from sluice.telemetry.instrument import Reading
from sluice.telemetry.instruments import trainer

__all__ = ["RunHistory"]

_STEP, _WAIT, _SKIPPED = "timing_s/step", "timing_s/wait_batch", "actor/skipped_updates"
_VALIDATION = "val-core/"


class RunHistory:
    """A sink of metrics that keeps the newest."""

    def __init__(self) -> None:
        self._last_step: Mapping[str, float] = {}
        self._scores: dict[tuple[str, str, str], float] = {}
        self._step_s = Histogram(trainer.STEP_SECONDS.bounds)
        self._wait_s = Histogram(trainer.BATCH_WAIT.bounds)
        self._num_skipped = 0.0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row, of a step or of a validation."""
        if "training/global_step" in metrics:
            self._last_step = metrics
            self._step_s.observe(metrics.get(_STEP, 0.0))
            self._wait_s.observe(metrics.get(_WAIT, 0.0))
            self._num_skipped += metrics.get(_SKIPPED, 0.0)
        else:
            self._scores.update(_scores_of(metrics))

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        """Texts are no metrics."""

    def close(self) -> None:
        """Nothing is open."""

    def readings(self) -> Iterator[Reading]:
        """What came so far."""
        yield trainer.STEP_SECONDS.at(self._step_s.distribution())
        yield trainer.BATCH_WAIT.at(self._wait_s.distribution())
        yield trainer.SKIPPED_UPDATES.at(self._num_skipped)
        for name, instrument in trainer.BY_ROW.items():
            if (value := self._last_step.get(name)) is not None:
                yield instrument.at(value)
        for labels, score in self._scores.items():
            yield trainer.VALIDATION_SCORE.at(score, *labels)


def _scores_of(metrics: Mapping[str, float]) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Of ``val-core/<source>/<variable>/<statistic>``; a source may hold slashes."""
    for name, value in metrics.items():
        if name.startswith(_VALIDATION):
            source, variable, statistic = name.removeprefix(_VALIDATION).rsplit("/", 2)
            yield (source, variable, statistic), value

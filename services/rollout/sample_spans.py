"""A span for every sample of a call, from the call's beginning to the sample's end."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from sluice.telemetry.span_names import Key, SpanName
from sluice.telemetry.tracing import TRACER, Moment
from sluice.types import Rollout


class SampleSpans:
    """The samples of the present call that have not ended; nothing where it is not recorded.

    As a context manager it ends them with the call: those that are left have been broken off.

    Args:
        indexes: the samples that were asked for.
    """

    def __init__(self, indexes: Iterable[int]) -> None:
        current = TRACER.current()
        self._parent = current if current is not None and current.is_sampled else None
        self._open = set(indexes) if self._parent else set[int]()
        self._began = Moment.now()

    def ended(self, rollouts: Iterable[Rollout]) -> None:
        """These samples have ended."""
        if self._parent is None:
            return
        for rollout in rollouts:
            if rollout.sample_index in self._open:
                self._open.remove(rollout.sample_index)
                TRACER.past(self._parent, SpanName.SAMPLE, self._began, _attributes(rollout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._parent is None:
            return
        for index in sorted(self._open):
            asked: dict[str, int] = {Key.SAMPLE_INDEX: index}
            TRACER.past(self._parent, SpanName.SAMPLE, self._began, asked, "broken off")
        self._open.clear()


def _attributes(rollout: Rollout) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        Key.SAMPLE_INDEX: rollout.sample_index,
        Key.NUM_TOKENS: rollout.num_tokens,
        Key.FINISH_REASON: rollout.finish_reason.value,
    }
    if rollout.version_spans:
        found[Key.VERSION] = rollout.version_spans[-1].version
        if rollout.version_spans[0].version != rollout.version_spans[-1].version:
            found[Key.OLDEST_VERSION] = rollout.version_spans[0].version
    return found

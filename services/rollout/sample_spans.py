"""A span for every sample of a call, from the call's beginning to the sample's end."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from sluice.telemetry.span_names import Key, SpanName
from sluice.telemetry.tracing import TRACER, Span
from sluice.types import Rollout


class SampleSpans:
    """The samples of the present call that have not ended; nothing where it is not recorded.

    As a context manager it ends them with the call: those that are left have been broken off.

    Args:
        indexes: the samples that were asked for.
    """

    def __init__(self, indexes: Iterable[int]) -> None:
        current = TRACER.current()
        is_recorded = current is not None and current.is_sampled
        self._open: dict[int, Span] = (
            {index: TRACER.stage(SpanName.SAMPLE, {Key.SAMPLE_INDEX: index}) for index in indexes}
            if is_recorded
            else {}
        )

    def ended(self, rollouts: Iterable[Rollout]) -> None:
        """These samples have ended."""
        if not self._open:
            return
        for rollout in rollouts:
            span = self._open.pop(rollout.sample_index, None)
            if span is not None:
                span.set(_attributes(rollout))
                span.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for span in self._open.values():
            span.fail("broken off")
            span.end()
        self._open.clear()


def _attributes(rollout: Rollout) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        Key.NUM_TOKENS: rollout.num_tokens,
        Key.FINISH_REASON: rollout.finish_reason.value,
    }
    if rollout.version_spans:
        found[Key.VERSION] = rollout.version_spans[-1].version
        if rollout.version_spans[0].version != rollout.version_spans[-1].version:
            found[Key.OLDEST_VERSION] = rollout.version_spans[0].version
    return found

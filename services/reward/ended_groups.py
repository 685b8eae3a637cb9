"""Ended groups with their texts, written to the run's archive for readers.

Texts are encoded off the event loop. Groups wait for the disk in a queue that is bounded: of more
than `MOST_WAITING` the oldest are left out. A folder that cannot be written never stops a run: it
is told once, and nothing is lost but the archive.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from sluice.telemetry.sample_archive import SampleArchive
from sluice.telemetry.sampled_group import sampled_group
from sluice.types import GradedGroup, Prompt, PromptEnd

logger = logging.getLogger(__name__)

MOST_WAITING = 1024


@dataclass(frozen=True, slots=True)
class _Ended:
    prompt: Prompt
    end: PromptEnd
    graded: GradedGroup | None
    version: int
    step: int | None
    ended_at: float
    replicas: tuple[str, ...]


class EndedGroups:
    """Takes groups in the event loop and writes them in another thread.

    Args:
        archive: where they go.
        most_chars: of each prompt and response.
        clock: seconds since 1970.
    """

    def __init__(
        self, archive: SampleArchive, most_chars: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._archive, self._most_chars, self._clock = archive, most_chars, clock
        self._waiting: deque[_Ended] = deque(maxlen=MOST_WAITING)
        self._is_broken = False

    def add(
        self,
        prompt: Prompt,
        end: PromptEnd,
        graded: GradedGroup | None,
        *,
        version: int,
        step: int | None,
        replicas: Sequence[str],
    ) -> None:
        """A group has ended; its texts are looked at by `write` only."""
        if not self._is_broken:
            ended = (prompt, end, graded, version, step, self._clock(), tuple(replicas))
            self._waiting.append(_Ended(*ended))

    def write(self) -> None:
        """Write what waits; one thread at a time."""
        lines = []
        while self._waiting:
            lines.append(self._line(self._waiting.popleft()))
        try:
            self._archive.append(lines)
        except OSError as error:
            self._is_broken = True
            self._waiting.clear()
            logger.warning("samples are no longer kept: %s; free the disk or the folder", error)

    def _line(self, one: _Ended) -> bytes:
        group = sampled_group(
            one.prompt,
            one.end,
            one.graded,
            version=one.version,
            step=one.step,
            ended_at=one.ended_at,
            replicas=list(one.replicas),
            most_chars=self._most_chars,
        )
        return msgspec.json.encode(group)

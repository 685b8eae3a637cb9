"""Ended groups with their texts, written to the run's archive for readers.

What the archive keeps of a group waits for the disk in a queue that is bounded in bytes: beyond it
the oldest are left out, which is counted and told. It is encoded and written off the event loop.
Nothing that goes wrong here stops a run: it is told once, and nothing is lost but the archive.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from sluice.telemetry.sample_archive import SampleArchive
from sluice.telemetry.sampled_group import SampledGroup, sampled_group
from sluice.types import GradedGroup, Prompt, PromptEnd

logger = logging.getLogger(__name__)

MOST_WAITING_BYTES = 128 << 20
_DEFECT = "samples are no longer kept: a defect of their archive"


class EndedGroups:
    """Takes groups in the event loop and writes them in another thread.

    A batch ends all its groups at once, before any of them can be written: the bound is on bytes
    of text, which are those of the batch in memory unless they are shortened.

    Args:
        archive: where they go.
        most_chars: of each prompt and response.
        clock: seconds since 1970.
        most_bytes: of texts that wait; the newest group waits whatever its size.
    """

    def __init__(
        self,
        archive: SampleArchive,
        most_chars: int,
        clock: Callable[[], float] = time.time,
        *,
        most_bytes: int = MOST_WAITING_BYTES,
    ) -> None:
        self._archive, self._most_chars, self._clock = archive, most_chars, clock
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[SampledGroup, int]] = deque()
        self._num_bytes = self._num_left_out = 0
        self._queue_lock, self._write_lock = threading.Lock(), threading.Lock()
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
        """A group has ended; tokens, log-probs and images of it are not held."""
        if self._is_broken:
            return
        try:
            group = sampled_group(
                prompt,
                end,
                graded,
                version=version,
                step=step,
                ended_at=self._clock(),
                replicas=list(replicas),
                most_chars=self._most_chars,
            )
        except Exception:
            logger.exception(_DEFECT)
            self._give_up()
            return
        with self._queue_lock:
            self._enqueue(group)

    def write(self) -> None:
        """Write what waits; a second thread waits for the first."""
        with self._write_lock:
            if self._is_broken:
                return
            try:
                self._archive.append(self._lines())
            except OSError as error:
                self._give_up()
                logger.warning("samples are no longer kept: %s; free the disk or the folder", error)
            except Exception:
                logger.exception(_DEFECT)
                self._give_up()
            self._report_omitted()

    def drop(self) -> int:
        """Forgets what waits; how many groups those were, with the ones left out before."""
        with self._queue_lock:
            num = len(self._waiting) + self._num_left_out
            self._waiting.clear()
            self._num_bytes = self._num_left_out = 0
        return num

    def _give_up(self) -> None:
        self._is_broken = True
        self.drop()

    def _enqueue(self, group: SampledGroup) -> None:
        size = _text_bytes(group)
        self._waiting.append((group, size))
        self._num_bytes += size
        while self._num_bytes > self._most_bytes and len(self._waiting) > 1:
            self._num_bytes -= self._waiting.popleft()[1]
            self._num_left_out += 1

    def _next(self) -> SampledGroup | None:
        with self._queue_lock:
            if not self._waiting:
                return None
            group, size = self._waiting.popleft()
            self._num_bytes -= size
            return group

    def _lines(self) -> Iterator[bytes]:
        while (group := self._next()) is not None:
            try:
                line = msgspec.json.encode(group)
            except (ValueError, TypeError, msgspec.MsgspecError) as error:  # as text not Unicode
                logger.warning("group %s is not kept among the samples: %s", group.prompt_id, error)
                continue
            yield line

    def _report_omitted(self) -> None:
        with self._queue_lock:
            num, self._num_left_out = self._num_left_out, 0
        if num:
            logger.warning(
                "%d groups are missing among the samples: more than %d MiB of texts waited for the "
                "disk; a lower sluice.dashboard.sample_chars makes them smaller",
                num,
                self._most_bytes >> 20,
            )


def _text_bytes(group: SampledGroup) -> int:
    texts = [group.prompt, group.ground_truth]
    for response in group.responses:
        texts += (response.text, response.failure)
    return sum(map(sys.getsizeof, texts))

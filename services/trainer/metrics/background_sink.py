"""Feeds a sink from a thread, so that a slow server never holds up the train loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from services.trainer.metrics.generations import Generation

if TYPE_CHECKING:
    from services.trainer.metrics.guarded_sink import GuardedSink

logger = logging.getLogger(__name__)

_WAITING_WRITES = 256


class BackgroundSink:
    """Passes on in order; what finds the queue full is dropped and counted.

    Args:
        name: the logger's, for warnings.
        sink: never raises.
        close_timeout_s: how long `close` waits for what is queued.
    """

    def __init__(self, name: str, sink: GuardedSink, close_timeout_s: float = 60.0) -> None:
        self._name, self._sink, self._close_timeout_s = name, sink, close_timeout_s
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING_WRITES)
        self.num_dropped = 0
        # A daemon: a server that never answers must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues a step."""
        numbers = dict(metrics)
        self._put(lambda: self._sink.write(step, numbers))

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        """Queues samples."""
        samples = tuple(generations)
        self._put(lambda: self._sink.write_generations(step, samples))

    def close(self) -> None:
        """Waits for what is queued, then closes; gives up after `close_timeout_s`."""
        try:
            self._queue.put(None, timeout=self._close_timeout_s)
        except queue.Full:
            self.num_dropped += self._queue.qsize()
        self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "logger %s did not finish within %g s and is left behind",
                self._name,
                self._close_timeout_s,
            )
        if self.num_dropped:
            logger.warning(
                "logger %s: %d writes came faster than it took them", self._name, self.num_dropped
            )

    def _put(self, work: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("logger %s is too slow: metrics are dropped", self._name)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
        self._sink.close()

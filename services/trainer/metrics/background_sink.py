"""Opens and feeds a sink in a thread, so that a slow server never holds up the train loop."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
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
        open_sink: called once, in the thread; may raise. The sink never raises.
        close_timeout_s: how long `close` waits for what is queued.

    Attributes:
        opening: done when the sink is open, with the error of `open_sink` if it failed. Until then
            writes are queued, after a failure they are dropped.
    """

    def __init__(
        self, name: str, open_sink: Callable[[], GuardedSink], close_timeout_s: float = 60.0
    ) -> None:
        self._name, self._open_sink, self._close_timeout_s = name, open_sink, close_timeout_s
        self.opening: Future[None] = Future()
        self.opening.set_running_or_notify_cancel()
        self._queue: queue.Queue[Callable[[GuardedSink], None] | None] = queue.Queue(
            _WAITING_WRITES
        )
        self.num_dropped = 0
        # A daemon: a server that never answers must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queues a step."""
        numbers = dict(metrics)
        self._put(lambda sink: sink.write(step, numbers))

    def write_generations(self, step: int, generations: Sequence[Generation]) -> None:
        """Queues samples."""
        samples = tuple(generations)
        self._put(lambda sink: sink.write_generations(step, samples))

    def close(self) -> None:
        """Waits for what is queued, then closes; gives up after `close_timeout_s`."""
        ends_s = time.monotonic() + self._close_timeout_s
        try:
            self._queue.put(None, timeout=self._close_timeout_s)
        except queue.Full:
            self.num_dropped += self._queue.qsize()
        self._thread.join(max(0.0, ends_s - time.monotonic()))
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

    def _put(self, work: Callable[[GuardedSink], None]) -> None:
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                logger.warning("logger %s is too slow: metrics are dropped", self._name)

    def _work(self) -> None:
        try:
            sink = self._open_sink()
        except Exception as error:  # noqa: BLE001 - told to whoever waits for `opening`
            self.opening.set_exception(error)
            return
        self.opening.set_result(None)
        while (work := self._queue.get()) is not None:
            work(sink)
        sink.close()

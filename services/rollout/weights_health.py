"""Has health say, under a name of its own, whether this replica has weights to draw with.

Consumes: the engine's load. Waits for: weights, for as long as the trainer takes. Unblocked by: a
version that serves; it looks every so often. Produces: one named answer of health. On failure: a
broken engine's error ends the replica. On shutdown: cancelled; the server then answers that nothing
serves.

The process as a whole is healthy before that: it has to be kept, and found, while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.rollout.engines.protocol import EngineLoad

_INTERVAL_S = 0.5


class NotifyHealth(Protocol):
    """Where the answer goes; see `RpcServer.set_named`."""

    def __call__(self, *, serving: bool) -> Awaitable[None]:
        """What health answers from now on."""
        ...


class WeightsHealth:
    """Looks for ever.

    Args:
        load: the engine's latest counters.
        tell: takes each change, the first answer included.
        interval_s: between two looks.
    """

    def __init__(
        self, load: Callable[[], EngineLoad], notify: NotifyHealth, interval_s: float = _INTERVAL_S
    ) -> None:
        self._load, self._notify, self._interval_s = load, notify, interval_s
        self._reported: bool | None = None

    async def run(self) -> None:
        """Never returns."""
        while True:
            has_weights = self._load().version is not None
            if has_weights is not self._reported:
                await self._notify(serving=has_weights)
                self._reported = has_weights
            await asyncio.sleep(self._interval_s)

"""What streams that broke are told of: one warning for each replica, not one for each group.

A replica that dies or hangs breaks the streams of all its groups at once.
"""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)

GATHER_S = 0.5
"""Seconds after the first broken stream of a replica in which the others are counted with it."""


class BrokenStreams:
    """Streams that broke lately, by replica. To be used inside an event loop."""

    def __init__(self) -> None:
        self._samples: dict[str, list[int]] = {}

    def note(self, replica: str, num_samples: int, why: str) -> None:
        """Count a stream that ended without `num_samples`; the warning tells the first `why`.

        One that broke after its last sample is none.
        """
        if not num_samples:
            return
        counts = self._samples.setdefault(replica, [])
        counts.append(num_samples)
        if len(counts) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self._notify, replica, why)

    def _notify(self, replica: str, why: str) -> None:
        counts = self._samples.pop(replica)
        logger.warning(
            "replica %s: streams of %d groups broke, %d samples continue elsewhere; the first: %s",
            *(replica, len(counts), sum(counts), why),
        )

"""What weight updates took and where they failed, counted since the trainer's start."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

__all__ = ["SyncCounts", "SyncPhase"]


class SyncPhase(StrEnum):
    """What a delivery of weights does, in order."""

    FORM = "form"  # the group of replicas, where it is another than before
    ENCODE = "encode"  # what changed since the version that all of them serve
    STAGE = "stage"  # the transfer, while generation goes on
    COMMIT = "commit"  # the swap


class SyncCounts:
    """Used from one event loop."""

    def __init__(self) -> None:
        self.seconds: dict[SyncPhase, float] = dict.fromkeys(SyncPhase, 0.0)
        self.failures: Counter[SyncPhase] = Counter()
        self.updates: Counter[str] = Counter()
        self.sparse_bytes = self.dense_bytes = self.whole_bytes = 0
        self.stall_s = 0.0

    @contextmanager
    def timed(self, phase: SyncPhase) -> Iterator[None]:
        """The block is this phase."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] += time.monotonic() - began_s

    def failed(self, phase: SyncPhase) -> None:
        """An attempt ended here."""
        self.failures[phase] += 1

    def arrived(self, to: str, sent_bytes: int, whole_bytes: int, stall_s: float) -> None:
        """Replicas serve a version.

        Args:
            to: ``fleet`` or ``newcomers``.
            sent_bytes: on the wire, once for all.
            whole_bytes: of all weights; more than `sent_bytes` if only changes were sent.
            stall_s: longest time in which one of them drew no token.
        """
        self.updates[to] += 1
        self.whole_bytes += whole_bytes
        if sent_bytes < whole_bytes:
            self.sparse_bytes += sent_bytes
        else:
            self.dense_bytes += sent_bytes
        self.stall_s += stall_s

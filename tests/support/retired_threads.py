"""Waiting for threads that `sluice.concurrency.threads` has retired."""

from __future__ import annotations

import time

from sluice.concurrency import threads


def wait_for_retired_threads(timeout_s: float) -> int:
    """Wait until retired threads have ended; return how many have not. 0 means exit is safe."""
    ends_s = time.monotonic() + timeout_s
    # Again and again: a thread that ends may retire others.
    while alive := [thread for thread in list(threads._retired) if thread.is_alive()]:
        left_s = ends_s - time.monotonic()
        if left_s <= 0:
            break
        alive[0].join(left_s)
    return len(alive)

"""Keeps the collection of cyclic garbage short in processes that live long.

A full collection looks through every container that the process holds. With torch and transformers
loaded these are 370,000, and it holds all threads up for 0.2 to 0.3 s (measured 2026-11-23), a
replica's decode steps among them, although next to nothing of it is ever thrown away.
"""

from __future__ import annotations

import gc


def exempt_start_up() -> None:
    """What this process holds by now is never looked through again; call it once it is up.

    What part of it is thrown away later is freed as ever, unless a cycle keeps it.
    """
    gc.collect()
    gc.freeze()

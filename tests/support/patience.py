"""Time limits in tests that have to wait for one to end."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest

SHORT_S, LONG_S = 3.0, 45.0


def in_time(
    attempt: Callable[[float], None], short_s: float = SHORT_S, long_s: float = LONG_S
) -> None:
    """Make an attempt with a short limit, and if it fails, with a long one.

    The limit has to end before the test can; but a busy machine may keep a sound process waiting
    for longer than a short one, and so fail what no rule forbids.
    """
    try:
        attempt(short_s)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - whatever it met
        traceback.print_exc()  # pytest shows it if the long attempt fails, too, or with -rP
        attempt(long_s)

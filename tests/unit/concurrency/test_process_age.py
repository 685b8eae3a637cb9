"""A process knows how long it has lived."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sluice.concurrency import process
from sluice.concurrency.process import process_age_s

_TICK_S = 0.01


def test_the_age_counts_from_before_the_interpreter_was_up() -> None:
    began_s = time.monotonic()
    code = (
        "import time; time.sleep(0.2)\n"
        "from sluice.concurrency.process import process_age_s; print(process_age_s())"
    )
    reported = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    age_s, seen_s = float(reported.stdout), time.monotonic() - began_s
    assert age_s <= seen_s + 2 * _TICK_S
    if Path("/proc/self/stat").exists():
        assert age_s >= 0.2


def test_it_grows_with_the_clock() -> None:
    outer_s = time.monotonic()
    age_s = process_age_s()
    inner_s = time.monotonic()
    time.sleep(0.05)
    min_s = time.monotonic() - inner_s
    grown_s = process_age_s() - age_s
    # Whatever the machine does in between, the clock was read outside and inside of both.
    assert min_s - 2 * _TICK_S <= grown_s <= time.monotonic() - outer_s + 2 * _TICK_S


def test_where_nothing_tells_the_start_it_counts_from_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(_self: Path, **_: object) -> str:
        raise OSError("no /proc here")

    monkeypatch.setattr(process.Path, "read_text", missing)
    imported_s = time.monotonic() - 5.0
    monkeypatch.setattr(process, "_IMPORTED_S", imported_s)
    assert 5.0 <= process_age_s() <= time.monotonic() - imported_s

"""Which idle scorer processes are ended: those that use CPU in idleness, and no others."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.grading import containment
from services.reward.grading.containment import (
    MARK_VARIABLE,
    MAX_IDLE_CPU_S,
    WINDOW_S,
    CpuReading,
    IdleCpu,
    IdleWatch,
    ProcessKey,
    cpu_by_mark,
    family_of,
    idle_cpu,
    new_mark,
    watch_idle,
)

SCORER, CHILD = (7, 100), (8, 200)
SECONDS = st.floats(0, 1e6, allow_nan=False)


def a_mark() -> str:
    return new_mark(family_of())


def reading(at_s: float, cpu_s: Mapping[ProcessKey, float], *, num_uses: int = 1) -> CpuReading:
    return CpuReading(num_uses, at_s, cpu_s)


def test_time_of_all_its_processes_is_added_up_and_a_new_one_counts_whole() -> None:
    used = idle_cpu(reading(1.0, {SCORER: 5.0}), reading(2.0, {SCORER: 5.25, CHILD: 0.5}))
    assert used == IdleCpu(0.75, 1.0)


@given(before=SECONDS, after=SECONDS)
def test_what_a_process_used_before_it_was_idle_never_counts(before: float, after: float) -> None:
    assert idle_cpu(reading(0, {SCORER: before}), reading(1, {SCORER: after}, num_uses=2)) is None


@given(st.dictionaries(st.tuples(st.integers(1, 5), st.integers(1, 3)), SECONDS))
def test_processes_that_ended_take_nothing_away(left: dict[ProcessKey, float]) -> None:
    used = idle_cpu(reading(0, {CHILD: 1e9, **left}), reading(1, left))
    assert used == IdleCpu(0.0, 1.0)


def test_a_process_that_was_asked_between_two_looks_is_judged_afresh() -> None:
    watch = IdleWatch()
    for at_s in range(20):  # a core at full load, for a request each time
        assert watch.find_busy({"a": reading(at_s, {SCORER: at_s}, num_uses=at_s)}) == {}
    assert watch.find_busy({"a": reading(20, {SCORER: 20}, num_uses=19)}) == {
        "a": IdleCpu(1.0, 1.0)
    }


def test_a_share_too_small_for_one_look_is_found_within_the_window() -> None:
    watch, step = IdleWatch(), MAX_IDLE_CPU_S / 3
    found = [watch.find_busy({"a": reading(i, {SCORER: i * step})}) for i in range(5)]
    assert [bool(each) for each in found] == [False] * 4 + [True]


def test_a_trickle_is_borne_for_ever() -> None:
    watch, share = IdleWatch(), 0.9 * MAX_IDLE_CPU_S / (WINDOW_S + 1)
    assert not any(watch.find_busy({"a": reading(i, {SCORER: i * share})}) for i in range(1000))


async def test_one_that_is_asked_during_a_look_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is idle again when the look ends, and has used CPU for a request."""
    monkeypatch.setattr(containment, "LOOK_INTERVAL_S", 0.0)
    uses, num_looks = {"asked": 0, "steady": 0}, 0
    ended: asyncio.Queue[str] = asyncio.Queue()

    def look(marks: set[str]) -> dict[str, dict[ProcessKey, float]]:
        nonlocal num_looks
        num_looks += 1
        if num_looks < 5:
            uses["asked"] += 1
        return {mark: {SCORER: float(num_looks)} for mark in marks if num_looks < 6}

    async def end(mark: str, num_uses: int, used: IdleCpu) -> None:
        assert (num_uses, used.cpu_s) == (uses[mark], 1.0)
        uses.pop(mark)
        ended.put_nowait(mark)

    monkeypatch.setattr(containment, "cpu_by_mark", look)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch_idle(lambda: dict(uses), end))
        async with asyncio.timeout(60):
            assert await ended.get() == "steady"
            while num_looks < 6:
                await asyncio.sleep(0.001)
        watching.cancel()
    assert ended.empty()


async def test_cpu_time_is_read_of_marked_processes_with_any_name() -> None:
    mark, code = a_mark(), "import time\nwhile time.process_time() < 0.3: pass\ninput()"
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", 'exec -a "a) b (c" "$0" -c "$1"', sys.executable, code),
        stdin=asyncio.subprocess.PIPE,
        env={**os.environ, MARK_VARIABLE: mark},
    )
    try:
        give_up_at = time.monotonic() + 20
        while not (found := cpu_by_mark({mark, a_mark()})) or max(found[mark].values()) < 0.2:
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.01)
    finally:
        process.kill()
        await process.wait()
    assert [pid for pid, _ in found[mark]] == [process.pid]

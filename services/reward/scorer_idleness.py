"""Scorer processes that have nothing to score and use CPU all the same.

A scorer may answer, or fail, and leave threads or processes behind that spin: no sample's time
limit ends them any more. So CPU time used in idleness is looked at about once a second, of the
process and of all it started.

Consumes: which processes are idle. Waits for: the next look. Unblocked by: the clock. Produces: the
processes that are to be ended. On failure to read about a process: it used nothing. On shutdown:
cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from services.reward.scorer_offspring import ProcessKey, cpu_by_mark

LOOK_INTERVAL_S = 0.75
"""Between looks. The first is the reference and the second finds a spinning thread: 1.5 s."""
MOST_IDLE_CPU_S = 0.5
"""CPU seconds in one window of idleness that are borne: threads that end, keepalives, a garbage
collection. A spinning thread of an idle machine uses more from one look to the next."""
WINDOW_S = 5.0
"""Seconds of idleness judged together: on a busy machine a spinning thread gets but a part."""
LOOK_SHARE = 0.02
"""Of one core that looking may cost: where there are thousands of processes it is rarer."""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """An idle scorer process at one moment.

    Attributes:
        num_uses: requests that it had been given by then; it idles on while they stay the same.
        at_s: on a monotonic clock.
        cpu_s: CPU seconds since its start of each of its processes.
    """

    num_uses: int
    at_s: float
    cpu_s: Mapping[ProcessKey, float]


@dataclass(frozen=True, slots=True)
class IdleCpu:
    """`cpu_s` seconds of CPU time were used in `idle_s` seconds without a request."""

    cpu_s: float
    idle_s: float

    @property
    def is_too_much(self) -> bool:
        """Whether the process is to be ended."""
        return self.cpu_s > MOST_IDLE_CPU_S


def idle_cpu(reference: CpuReading, reading: CpuReading) -> IdleCpu | None:
    """What was used from one sight to the next; ``None``: it had a request between them.

    A process seen for the first time has used all its time in between, for it was started then.
    """
    if reference.num_uses != reading.num_uses:
        return None
    used = (max(0.0, now - reference.cpu_s.get(key, 0.0)) for key, now in reading.cpu_s.items())
    return IdleCpu(sum(used), reading.at_s - reference.at_s)


class IdleWatch:
    """The sights that later ones are compared with, by the mark of the scorer process."""

    def __init__(self) -> None:
        self._references: dict[str, CpuReading] = {}

    def burning(self, sights: Mapping[str, CpuReading]) -> dict[str, IdleCpu]:
        """Those of the idle processes that use too much; those without a sight are forgotten."""
        references, self._references = self._references, {}
        found: dict[str, IdleCpu] = {}
        for mark, reading in sights.items():
            reference = references.get(mark, reading)
            used = idle_cpu(reference, reading)
            is_same_window = used is not None and used.idle_s < WINDOW_S
            self._references[mark] = reference if is_same_window else reading
            if used is not None and used.is_too_much:
                found[mark] = used
        return found


async def watch_idle(
    idle: Callable[[], Mapping[str, int]], end: Callable[[str, int, IdleCpu], Awaitable[None]]
) -> None:
    """Look until cancelled.

    Args:
        idle: number of requests so far of each scorer process that has none now, by mark.
        end: ends one; it must see for itself that the process still idles at that number.
    """
    watch = IdleWatch()
    look_s = 0.0
    while True:
        await asyncio.sleep(max(LOOK_INTERVAL_S, look_s / LOOK_SHARE))
        before = idle()
        if not before:
            continue
        seen, look_s = await asyncio.to_thread(_timed_look, set(before))
        # One that was asked meanwhile used its CPU for good reason.
        steady = {mark: n for mark, n in idle().items() if mark in seen and before.get(mark) == n}
        at_s = time.monotonic()
        sights = {mark: CpuReading(n, at_s, seen[mark]) for mark, n in steady.items()}
        for mark, used in watch.burning(sights).items():
            await end(mark, steady[mark], used)


def _timed_look(marks: set[str]) -> tuple[dict[str, dict[ProcessKey, float]], float]:
    started_s = time.thread_time()
    return cpu_by_mark(marks), time.thread_time() - started_s

"""What every process tells of itself when its metrics are read; asked in any thread."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sluice.concurrency.waits import WAITS
from sluice.concurrency.watchdog import still_seconds
from sluice.rpc.error_tally import QUOTA_REFUSALS, RPC_ERRORS
from sluice.telemetry.instrument import Reading
from sluice.telemetry.instruments import process
from sluice.telemetry.process_age import process_age_s

__all__ = ["ProcessName", "process_readings"]


@dataclass(frozen=True, slots=True)
class ProcessName:
    """Who tells.

    Attributes:
        kind: trainer, reward or rollout.
        name: the replica's, or the kind.
        restarts: how often its launcher has started it again.
    """

    kind: str
    name: str
    restarts: int = 0


def process_readings(who: ProcessName, run_dir: Path) -> Iterator[Reading]:
    """Age, waits, errors, restarts, disk; needs no event loop."""
    yield process.INFO.at(1.0, who.name, who.kind, _version())
    yield process.UPTIME.at(process_age_s())
    yield process.RESTARTS.at(float(who.restarts))
    yield process.STILL.at(still_seconds() or 0.0)
    waits = WAITS.snapshot()
    yield process.LONGEST_WAIT.at(max((wait.seconds for wait in waits), default=0.0))
    yield process.WAITS.at(float(sum(wait.count for wait in waits)))
    for kind, count in RPC_ERRORS.counts().items():
        yield process.RPC_ERRORS.at(float(count), *kind)
    for limit, count in QUOTA_REFUSALS.counts().items():
        yield process.QUOTA_REFUSALS.at(float(count), *limit)
    yield from _disk(run_dir)


def _disk(run_dir: Path) -> Iterator[Reading]:
    try:
        found = os.statvfs(run_dir)
    except OSError:  # a replica may run on a machine without the folder
        return
    yield process.RUN_FOLDER_FREE.at(float(found.f_bavail * found.f_frsize))
    yield process.RUN_FOLDER_SIZE.at(float(found.f_blocks * found.f_frsize))


def _version() -> str:
    try:
        return version("sluice")
    except PackageNotFoundError:  # run from a source tree
        return ""

"""What every process tells of itself when its metrics are read; asked in any thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from sluice.concurrency.waits import WAITS
from sluice.concurrency.watchdog import still_seconds
from sluice.rpc.certificate_ends import CERTIFICATE_ENDS
from sluice.rpc.error_tally import QUOTA_REFUSALS, RPC_ERRORS
from sluice.telemetry.disk_space import DiskSpace
from sluice.telemetry.instrument import Reading
from sluice.telemetry.instruments import process
from sluice.telemetry.own_cost import SPANS, TELEMETRY_CPU, SpanOutcome
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


def process_readings(who: ProcessName, disk: DiskSpace) -> Iterator[Reading]:
    """Age, waits, errors, restarts, certificates, disk, what telling costs; needs no event loop."""
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
    for file, end in CERTIFICATE_ENDS.by_file.items():
        yield process.CERTIFICATE_END.at(end.timestamp(), file)
    for part, seconds in TELEMETRY_CPU.seconds().items():
        yield process.TELEMETRY_CPU.at(seconds, part)
    spans = SPANS.counts()
    for outcome in SpanOutcome:
        yield process.TELEMETRY_SPANS.at(float(spans.get((outcome,), 0)), outcome)
    yield from _disk(disk)


def _disk(disk: DiskSpace) -> Iterator[Reading]:
    if (capacity := disk.capacity()) is not None:
        yield process.RUN_FOLDER_FREE.at(float(capacity.free_bytes))
        yield process.RUN_FOLDER_SIZE.at(float(capacity.size_bytes))


def _version() -> str:
    try:
        return version("sluice")
    except PackageNotFoundError:  # run from a source tree
        return ""

"""What processes wait for, on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sluice.api.common.v1 import common_pb2 as common
from sluice.concurrency.waits import WAITS, Waiting, merged_waits
from sluice.concurrency.watchdog import still_seconds

_MOST_WAITS = 64


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A process's waits, the longest first.

    `still_s` are seconds without progress although there is work; ``None``: there is none, or
    nobody looks.
    """

    waits: tuple[Waiting, ...]
    still_s: float | None


def present_waits_to_proto(further: Iterable[Waiting] = ()) -> common.WaitReport:
    """This process's waits, and `further` ones that only its service knows."""
    waits = merged_waits((*further, *WAITS.snapshot()), _MOST_WAITS)
    return common.WaitReport(
        waits=[
            common.Wait(
                peer=wait.peer,
                phase=wait.phase,
                seconds=max(wait.seconds, 0.0),
                count=wait.count,
                task=wait.task,
            )
            for wait in waits
        ],
        still_seconds=still_seconds(),
    )


def wait_report_from_proto(message: common.WaitReport) -> WaitReport:
    """As it was sent."""
    waits = (Waiting(w.peer, w.phase, w.seconds, w.count, w.task) for w in message.waits)
    still_s = message.still_seconds if message.HasField("still_seconds") else None
    return WaitReport(tuple(waits), still_s)

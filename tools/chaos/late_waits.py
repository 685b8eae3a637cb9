"""Wait that lasted longer than their deadline allows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice.config.schema.service import ServiceConfig

# A look takes a second, a busy machine some more.
GRACE_S = 10.0
_COUNT = re.compile(r"\d+")
_BUCKETS = 3  # of a small model: one of weights, two that frame them


@dataclass(frozen=True, slots=True)
class ObservedWait:
    """A wait as a service reported it at `at_s`."""

    at_s: float
    service: str
    peer: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True)
class LateWait:
    """The worst sight of a wait, and its deadline."""

    wait: ObservedWait
    allowed_s: float


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Seconds by phase, but for a number at its end; `longest_s` for all others."""

    by_phase: tuple[tuple[str, float], ...]
    longest_s: float

    def allowed_s(self, phase: str) -> float:
        """Return the deadline of a wait."""
        name = phase.rstrip("0123456789 ")
        return next((limit for one, limit in self.by_phase if one == name), self.longest_s)


def limits_of(service: ServiceConfig) -> WaitLimits:
    """Return deadlines by phase as `service` and the table of call policies set them.

    What is not listed waits for another wait of the run and has to end with the longest of them.
    """
    reward, weights = service.reward, service.weights
    transfer_s = _BUCKETS * weights.timeout_s
    return WaitLimits(
        (
            ("generating", reward.stall_timeout_s),
            ("joining epoch", weights.timeout_s),
            ("staging version", transfer_s),
            ("committing version", 2 * weights.timeout_s),
            ("aborting epoch", weights.timeout_s),
            ("answering a probe", weights.probe_timeout_s),
            ("leaving a failed epoch", weights.timeout_s),
            ("sending a heartbeat", 3.0),
            ("registering a replica", 16.0),
            ("committing changes", 60.0),
        ),
        max(
            service.trainer.batch_timeout_s,
            service.trainer.replica_wait_timeout_s,
            reward.generate_timeout_s,
        ),
    )


def late_waits(
    seen: Iterable[ObservedWait],
    limits: WaitLimits,
    stopped: Sequence[tuple[str, float, float]] = (),
    *,
    grace_s: float = GRACE_S,
) -> tuple[LateWait, ...]:
    """Return one entry for each wait that grew too old.

    Args:
        seen: all looks.
        limits: deadlines.
        stopped: service, from, to (the clock of `seen`): a stopped process sees no deadline.
        grace_s: on top of each deadline.
    """
    worst: dict[tuple[str, str, str, int], LateWait] = {}
    for wait in seen:
        began_s = wait.at_s - wait.seconds
        own = [(a, b) for name, a, b in stopped if name == wait.service]
        asleep_s = sum(max(0.0, min(b, wait.at_s) - max(a, began_s)) for a, b in own)
        allowed_s = limits.allowed_s(wait.phase)
        if wait.seconds - asleep_s <= allowed_s + grace_s:
            continue
        # Sights of one wait agree about its beginning to a second or two,
        # and its phase may hold counts.
        phase = _COUNT.sub("", wait.phase)
        key = (wait.service, wait.peer, phase, round(began_s / 5))
        if key not in worst or worst[key].wait.seconds < wait.seconds:
            worst[key] = LateWait(wait, allowed_s)
    return tuple(worst.values())

"""What the service is waiting for, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.concurrency.waits import Waiting


@dataclass(frozen=True, slots=True)
class Awaited:
    """Someone who has to act before a batch can be filled; `key` names the kind of wait."""

    key: str
    peer: str
    phase: str


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """The loop as far as it decides what is waited for."""

    is_announced: bool
    num_replicas: int
    leased_batch: str | None
    batch_asked: bool
    num_generating: int
    num_grading: int
    num_kept: int
    batch_size: int
    num_in_training: int
    has_dataset: bool
    is_exhausted: bool


def awaited_now(facts: LoopFacts) -> tuple[Awaited, ...]:
    """Everything that is waited for, the nearest cause first; empty while nothing is wanted."""
    if not facts.is_announced:
        return (Awaited("announce", "trainer", "announcing a policy"),)
    found: list[Awaited] = []
    if facts.num_replicas == 0:
        found.append(Awaited("replica", "rollout fleet", "serving a replica: no replica announced"))
    if facts.num_generating:
        progress = f"{facts.num_kept} of {facts.batch_size} groups kept"
        what = f"generating {facts.num_generating} groups ({progress})"
        found.append(Awaited("generating", "rollout fleet", what))
    if facts.num_grading:
        what = f"grading {facts.num_grading} groups"
        found.append(Awaited("grading", "scorer pool", what))
    is_idle = not facts.num_generating and not facts.num_grading
    if facts.leased_batch is not None:
        what = f"training batch {facts.leased_batch}"
        found.append(Awaited(f"lease {facts.leased_batch}", "trainer", what))
    elif is_idle and facts.num_kept < facts.batch_size and facts.num_replicas:
        found.append(_idle_reason(facts))
    elif is_idle and facts.num_kept >= facts.batch_size and not facts.batch_asked:
        found.append(Awaited("take", "trainer", "taking the batch that is ready"))
    return tuple(found)


def _idle_reason(facts: LoopFacts) -> Awaited:
    if facts.num_in_training:
        return Awaited("publish", "trainer", "announcing the next policy version")
    if facts.is_exhausted:
        return Awaited("prompts", "clients", "submitting prompts: the data set is exhausted")
    if not facts.has_dataset:
        return Awaited("prompts", "clients", "submitting prompts: there is no data set")
    return Awaited("data", "data set", "reading prompts")


def as_waits(awaited: Sequence[tuple[Awaited, float]], later_s: float = 0.0) -> tuple[Waiting, ...]:
    """The same as waits of the whole service, `later_s` seconds after they were looked at."""
    return tuple(Waiting(one.peer, one.phase, seconds + later_s) for one, seconds in awaited)


class AwaitedClock:
    """Remembers since when each kind of wait lasts."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def update(self, awaited: Sequence[Awaited], now: float) -> None:
        """Note what is waited for at `now`; what is no longer waited for is forgotten."""
        self._since = {wait.key: self._since.get(wait.key, now) for wait in awaited}

    def seconds(self, wait: Awaited, now: float) -> float:
        """How long `wait` has lasted."""
        return now - self._since.get(wait.key, now)

"""Whether a run is well, in one word and the reasons for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sluice.client.run_monitor import ReplicaSnapshot

__all__ = ["Health", "RunFacts", "Verdict", "health_of"]

_STUCK_S = 60.0
_STUCK_STEPS = 5.0
_MANY_FAILED = 0.1
_FEW_KEPT = 0.05
_RESIDUAL = 0.02
_AT_REST = frozenset({"paused", "finished"})
_COMING, _LEAVING = "pending", "draining"


class Verdict(StrEnum):
    """What the page shows first."""

    HEALTHY = "healthy"
    ATTENTION = "needs attention"
    TROUBLE = "in trouble"
    FINISHED = "finished"
    NOT_RUNNING = "not running"


@dataclass(frozen=True, slots=True)
class Health:
    """A verdict and why, a sentence each; none for a run that is well."""

    verdict: Verdict
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the verdict is made of.

    Args:
        answers: whether the trainer does.
        is_finished: whether the run reached its end.
        phase: of the trainer, and for how many seconds.
        step_s: what a step takes, seconds, the middle of the last ones; ``None`` before the first.
        wait: who is behind what is waited for, a sentence; empty: nobody waits.
        replicas: the fleet.
        prompts: the accounts of prompts, ``prompts_lost`` among them if it is known.
        recent: groups of the last steps by ``train/groups_<kind>``.
        residual_share: of the books of tokens.
    """

    answers: bool
    is_finished: bool
    phase: str = ""
    phase_seconds: float = 0.0
    step_s: float | None = None
    wait: str = ""
    replicas: Sequence[ReplicaSnapshot] = ()
    prompts: Mapping[str, float] | None = None
    recent: Mapping[str, float] | None = None
    residual_share: float = 0.0


def health_of(facts: RunFacts) -> Health:
    """Judges a run."""
    if not facts.answers or facts.phase == "finished":
        if facts.is_finished or facts.phase == "finished":
            return Health(Verdict.FINISHED, ())
        if facts.wait:
            return Health(Verdict.TROUBLE, (f"the trainer does not answer; {facts.wait}",))
        reason = "the trainer does not answer, and the run has not reached its end"
        return Health(Verdict.NOT_RUNNING, (reason,))
    trouble = tuple(_trouble(facts))
    attention = tuple(_attention(facts))
    if trouble:
        return Health(Verdict.TROUBLE, trouble + attention)
    return Health(Verdict.ATTENTION if attention else Verdict.HEALTHY, attention)


def _trouble(facts: RunFacts) -> Iterator[str]:
    serving = [replica for replica in facts.replicas if replica.state == "serving"]
    coming = [replica for replica in facts.replicas if replica.state == _COMING]
    if facts.replicas and not serving and not coming:
        yield "no replica serves"
    lost = (facts.prompts or {}).get("prompts_lost", 0.0)
    if lost:
        yield f"{lost:.0f} prompts are lost: neither pending nor ended"


def _attention(facts: RunFacts) -> Iterator[str]:
    usual_s = max(_STUCK_S, _STUCK_STEPS * (facts.step_s or 0.0))
    if facts.phase not in _AT_REST and facts.phase_seconds > usual_s:
        behind = f"; {facts.wait}" if facts.wait else ""
        yield f"{facts.phase} for {facts.phase_seconds:.0f} s{behind}"
    if facts.phase == "paused":
        yield f"held between steps for {facts.phase_seconds:.0f} s"
    usual = {"serving", _COMING, _LEAVING}
    for replica in (r for r in facts.replicas if r.state not in usual):
        yield f"replica {replica.name} is {replica.state}"
    yield from _composition(facts.recent or {})
    if abs(facts.residual_share) > _RESIDUAL:
        yield f"{abs(facts.residual_share):.1%} of all tokens are in no account"


def _composition(recent: Mapping[str, float]) -> Iterator[str]:
    total = sum(recent.values())
    if total <= 0:
        return
    failed, kept = recent.get("failed", 0.0) / total, recent.get("kept", 0.0) / total
    if failed > _MANY_FAILED:
        yield f"{failed:.0%} of the groups of the last steps failed"
    if kept < _FEW_KEPT:
        yield f"only {kept:.1%} of the groups of the last steps were mixed"

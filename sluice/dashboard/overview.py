"""The page's first lines: health, state, step, accuracy, speed, waits, fleet and accounting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sluice.client.launcher import LaunchedProcess
from sluice.client.run_monitor import RunSnapshot
from sluice.dashboard.curves import COMPOSITION
from sluice.dashboard.live_status import LiveAnswer
from sluice.dashboard.step_history import StepHistory
from sluice.report.progress import low_yield_notice
from sluice.report.run_record import ACCOUNTS_NAME
from sluice.report.summary import account_views
from sluice.telemetry.metric_names import REWARD, STEP_S, TOKENS_PER_S

_STUCK_S = 60.0
_STUCK_STEPS = 5.0
_MANY_FAILED = 0.1
_RESIDUAL = 0.02
_AT_REST = frozenset({"paused", "finished"})
_WITHOUT_REPLICAS = frozenset({"starting", "waiting for replicas", "paused", "saving"})
_COMING, _LEAVING = "pending", "draining"
_RECENT_STEPS = 20


class RunVerdict(StrEnum):
    """The health of a run in one word."""

    HEALTHY = "healthy"
    ATTENTION = "needs attention"
    TROUBLE = "in trouble"
    FINISHED = "finished"
    NOT_RUNNING = "not running"


@dataclass(frozen=True, slots=True)
class Health:
    """A verdict with its reasons, one sentence each; a healthy run has none.

    A finished run has one only if it has lost prompts.
    """

    verdict: RunVerdict
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunHealthInputs:
    """The inputs of the verdict.

    Args:
        run: what the trainer says; ``None``: it does not answer.
        is_finished: whether the run reached its end.
        step_s: the median duration of the last steps; ``None`` before the first.
        wait: a sentence about the service that holds up the run; empty if no service waits.
        prompts: the accounting of prompts, with ``prompts_lost`` if it is known.
        recent: groups of the last steps by ``train/groups_<kind>``.
        residual_share: the share of all tokens that the accounting does not explain.
        processes: those that the launcher keeps running.
    """

    run: RunSnapshot | None
    is_finished: bool
    step_s: float | None
    wait: str
    prompts: Mapping[str, float]
    recent: Mapping[str, float]
    residual_share: float
    processes: Sequence[LaunchedProcess]


def health_of(facts: RunHealthInputs) -> Health:
    """Return the verdict on a run."""
    run = facts.run
    if run is None or run.phase == "finished":
        if facts.is_finished or run is not None:
            return Health(RunVerdict.FINISHED, tuple(_lost_prompt_reasons(facts)))
        if restarts := tuple(_restart_reasons(facts)):
            return Health(RunVerdict.TROUBLE, restarts)
        if facts.wait:
            return Health(RunVerdict.TROUBLE, (f"the trainer does not answer; {facts.wait}",))
        reason = "the trainer does not answer, and the run has not reached its end"
        return Health(RunVerdict.NOT_RUNNING, (reason,))
    trouble = tuple(_trouble_reasons(run, facts))
    attention = tuple(_attention_reasons(run, facts))
    if trouble:
        return Health(RunVerdict.TROUBLE, trouble + attention)
    return Health(RunVerdict.ATTENTION if attention else RunVerdict.HEALTHY, attention)


def _trouble_reasons(run: RunSnapshot, facts: RunHealthInputs) -> Iterator[str]:
    has_replica = any(replica.state in {"serving", _COMING} for replica in run.replicas)
    if run.phase not in _WITHOUT_REPLICAS and not has_replica:
        yield "no replica serves"
    yield from _lost_prompt_reasons(facts)


def _lost_prompt_reasons(facts: RunHealthInputs) -> Iterator[str]:
    num_lost = facts.prompts.get("prompts_lost", 0.0)
    if num_lost:
        yield f"{num_lost:.0f} prompts are lost: neither pending nor ended"


def _attention_reasons(run: RunSnapshot, facts: RunHealthInputs) -> Iterator[str]:
    usual_s = max(_STUCK_S, _STUCK_STEPS * (facts.step_s or 0.0))
    if run.phase not in _AT_REST and run.phase_seconds > usual_s:
        behind = f"; {facts.wait}" if facts.wait else ""
        yield f"{run.phase} for {run.phase_seconds:.0f} s{behind}"
    if run.hold_reason:
        yield f"held by a guard: {run.hold_reason}; `sluice resume` ends the hold"
    elif run.phase == "paused":
        yield f"held between steps for {run.phase_seconds:.0f} s"
    for guard in run.guards:
        if guard.state == "no signal" and facts.step_s is not None:  # else it is too early
            yield f"no signal for the guard '{guard.rule}': {guard.detail}"
    usual = {"serving", "held", _COMING, _LEAVING}
    for replica in (r for r in run.replicas if r.state not in usual):
        yield f"replica {replica.name} is {replica.state}"
    yield from _restart_reasons(facts)
    yield from _composition_reasons(facts.recent)
    if abs(facts.residual_share) > _RESIDUAL:
        yield f"{abs(facts.residual_share):.1%} of all tokens are unaccounted for"


def _restart_reasons(facts: RunHealthInputs) -> Iterator[str]:
    for process in facts.processes:
        if not process.pid and process.restarts and not process.is_draining:
            yield process.restart_text


def _composition_reasons(recent: Mapping[str, float]) -> Iterator[str]:
    total = sum(recent.values())
    if total <= 0:
        return
    failed = recent.get("failed", 0.0) / total
    if failed > _MANY_FAILED:
        yield f"{failed:.0%} of the groups of the last steps failed"
    if notice := low_yield_notice(
        {f"train/groups_{kind}": count for kind, count in recent.items()}
    ):
        yield f"{notice} (last steps)"


def read_final_accounts(run_dir: Path) -> Mapping[str, float]:
    """Return `accounts.json`, which a run writes at its end; empty without it.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        text = (run_dir / ACCOUNTS_NAME).read_bytes()
        return msgspec.json.decode(text, type=dict[str, float])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def overview(
    name: str,
    total_steps: int | None,
    final_accounts: Mapping[str, float],
    history: StepHistory,
    live: LiveAnswer | None,
) -> dict[str, Any]:
    """Return the page's first lines, the fleet and the accounting as one object.

    Args:
        name: of the run's folder.
        total_steps: steps in the configuration; ``None``: it depends on the data set.
        final_accounts: the accounting of a run that reached its end; empty otherwise.
        history: all steps.
        live: what the services say; ``None``: no process of the run is there.
    """
    run = live.run if live else None
    accounts = final_accounts or (run.accounts if run else {}) or history.accounts
    facts = _health_inputs(final_accounts, history, live, accounts)
    health = health_of(facts)
    accuracies = history.accuracies()
    return {
        "name": name,
        "health": health.verdict.value,
        "reasons": list(health.reasons),
        "phase": run.phase if run else _phase_of(health.verdict),
        "phase_seconds": _round(run.phase_seconds) if run else None,
        "step": run.step if run else _last_step(history),
        "total_steps": run.total_steps if run else total_steps,
        "version": run.version if run else None,
        "training_seconds": _round(float(np.nansum(history.column(STEP_S)))),
        "accuracy": _point(accuracies[-1]) if accuracies else None,
        "first_accuracy": _point(accuracies[0]) if len(accuracies) > 1 else None,
        "reward": _newest_value(history, REWARD),
        "tokens_per_s": _newest_value(history, TOKENS_PER_S),
        "tokens_per_s_now": _tokens_per_s(run),
        "wait": asdict(live.wait) if live and live.wait else None,
        "awaited": [asdict(wait) for wait in run.awaited] if run else [],
        "processes": [asdict(process) for process in live.processes] if live else [],
        "replicas": [asdict(replica) for replica in run.replicas] if run else [],
        "prompts": dict(run.prompts) if run else _prompts(accounts),
        "accounts": [asdict(view) for view in account_views(accounts)],
    }


def _phase_of(verdict: RunVerdict) -> str:
    return "does not answer" if verdict is RunVerdict.TROUBLE else verdict.value


def _health_inputs(
    final_accounts: Mapping[str, float],
    history: StepHistory,
    live: LiveAnswer | None,
    accounts: Mapping[str, float],
) -> RunHealthInputs:
    run = live.run if live else None
    seconds = history.column(STEP_S)[-_RECENT_STEPS:]
    measured = seconds[~np.isnan(seconds)]
    return RunHealthInputs(
        run=run,
        is_finished=bool(final_accounts),
        step_s=float(np.median(measured)) if measured.size else None,
        wait=live.wait.cause if live and live.wait and live.wait.root else "",
        prompts=final_accounts or (run.prompts if run else {}),
        recent=_recent_groups(history),
        residual_share=accounts.get("tokens_residual_share", 0.0)
        if history.steps.size > 1
        else 0.0,
        processes=live.processes if live else (),
    )


def _recent_groups(history: StepHistory) -> dict[str, float]:
    return {
        kind: float(
            sum(
                np.nansum(history.column(f"train/groups_{part}")[-_RECENT_STEPS:]) for part in parts
            )
        )
        for kind, parts in COMPOSITION.items()
    }


def _prompts(accounts: Mapping[str, float]) -> dict[str, float]:
    names = ("submitted", "pending", "trained", "skipped", "prompts_lost")
    return {
        name: value
        for name, value in accounts.items()
        if name in names or (name.startswith(("filtered_", "dropped_")) and "/" not in name)
    }


def _tokens_per_s(run: RunSnapshot | None) -> float | None:
    if run is None:
        return None
    return _round(sum(replica.tokens_per_second for replica in run.replicas))


def _newest_value(history: StepHistory, name: str) -> float | None:
    value = history.newest.get(name)
    return None if value is None else _round(value)


def _last_step(history: StepHistory) -> int:
    steps = history.steps
    return int(steps[-1]) if steps.size else 0


def _point(point: tuple[int, float]) -> dict[str, float]:
    return {"step": point[0], "value": _round(point[1])}


def _round(value: float) -> float:
    return float(f"{value:.6g}")

"""What Prometheus reads of the trainer: the numbers of `sluice status`, taken when it asks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from services.trainer.fleet import Fleet, MemberState
from services.trainer.metrics.run_history import RunHistory
from services.trainer.run_state import RunPhase, RunState
from services.trainer.sync_counts import SyncCounts, SyncPhase
from sluice.algorithm.accounts import TOKENS_AGE, TOKENS_MOVED
from sluice.config.run import RunConfig
from sluice.rpc.process_readings import ProcessName
from sluice.rpc.served_metrics import served_metrics
from sluice.service_contract import restarts
from sluice.telemetry.instrument import Reading
from sluice.telemetry.instruments import fleet, trainer
from sluice.telemetry.process_age import process_age_s

__all__ = ["TrainerMetrics", "exported"]

_TOKENS = "tokens/"
_OPEN = ("pending", "under_way")
_ACCOUNTS = ("tokens", "trainer_seconds", "rollout_seconds")


@dataclass(frozen=True, slots=True)
class TrainerMetrics:
    """Where the numbers are.

    Args:
        state: phases, steps and the books as they were last taken.
        fleet: the replicas.
        history: the last rows.
        sync: weight updates.
    """

    state: RunState
    fleet: Fleet
    history: RunHistory
    sync: SyncCounts

    def readings(self) -> Iterator[Reading]:
        """All of them; called in the event loop."""
        yield from _run(self.state)
        yield from _accounting(self.state.accounts)
        yield from _fleet(self.fleet)
        yield from self.history.readings()
        yield from _sync(self.sync)


def exported(config: RunConfig, metrics: TrainerMetrics) -> AbstractContextManager[None]:
    """Serves them while the block runs, if a port is set."""
    who = ProcessName("trainer", "trainer", restarts())
    endpoint = config.sluice.trainer.endpoint
    return served_metrics(config.sluice, endpoint, who, metrics.readings)


def _run(state: RunState) -> Iterator[Reading]:
    yield trainer.STEPS.at(float(state.step))
    yield trainer.PLANNED_STEPS.at(float(state.total_steps))
    if state.version is not None:
        yield trainer.POLICY_VERSION.at(float(state.version))
    spent = state.seconds_by_phase()
    for phase in RunPhase:
        yield trainer.PHASE.at(float(phase is state.phase), phase)
        yield trainer.PHASE_SECONDS.at(spent.get(phase, 0.0), phase)
    yield trainer.PHASE_AGE.at(state.phase_seconds)
    yield trainer.WALL.at(process_age_s())


def _accounting(accounts: Mapping[str, float]) -> Iterator[Reading]:
    """Of a run whose books were not taken yet there is nothing to tell."""
    if (generated := accounts.get("generated_tokens")) is not None:
        yield trainer.TOKENS_GENERATED.at(generated)
    for name, value in accounts.items():
        if name.startswith(_TOKENS):
            use = name.removeprefix(_TOKENS)
            instrument = trainer.OPEN_TOKENS if use in _OPEN else trainer.TOKENS
            yield instrument.at(value, use)
    for account in _ACCOUNTS:
        if f"{account}_residual" in accounts:
            yield trainer.ACCOUNTING_RESIDUAL.at(accounts[f"{account}_residual"], account)
            share = accounts[f"{account}_residual_share"]
            yield trainer.ACCOUNTING_RESIDUAL_SHARE.at(share, account)
    if TOKENS_AGE in accounts:
        yield trainer.ACCOUNTING_AGE.at(accounts[TOKENS_AGE])
        yield trainer.ACCOUNTING_MOVED.at(accounts[TOKENS_MOVED])


def _fleet(replicas: Fleet) -> Iterator[Reading]:
    members, now_s = replicas.members(), time.monotonic()
    states = Counter(member.state for member in members)
    for state in MemberState:
        yield fleet.REPLICAS.at(float(states[state]), state)
    yield fleet.SLOTS.at(float(sum(member.info.slots for member in members)))
    yield fleet.SLOTS_BUSY.at(float(sum(member.load.slots_busy for member in members)))
    yield fleet.QUEUED.at(float(sum(member.load.queued for member in members)))
    counters = replicas.counters()
    yield fleet.FLEET_TOKENS.at(float(counters.generated_tokens))
    yield fleet.FLEET_WALL.at(counters.wall_s)
    for name, seconds in counters.seconds_by_state.items():
        yield fleet.FLEET_SECONDS.at(seconds, name)
    for member in members:
        name = member.info.name
        yield fleet.REPLICA_VERSION.at(float(member.version), name)
        yield fleet.REPLICA_BUSY.at(float(member.load.slots_busy), name)
        yield fleet.REPLICA_TOKENS.at(float(member.load.generated_tokens), name)
        yield fleet.HEARTBEAT_AGE.at(now_s - member.last_seen_s, name)


def _sync(counts: SyncCounts) -> Iterator[Reading]:
    for to in ("fleet", "newcomers"):
        yield trainer.SYNC_UPDATES.at(float(counts.updates[to]), to)
    yield trainer.SYNC_BYTES.at(float(counts.dense_bytes), "dense")
    yield trainer.SYNC_BYTES.at(float(counts.sparse_bytes), "sparse")
    yield trainer.SYNC_DENSE_BYTES.at(float(counts.whole_bytes))
    for phase in SyncPhase:
        yield trainer.SYNC_SECONDS.at(counts.seconds[phase], phase)
        yield trainer.SYNC_FAILURES.at(float(counts.failures[phase]), phase)
    yield trainer.SYNC_STALL.at(counts.stall_s)

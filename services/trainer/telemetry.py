"""Observation of the trainer: Prometheus readings, and the watchdog's view."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.trainer.fleet.delivery import DeliveryCounts, DeliveryPhase
from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.loop.run_state import RunPhase, RunState, phase_waits
from services.trainer.metrics.sinks import MetricSink
from sluice.algorithm.accounting import TOKENS_AGE, TOKENS_MOVED
from sluice.algorithm.guards import RuleState
from sluice.concurrency.process import process_age_s
from sluice.concurrency.threads import BackgroundMeasurement
from sluice.concurrency.waits import units_done
from sluice.concurrency.watchdog import WorkState, watch_service
from sluice.config.addresses import advertised_address
from sluice.config.deadlines import replica_wait_timeout_s
from sluice.config.derived import checkpoint_folder
from sluice.config.run import RunConfig
from sluice.rpc.metrics import ProcessName, serve_metrics
from sluice.service_contract import restarts
from sluice.telemetry.metric_names import STEP, STEP_S, VAL_CORE, WAIT_BATCH_S, exported_rows
from sluice.telemetry.metrics import Histogram, InstrumentReading, reading

_SKIPPED = "actor/skipped_updates"
_TOKENS = "tokens/"
_OPEN = ("pending", "under_way")
_ACCOUNTS = ("tokens", "trainer_seconds", "rollout_seconds")
_AT_REST = (RunPhase.PAUSED, RunPhase.FINISHED)


class RunHistory(MetricSink):
    """Keeps the newest values for Prometheus."""

    def __init__(self) -> None:
        self._last_step: Mapping[str, float] = {}
        self._scores: dict[tuple[str, str, str], float] = {}
        self._step_s = Histogram("sluice_trainer_step_seconds")
        self._wait_s = Histogram("sluice_trainer_batch_wait_seconds")
        self._num_skipped = 0.0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step or a validation."""
        if STEP in metrics:
            self._last_step = metrics
            self._step_s.observe(metrics.get(STEP_S, 0.0))
            self._wait_s.observe(metrics.get(WAIT_BATCH_S, 0.0))
            self._num_skipped += metrics.get(_SKIPPED, 0.0)
        else:
            self._scores.update(_scores_of(metrics))

    def readings(self) -> Iterator[InstrumentReading]:
        """Yield the readings of finished steps and validations."""
        yield self._step_s.reading()
        yield self._wait_s.reading()
        yield reading("sluice_trainer_skipped_updates_total", self._num_skipped)
        for row, name in exported_rows("trainer").items():
            if (value := self._last_step.get(row)) is not None:
                yield reading(name, value)
        for labels, score in self._scores.items():
            yield reading("sluice_trainer_validation_score", score, *labels)


def _scores_of(metrics: Mapping[str, float]) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield scores by data source, variable and statistic, from names of ``val-core/``.

    Names are ``val-core/<data source>/<variable>/<statistic>``; a data source may contain slashes.
    """
    for name, value in metrics.items():
        if name.startswith(VAL_CORE):
            source, variable, statistic = name.removeprefix(VAL_CORE).rsplit("/", 2)
            yield (source, variable, statistic), value


@dataclass(frozen=True, slots=True)
class TrainerMetrics:
    """The sources of the trainer's Prometheus readings."""

    state: RunState
    fleet: Fleet
    history: RunHistory
    deliveries: DeliveryCounts

    def readings(self) -> Iterator[InstrumentReading]:
        """Yield all readings; call in the event loop."""
        yield from _run_readings(self.state)
        yield from _account_readings(self.state.accounts)
        yield from _fleet_readings(self.fleet)
        yield from self.history.readings()
        yield from _delivery_readings(self.deliveries)


def served_readings(config: RunConfig, metrics: TrainerMetrics) -> AbstractContextManager[None]:
    """Serve the readings during the block, if a port is set."""
    process = ProcessName("trainer", "trainer", restarts())
    endpoint = config.sluice.trainer.endpoint
    return serve_metrics(config.sluice, endpoint, process, metrics.readings)


def _run_readings(state: RunState) -> Iterator[InstrumentReading]:
    yield reading("sluice_trainer_steps_total", state.step)
    yield reading("sluice_trainer_planned_steps", state.total_steps)
    if state.version is not None:
        yield reading("sluice_trainer_policy_version", state.version)
    spent = state.seconds_by_phase()
    for phase in RunPhase:
        yield reading("sluice_trainer_phase", float(phase is state.phase), phase)
        yield reading("sluice_trainer_seconds_total", spent.get(phase, 0.0), phase)
    yield reading("sluice_trainer_present_phase_seconds", state.phase_seconds)
    yield reading("sluice_trainer_guard_hold", float(bool(state.hold_reason)))
    yield reading("sluice_trainer_rollbacks_total", state.num_rollbacks)
    judgements = [judgement for _, judgement in state.judgements()]
    silent = [judgement for judgement in judgements if judgement.state is RuleState.NO_SIGNAL]
    yield reading("sluice_trainer_guards_without_signal", len(silent))
    yield reading("sluice_trainer_wall_seconds_total", process_age_s())


def _account_readings(accounts: Mapping[str, float]) -> Iterator[InstrumentReading]:
    """Yield the accounts' readings; nothing before the accounts are taken for the first time."""
    if (generated := accounts.get("generated_tokens")) is not None:
        yield reading("sluice_tokens_generated_total", generated)
    for name, value in accounts.items():
        if name.startswith(_TOKENS):
            use = name.removeprefix(_TOKENS)
            is_open = use in _OPEN
            yield reading("sluice_tokens_open" if is_open else "sluice_tokens_total", value, use)
    for account in _ACCOUNTS:
        if f"{account}_residual" in accounts:
            yield reading("sluice_accounting_residual", accounts[f"{account}_residual"], account)
            share = accounts[f"{account}_residual_share"]
            yield reading("sluice_accounting_residual_ratio", share, account)
    if TOKENS_AGE in accounts:
        yield reading("sluice_accounting_tokens_age_seconds", accounts[TOKENS_AGE])
        yield reading("sluice_accounting_tokens_moved", accounts[TOKENS_MOVED])


def _fleet_readings(replicas: Fleet) -> Iterator[InstrumentReading]:
    members, now_s = replicas.members(), time.monotonic()
    states = Counter(member.state for member in members)
    for state in MemberState:
        yield reading("sluice_fleet_replicas", states[state], state)
    yield reading("sluice_fleet_slots", sum(member.info.slots for member in members))
    yield reading("sluice_fleet_slots_busy", sum(member.load.slots_busy for member in members))
    yield reading("sluice_fleet_queued_samples", sum(member.load.queued for member in members))
    counters = replicas.counters()
    yield reading("sluice_fleet_tokens_total", counters.generated_tokens)
    yield reading("sluice_fleet_wall_seconds_total", counters.wall_seconds)
    for name, seconds in counters.seconds_by_state.items():
        yield reading("sluice_fleet_seconds_total", seconds, name)
    for member in members:
        name = member.info.name
        yield reading("sluice_fleet_replica_version", member.version, name)
        yield reading("sluice_fleet_replica_slots_busy", member.load.slots_busy, name)
        yield reading("sluice_fleet_replica_tokens_total", member.load.generated_tokens, name)
        yield reading(
            "sluice_fleet_replica_heartbeat_age_seconds", now_s - member.last_seen_s, name
        )


def _delivery_readings(counts: DeliveryCounts) -> Iterator[InstrumentReading]:
    for to in ("fleet", "newcomers"):
        yield reading("sluice_weights_updates_total", counts.updates[to], to)
    yield reading("sluice_weights_sent_bytes_total", counts.dense_bytes, "dense")
    yield reading("sluice_weights_sent_bytes_total", counts.sparse_bytes, "sparse")
    yield reading("sluice_weights_whole_bytes_total", counts.whole_bytes)
    for phase in DeliveryPhase:
        yield reading("sluice_weights_seconds_total", counts.seconds[phase], phase)
        yield reading("sluice_weights_failures_total", counts.failures[phase], phase)
    yield reading("sluice_weights_stall_seconds_total", counts.stall_s)


def watched_trainer(
    config: RunConfig, state: RunState, fleet: Fleet
) -> AbstractContextManager[None]:
    """Run the trainer's watchdog during the block."""
    endpoint = config.sluice.trainer.endpoint
    address = advertised_address(endpoint, endpoint.port)
    work = trainer_work(config, state, fleet)
    return watch_service("trainer", config.sluice, work, address=address)


def trainer_work(config: RunConfig, state: RunState, fleet: Fleet) -> Callable[[], WorkState]:
    """Return a function that reads the trainer's progress; call it in the event loop.

    These count as progress: steps, changes of phase, forward passes, buckets of weights, bytes of
    the checkpoint that is being written, and the fleet's tokens, which fill the next batch. A
    paused or finished run has no work.
    """
    unfinished = BackgroundMeasurement(
        "unfinished checkpoint", partial(unfinished_checkpoint, Path(checkpoint_folder(config)))
    )
    batch_s = config.sluice.trainer.batch_timeout_s
    patience_s = {  # of waits that have their own deadlines
        RunPhase.WAITING_FOR_REPLICAS: replica_wait_timeout_s(config),
        RunPhase.WAITING_FOR_BATCH: batch_s,
        RunPhase.EVALUATING: batch_s,
    }

    def work_state() -> WorkState:
        phase = state.phase
        written = unfinished.latest() if phase is RunPhase.SAVING else None
        progress = (phase, state.step, units_done(), written, fleet.totals())
        is_working = phase not in _AT_REST
        return WorkState(progress, is_working, patience_s.get(phase, 0.0), phase_waits(state))

    return work_state


def unfinished_checkpoint(root: Path) -> tuple[int, int]:
    """Return the bytes of the files of a checkpoint that is being written, and those allocated.

    Raises:
        OSError: the folder was renamed meanwhile, because the checkpoint is complete.
    """
    files = [file.stat() for file in root.glob(".*/**/*")]
    return sum(s.st_size for s in files), sum(s.st_blocks for s in files) * 512

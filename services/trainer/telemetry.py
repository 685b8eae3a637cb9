"""Observation of the trainer: Prometheus readings, memory metrics, and the watchdog's view."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from services.trainer.fleet.delivery import SyncCounts, SyncPhase
from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.loop.run_state import RunPhase, RunState
from services.trainer.metrics.step_metrics import Example
from sluice.algorithm.accounting import TOKENS_AGE, TOKENS_MOVED
from sluice.concurrency.deadlines import units_done
from sluice.concurrency.threads import OwnerThread
from sluice.concurrency.waits import Waiting
from sluice.concurrency.watchdog import WorkState, watched_service
from sluice.config.addresses import advertised_address
from sluice.config.derived import checkpoint_folder
from sluice.config.run import RunConfig
from sluice.config.schema.service import TrainerServiceConfig
from sluice.device.cpu import CpuDevice
from sluice.rpc.metrics import ProcessName, served_metrics
from sluice.service_contract import restarts
from sluice.telemetry.instruments import fleet, trainer
from sluice.telemetry.metrics import Histogram, InstrumentReading
from sluice.telemetry.process import process_age_s

_GIB = float(1 << 30)
_STEP = "timing_s/step"
_WAIT = "timing_s/wait_batch"
_SKIPPED = "actor/skipped_updates"
_VALIDATION = "val-core/"
_TOKENS = "tokens/"
_OPEN = ("pending", "under_way")
_ACCOUNTS = ("tokens", "trainer_seconds", "rollout_seconds")
_AT_REST = (RunPhase.PAUSED, RunPhase.FINISHED)
# Peer and activity that each phase waits for.
_AWAITED_IN = {
    RunPhase.WAITING_FOR_REPLICAS: ("rollout fleet", "registering replicas"),
    RunPhase.WAITING_FOR_BATCH: ("reward service", "filling a batch"),
    RunPhase.TRAINING: ("learner thread", "updating the policy"),
    RunPhase.PUBLISHING: ("rollout fleet", "taking the weights"),
    RunPhase.EVALUATING: ("reward service", "validating"),
    RunPhase.SAVING: ("learner thread", "saving a checkpoint"),
    RunPhase.PAUSED: ("operator", "resuming the run"),
}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return ``perf/cpu_memory_used_gb`` and, for accelerators, ``perf/max_memory_*_gb``, in GiB.

    Args:
        device: rank 0's; the peaks are those of this process since its start.
    """
    host = CpuDevice().memory_info()
    metrics = {"perf/cpu_memory_used_gb": (host.total_bytes - host.free_bytes) / _GIB}
    if device.type != "cpu":
        peaks = torch.get_device_module(device)
        metrics["perf/max_memory_allocated_gb"] = peaks.max_memory_allocated(device) / _GIB
        metrics["perf/max_memory_reserved_gb"] = peaks.max_memory_reserved(device) / _GIB
    return metrics


class RunHistory:
    """A metric sink that keeps the newest values for Prometheus."""

    def __init__(self) -> None:
        self._last_step: Mapping[str, float] = {}
        self._scores: dict[tuple[str, str, str], float] = {}
        self._step_s = Histogram(trainer.STEP_SECONDS.bounds)
        self._wait_s = Histogram(trainer.BATCH_WAIT.bounds)
        self._num_skipped = 0.0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step or a validation."""
        if "training/global_step" in metrics:
            self._last_step = metrics
            self._step_s.observe(metrics.get(_STEP, 0.0))
            self._wait_s.observe(metrics.get(_WAIT, 0.0))
            self._num_skipped += metrics.get(_SKIPPED, 0.0)
        else:
            self._scores.update(_scores_of(metrics))

    def write_generations(self, step: int, examples: Sequence[Example]) -> None:
        """Do nothing: texts are not metrics."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def readings(self) -> Iterator[InstrumentReading]:
        """Yield the readings of finished steps and validations."""
        yield trainer.STEP_SECONDS.at(self._step_s.distribution())
        yield trainer.BATCH_WAIT.at(self._wait_s.distribution())
        yield trainer.SKIPPED_UPDATES.at(self._num_skipped)
        for name, instrument in trainer.BY_ROW.items():
            if (value := self._last_step.get(name)) is not None:
                yield instrument.at(value)
        for labels, score in self._scores.items():
            yield trainer.VALIDATION_SCORE.at(score, *labels)


def _scores_of(metrics: Mapping[str, float]) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Yield scores by source, variable and statistic, from names of ``val-core/``.

    Names are ``val-core/<source>/<variable>/<statistic>``; a source may contain slashes.
    """
    for name, value in metrics.items():
        if name.startswith(_VALIDATION):
            source, variable, statistic = name.removeprefix(_VALIDATION).rsplit("/", 2)
            yield (source, variable, statistic), value


@dataclass(frozen=True, slots=True)
class TrainerMetrics:
    """The sources of the trainer's Prometheus readings."""

    state: RunState
    fleet: Fleet
    history: RunHistory
    sync: SyncCounts

    def readings(self) -> Iterator[InstrumentReading]:
        """Yield all readings; call in the event loop."""
        yield from _run(self.state)
        yield from _accounting(self.state.accounts)
        yield from _fleet(self.fleet)
        yield from self.history.readings()
        yield from _sync(self.sync)


def exported(config: RunConfig, metrics: TrainerMetrics) -> AbstractContextManager[None]:
    """Serve the readings during the block, if a port is set."""
    who = ProcessName("trainer", "trainer", restarts())
    endpoint = config.sluice.trainer.endpoint
    return served_metrics(config.sluice, endpoint, who, metrics.readings)


def _run(state: RunState) -> Iterator[InstrumentReading]:
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


def _accounting(accounts: Mapping[str, float]) -> Iterator[InstrumentReading]:
    """Yield the accounts' readings; nothing before the accounts are taken for the first time."""
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


def _fleet(replicas: Fleet) -> Iterator[InstrumentReading]:
    members, now_s = replicas.members(), time.monotonic()
    states = Counter(member.state for member in members)
    for state in MemberState:
        yield fleet.REPLICAS.at(float(states[state]), state)
    yield fleet.SLOTS.at(float(sum(member.info.slots for member in members)))
    yield fleet.SLOTS_BUSY.at(float(sum(member.load.slots_busy for member in members)))
    yield fleet.QUEUED.at(float(sum(member.load.queued for member in members)))
    counters = replicas.counters()
    yield fleet.FLEET_TOKENS.at(float(counters.generated_tokens))
    yield fleet.FLEET_WALL.at(counters.wall_seconds)
    for name, seconds in counters.seconds_by_state.items():
        yield fleet.FLEET_SECONDS.at(seconds, name)
    for member in members:
        name = member.info.name
        yield fleet.REPLICA_VERSION.at(float(member.version), name)
        yield fleet.REPLICA_BUSY.at(float(member.load.slots_busy), name)
        yield fleet.REPLICA_TOKENS.at(float(member.load.generated_tokens), name)
        yield fleet.HEARTBEAT_AGE.at(now_s - member.last_seen_s, name)


def _sync(counts: SyncCounts) -> Iterator[InstrumentReading]:
    for to in ("fleet", "newcomers"):
        yield trainer.SYNC_UPDATES.at(float(counts.updates[to]), to)
    yield trainer.SYNC_BYTES.at(float(counts.dense_bytes), "dense")
    yield trainer.SYNC_BYTES.at(float(counts.sparse_bytes), "sparse")
    yield trainer.SYNC_DENSE_BYTES.at(float(counts.whole_bytes))
    for phase in SyncPhase:
        yield trainer.SYNC_SECONDS.at(counts.seconds[phase], phase)
        yield trainer.SYNC_FAILURES.at(float(counts.failures[phase]), phase)
    yield trainer.SYNC_STALL.at(counts.stall_s)


def phase_waits(state: RunState) -> tuple[Waiting, ...]:
    """Return the run's wait of the current phase, if it waits."""
    awaited = _AWAITED_IN.get(state.phase)
    return () if awaited is None else (Waiting(*awaited, state.phase_seconds),)


def watching(config: RunConfig, state: RunState, fleet: Fleet) -> AbstractContextManager[None]:
    """Run the trainer's watchdog during the block."""
    service = config.sluice.trainer
    work = TrainerWork(service, state, fleet, Path(checkpoint_folder(config)))
    address = advertised_address(service.endpoint, service.endpoint.port)
    return watched_service("trainer", config.sluice, work.work_state, address=address)


class TrainerWork:
    """The trainer's progress, for the watchdog.

    These count as progress: steps, changes of phase, forward passes, buckets of weights, bytes of
    the checkpoint that is being written, and the fleet's tokens, which fill the next batch. A
    paused or finished run has no work.

    Args:
        service: the deadlines of waits that have their own.
        checkpoints: the folder of the run's checkpoints.
    """

    def __init__(
        self, service: TrainerServiceConfig, state: RunState, fleet: Fleet, checkpoints: Path
    ) -> None:
        self._state = state
        self._fleet = fleet
        self._unfinished = UnfinishedCheckpoint(checkpoints)
        self._patience_s = {
            RunPhase.WAITING_FOR_REPLICAS: service.replica_wait_timeout_s,
            RunPhase.WAITING_FOR_BATCH: service.batch_timeout_s,
            RunPhase.EVALUATING: service.batch_timeout_s,
        }

    def work_state(self) -> WorkState:
        """Return progress and whether there is work; call in the event loop."""
        phase = self._state.phase
        written = self._unfinished.latest() if phase is RunPhase.SAVING else None
        progress = (phase, self._state.step, units_done(), written, self._fleet.totals())
        patience_s = self._patience_s.get(phase, 0.0)
        return WorkState(progress, phase not in _AT_REST, patience_s, phase_waits(self._state))


class UnfinishedCheckpoint:
    """The size of the checkpoint that is being written, measured by a thread: a disk may hang.

    Args:
        root: the folder of the run's checkpoints.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._latest: tuple[int, int] | None = None
        self._thread = OwnerThread("unfinished checkpoint")
        self._measuring: Future[None] | None = None

    def latest(self) -> tuple[int, int] | None:
        """Start the next measurement; return the bytes of files, and those allocated, of the last.

        ``None`` before the first measurement has ended.
        """
        if self._measuring is None or self._measuring.done():
            self._measuring = self._thread.submit(self._measure)
        return self._latest

    def _measure(self) -> None:
        try:
            files = [file.stat() for file in self._root.glob(".*/**/*")]
        except OSError:  # the folder was renamed meanwhile; the next measurement sees the new one
            return
        self._latest = sum(s.st_size for s in files), sum(s.st_blocks for s in files) * 512

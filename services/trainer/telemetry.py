"""Show the trainer's work to others: Prometheus readings, memory, the watchdog's and the status
calls' view.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from services.trainer.fleet.delivery import SyncCounts, SyncPhase
from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.loop.run_state import RunPhase, RunState
from services.trainer.metrics.sinks import ValidationSample
from sluice.algorithm.accounting import TOKENS_AGE, TOKENS_MOVED
from sluice.concurrency.deadlines import units_done
from sluice.concurrency.waits import WAITS, Waiting, merged_waits
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


def memory_metrics(device: torch.device) -> dict[str, float]:
    """``perf/cpu_memory_used_gb`` and, of an accelerator, ``perf/max_memory_*_gb``; GiB.

    Args:
        device: rank 0's; its peaks are those of this process since its start.
    """
    host = CpuDevice().memory_info()
    metrics = {"perf/cpu_memory_used_gb": (host.total_bytes - host.free_bytes) / _GIB}
    if device.type != "cpu":
        peaks = torch.get_device_module(device)
        metrics["perf/max_memory_allocated_gb"] = peaks.max_memory_allocated(device) / _GIB
        metrics["perf/max_memory_reserved_gb"] = peaks.max_memory_reserved(device) / _GIB
    return metrics


_STEP, _WAIT, _SKIPPED = "timing_s/step", "timing_s/wait_batch", "actor/skipped_updates"
_VALIDATION = "val-core/"


class RunHistory:
    """A sink of metrics that keeps the newest."""

    def __init__(self) -> None:
        self._last_step: Mapping[str, float] = {}
        self._scores: dict[tuple[str, str, str], float] = {}
        self._step_s = Histogram(trainer.STEP_SECONDS.bounds)
        self._wait_s = Histogram(trainer.BATCH_WAIT.bounds)
        self._num_skipped = 0.0

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row, of a step or of a validation."""
        if "training/global_step" in metrics:
            self._last_step = metrics
            self._step_s.observe(metrics.get(_STEP, 0.0))
            self._wait_s.observe(metrics.get(_WAIT, 0.0))
            self._num_skipped += metrics.get(_SKIPPED, 0.0)
        else:
            self._scores.update(_scores_of(metrics))

    def write_generations(self, step: int, generations: Sequence[ValidationSample]) -> None:
        """Texts are no metrics."""

    def close(self) -> None:
        """Nothing is open."""

    def readings(self) -> Iterator[InstrumentReading]:
        """What came so far."""
        yield trainer.STEP_SECONDS.at(self._step_s.distribution())
        yield trainer.BATCH_WAIT.at(self._wait_s.distribution())
        yield trainer.SKIPPED_UPDATES.at(self._num_skipped)
        for name, instrument in trainer.BY_ROW.items():
            if (value := self._last_step.get(name)) is not None:
                yield instrument.at(value)
        for labels, score in self._scores.items():
            yield trainer.VALIDATION_SCORE.at(score, *labels)


def _scores_of(metrics: Mapping[str, float]) -> Iterator[tuple[tuple[str, str, str], float]]:
    """Of ``val-core/<source>/<variable>/<statistic>``; a source may hold slashes."""
    for name, value in metrics.items():
        if name.startswith(_VALIDATION):
            source, variable, statistic = name.removeprefix(_VALIDATION).rsplit("/", 2)
            yield (source, variable, statistic), value


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

    def readings(self) -> Iterator[InstrumentReading]:
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


_AWAITED_IN = {
    RunPhase.WAITING_FOR_REPLICAS: ("rollout fleet", "registering replicas"),
    RunPhase.WAITING_FOR_BATCH: ("reward service", "filling a batch"),
    RunPhase.TRAINING: ("learner thread", "updating the policy"),
    RunPhase.PUBLISHING: ("rollout fleet", "taking the weights"),
    RunPhase.EVALUATING: ("reward service", "validating"),
    RunPhase.SAVING: ("learner thread", "saving a checkpoint"),
    RunPhase.PAUSED: ("operator", "resuming the run"),
}
_AT_REST = (RunPhase.PAUSED, RunPhase.FINISHED)


def phase_waits(state: RunState) -> tuple[Waiting, ...]:
    """Whom the run as a whole waits for, since the present phase began."""
    awaited = _AWAITED_IN.get(state.phase)
    return () if awaited is None else (Waiting(*awaited, state.phase_seconds),)


def watching(config: RunConfig, state: RunState, fleet: Fleet) -> AbstractContextManager[None]:
    """The trainer's watchdog."""
    service = config.sluice.trainer
    work = TrainerWork(service, state, fleet, Path(checkpoint_folder(config)))
    address = advertised_address(service.endpoint, service.endpoint.port)
    return watched_service(
        "trainer", config.sluice, work.work_state, address=address, waits=work.waits
    )


class TrainerWork:
    """What the watchdog asks.

    Progress are steps, changes of phase, forward passes, buckets of weights, bytes of a checkpoint
    under way, and tokens of the fleet, which is what a wait for a batch waits for. A paused or
    finished run has no work.

    Args:
        service: the deadlines of the waits that have one of their own.
        state: what the run does.
        fleet: who generates.
        checkpoints: the folder of the run's checkpoints.
    """

    def __init__(
        self, service: TrainerServiceConfig, state: RunState, fleet: Fleet, checkpoints: Path
    ) -> None:
        self._state, self._fleet = state, fleet
        self._unfinished = UnfinishedCheckpoint(checkpoints)
        self._patience_s = {
            RunPhase.WAITING_FOR_REPLICAS: service.replica_wait_timeout_s,
            RunPhase.WAITING_FOR_BATCH: service.batch_timeout_s,
            RunPhase.EVALUATING: service.batch_timeout_s,
        }

    def work_state(self) -> WorkState:
        """In the event loop."""
        phase = self._state.phase
        written = self._unfinished.latest() if phase is RunPhase.SAVING else None
        progress = (phase, self._state.step, units_done(), written, self._fleet.totals())
        return WorkState(progress, phase not in _AT_REST, self._patience_s.get(phase, 0.0))

    def waits(self) -> tuple[Waiting, ...]:
        """In any thread."""
        return merged_waits((*phase_waits(self._state), *WAITS.snapshot()))


class UnfinishedCheckpoint:
    """How much of a checkpoint is on the disk, measured by a thread: a disk may hang.

    Args:
        root: the folder of the run's checkpoints.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._latest: tuple[int, int] | None = None
        self._measuring: threading.Thread | None = None

    def latest(self) -> tuple[int, int] | None:
        """Bytes that files have and bytes that are allocated; starts the next measurement.

        ``None`` before the first has ended.
        """
        if self._measuring is None or not self._measuring.is_alive():
            self._measuring = threading.Thread(
                target=self._measure, name="unfinished checkpoint", daemon=True
            )
            self._measuring.start()
        return self._latest

    def _measure(self) -> None:
        try:
            files = [file.stat() for file in self._root.glob(".*/**/*")]
        except OSError:  # renamed meanwhile: the next look sees what came of it
            return
        self._latest = sum(s.st_size for s in files), sum(s.st_blocks for s in files) * 512

"""Report the service's state: Prometheus metrics, demand for replicas, and progress for the
watchdog.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from services.reward.app import RewardApp
from services.reward.group_table import PENDING_STATES, GroupState
from services.reward.records.statistics import SAMPLE_OUTCOMES
from sluice.algorithm.routing import FleetUse, ReplicaUse, replicas_needed, slots_needed
from sluice.concurrency.watchdog import WorkState, watch_service
from sluice.config.deadlines import generate_timeout_s
from sluice.config.run import RunConfig
from sluice.config.sources import largest_n
from sluice.rpc.metrics import ProcessName, serve_metrics
from sluice.service_contract import restarts
from sluice.telemetry.metric_names import exported_rows
from sluice.telemetry.metrics import Histogram, InstrumentReading, reading
from sluice.types import TrainGroup

_INTERVAL_S = 1.0
_BATCHES, _MIN_S = 4, 60.0
_AGAIN = {
    "scored": "reward/samples_scored_again",
    "generated": "reward/samples_generated_again",
}


class BatchHistory:
    """Measures the batches formed so far: the time to fill them and the staleness of their
    responses.

    Args:
        max_staleness: the bound, in versions. Responses at the bound are counted, unless it is 0,
            where every response is.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._fill_s = Histogram("sluice_reward_batch_fill_seconds")
        self._staleness = Histogram("sluice_reward_staleness_versions")
        self.num_formed = self.num_at_bound = 0

    def note_batch(self, groups: Sequence[TrainGroup], version: int, fill_s: float) -> None:
        """Note a batch for `version`, formed `fill_s` seconds after the previous one."""
        self.num_formed += 1
        self._fill_s.observe(fill_s)
        for group in groups:
            for rollout in group.rollouts:
                if rollout.oldest_version is not None:
                    staleness = version - rollout.oldest_version
                    self._staleness.observe(staleness)
                    self.num_at_bound += 0 < self.max_staleness <= staleness

    def readings(self) -> Iterator[InstrumentReading]:
        """Yield the readings of all batches."""
        yield self._fill_s.reading()
        yield self._staleness.reading()


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """The state of the loop that demand depends on.

    Attributes:
        num_batches: batches formed so far.
        is_starved: whether the trainer waits for a batch while training samples are on replicas or
            wait for one, or while there is no replica.
        slots_in_use: slots that run a sequence.
        num_slots: all slots of the fleet.
        num_replicas: announced replicas.
    """

    num_batches: int
    is_starved: bool
    slots_in_use: int
    num_slots: int
    num_replicas: int


@dataclass(frozen=True, slots=True)
class _Mark:
    at_s: float
    slot_seconds: float
    starved_s: float


class DemandMeter:
    """Measures the use of the fleet for the last `_BATCHES` batches, at least `_MIN_S` seconds.

    It looks once a second, only if metrics are on, and assumes that what it finds has held since
    the previous look. `sluice.algorithm.routing` computes the demand.

    Args:
        facts: returns the current state of the loop; must not block.
    """

    def __init__(self, facts: Callable[[], FleetStatus]) -> None:
        self._facts = facts
        self._latest: tuple[float, FleetStatus] | None = None
        self._marks: deque[_Mark] = deque()
        self._num_batches = 0
        self.slot_seconds = self.starved_s = 0.0

    def measure(self, now_s: float) -> None:
        """Note the state of the loop at `now_s`, on a monotonic clock."""
        facts = self._facts()
        if self._latest is not None:
            before_s, previous = self._latest
            self.slot_seconds += previous.slots_in_use * (now_s - before_s)
            self.starved_s += (now_s - before_s) * previous.is_starved
        self._latest = (now_s, facts)
        if facts.num_batches != self._num_batches:
            self._num_batches = facts.num_batches
            self._marks.append(_Mark(now_s, self.slot_seconds, self.starved_s))
        while len(self._marks) > _BATCHES and now_s - self._marks[1].at_s >= _MIN_S:
            self._marks.popleft()

    @property
    def slots(self) -> float | None:
        """Slots wanted; ``None`` before the first batch."""
        if self._latest is None or not self._marks:
            return None
        now_s, facts = self._latest
        first_mark = self._marks[0]
        use = FleetUse(
            now_s - first_mark.at_s,
            self.starved_s - first_mark.starved_s,
            self.slot_seconds - first_mark.slot_seconds,
        )
        return slots_needed(use, facts.num_slots)

    @property
    def replicas(self) -> int | None:
        """Replicas wanted, of the current size."""
        slots = self.slots
        if slots is None or self._latest is None:
            return None
        _, facts = self._latest
        return replicas_needed(slots, num_slots=facts.num_slots, num_replicas=facts.num_replicas)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Look regularly while the block runs, in the running event loop."""
        loop = asyncio.get_running_loop()
        upcoming: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal upcoming
            upcoming = loop.call_later(_INTERVAL_S, look)
            self.measure(time.monotonic())

        look()
        try:
            yield
        finally:
            if upcoming is not None:
                upcoming.cancel()


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """Reads the service's metrics.

    Args:
        app: the service's parts.
        history: measures the batches.
        demand: measures the demand for replicas.
        batch_size: groups per batch.
    """

    app: RewardApp
    history: BatchHistory
    demand: DemandMeter
    batch_size: int

    def readings(self) -> Iterator[InstrumentReading]:
        """Yield all readings; called in the event loop."""
        yield from self._prompts()
        yield from self._count_readings()
        yield from self._batch()
        yield from self.history.readings()
        yield from self._demand_readings()

    def _prompts(self) -> Iterator[InstrumentReading]:
        ledger, groups = self.app.ledger, self.app.groups
        yield reading("sluice_reward_prompts_submitted_total", ledger.num_submitted)
        for end, count in ledger.by_end.items():
            yield reading("sluice_reward_prompts_ended_total", count, end)
        for state in PENDING_STATES:
            yield reading("sluice_reward_prompts", groups.counts[state], state)
        yield reading("sluice_reward_queued_groups", self.app.queue.num_waiting)

    def _count_readings(self) -> Iterator[InstrumentReading]:
        counts = self.app.statistics()
        for row, name in exported_rows("reward").items():
            yield reading(name, counts.get(row, 0.0))
        for outcome in SAMPLE_OUTCOMES:
            yield reading(
                "sluice_reward_samples_total",
                counts.get(f"reward/outcomes/{outcome}", 0.0),
                outcome,
            )
        for kind, name in _AGAIN.items():
            yield reading("sluice_reward_samples_again_total", counts.get(name, 0.0), kind)
        yield reading("sluice_reward_scorer_seconds_total", self.app.counters.scorers.busy_seconds)

    def _batch(self) -> Iterator[InstrumentReading]:
        loop, num_kept = self.app.loop, self.app.groups.num_kept
        yield reading("sluice_reward_batch_groups", self.batch_size)
        yield reading("sluice_reward_batch_fill_ratio", min(1.0, num_kept / self.batch_size))
        yield reading("sluice_reward_batch_asked", float(loop.batches.num_asking > 0))
        yield reading("sluice_reward_responses_at_bound_total", self.history.num_at_bound)
        yield reading("sluice_reward_max_staleness_versions", self.history.max_staleness)
        if (version := self.app.groups.policy_version) is not None:
            yield reading("sluice_reward_policy_version", version)
        yield reading("sluice_reward_replicas", len(self.app.queue.fleet.announced))
        for kind, wait in loop.waits().items():
            # The kind of a lease ends with its step.
            yield reading("sluice_reward_awaited_seconds", wait.seconds, kind.partition(" ")[0])

    def _demand_readings(self) -> Iterator[InstrumentReading]:
        yield reading("sluice_rollout_used_slot_seconds_total", self.demand.slot_seconds)
        yield reading("sluice_rollout_starved_seconds_total", self.demand.starved_s)
        if (slots := self.demand.slots) is not None:
            yield reading("sluice_rollout_demand_slots", slots)
        if (replicas := self.demand.replicas) is not None:
            yield reading("sluice_rollout_demand_replicas", replicas)


def fleet_status(app: RewardApp, num_batches: int) -> FleetStatus:
    """Return the state that demand depends on, after `num_batches` batches.

    Replicas that only serve a validation do not count.
    """
    replicas = [
        announced
        for announced in app.queue.fleet.announced
        if announced.use is not ReplicaUse.VALIDATION
    ]
    generates = app.groups.counts[GroupState.GENERATING] > 0 and app.dispatcher.is_training_sampled
    return FleetStatus(
        num_batches,
        app.loop.batches.num_asking > 0 and (generates or not replicas),
        app.queue.fleet.num_slots_in_use,
        sum(replica.info.slots for replica in replicas),
        len(replicas),
    )


@contextmanager
def exported(config: RunConfig, app: RewardApp, name: str) -> Iterator[None]:
    """Serve the readings while the block runs, if a port is set; otherwise measure nothing."""
    endpoint = config.sluice.reward.endpoint
    if endpoint.metrics_port is None:
        yield
        return
    history = BatchHistory(config.sluice.asynchrony.max_staleness)
    demand = DemandMeter(lambda: fleet_status(app, history.num_formed))
    app.counters.on_batch = history.note_batch
    metrics = RewardMetrics(app, history, demand, config.data.train_batch_size)
    process = ProcessName("reward", name, restarts())
    with demand.measuring(), serve_metrics(config.sluice, endpoint, process, metrics.readings):
        yield


def watching(config: RunConfig, app: RewardApp, address: str) -> AbstractContextManager[None]:
    """Return the watchdog of the reward service, which serves at `address`."""
    timeouts = config.sluice.reward.outcomes.scorer_timeout.max_attempts
    # Only a fully graded group counts as progress, and each sample may take its whole time limit.
    grading_s = largest_n(config) * timeouts * config.reward.scorer_pool.timeout_s
    work = partial(work_state, app, max(generate_timeout_s(config), grading_s))
    return watch_service("reward", config.sluice, work, address=address)


def work_state(app: RewardApp, patience_s: float) -> WorkState:
    """Return the state for the watchdog; call in the event loop.

    Ended prompts, graded samples and received tokens are progress. There is work while groups are
    graded, or generated by announced replicas; without these the trainer waits. If all samples wait
    for agents or environments, which have other deadlines, there is no work.

    Args:
        app: the service's parts.
        patience_s: seconds a replica may take to generate a group, or the scorers to grade it.
    """
    groups = app.groups
    has_fleet = bool(app.queue.fleet.announced)
    is_outside = app.dispatcher.awaited_outside is not None and not app.queue.is_busy
    generates = groups.counts[GroupState.GENERATING] > 0 and has_fleet and not is_outside
    progress = (groups.policy_version, groups.num_kept, app.counters.progress)
    has_work = generates or groups.counts[GroupState.GRADING] > 0
    return WorkState(progress, has_work, patience_s, tuple(app.loop.waits().values()))

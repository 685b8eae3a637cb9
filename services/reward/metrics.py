"""Report the service's state: metrics for Prometheus, demand for the fleet, progress for the
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
from sluice.concurrency.watchdog import WorkState, watched_service
from sluice.config.deadlines import generate_timeout_s
from sluice.config.run import RunConfig
from sluice.config.sources import largest_n
from sluice.rpc.metrics import ProcessName, served_metrics
from sluice.service_contract import restarts
from sluice.telemetry.metric_names import exported_rows
from sluice.telemetry.metrics import Histogram, InstrumentReading, reading
from sluice.types import TrainGroup

_INTERVAL_S = 1.0
_BATCHES, _LEAST_S = 4, 60.0
_AGAIN = {
    "scored": "reward/samples_scored_again",
    "generated": "reward/samples_generated_again",
}


class BatchHistory:
    """The batches formed so far: how long they took to fill, and how stale their responses were.

    Args:
        max_staleness: versions; responses that are so stale are counted. With 0 every response is
            at the bound, and none is counted.
    """

    def __init__(self, max_staleness: int) -> None:
        self.max_staleness = max_staleness
        self._fill_s = Histogram("sluice_reward_batch_fill_seconds")
        self._staleness = Histogram("sluice_reward_staleness_versions")
        self.num_formed = self.num_at_bound = 0

    def formed(self, groups: Sequence[TrainGroup], version: int, fill_s: float) -> None:
        """Note a batch for `version`, formed `fill_s` seconds after the one before."""
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
class FleetFacts:
    """The loop at one moment, as far as demand depends on it.

    Attributes:
        num_batches: batches formed so far.
        is_starved: whether the trainer waits for a batch, and a group of it for replicas; or, while
            a validation samples, for agents or environments.
        slots_in_use: slots of the fleet with a sequence.
        num_slots: all of them.
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
    """Measures what the last batches cost the fleet: `_BATCHES` of them, or `_LEAST_S` seconds.

    It looks once a second, and only where metrics are on. What a look finds is taken to have held
    since the look before. `sluice.algorithm.routing` computes the demand.

    Args:
        facts: the loop now; must not block.
    """

    def __init__(self, facts: Callable[[], FleetFacts]) -> None:
        self._facts = facts
        self._latest: tuple[float, FleetFacts] | None = None
        self._marks: deque[_Mark] = deque()
        self._num_batches = 0
        self.slot_seconds = self.starved_s = 0.0

    def look(self, now_s: float) -> None:
        """Note the state of the loop at `now_s`, on a clock that rises."""
        facts = self._facts()
        if self._latest is not None:
            before_s, before = self._latest
            self.slot_seconds += before.slots_in_use * (now_s - before_s)
            self.starved_s += (now_s - before_s) * before.is_starved
        self._latest = (now_s, facts)
        if facts.num_batches != self._num_batches:
            self._num_batches = facts.num_batches
            self._marks.append(_Mark(now_s, self.slot_seconds, self.starved_s))
        while len(self._marks) > _BATCHES and now_s - self._marks[1].at_s >= _LEAST_S:
            self._marks.popleft()

    @property
    def slots(self) -> float | None:
        """Slots wanted; ``None`` before a batch was formed, since nothing is known."""
        if self._latest is None or not self._marks:
            return None
        now_s, facts = self._latest
        first = self._marks[0]
        use = FleetUse(
            now_s - first.at_s,
            self.starved_s - first.starved_s,
            self.slot_seconds - first.slot_seconds,
        )
        return slots_needed(use, facts.num_slots)

    @property
    def replicas(self) -> int | None:
        """The same in replicas of the present size."""
        slots = self.slots
        if slots is None or self._latest is None:
            return None
        _, facts = self._latest
        return replicas_needed(slots, num_slots=facts.num_slots, num_replicas=facts.num_replicas)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at intervals while the block runs, in the running event loop."""
        loop = asyncio.get_running_loop()
        upcoming: asyncio.TimerHandle | None = None

        def look() -> None:
            nonlocal upcoming
            upcoming = loop.call_later(_INTERVAL_S, look)
            self.look(time.monotonic())

        look()
        try:
            yield
        finally:
            if upcoming is not None:
                upcoming.cancel()


@dataclass(frozen=True, slots=True)
class RewardMetrics:
    """The sources of the service's readings.

    Args:
        app: the service's parts.
        history: of its batches.
        demand: what they cost the fleet.
        batch_size: groups of a batch.
    """

    app: RewardApp
    history: BatchHistory
    demand: DemandMeter
    batch_size: int

    def readings(self) -> Iterator[InstrumentReading]:
        """Yield all readings; called in the event loop."""
        yield from self._prompts()
        yield from self._counted()
        yield from self._batch()
        yield from self.history.readings()
        yield from self._demanded()

    def _prompts(self) -> Iterator[InstrumentReading]:
        ledger, groups = self.app.ledger, self.app.groups
        yield reading("sluice_reward_prompts_submitted_total", ledger.num_submitted)
        for end, count in ledger.by_end.items():
            yield reading("sluice_reward_prompts_ended_total", count, end)
        for state in PENDING_STATES:
            yield reading("sluice_reward_prompts", groups.counts[state], state)
        yield reading("sluice_reward_queued_groups", self.app.queue.num_waiting)

    def _counted(self) -> Iterator[InstrumentReading]:
        counts = self.app.statistics()
        for row, name in exported_rows("reward").items():
            yield reading(name, counts.get(row, 0.0))
        for outcome in SAMPLE_OUTCOMES:
            yield reading(
                "sluice_reward_samples_total",
                counts.get(f"reward/outcomes/{outcome}", 0.0),
                outcome,
            )
        for what, name in _AGAIN.items():
            yield reading("sluice_reward_samples_again_total", counts.get(name, 0.0), what)
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
        for kind, wait in loop.awaited().items():
            # The kind of a lease ends with its step.
            yield reading("sluice_reward_awaited_seconds", wait.seconds, kind.partition(" ")[0])

    def _demanded(self) -> Iterator[InstrumentReading]:
        yield reading("sluice_rollout_used_slot_seconds_total", self.demand.slot_seconds)
        yield reading("sluice_rollout_starved_seconds_total", self.demand.starved_s)
        if (slots := self.demand.slots) is not None:
            yield reading("sluice_rollout_demand_slots", slots)
        if (replicas := self.demand.replicas) is not None:
            yield reading("sluice_rollout_demand_replicas", replicas)


def fleet_facts(app: RewardApp, num_batches: int) -> FleetFacts:
    """Return what demand depends on, now, after so many batches were formed.

    Replicas that serve validation only are no part of the fleet here.
    """
    replicas = [one for one in app.queue.fleet.announced if one.use is not ReplicaUse.VALIDATION]
    generates = app.groups.counts[GroupState.GENERATING] > 0 and app.dispatcher.is_training_sampled
    return FleetFacts(
        num_batches,
        app.loop.batches.num_asking > 0 and (generates or not replicas),
        app.queue.fleet.num_slots_in_use,
        sum(replica.info.slots for replica in replicas),
        len(replicas),
    )


@contextmanager
def exported(config: RunConfig, app: RewardApp, name: str) -> Iterator[None]:
    """Serve the readings while the block runs, if a port is set; else nothing is measured."""
    endpoint = config.sluice.reward.endpoint
    if endpoint.metrics_port is None:
        yield
        return
    history = BatchHistory(config.sluice.asynchrony.max_staleness)
    demand = DemandMeter(lambda: fleet_facts(app, history.num_formed))
    app.counters.on_batch = history.formed
    metrics = RewardMetrics(app, history, demand, config.data.train_batch_size)
    who = ProcessName("reward", name, restarts())
    with demand.looking(), served_metrics(config.sluice, endpoint, who, metrics.readings):
        yield


def watching(config: RunConfig, app: RewardApp, address: str) -> AbstractContextManager[None]:
    """Return the reward service's watchdog; `address` is where it serves."""
    timeouts = config.sluice.reward.outcomes.scorer_timeout.max_attempts
    # A group counts as progress when all of its samples are graded, each as slowly as is allowed.
    grading_s = largest_n(config) * timeouts * config.reward.scorer_pool.timeout_s
    work = partial(work_state, app, max(generate_timeout_s(config), grading_s))
    return watched_service("reward", config.sluice, work, address=address)


def work_state(app: RewardApp, patience_s: float) -> WorkState:
    """Return what the watchdog asks; call in the event loop.

    Progress are prompts that ended, samples graded and tokens received. There is work while groups
    are graded, or generated by replicas that are there: for others the trainer waits. Episodes have
    deadlines of their own, and samples may wait for agents: where all do, there is no work.

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
    return WorkState(progress, has_work, patience_s, tuple(app.loop.awaited().values()))

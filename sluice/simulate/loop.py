"""The simulated loop: prompts in, kept groups out, versions back.

It decides with the same functions, in the same order, as the reward service: `SamplingStrategy`
for what to start, `ReplicaRouter` for where, `filter_values` for what to keep, `staleness` for when
a batch may be formed and what to break off, `publishing` for what a transfer runs beside and how
many replicas swap at once, `YieldFloor` for when to give up. Only the waiting is
replaced by a queue of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush

import numpy as np

from sluice.algorithm.groups.staleness import BatchDecision, GroupAges, OnStale, reserves_slot
from sluice.algorithm.publishing import may_overlap, swaps_at_once
from sluice.algorithm.sampling.admission import (
    AdmissionOrder,
    FinishForecast,
    YieldEstimate,
    YieldFloor,
    groups_with_capacity,
    kept_upper_bound,
)
from sluice.algorithm.sampling.attempt import PromptHistory, update_history
from sluice.algorithm.sampling.strategy import LoopLoad, SamplingStrategy
from sluice.errors import BatchUnfillableError
from sluice.simulate.fleet import EventQueue, SimulatedFleet
from sluice.simulate.group import SimulatedGroup
from sluice.simulate.recorder import LeaseMark, SimulatedStepTimes, SimulationRecorder, TokenCause
from sluice.simulate.settings import SimulationSettings
from sluice.simulate.workload import SimulatedPrompt, SimulatedSamples, Workload

_REMEDY = (
    "simulate prompts that are solved sometimes (--mixture, --workload), or larger groups "
    "(--group-size); of a run, lower its min_yield"
)
_BATCHES_WITHOUT_BOUND = 100
"""Without a bound of the run, a simulation ends when none of so many batches' groups is kept."""


class _Preemptions:
    """Preempted groups by name, until a group of the prompt ends."""

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._times: dict[str, int] = {}
        self._reserved: set[str] = set()

    def reserves_slot(self, name: str) -> bool:
        """Return whether a group that starts gets a slot for certain."""
        if reserves_slot(self._times.get(name, 0), len(self._reserved), self._batch_size):
            self._reserved.add(name)
        return name in self._reserved

    def note_preempted(self, name: str) -> None:
        """Record that a group was cancelled for lack of a slot, and will start again."""
        self._times[name] = self._times.get(name, 0) + 1
        self._reserved.discard(name)

    def note_ended(self, name: str) -> None:
        """Record that a group was kept, filtered or failed."""
        self._times.pop(name, None)
        self._reserved.discard(name)


class Batching:
    """Kept and running groups, and the batches leased.

    Args:
        batch_size: B.
        max_staleness: S.
        on_stale: what happens to groups that would grow stale.
    """

    def __init__(self, batch_size: int, max_staleness: int, on_stale: OnStale) -> None:
        self._batch_size = batch_size
        self._ages = GroupAges(batch_size, max_staleness, on_stale)
        self._kept: dict[str, SimulatedGroup] = {}
        self._started: dict[str, SimulatedGroup] = {}
        self._unpublished: list[int] = []

    @property
    def kept(self) -> tuple[SimulatedGroup, ...]:
        """Groups that wait for a batch."""
        return tuple(self._kept.values())

    @property
    def num_kept(self) -> int:
        """Groups that wait for a batch."""
        return len(self._kept)

    @property
    def num_in_training(self) -> int:
        """Groups leased under a version whose successor is not announced yet."""
        return len(self._unpublished) * self._batch_size

    def reserve(self, group: SimulatedGroup, version: int) -> None:
        """Reserve a place in the batch for `version` for a group that is issued."""
        self._started[group.name] = group
        self._ages.reserve(group.name, version)

    def note_started(self, group: SimulatedGroup) -> None:
        """Record that a replica generates for a group from now on."""
        assert group.start_version is not None
        self._started[group.name] = group
        self._ages.add_running(group.name, group.start_version)

    def note_left(self, group: SimulatedGroup) -> None:
        """Record that a group runs no more; harmless if it never started."""
        self._started.pop(group.name, None)
        self._ages.remove_running(group.name)

    def keep(self, group: SimulatedGroup) -> None:
        """Take on a kept group."""
        self._kept[group.name] = group
        self._ages.keep(group.name, group.oldest_version, group.position)

    def remove(self, group: SimulatedGroup) -> None:
        """Give up a kept group."""
        del self._kept[group.name]
        self._ages.remove(group.name)

    def lease(self, groups: Sequence[SimulatedGroup], version: int) -> None:
        """Let the trainer take a batch."""
        for group in groups:
            self.remove(group)
        self._unpublished.append(version)

    def note_published(self, version: int) -> None:
        """Record that a version was announced."""
        self._unpublished = [leased for leased in self._unpublished if leased >= version]

    def next_version(self, announced: int) -> int:
        """Return the version of the next batch to be formed while `announced` is."""
        return max((announced, *(leased + 1 for leased in self._unpublished)))

    def decide(self, version: int, estimate: YieldEstimate) -> BatchDecision:
        """Return what to do towards the batch for `version`."""
        return self._ages.decide(version, partial(kept_upper_bound, estimate=estimate))

    def without_slot(self, announced: int) -> list[SimulatedGroup]:
        """Return the running groups that no batch will have a place for."""
        return self.running_groups(self._ages.without_slot(self.next_version(announced)))

    def running_groups(self, names: Sequence[str]) -> list[SimulatedGroup]:
        """Return running groups by name."""
        return [self._started[name] for name in names]

    def kept_groups(self, names: Sequence[str]) -> list[SimulatedGroup]:
        """Return kept groups by name."""
        return [self._kept[name] for name in names]

    def drops(self, group: SimulatedGroup, next_version: int) -> bool:
        """Return whether a group that is sure to be stale is dropped, not restarted."""
        return self._ages.drops(group.name, next_version)


class PromptFeed:
    """Positions of the data set, and groups that wait to begin again.

    Args:
        num_in_line: positions that are weighed against each other, see `AdmissionOrder`; 1: none.
        key: names the prompt at a position.
        forecast: how long groups take.
    """

    def __init__(
        self, num_in_line: int, key: Callable[[int], str], forecast: FinishForecast
    ) -> None:
        self._num_in_line = num_in_line
        self._key = key
        self._forecast = forecast
        self._waiting: list[tuple[int, SimulatedGroup]] = []
        self._order = AdmissionOrder()
        self._next_position = 0

    def put(self, group: SimulatedGroup) -> None:
        """Let a group begin again before any later one."""
        heappush(self._waiting, (group.position, group))

    def first_waiting(self) -> SimulatedGroup | None:
        """Return the first group that waits to begin again."""
        return heappop(self._waiting)[1] if self._waiting else None

    def next_position(self, version: int, now_s: float) -> int:
        """Return the next position of the data set to start under `version`."""
        while len(self._order) < self._num_in_line:
            expected = self._forecast.tokens(self._key(self._next_position))
            self._order.add(self._next_position, expected, version)
            self._next_position += 1
        return self._order.take(version, self._forecast.tokens_in_time(now_s))


class SimulatedLoop:
    """One run.

    Args:
        settings: the fleet, the trainer and the rules.
        workload: the data set and its answers.
        recorder: counts.
        on_step: gets the number of batches leased.
    """

    def __init__(
        self,
        settings: SimulationSettings,
        workload: Workload,
        recorder: SimulationRecorder,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        rules = settings.rules
        self._settings = settings
        self._rules = rules
        self._workload = workload
        self._recorder = recorder
        self._on_step = on_step
        self._events = EventQueue()
        self._fleet = SimulatedFleet(
            settings.fleet, self._events, self._started, self._sample_ended, self._start_grading
        )
        self._strategy = SamplingStrategy(rules)
        self._batching = Batching(rules.train_batch_size, rules.max_staleness, settings.on_stale)
        forecast = self._strategy.forecast
        self._feed = PromptFeed(
            self._strategy.num_in_line, lambda at: workload.prompt(at, 0).key, forecast
        )
        self._histories: dict[str, PromptHistory] = {}
        self._in_flight: dict[int, SimulatedGroup] = {}
        self._sure: set[int] = set()  # of those, which have a place as if they were kept
        self._preemptions = _Preemptions(rules.train_batch_size)
        self._train_times = np.random.default_rng([settings.seed, 3])
        self._version = 0  # announced
        self._trained = 0  # versions that the trainer has made
        self._asked_s: float | None = 0.0
        self._overlaps = settings.trainer.overlaps and may_overlap(rules.max_staleness)
        self._is_publishing = False
        self._waiting: tuple[float, float, float] | None = None  # for the publication before
        self._trainer_wait_s = 0.0
        self._floor = settings.yield_floor
        if not self._floor.min_yield:
            num_groups = _BATCHES_WITHOUT_BOUND * rules.train_batch_size
            self._floor = YieldFloor(1.0 / num_groups, num_groups)
        self._last_kept: deque[bool] = deque(maxlen=self._floor.num_groups)
        self._has_changed = True
        self._is_over = False
        self.num_samples = 0

    def run(self) -> None:
        """Run until the last step is published.

        Raises:
            BatchUnfillableError: hardly a group is kept any more, or ``rounds`` used up its waves.
        """
        self._fleet.announce(0)
        self._settle()
        while not self._is_over:
            if not self._events.step():
                raise BatchUnfillableError(
                    f"the simulation stands still at {self._events.now:.0f} s with "
                    f"{self._batching.num_kept} kept groups; report the settings"
                )
            if not self._is_over:
                self._settle()

    def totals(self) -> tuple[float, float, float]:
        """Return tokens generated, busy seconds, slot seconds."""
        return self._fleet.totals

    def num_pending_tokens(self) -> float:
        """Return the tokens of groups that run or wait for a batch."""
        running = (g.finished_tokens + self._fleet.num_sampled(g) for g in self._in_flight.values())
        return sum(running) + sum(group.finished_tokens for group in self._batching.kept)

    def _settle(self) -> None:
        """Take all decisions that the last event makes possible."""
        self._admit()
        while self._has_changed:
            self._has_changed = False
            if not self._strategy.discards_surplus:  # else a wave is awaited whole
                self._cancel_without_slot(self._batching.without_slot(self._version))
            self._admit()
            self._form()

    # ------------------------------------------------------------------------------ admission

    def _capacity(self) -> int:
        free = self._fleet.num_free(self._version - self._rules.max_staleness)
        uses_probes = self._rules.strategy.uses_probes
        first_sequences = (
            self._rules.probe_samples if uses_probes else self._rules.samples_per_group
        )
        return groups_with_capacity(
            free, first_sequences=first_sequences, is_idle=not self._in_flight
        )

    def _load(self, capacity: int) -> LoopLoad:
        return LoopLoad(
            num_in_flight=len(self._in_flight),
            num_kept=self._batching.num_kept,
            num_in_training=self._batching.num_in_training,
            capacity=capacity,
            num_sure=len(self._sure),
        )

    def _admit(self) -> None:
        while (capacity := self._capacity()) and self._strategy.num_to_start(
            self._load(capacity)
        ) > 0:
            self._issue(self._feed.first_waiting())

    def _issue(self, restarted: SimulatedGroup | None) -> None:
        """Issue the next prompt, or the prompt of a group that begins again."""
        if restarted is None:
            position = self._feed.next_position(self._version, self._events.now)
        else:
            position = restarted.position
        prompt = self._workload.prompt(position, self._version)
        history = self._histories.get(prompt.key)
        attempt = self._strategy.attempt(prompt.key, position, history, self._version)
        if not attempt.first_samples:
            self._strategy.note_skipped(attempt)
            return
        num_restarts, issued_version = 0, self._version
        if restarted is not None:
            num_restarts, issued_version = restarted.num_restarts + 1, restarted.issued_version
        samples = self._samples(prompt, position, num_restarts)
        group = SimulatedGroup(position, prompt, issued_version, attempt, samples, num_restarts)
        group.issued_s = self._events.now
        if self._preemptions.reserves_slot(group.name):
            self._sure.add(position)
            self._batching.reserve(group, self._version)
        self._strategy.note_started(attempt)
        self._recorder.record_issued(group)
        self._in_flight[position] = group
        self._ask(group, attempt.first_samples)

    def _samples(
        self, prompt: SimulatedPrompt, position: int, num_restarts: int
    ) -> SimulatedSamples:
        num_samples = self._rules.samples_per_group
        samples = self._workload.samples(prompt, position, num_restarts, num_samples)
        return samples if self._settings.filters_groups else replace(samples, is_filtered=False)

    def _ask(self, group: SimulatedGroup, num_samples: int) -> None:
        self.num_samples += num_samples
        self._fleet.ask(group, num_samples)

    # ------------------------------------------------------------------------------ groups

    def _started(self, group: SimulatedGroup) -> None:
        self._batching.note_started(group)
        self._has_changed = True

    def _call_after_grading(self, graded: Callable[[], None]) -> None:
        if self._settings.fleet.grading_s:
            self._events.after(self._settings.fleet.grading_s, graded)
        else:
            graded()

    def _sample_ended(self, group: SimulatedGroup, is_right: bool) -> None:
        if group.num_needed < self._rules.samples_per_group:
            self._call_after_grading(partial(self._sample_graded, group, is_right=is_right))

    def _sample_graded(self, group: SimulatedGroup, *, is_right: bool) -> None:
        """Request the rest as soon as the grades of two of the first samples differ."""
        if group.is_cancelled:
            return
        group.record_grade(is_right=is_right)
        num_rest = self._rules.samples_per_group - group.num_needed
        if num_rest and group.differs:
            self._sure.add(group.position)
            self._has_changed = True
            self._ask(group, num_rest)

    def _start_grading(self, group: SimulatedGroup) -> None:
        group.generated_s = self._events.now
        self._call_after_grading(partial(self._handle_grades, group, group.num_needed))

    def _handle_grades(self, group: SimulatedGroup, num_samples: int) -> None:
        """Judge a group, unless the strategy requested more samples while these were graded."""
        if group.is_cancelled or group.num_needed > num_samples:
            return
        self._has_changed = True
        num_rest = self._rules.samples_per_group - group.num_needed
        if num_rest:
            continued = self._strategy.after_probes(
                group.attempt,
                num_right=group.num_right,
                num_scored=group.num_asked,
                version=self._version,
            )
            if continued is not None:
                group.attempt = continued
                if group.is_sure:
                    self._sure.add(group.position)
                self._ask(group, num_rest)
                return
        self._judge(group)

    def _remove(self, group: SimulatedGroup) -> None:
        del self._in_flight[group.position]
        self._sure.discard(group.position)
        self._batching.note_left(group)

    def _judge(self, group: SimulatedGroup) -> None:
        if self._has_no_place(group):
            self._cancel_running(group)
            return
        self._remove(group)
        self._preemptions.note_ended(group.name)
        is_kept = group.end is None
        self._strategy.note_ended(
            group.attempt,
            num_right=group.num_right,
            num_scored=group.num_asked,
            mean_tokens=group.finished_tokens / group.num_asked,
            is_kept=is_kept,
            version=self._version,
            seconds=self._events.now - group.issued_s,
        )
        self._last_kept.append(is_kept)
        if is_kept:
            self._batching.keep(group)
        else:
            self._recorder.record_filtered(group, self._events.now)

    def _check_yield(self) -> None:
        """Give up where a batch lacks groups and the yield is hopeless."""
        floor, last_kept = self._floor, self._last_kept
        lacks_groups = self._batching.num_kept < self._rules.train_batch_size
        if not lacks_groups or len(last_kept) < floor.num_groups:
            return
        if floor.is_hopeless(sum(last_kept), len(last_kept)):
            raise floor.error(sum(last_kept), " (all of them simulated)", _REMEDY)

    def _has_no_place(self, group: SimulatedGroup) -> bool:
        """Return whether another group, kept at the same instant, has taken the last place."""
        return self._rules.preempts and group in self._batching.without_slot(self._version)

    def _cancel_without_slot(self, without_slot: list[SimulatedGroup]) -> None:
        for group in without_slot:
            self._cancel_running(group)
        if without_slot:
            self._fleet.serve()

    def _cancel_running(self, group: SimulatedGroup) -> None:
        preempts, next_version = self._rules.preempts, self._batching.next_version(self._version)
        is_dropped = not preempts and self._batching.drops(group, next_version)
        group.is_cancelled = self._has_changed = True
        self._remove(group)
        tokens = group.finished_tokens + self._fleet.cancel(group)
        if preempts:
            self._recorder.record_preempted(tokens)
            self._preemptions.note_preempted(group.name)
        else:
            self._recorder.record_cancelled(tokens, restarts=not is_dropped)
        if is_dropped:
            return
        self._strategy.note_restarted(group.admitted_as)
        self._feed.put(group)

    # ------------------------------------------------------------------------------ the trainer

    def _form(self) -> None:
        """Lease a batch to the trainer if it waits for one and the rules allow."""
        if self._asked_s is None:
            return
        if not self._strategy.may_form(len(self._in_flight)):
            self._check_yield()
            return
        decision = self._batching.decide(self._trained, self._strategy.estimate)
        chosen = self._batching.kept_groups(decision.chosen)
        for group in self._batching.kept_groups(decision.dropped):
            self._discard(group, TokenCause.STALE)
        self._cancel_without_slot(self._batching.running_groups(decision.without_slot))
        if chosen:
            self._lease(chosen, self._asked_s)
        else:
            self._check_yield()

    def _discard(self, group: SimulatedGroup, cause: TokenCause) -> None:
        self._batching.remove(group)
        self._recorder.record_discarded(group, cause, self._events.now)
        self._has_changed = True

    def _lease(self, groups: list[SimulatedGroup], asked_s: float) -> None:
        now_s, trainer = self._events.now, self._settings.trainer
        self._batching.lease(groups, self._trained)
        self._strategy.batch_formed()
        if self._strategy.discards_surplus:
            for group in self._batching.kept:
                self._discard(group, TokenCause.SURPLUS)
        leased_s = now_s + trainer.handover_s
        self._trainer_wait_s += leased_s - asked_s
        self._recorder.record_leased(groups, self._trained, now_s)
        self._recorder.marks.append(self._mark(now_s))
        self._asked_s = None
        self._has_changed = True
        trained_s = leased_s + self._train_s(len(self._recorder.marks) - 1)
        self._events.at(trained_s, partial(self._end_step, asked_s, leased_s, trained_s))
        if self._on_step is not None:
            self._on_step(len(self._recorder.marks))

    def _train_s(self, step: int) -> float:
        trainer = self._settings.trainer
        if step < len(trainer.recorded_s):
            return trainer.recorded_s[step]
        spread = trainer.spread_s * float(self._train_times.standard_normal())
        return max(0.0, trainer.train_s + spread)

    def _end_step(self, asked_s: float, leased_s: float, trained_s: float) -> None:
        if self._is_publishing:
            self._waiting = asked_s, leased_s, trained_s
        else:
            self._publish(asked_s, leased_s, trained_s)

    def _publish(self, asked_s: float, leased_s: float, trained_s: float) -> None:
        """Send the trained version: the replicas swap in turns at the end of it."""
        trainer, now_s, num_replicas = self._settings.trainer, self._events.now, self._fleet.size
        self._is_publishing = True
        self._trained += 1
        at_once = swaps_at_once(num_replicas, self._rules.max_staleness)
        turns = range(0, num_replicas, at_once)
        swap_s = now_s + max(0.0, trainer.publish_s - len(turns) * trainer.stall_s)
        for first_replica in turns:
            swapping = range(first_replica, min(first_replica + at_once, num_replicas))
            self._events.at(swap_s, partial(self._swap, self._trained, swapping))
            swap_s += trainer.stall_s
        self._events.at(swap_s, partial(self._finish_publish, asked_s, leased_s, trained_s))
        if self._overlaps and self._trained < self._settings.num_steps:
            self._asked_s, self._has_changed = now_s, True

    def _swap(self, version: int, replicas: range) -> None:
        self._fleet.swap(version, self._settings.trainer.stall_s, replicas)

    def _finish_publish(self, asked_s: float, leased_s: float, trained_s: float) -> None:
        generated, busy_s, _ = self._fleet.totals
        now_s = self._events.now
        self._recorder.steps.append(
            SimulatedStepTimes(asked_s, leased_s, trained_s, now_s, generated, busy_s)
        )
        self._is_over = len(self._recorder.steps) == self._settings.num_steps
        self._version += 1
        for key, attempt in self._strategy.new_version():
            self._histories[key] = update_history(self._histories.get(key), attempt)
        self._strategy.forecast.note_announced(now_s)
        self._batching.note_published(self._version)
        self._fleet.announce(self._version)
        self._is_publishing, self._has_changed = False, not self._is_over
        if not self._overlaps:
            self._asked_s = now_s
        elif self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._publish(*waiting)

    def _mark(self, now_s: float) -> LeaseMark:
        generated, busy_s, slot_s = self._fleet.totals
        trained = self._recorder.tokens[TokenCause.TRAINED]
        return LeaseMark(now_s, generated, busy_s, slot_s, trained, self._trainer_wait_s)

"""Simulated replicas, and groups on their way to them and back, routed by `algorithm.routing`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

from sluice.algorithm.routing import AnnouncedReplica, ReplicaRequirement, ReplicaRouter
from sluice.simulate.group import GroupPart, SimulatedGroup, SimulatedSample
from sluice.simulate.settings import FleetSettings
from sluice.types import ReplicaInfo

_CLOCK_SLACK = 1e-6


class EventQueue:
    """Actions by time; actions of one time in the order of planning."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_planned = 0
        self.now = 0.0

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do `action` at `time_s` seconds, not before now."""
        self._num_planned += 1
        heappush(self._events, (max(time_s, self.now), self._num_planned, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Do `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def step(self) -> bool:
        """Do what comes next; return ``False`` if nothing does."""
        if not self._events:
            return False
        self.now, _, action = heappop(self._events)
        action()
        return True


class SimulatedReplica:
    """A rollout replica, whose slots generate a token a step together.

    One clock counts tokens per sequence: a sequence that starts at clock c with n tokens ends at
    c + n, whatever happens to the step time. Only the next end is planned again when the load
    changes.

    Args:
        settings: slots and step times.
    """

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings
        self._running: list[tuple[float, int, SimulatedSample]] = []  # by the clock at their end
        self._waiting: deque[SimulatedSample] = deque()
        self._num_started = self._num_running = 0
        self._clock = self._updated_s = self._stalled_until_s = 0.0
        self.version = 0
        self.generated_tokens = 0.0
        self.busy_s = 0.0
        self.slot_s = 0.0
        self.plan = 0  # counts changes: an end planned before the last one is void

    def advance(self, now_s: float) -> None:
        """Let sequences generate tokens until `now_s`."""
        seconds = now_s - max(self._updated_s, self._stalled_until_s)
        self._updated_s = now_s
        if seconds <= 0.0 or not self._num_running:
            return
        sampled = seconds / self._settings.step_s(self._num_running)
        self._clock += sampled
        self.generated_tokens += sampled * self._num_running
        self.busy_s += seconds
        self.slot_s += seconds * self._num_running

    def swap(self, now_s: float, version: int, seconds: float) -> None:
        """Take on new weights and generate nothing meanwhile; running samples keep their tokens."""
        self.advance(now_s)
        self._stalled_until_s = max(now_s, self._stalled_until_s) + seconds
        self.version = version

    def add(self, samples: Sequence[SimulatedSample], now_s: float) -> None:
        """Take on sequences; those without a slot wait in order."""
        self.advance(now_s)
        self._waiting.extend(samples)
        self._fill_slots()

    def take_finished(self, now_s: float) -> list[SimulatedSample]:
        """Return sequences that have ended by `now_s`; others get their slots."""
        self.advance(now_s)
        ended_samples = []
        while self._running and self._running[0][0] <= self._clock + _CLOCK_SLACK:
            sample = heappop(self._running)[2]
            if not sample.is_over:
                sample.is_over = True
                self._num_running -= 1
                ended_samples.append(sample)
        self._fill_slots()
        return ended_samples

    def abort(self, samples: Sequence[SimulatedSample], now_s: float) -> float:
        """Cancel sequences; return the tokens that they had generated."""
        self.advance(now_s)
        sampled = 0.0
        for sample in samples:
            if sample.is_over:
                continue
            sample.is_over = True
            if sample.start_clock is not None:
                self._num_running -= 1
                sampled += self._clock - sample.start_clock
        self._fill_slots()
        return sampled

    def num_tokens_sampled(self, samples: Sequence[SimulatedSample], now_s: float) -> float:
        """Return the tokens of unfinished sequences by `now_s`."""
        self.advance(now_s)
        return sum(
            self._clock - sample.start_clock
            for sample in samples
            if sample.start_clock is not None and not sample.is_over
        )

    def next_end(self, now_s: float) -> float | None:
        """Return when a sequence ends if nothing changes, seconds; ``None``: none runs."""
        while self._running and self._running[0][2].is_over:
            heappop(self._running)
        if not self._running:
            return None
        tokens = max(0.0, self._running[0][0] - self._clock)
        begin = max(now_s, self._stalled_until_s)
        return begin + tokens * self._settings.step_s(self._num_running)

    def _fill_slots(self) -> None:
        while self._waiting and self._num_running < self._settings.slots:
            sample = self._waiting.popleft()
            if sample.is_over:
                continue
            sample.start_clock, sample.oldest_version = self._clock, self.version
            self._num_started += 1
            self._num_running += 1
            end = self._clock + sample.tokens
            heappush(self._running, (end, self._num_started, sample))


class SimulatedFleet:
    """Replicas and the groups that wait for them, served in order of issue.

    Args:
        settings: the replicas.
        events: where ends are planned.
        on_started: called when a group's first samples are at a replica.
        on_sample: called when a sample has ended and others of its group have not, with whether
            it is right.
        on_generated: called when all requested samples of a group are there.
    """

    def __init__(
        self,
        settings: FleetSettings,
        events: EventQueue,
        on_started: Callable[[SimulatedGroup], None],
        on_sample: Callable[[SimulatedGroup, bool], None],
        on_generated: Callable[[SimulatedGroup], None],
    ) -> None:
        self._settings = settings
        self._events = events
        self._on_started = on_started
        self._on_sample = on_sample
        self._on_generated = on_generated
        self._routing = ReplicaRouter(settings.slack)
        self._replicas = [SimulatedReplica(settings) for _ in range(settings.num_replicas)]
        self._infos = [
            ReplicaInfo(f"replica-{number}", "0", f"replica-{number}:0", settings.slots)
            for number in range(settings.num_replicas)
        ]
        # Position, samples wanted so far, samples of this request.
        self._waiting: list[tuple[int, int, int, SimulatedGroup]] = []
        self._num_waiting = 0

    @property
    def totals(self) -> tuple[float, float, float]:
        """Tokens generated, seconds of busy replicas, seconds of busy slots, so far."""
        for replica in self._replicas:
            replica.advance(self._events.now)
        return (
            sum(replica.generated_tokens for replica in self._replicas),
            sum(replica.busy_s for replica in self._replicas),
            sum(replica.slot_s for replica in self._replicas),
        )

    def num_free(self, lowest_version: int) -> int:
        """Return how many sequences could start now, less those that wait for a replica already."""
        return self._routing.num_free(lowest_version, self._events.now) - self._num_waiting

    @property
    def size(self) -> int:
        """Replicas."""
        return len(self._replicas)

    def swap(self, version: int, stall_s: float, replicas: range) -> None:
        """Let some of the replicas take on a version."""
        for number in replicas:
            self._replicas[number].swap(self._events.now, version, stall_s)
            self._plan(number)

    def announce(self, version: int) -> None:
        """Let groups go to replicas of `version`."""
        self._routing.announce([AnnouncedReplica(info, version) for info in self._infos])
        self.serve()

    def ask(self, group: SimulatedGroup, num_samples: int) -> None:
        """Request the next `num_samples` samples of a group."""
        group.num_needed += num_samples
        # Of one group the earlier request, which has fewer samples, is served first.
        heappush(self._waiting, (group.position, group.num_needed, num_samples, group))
        self._num_waiting += num_samples
        self.serve()

    def serve(self) -> None:
        """Give capacity to waiting groups, in order."""
        while self._waiting:
            _, _, num_samples, group = self._waiting[0]
            # Any version will do: no replica is behind the announced one, and versions only grow.
            member = self._routing.choose(ReplicaRequirement(num_samples, 0), self._events.now)
            if member is None:
                return
            heappop(self._waiting)
            self._num_waiting -= num_samples
            reservation = self._routing.reservation(member, num_samples)
            self._start(GroupPart(group, member.order, reservation, num_samples))

    def cancel(self, group: SimulatedGroup) -> float:
        """Cancel a group; return the tokens of its unfinished samples."""
        for entry in [entry for entry in self._waiting if entry[3] is group]:
            self._waiting.remove(entry)
            self._num_waiting -= entry[2]
        heapify(self._waiting)
        sampled = 0.0
        for part in group.parts:
            sampled += self._replicas[part.replica].abort(part.samples, self._events.now)
            self._routing.give_back(part.reservation)
            self._plan(part.replica)
        group.parts.clear()
        return sampled

    def num_sampled(self, group: SimulatedGroup) -> float:
        """Return the tokens of a group's unfinished samples."""
        now_s = self._events.now
        return sum(
            self._replicas[part.replica].num_tokens_sampled(part.samples, now_s)
            for part in group.parts
        )

    def _start(self, part: GroupPart) -> None:
        group, replica, now_s = part.group, self._replicas[part.replica], self._events.now
        if group.start_version is None:
            group.start_version, group.started_s = replica.version, now_s
            self._on_started(group)
        group.parts.append(part)
        group.replicas.append(part.replica)
        sampled = slice(group.num_asked, group.num_asked + part.num_missing)
        group.num_asked += part.num_missing
        part.samples = [
            SimulatedSample(part, tokens, is_right)
            for tokens, is_right in zip(
                group.samples.tokens[sampled], group.samples.are_right[sampled], strict=True
            )
        ]
        replica.add(part.samples, now_s)
        self._plan(part.replica)

    def _plan(self, number: int) -> None:
        replica = self._replicas[number]
        replica.plan += 1
        end = replica.next_end(self._events.now)
        if end is not None:
            self._events.at(end, partial(self._end, number, replica.plan))

    def _end(self, number: int, plan: int) -> None:
        replica = self._replicas[number]
        if plan != replica.plan:
            return
        for sample in replica.take_finished(self._events.now):
            self._sample_ended(sample)
        self._plan(number)
        self.serve()

    def _sample_ended(self, sample: SimulatedSample) -> None:
        part, group = sample.part, sample.part.group
        group.num_finished += 1
        group.finished_tokens += sample.tokens
        group.sample_versions.append(sample.oldest_version)
        self._routing.release_sequences(part.reservation, 1)
        part.num_missing -= 1
        if not part.num_missing:
            self._routing.give_back(part.reservation)
            group.parts.remove(part)
        if group.num_finished == group.num_needed:
            self._on_generated(group)
        else:
            self._on_sample(group, sample.is_right)

"""Groups on their way to simulated replicas and back, by the routing of `algorithm.routing`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heapify, heappop, heappush

from sluice.algorithm.routing import AnnouncedReplica, Fleet, ReplicaRequirement
from sluice.simulate.event_queue import EventQueue
from sluice.simulate.group import GroupPart, Sample, SimulatedGroup
from sluice.simulate.replica import SimulatedReplica
from sluice.simulate.settings import FleetSettings
from sluice.types import ReplicaInfo


class SimulatedFleet:
    """Replicas and the groups that wait for them, served in order of issue.

    Args:
        settings: the replicas.
        events: where ends are planned.
        on_started: told when a group's first samples are at a replica.
        on_sample: told when a sample has ended and others of its group have not, and whether the
            sample is right.
        on_generated: told when all samples that were asked for a group are there.
    """

    def __init__(
        self,
        settings: FleetSettings,
        events: EventQueue,
        on_started: Callable[[SimulatedGroup], None],
        on_sample: Callable[[SimulatedGroup, bool], None],
        on_generated: Callable[[SimulatedGroup], None],
    ) -> None:
        self._settings, self._events = settings, events
        self._on_started, self._on_sample = on_started, on_sample
        self._on_generated = on_generated
        self._routing = Fleet(settings.slack)
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
        """Tokens drawn, seconds that replicas were busy, seconds of busy slots, so far."""
        for replica in self._replicas:
            replica.advance(self._events.now)
        return (
            sum(replica.generated_tokens for replica in self._replicas),
            sum(replica.busy_s for replica in self._replicas),
            sum(replica.slot_s for replica in self._replicas),
        )

    def num_free(self, lowest_version: int) -> int:
        """Sequences that could start now, less those that wait for a replica already."""
        return self._routing.num_free(lowest_version, self._events.now) - self._num_waiting

    def swap(self, version: int, stall_s: float) -> None:
        """Replicas take on a version."""
        for number, replica in enumerate(self._replicas):
            replica.swap(self._events.now, version, stall_s)
            self._plan(number)

    def announce(self, version: int) -> None:
        """Groups may go to replicas of `version`."""
        self._routing.announce([AnnouncedReplica(info, version) for info in self._infos])
        self.serve()

    def ask(self, group: SimulatedGroup, num_samples: int) -> None:
        """Draw the next `num_samples` samples of a group."""
        group.num_needed += num_samples
        # Of one group the earlier request, that of fewer samples, is served first.
        heappush(self._waiting, (group.position, group.num_needed, num_samples, group))
        self._num_waiting += num_samples
        self.serve()

    def serve(self) -> None:
        """Give room to those who wait, in order."""
        while self._waiting:
            _, _, num_samples, group = self._waiting[0]
            # Any version will do: all replicas swap at once, and versions only grow.
            member = self._routing.choose(ReplicaRequirement(num_samples, 0), self._events.now)
            if member is None:
                return
            heappop(self._waiting)
            self._num_waiting -= num_samples
            reservation = self._routing.reservation(member, num_samples)
            self._start(GroupPart(group, member.order, reservation, num_samples))

    def cancel(self, group: SimulatedGroup) -> float:
        """Break a group off; returns the tokens it had drawn in unfinished samples."""
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
        """Tokens of a group's unfinished samples."""
        now = self._events.now
        return sum(self._replicas[part.replica].sampled(part.samples, now) for part in group.parts)

    def _start(self, part: GroupPart) -> None:
        group, replica, now = part.group, self._replicas[part.replica], self._events.now
        if group.start_version is None:
            group.start_version, group.started_s = replica.version, now
            self._on_started(group)
        group.parts.append(part)
        group.replicas.append(part.replica)
        sampled = slice(group.num_asked, group.num_asked + part.num_missing)
        group.num_asked += part.num_missing
        part.samples = [
            Sample(part, tokens, is_right)
            for tokens, is_right in zip(
                group.samples.tokens[sampled], group.samples.are_right[sampled], strict=True
            )
        ]
        if self._settings.prefill_s:
            replica.stall(now, self._settings.prefill_s)
        replica.add(part.samples, now)
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
        for sample in replica.finished(self._events.now):
            self._sample_ended(sample)
        self._plan(number)
        self.serve()

    def _sample_ended(self, sample: Sample) -> None:
        part, group = sample.part, sample.part.group
        group.num_finished += 1
        group.finished_tokens += sample.tokens
        group.sample_versions.append(sample.oldest_version)
        self._routing.sequence_ended(part.reservation)
        part.num_missing -= 1
        if not part.num_missing:
            self._routing.give_back(part.reservation)
            group.parts.remove(part)
        if group.num_finished == group.num_needed:
            self._on_generated(group)
        else:
            self._on_sample(group, sample.is_right)

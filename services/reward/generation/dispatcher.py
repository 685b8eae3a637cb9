"""Send groups to replicas and return their samples, even if replicas fail.

Consumes: groups to generate. Waits for: a replica with free capacity (`ReplicaQueue`: validation
before training, then in order of issue), then its stream. Unblocked by: an announcement, a finished
sequence, the end of a pause, a stream that failed, stalled or lost its replica, the group's own
deadline. Produces: whole groups. On failure of a stream: the replica pauses, and its missing
samples continue on another replica from the tokens received; after `max_attempts` failures the
group continues without them, or fails. On shutdown: cancelling a call cancels its stream, which
frees the replica's slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager

from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import (
    GenerateEvent,
    GenerationClient,
    GroupFailedError,
    GroupOverError,
    GroupRequest,
    OverlongPromptError,
    Purpose,
    SampleCallback,
)
from services.reward.generation.stream import (
    Backlog,
    CollectedSamples,
    EndedStreams,
    StreamEnd,
    StreamWatch,
)
from sluice.algorithm.episode_rules import AGENT_NAME, SINGLE_TURN
from sluice.algorithm.groups.stragglers import RateTable, StragglerRules
from sluice.algorithm.routing import AnnouncedReplica, Reservation, RoutedReplica
from sluice.errors import (
    EngineError,
    ExhaustedError,
    HistoryRewrittenError,
    InvalidRequestError,
    PeerDefectError,
    PromptTooLongError,
    SequenceTooLongError,
    SluiceError,
)
from sluice.safe_text import printable
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanKind, SpanName
from sluice.types import Failed, FailureKind, Rollout, RolloutGroup

logger = logging.getLogger(__name__)


class OutsideWaits:
    """Counts the samples that wait for an agent or an environment instead of a replica."""

    def __init__(self) -> None:
        self._num_waiting: Counter[str] = Counter()  # by the peer that they wait for
        self._num_untaken = 0

    @property
    def num_waiting(self) -> int:
        """The number of samples that wait."""
        return self._num_waiting.total()

    @property
    def peer(self) -> str:
        """The peer they wait for: "agent" or "environment"; empty if none waits."""
        return next((peer for peer, number in self._num_waiting.items() if number), "")

    @property
    def are_untaken(self) -> bool:
        """Whether no agent has taken any of them."""
        return self._num_untaken == self.num_waiting

    @contextmanager
    def waiting(self, peer: str) -> Iterator[None]:
        """Count a sample that waits for `peer` while the block runs."""
        self._num_waiting[peer] += 1
        try:
            yield
        finally:
            self._num_waiting[peer] -= 1

    @contextmanager
    def untaken(self) -> Iterator[None]:
        """Count a waiting sample as not yet taken by an agent, while the block runs."""
        self._num_untaken += 1
        try:
            yield
        finally:
            self._num_untaken -= 1


class GroupDispatcher:
    """Sends groups to replicas, and collects their samples.

    Attributes:
        queue: assigns capacity on replicas.
        rules: when to give up streams and groups; by default never.
        num_received: response tokens received since the start, by purpose. The replicas count the
            tokens they send, so the two counts check each other.
        outside: the samples that wait for an agent or an environment, by purpose.

    Args:
        client: calls the replicas.
        queue: see above.
        max_attempts: failed streams of one request, after which it ends without its missing
            samples (`end_without_missing`).
        rules: see above.
    """

    def __init__(
        self,
        client: GenerationClient,
        queue: ReplicaQueue,
        *,
        max_attempts: int,
        rules: StragglerRules | None = None,
    ) -> None:
        self._client, self.queue, self._max_attempts = client, queue, max_attempts
        self.rules = rules or StragglerRules()
        self._rates = RateTable()
        self._ended_streams = EndedStreams()
        self._streams: set[StreamWatch] = set()
        self._backlog = Backlog(client.after_backlog)
        self.num_received: Counter[Purpose] = Counter()
        self.outside = {purpose: OutsideWaits() for purpose in Purpose}
        self._num_collecting: Counter[Purpose] = Counter()

    @property
    def is_training_sampled(self) -> bool:
        """Whether samples for training are on replicas, or wait for one."""
        return self._num_collecting[Purpose.TRAINING] > 0

    @property
    def awaited_outside(self) -> OutsideWaits | None:
        """The waits of all unfinished training samples or, if there are none, of a validation's.

        ``None`` if some wait for replicas. Agents and environments have their own deadlines; a
        sample that no agent has taken counts too, but has no deadline.
        """
        training, validation = self.outside[Purpose.TRAINING], self.outside[Purpose.VALIDATION]
        if self.is_training_sampled or not self.queue.fleet.announced:
            return None
        if training.num_waiting:
            return training
        return validation if validation.num_waiting and not self.queue.is_busy else None

    async def announce(self, replicas: Sequence[AnnouncedReplica]) -> None:
        """Adopt a new fleet; groups move away from replicas that are gone.

        Groups of a validation also leave a replica that is about to get another version.
        """
        self.queue.announce(replicas)
        for watch in self._streams:
            watch.reschedule()
        self._rates.retain({replica.info.name for replica in replicas})
        await self._client.adopt_fleet([replica.info for replica in replicas])

    def may_validate(self, version: int) -> bool:
        """Return whether a replica, busy or paused, serves validations of `version`."""
        return self.queue.may_validate(version)

    async def generate(
        self, request: GroupRequest, on_sample: SampleCallback | None = None
    ) -> RolloutGroup:
        """Generate the requested samples.

        A group that has used its time or tokens (`GroupProgress`) returns its unfinished samples as
        ``ABORTED``, with the tokens received so far. No replica gets a request for a group that is
        over.

        Args:
            request: the samples.
            on_sample: called with each sample that has finished.

        Raises:
            GroupFailedError: the row names an environment, the engine refuses the prompt
                (`OverlongPromptError`: as too long), too many attempts failed (and the request
                allows no missing samples), or the group ended before any of its samples finished.
            ValidationFailedError: no replica may validate the wanted version any more.
        """
        prompt = request.prompt
        named = prompt.extra_info.get(AGENT_NAME)
        if named and named != SINGLE_TURN:
            agent_text = printable(repr(named)[:100])
            raise GroupFailedError(
                f"{prompt.place or prompt.prompt_id}: {AGENT_NAME} is {agent_text}, and the run "
                f"has no environment; set sluice.environment.path, or write {SINGLE_TURN}"
            )
        collected = CollectedSamples(request, on_sample)
        await self.collect(collected)
        return collected.group()

    async def collect(self, collected: CollectedSamples) -> None:
        """Generate the samples that are missing; see `generate`.

        Raises:
            GroupFailedError: see `generate`. A request for a turn ends with unfinished samples
                instead, if these may be missing.
            HistoryRewrittenError: the template cannot continue the turn's tokens.
            SequenceTooLongError: the turn's prompt leaves no token to sample.
        """
        request, progress = collected.request, collected.request.progress
        order = (request.purpose is Purpose.TRAINING, request.prompt.sequence)
        clock, failures = asyncio.get_running_loop().time, list[str]()
        self._num_collecting[request.purpose] += 1
        try:
            while (missing := collected.missing) and not progress.check(clock()):
                partials, requirement = collected.partials(), request.requirement(len(missing))
                collected.note_version()
                queued_since = clock()
                try:
                    reservation = await progress.run_until_over(
                        self.queue.reserve(requirement, order)
                    )
                except GroupOverError:
                    break
                finally:
                    collected.queued_s += clock() - queued_since
                try:
                    failure = await self._attempt(reservation, collected, partials)
                finally:
                    self.queue.give_back(reservation)
                if failure is not None:
                    failures.append(failure)
                if collected.missing and len(failures) >= self._max_attempts:
                    end_without_missing(collected, failures)
            if collected.missing:
                end_early(collected)
        finally:
            self._num_collecting[request.purpose] -= 1

    async def _attempt(
        self, reservation: Reservation, collected: CollectedSamples, partials: Sequence[Rollout]
    ) -> str | None:
        """Receive one stream, an attempt at the request's missing samples. Return the reason if it
        counts as a failure."""
        member = reservation.member
        name = member.announced.info.name
        try:
            with TRACER.span(
                SpanName.ATTEMPT, {SpanAttribute.REPLICA: name}, SpanKind.CLIENT
            ) as span:
                failure = await self._receive(reservation, collected, partials)
                span.fail(failure)
                return failure
        except PromptTooLongError as error:
            prompt = collected.request.prompt
            raise OverlongPromptError(f"{prompt.place or prompt.prompt_id}: {error}") from error
        except (HistoryRewrittenError, SequenceTooLongError):
            raise  # the turn is at fault, not the replica
        except InvalidRequestError as error:
            if not self._may_be_too_small(reservation, len(collected.missing)):
                raise GroupFailedError(f"refused by {name}: {error}") from error
            logger.warning("replica %s has too few slots, groups go to others: %s", name, error)
            self.queue.pause(member)
        except ExhaustedError:  # full: neither the group's fault nor the replica's
            self.queue.pause(member, may_be_sick=False)
        except SluiceError as error:
            prompt_id = collected.request.prompt.prompt_id
            logger.debug("prompt %s: %s (the group: %s)", prompt_id, error, collected.state())
            self._ended_streams.note(name, len(collected.missing), str(error))
            self.queue.pause(member)
            if isinstance(error, EngineError | PeerDefectError):
                collected.request.progress.engine_answered = True
            return str(error)
        return None

    def _may_be_too_small(self, reservation: Reservation, samples: int) -> bool:
        """Return whether the replica may have refused because it has fewer slots than another.

        If the replica with the most slots refuses, the prompt is at fault or fits nowhere.
        """
        slots = reservation.member.announced.info.slots
        max_slots = max(
            (replica.info.slots for replica in self.queue.fleet.announced), default=slots
        )
        return slots < min(samples, max_slots)

    async def _receive(
        self, reservation: Reservation, collected: CollectedSamples, partials: Sequence[Rollout]
    ) -> str | None:
        """Store what one stream delivers. Return the reason if its early end counts as a
        failure."""
        info, missing = reservation.member.announced.info, collected.missing
        progress, clock = collected.request.progress, asyncio.get_running_loop().time
        collected.note_requested(info.name)
        events = self._client.generate(info, collected.request, missing, partials)
        async with aclosing(events):
            try:
                async with asyncio.timeout(None) as scope:
                    watch = StreamWatch(
                        *(scope, reservation.member, self.rules, self._backlog),
                        *(collected.request, missing, clock()),
                    )
                    with self._watched(watch), progress.observed(watch.reschedule):
                        async for event in events:
                            self._store_event(reservation, watch, collected, event, clock())
                            del event  # frees memory: the next event may take long
                            if (end := self._reason_to_end(watch, collected, clock())) is not None:
                                return self._handle_end(end, watch, collected)
            except TimeoutError:
                if not scope.expired():
                    raise
                return self._handle_end(watch.why_expired(clock()), watch, collected)
        if collected.missing:
            raise EngineError(
                f"{info.name}: its stream ended without {len(collected.missing)} samples"
            )
        return None

    @contextmanager
    def _watched(self, watch: StreamWatch) -> Iterator[None]:
        """Let announcements end the stream; afterwards note its least rate if it was too short for
        one."""
        self._streams.add(watch)
        try:
            yield
        finally:
            self._streams.remove(watch)
            watch.close()
            rate = watch.pace.rate(asyncio.get_running_loop().time())
            if rate is None and (min_rate := watch.pace.min_rate()) is not None:
                self._note_rate(watch.member, min_rate)

    def _note_rate(self, member: RoutedReplica, rate: float) -> None:
        """Note the rate of a stream, unless its replica has left."""
        if not member.removed:
            self._rates.note(member.announced.info.name, rate)

    def _store_event(
        self,
        reservation: Reservation,
        watch: StreamWatch,
        collected: CollectedSamples,
        event: GenerateEvent,
        now_s: float,
    ) -> None:
        request, member = collected.request, reservation.member
        if event.started is not None:
            watch.pace.note_accepted(now_s)
            self.queue.note_answer(member)
        num_received, num_ended = request.progress.num_received, len(collected.rollouts)
        try:
            new_tokens = collected.take(event, now_s)
        finally:  # unused tokens were received, too
            self.num_received[request.purpose] += request.progress.num_received - num_received
        if num_finished := len(collected.rollouts) - num_ended:
            # Samples of one request share the cache of their prompt.
            prompt = collected.prompt_token_ids
            prompt_share = 0 if prompt is None else -(-prompt.size // len(request.sample_indexes))
            for rollout in event.rollouts:
                self.queue.fleet.note_context(prompt_share + rollout.num_tokens)
            self.queue.release_sequences(reservation, num_finished)
        if event.deltas or event.rollouts:
            watch.pace.note_tokens(
                new_tokens, [finished.sample_index for finished in event.rollouts], now_s
            )
        elif event.engine_tokens is not None:
            watch.pace.note_engine_tokens(event.engine_tokens, now_s)

    def _reason_to_end(
        self, watch: StreamWatch, collected: CollectedSamples, now_s: float
    ) -> StreamEnd | None:
        """Note the stream's rate; return why it should end, or ``None``: it continues."""
        # Check after the last sample too: other requests of the group depend on it.
        is_over = collected.request.progress.check(now_s)
        num_missing = len(collected.request.sample_indexes) - len(collected.rollouts)
        if not num_missing:
            return None
        if is_over:
            return StreamEnd.GROUP_OVER
        name, rate = watch.member.announced.info.name, watch.pace.rate(now_s)
        if rate is None:
            return None
        self._note_rate(watch.member, rate)
        is_slow = self.rules.is_slow(rate, self._rates.median_of_others(name))
        if collected.was_moved or not is_slow:
            return None
        requirement = collected.request.requirement(num_missing)
        return StreamEnd.SLOW if self.queue.has_other_capacity(watch.member, requirement) else None

    def _handle_end(
        self, end: StreamEnd, watch: StreamWatch, collected: CollectedSamples
    ) -> str | None:
        """Handle the end of a stream; return the reason if it counts as a failure."""
        prompt_id, name = collected.request.prompt.prompt_id, watch.member.announced.info.name
        state = watch.state(asyncio.get_running_loop().time())
        if end is StreamEnd.GROUP_OVER:
            collected.request.progress.end()
            logger.warning("prompt %s: over on replica %s: %s", prompt_id, name, state)
            return None
        broke = end is StreamEnd.STALLED
        self._ended_streams.note(name, len(collected.missing), f"{end}: {state}", broke=broke)
        logger.debug(
            "prompt %s: replica %s is %s, its samples continue elsewhere: %s; the group: %s",
            *(prompt_id, name, end, state, collected.state()),
        )
        if end in (StreamEnd.REPLICA_REMOVED, StreamEnd.REPLICA_SWAPS):
            return None
        self.queue.pause(watch.member, may_be_sick=end is not StreamEnd.SLOW)
        if end is StreamEnd.SLOW:
            collected.was_moved = True
            return None
        return f"{name}: stalled: {state}"


def end_early(collected: CollectedSamples) -> None:
    """End a group that has used its time or tokens; its unfinished samples end as aborted.

    Raises:
        GroupFailedError: no sample of it has finished.
    """
    prompt_id, state = collected.request.prompt.prompt_id, collected.state()
    limits = "sluice.reward.group_deadline_s or group_token_budget"
    if collected.request.turn is not None:
        collected.end_unfinished()
        return
    if not collected.request.progress.has_finished_samples:
        raise GroupFailedError(f"no sample finished within {limits}: {state}", FailureKind.ABORTED)
    logger.warning(
        "prompt %s: ended by %s without samples %s: %s",
        *(prompt_id, limits, collected.missing, state),
    )
    collected.end_unfinished()


def end_without_missing(collected: CollectedSamples, failures: Sequence[str]) -> None:
    """End a group that failed too often without the samples that no replica could generate.

    Raises:
        GroupFailedError: the request allows no missing samples, or no sample has finished.
    """
    request, missing = collected.request, collected.missing
    detail = f"{len(failures)} attempts failed, the last: {failures[-1]}"
    is_turn = request.turn is not None
    if not (request.allows_missing and (is_turn or request.progress.has_finished_samples)):
        raise GroupFailedError(detail, FailureKind.ENGINE_ERROR)
    logger.warning(
        "prompt %s: continues without samples %s: %s", request.prompt.prompt_id, missing, detail
    )
    failed = Failed(FailureKind.ENGINE_ERROR, detail)
    request.progress.engine_errors.update(dict.fromkeys(missing, failed))
    collected.end_unfinished()

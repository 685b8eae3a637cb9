"""Send groups to replicas and return their samples, whatever happens to a replica.

Consumes: groups to generate. Waits for: a replica with free capacity, then its stream. Unblocked
by: an announcement, a finished sequence, the end of a pause, a stream that failed, stalled or lost
its replica, the group's own deadline. Produces: whole groups. On failure of a stream: the replica
pauses and the missing samples continue elsewhere from the tokens that came, up to `max_attempts`
failures; then the group continues without them, or fails. On shutdown: cancelling a call cancels
its stream, which frees the replica's slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace

from services.reward.generation.queue import Priority, ReplicaQueue
from services.reward.generation.request import (
    GenerateEvent,
    GenerationClient,
    GroupFailedError,
    GroupRequest,
    OldestStart,
    OverlongPromptError,
    SampleCallback,
    StartCallback,
    decisive,
    first_samples,
    for_prompt,
)
from services.reward.generation.stream import CollectedGroup, StreamEnd, StreamWatch
from sluice.algorithm.groups.stragglers import RateTable, StragglerRules
from sluice.algorithm.routing import AnnouncedReplica, ReplicaRequirement, Reservation
from sluice.errors import (
    DataError,
    EngineError,
    ExhaustedError,
    InvalidRequestError,
    PeerDefectError,
    PromptTooLongError,
    SluiceError,
)
from sluice.telemetry.tracing import TRACER, Key, SpanKind, SpanName
from sluice.types import FailureKind, PromptOrigin, Rollout, RolloutGroup, SamplingParams

logger = logging.getLogger(__name__)


class GroupDispatcher:
    """Groups on their way to replicas and back.

    Attributes:
        num_received: response tokens received since the start, by what they are for. The replicas
            count what they hand over: the two counts check each other.

    Args:
        client: how replicas are called.
        queue: assigns capacity on replicas.
        max_attempts: failures after which a group is given up.
        leave_out_overlong: whether a row that is too long is left out, or an error of the data.
        rules: when streams and groups are given up on; by default never.
    """

    def __init__(
        self,
        client: GenerationClient,
        queue: ReplicaQueue,
        *,
        max_attempts: int,
        leave_out_overlong: bool = False,
        rules: StragglerRules | None = None,
    ) -> None:
        self._client, self._queue, self._max_attempts = client, queue, max_attempts
        self._leave_out_overlong = leave_out_overlong
        self._rules = rules or StragglerRules()
        self._rates = RateTable()
        self._broken = BrokenStreams()
        self._streams: dict[StreamWatch, Reservation] = {}
        self.num_received: Counter[Priority] = Counter()

    async def announce(self, replicas: Sequence[AnnouncedReplica]) -> None:
        """Take on a new fleet; streams of replicas that are gone end, their groups go elsewhere."""
        gone = self._queue.announce(replicas)
        for watch, reservation in self._streams.items():
            if reservation.member in gone:
                watch.removed(_now())
        self._rates.retain({replica.info.name for replica in replicas})
        await self._client.retain({replica.info.address for replica in replicas})

    async def generate(
        self,
        request: GroupRequest,
        on_start: StartCallback | None = None,
        on_sample: SampleCallback | None = None,
    ) -> RolloutGroup:
        """Generate the samples asked for.

        A training group that has taken its time or its tokens (`StragglerRules`, measured over all
        requests of one `GroupBudget`) returns with its unfinished samples ``ABORTED``, which
        hold the tokens that came of them. No replica is asked for samples of a group that is over.

        Args:
            request: the samples.
            on_start: called with the oldest version in the group whenever it changes; ``None``
                while the group holds nothing and waits.
            on_sample: called with each sample that has finished.

        Raises:
            GroupFailedError: the engine refuses the prompt (`OverlongPromptError`: as too long),
                too many attempts failed (and the request does not go without what is missing), or
                no sample of the group finished before it was over.
            DataError: a row is too long, and such rows are not to be left out.
        """
        collected = CollectedGroup(request, on_sample)
        await self._complete(collected, on_start or _ignore)
        return collected.group()

    async def _complete(self, collected: CollectedGroup, notify: StartCallback) -> None:
        """Get what is missing, or end the group without it."""
        request = collected.request
        rank = (int(request.priority), request.prompt.sequence)
        failures: list[str] = []
        while (missing := collected.missing) and not self.is_over(request):
            partials = collected.partials()
            notify(collected.oldest_version())
            wanted = ReplicaRequirement(
                len(missing), request.lowest_version, request.highest_version
            )
            async with AsyncExitStack() as held:
                reservation = await self._capacity(held, collected, wanted, rank)
                if reservation is not None:
                    failure = await self._attempt(reservation, collected, partials, notify)
                    failures += [failure] if failure else []
            if collected.missing and len(failures) >= self._max_attempts:
                end_without_missing(collected, failures)
        if collected.missing:
            end_early(collected)

    def is_over(self, request: GroupRequest) -> bool:
        """Whether the group that `request` is of has taken its time or its tokens.

        Validation is never cut short.
        """
        budget = request.budget
        over_at = self._over_at(request)
        is_late = over_at is not None and over_at <= _now()
        if is_late or (_is_bounded(request) and self._rules.is_spent(budget.num_tokens)):
            budget.end()
        return budget.is_over

    def _over_at(self, request: GroupRequest) -> float | None:
        """When a group has taken its time; of one that is over, a time that has passed."""
        budget = request.budget
        if not _is_bounded(request):
            return None
        return budget.first_start if budget.is_over else self._rules.over_at(budget.first_start)

    async def _capacity(
        self,
        held: AsyncExitStack,
        collected: CollectedGroup,
        wanted: ReplicaRequirement,
        rank: tuple[int, int],
    ) -> Reservation | None:
        """Reserve capacity, which `held` gives back; ``None``: the group was over before."""
        request = collected.request
        try:
            async with asyncio.timeout_at(self._over_at(request)) as scope:

                def bounded() -> None:
                    if not scope.expired():
                        scope.reschedule(self._over_at(request))

                with request.budget.observed(bounded):
                    return await held.enter_async_context(self._queue.capacity(wanted, rank))
        except TimeoutError:
            request.budget.end()
            return None

    async def _attempt(
        self,
        reservation: Reservation,
        collected: CollectedGroup,
        partials: Sequence[Rollout],
        notify: StartCallback,
    ) -> str | None:
        """Receive one stream. Returns why it counts as a failure."""
        member = reservation.member
        name = member.announced.info.name
        try:
            with TRACER.stage(SpanName.ATTEMPT, {Key.REPLICA: name}, SpanKind.CLIENT) as span:
                failure = await self._receive(reservation, collected, partials, notify)
                span.fail(failure)
                return failure
        except PromptTooLongError as error:
            prompt = collected.request.prompt
            if prompt.origin is PromptOrigin.DATASET and not self._leave_out_overlong:
                raise DataError(f"{prompt.place}: {error}") from error
            raise OverlongPromptError(f"{prompt.place or prompt.prompt_id}: {error}") from error
        except InvalidRequestError as error:
            if not self._may_be_too_small(reservation, len(collected.missing)):
                raise GroupFailedError(f"refused by {name}: {error}") from error
            logger.warning("replica %s has few slots, groups go elsewhere: %s", name, error)
            self._queue.pause(member)
        except ExhaustedError:
            self._queue.pause(member)  # full: neither the group's fault nor the replica's
        except SluiceError as error:
            prompt_id = collected.request.prompt.prompt_id
            logger.info("prompt %s: %s (the group: %s)", prompt_id, error, collected.state())
            self._broken.note(name, len(collected.missing), str(error))
            self._queue.pause(member)
            if isinstance(error, EngineError | PeerDefectError):
                collected.request.budget.engine_answered = True
            return str(error)
        return None

    def _may_be_too_small(self, reservation: Reservation, samples: int) -> bool:
        """Return whether a replica may have refused for want of slots, where another has more.

        If the replica with most slots refuses, the prompt is at fault, or fits nowhere.
        """
        slots = reservation.member.announced.info.slots
        most = max((replica.info.slots for replica in self._queue.replicas), default=slots)
        return slots < min(samples, most)

    async def _receive(
        self,
        reservation: Reservation,
        collected: CollectedGroup,
        partials: Sequence[Rollout],
        notify: StartCallback,
    ) -> str | None:
        """Store what one stream brings. Returns why its early end counts as a failure."""
        info, missing = reservation.member.announced.info, collected.missing
        collected.asked(info.name)
        events = self._client.generate(info, collected.request, missing, partials)
        async with aclosing(events):
            try:
                async with asyncio.timeout(None) as scope:
                    over_at = self._over_at(collected.request)
                    watch = StreamWatch(
                        scope, reservation.member, self._rules, over_at, missing, _now()
                    )
                    with self._registered(watch, reservation, collected.request):
                        async for event in events:
                            self._store(reservation, watch, collected, event, notify)
                            if (end := self._judged(reservation, watch, collected)) is not None:
                                return self._ended(end, reservation, watch, collected)
            except TimeoutError:
                if not scope.expired():
                    raise
                return self._ended(watch.why_expired(_now()), reservation, watch, collected)
        if collected.missing:
            raise EngineError(
                f"{info.name}: its stream ended without {len(collected.missing)} samples"
            )
        return None

    def _store(
        self,
        reservation: Reservation,
        watch: StreamWatch,
        collected: CollectedGroup,
        event: GenerateEvent,
        notify: StartCallback,
    ) -> None:
        now = _now()
        if event.started is not None:
            self._queue.answered(reservation.member)
            prompt_token_ids, version = event.started
            collected.started(prompt_token_ids, now)
            watch.accepted(now)
            notify(collected.oldest_version(or_version=version))
        tokens, priority = collected.request.tokens, collected.request.priority
        num_before = tokens.num_received
        try:
            arrival = collected.take(event, reservation.member.announced.info.name)
        finally:  # what is of no use was received, too
            self.num_received[priority] += tokens.num_received - num_before
        if arrival.num_finished:
            self._queue.sequences_ended(reservation, arrival.num_finished)
        if event.deltas or event.rollouts:
            watch.arrived(arrival, now)
        elif event.engine_tokens is not None:
            watch.engine_progressed(event.engine_tokens, now)

    def _judged(
        self, reservation: Reservation, watch: StreamWatch, collected: CollectedGroup
    ) -> StreamEnd | None:
        """Return why a healthy stream should end; ``None``: it continues."""
        request, missing = collected.request, collected.missing
        is_over = self.is_over(request)  # asked of the last sample too: other parts end by it
        if not missing:
            return None
        if is_over:
            return StreamEnd.GROUP_OVER
        name, rate = reservation.member.announced.info.name, watch.pace.rate(_now())
        if rate is None:
            return None
        self._rates.note(name, rate)
        others = self._rates.median_of_others(name)
        if collected.was_moved or not self._rules.is_slow(rate, others):
            return None
        wanted = ReplicaRequirement(len(missing), request.lowest_version, request.highest_version)
        return (
            StreamEnd.SLOW if self._queue.has_capacity_beside(reservation.member, wanted) else None
        )

    def _ended(
        self,
        end: StreamEnd,
        reservation: Reservation,
        watch: StreamWatch,
        collected: CollectedGroup,
    ) -> str | None:
        """Settle what follows from a stream's end. Returns why it counts as a failure."""
        prompt_id, name = collected.request.prompt.prompt_id, reservation.member.announced.info.name
        state = watch.state(_now())
        if end is StreamEnd.GROUP_OVER:
            collected.request.budget.end()
            logger.warning("prompt %s: over on replica %s: %s", prompt_id, name, state)
            return None
        if end is StreamEnd.STALLED:
            self._broken.note(name, len(collected.missing), f"{end}: {state}")
        logger.info(
            "prompt %s: replica %s is %s, its samples continue elsewhere: %s; the group: %s",
            *(prompt_id, name, end, state, collected.state()),
        )
        if end is StreamEnd.REPLICA_REMOVED:
            return None
        self._queue.pause(reservation.member)
        if end is StreamEnd.SLOW:
            collected.was_moved = True
            return None
        return f"{name}: stalled: {state}"

    @contextmanager
    def _registered(
        self, watch: StreamWatch, reservation: Reservation, request: GroupRequest
    ) -> Iterator[None]:
        self._streams[watch] = reservation
        try:
            with request.budget.observed(lambda: watch.bounded(self._over_at(request))):
                yield
        finally:
            del self._streams[watch]
            if watch.pace.rate(_now()) is None and (least := watch.pace.least_rate()) is not None:
                self._rates.note(reservation.member.announced.info.name, least)


@dataclass(frozen=True, slots=True)
class GeneratedGroup:
    """A prompt's samples and, where a baseline is needed, its greedy response: the baseline of
    ReMax (arXiv 2310.10505)."""

    samples: RolloutGroup
    greedy: RolloutGroup | None = None

    @property
    def num_greedy_tokens(self) -> int:
        """Length of the greedy response; 0 without one."""
        return self.greedy.num_response_tokens if self.greedy else 0

    @property
    def num_response_tokens(self) -> int:
        """Length of all responses."""
        return self.samples.num_response_tokens + self.num_greedy_tokens


async def generate_group(
    dispatcher: GroupDispatcher,
    request: GroupRequest,
    greedy: SamplingParams | None,
    on_start: StartCallback,
    on_sample: SampleCallback | None = None,
) -> GeneratedGroup:
    """Generate a prompt's samples and, with `greedy`, one more response with those parameters.

    Args:
        dispatcher: where groups are generated.
        request: the samples; the greedy response keeps to the same versions.
        greedy: parameters of the greedy response; ``None``: there is none.
        on_start: called with the oldest version among the tokens of both, whenever it changes.
        on_sample: called with each sample that has finished, but not with the greedy response.

    Raises:
        GroupFailedError: samples or response cannot be had; the detail of the response's failure
            begins with its `FailureKind`.
        SluiceError: whatever else ends the generation of a group; the gravest of the two.
    """
    if greedy is None:
        return GeneratedGroup(await dispatcher.generate(request, on_start, on_sample))
    beside = replace(
        request,
        sample_indexes=first_samples(1),
        sampling=for_prompt(greedy, request.prompt, stage="greedy"),
        allows_missing=False,
    )
    oldest = OldestStart(on_start)
    try:
        async with asyncio.TaskGroup() as tasks:
            name = f"prompt {request.prompt.prompt_id}"
            samples = tasks.create_task(
                dispatcher.generate(request, oldest.of("samples"), on_sample),
                name=f"{name}, samples",
            )
            response = tasks.create_task(
                _response(dispatcher, beside, oldest.of("greedy")), name=f"{name}, greedy"
            )
    except ExceptionGroup as group:
        raise decisive(group) from group
    return GeneratedGroup(samples.result(), response.result())


async def _response(
    dispatcher: GroupDispatcher, request: GroupRequest, on_start: StartCallback
) -> RolloutGroup:
    try:
        return await dispatcher.generate(request, on_start)
    except GroupFailedError as error:
        if type(error) is not GroupFailedError:
            raise  # the prompt itself is refused, and the type of the error names the reason
        kind = error.kind or FailureKind.ENGINE_ERROR
        raise GroupFailedError(
            f"{kind}: no greedy response, the baseline of its samples: {error}",
            error.kind,
        ) from error


def _is_bounded(request: GroupRequest) -> bool:
    return request.priority is Priority.TRAINING


def _now() -> float:
    return asyncio.get_running_loop().time()


def _ignore(_version: int | None) -> None:
    """For callers that do not follow when a group started."""


def end_early(collected: CollectedGroup) -> None:
    """End a group that has taken its time or its tokens, as it stands.

    Raises:
        GroupFailedError: no sample of it has finished.
    """
    prompt_id, state = collected.request.prompt.prompt_id, collected.state()
    limits = "sluice.reward.group_deadline_s or group_token_budget"
    if not collected.request.budget.has_finished_samples:
        raise GroupFailedError(f"no sample finished within {limits}: {state}", FailureKind.ABORTED)
    logger.warning(
        "prompt %s: ended by %s without samples %s: %s",
        *(prompt_id, limits, collected.missing, state),
    )
    collected.end_unfinished()


def end_without_missing(collected: CollectedGroup, failures: Sequence[str]) -> None:
    """End a group that failed too often without the samples that nobody could generate.

    Raises:
        GroupFailedError: the request does not go without them, or no sample has finished.
    """
    request, missing = collected.request, collected.missing
    detail = f"{len(failures)} attempts failed, the last: {failures[-1]}"
    if not (request.allows_missing and request.budget.has_finished_samples):
        raise GroupFailedError(detail, FailureKind.ENGINE_ERROR)
    logger.warning(
        "prompt %s: continues without samples %s: %s", request.prompt.prompt_id, missing, detail
    )
    request.budget.engine_errors.update(dict.fromkeys(missing, detail))
    collected.end_unfinished()


# A replica that dies or hangs breaks the streams of all its groups at once: log one warning for
# all of them after this long, in seconds.
GATHER_S = 0.5
"""Seconds after the first broken stream of a replica in which the others are counted with it."""


class BrokenStreams:
    """Streams that broke lately, by replica. To be used inside an event loop."""

    def __init__(self) -> None:
        self._samples: dict[str, list[int]] = {}

    def note(self, replica: str, num_samples: int, why: str) -> None:
        """Count a stream that ended without `num_samples`; the warning tells the first `why`.

        One that broke after its last sample is none.
        """
        if not num_samples:
            return
        counts = self._samples.setdefault(replica, [])
        counts.append(num_samples)
        if len(counts) == 1:
            asyncio.get_running_loop().call_later(GATHER_S, self._notify, replica, why)

    def _notify(self, replica: str, why: str) -> None:
        counts = self._samples.pop(replica)
        logger.warning(
            "replica %s: streams of %d groups broke, %d samples continue elsewhere; the first: %s",
            *(replica, len(counts), sum(counts), why),
        )

"""Sends groups to replicas and brings their samples home, whatever happens to a replica.

Consumes: groups to generate. Waits for: a replica with free capacity, then its stream. Unblocked
by: an announcement, a finished sequence, the end of a pause, a failed or withdrawn stream.
Produces: complete groups. On failure of a stream: the replica pauses and only the missing samples
are generated elsewhere, up to `max_attempts` failures. On shutdown: cancelling a call cancels its
stream, which frees the replica's slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from services.reward.replica_queue import Priority, ReplicaQueue
from sluice.algorithm.routing import AnnouncedReplica, Grant, Member, Wanted
from sluice.errors import (
    DataError,
    EngineError,
    ExhaustedError,
    InvalidRequestError,
    PeerError,
    PromptTooLongError,
    SluiceError,
)
from sluice.types import (
    FinishReason,
    Prompt,
    PromptOrigin,
    ReplicaInfo,
    Rollout,
    RolloutGroup,
    SamplingParams,
    TokenIds,
)

logger = logging.getLogger(__name__)

PHASE = "generating"


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A group to generate, on replicas of `lowest_version` up to `highest_version`."""

    prompt: Prompt
    num_samples: int
    sampling: SamplingParams
    priority: Priority
    lowest_version: int
    highest_version: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateEvent:
    """Something a replica sent. `started` is set in the first event only."""

    started: tuple[TokenIds, int] | None  # the prompt's tokens, and the version that starts
    rollouts: tuple[Rollout, ...]


class GenerationClient(Protocol):
    """How replicas are called."""

    def generate(
        self, replica: ReplicaInfo, request: GroupRequest, sample_indexes: Sequence[int]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """Stream samples; `SluiceError` on failure, `InvalidRequestError` if refused for good."""
        ...

    async def retain(self, addresses: Collection[str]) -> None:
        """Forget replicas at all other addresses."""
        ...


class GroupFailedError(SluiceError):
    """A group cannot be generated: refused by the engine, or failed too often."""


class OverlongPromptError(GroupFailedError):
    """A prompt is over data.max_prompt_length, and such prompts are left out."""


StartCallback = Callable[[int | None], None]


@dataclass(slots=True)
class _Collected:
    """Samples of one group so far."""

    request: GroupRequest
    rollouts: dict[int, Rollout] = field(default_factory=dict)
    prompt_token_ids: TokenIds | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.request.num_samples) if i not in self.rollouts)

    def oldest_version(self, *, or_version: int | None = None) -> int | None:
        drawn_by = [rollout.oldest_version for rollout in self.rollouts.values()]
        return min((v for v in (*drawn_by, or_version) if v is not None), default=None)

    def group(self) -> RolloutGroup:
        assert self.prompt_token_ids is not None
        rollouts = tuple(self.rollouts[i] for i in sorted(self.rollouts))
        return RolloutGroup(self.request.prompt, self.prompt_token_ids, rollouts)


class GroupDispatcher:
    """Groups on their way to replicas and back.

    Args:
        client: how replicas are called.
        queue: who gets room on which replica.
        max_attempts: failures after which a group is given up.
        leave_out_overlong: whether a row that is too long is left out, or an error of the data.
    """

    def __init__(
        self,
        client: GenerationClient,
        queue: ReplicaQueue,
        *,
        max_attempts: int,
        leave_out_overlong: bool = False,
    ) -> None:
        self._client, self._queue, self._max_attempts = client, queue, max_attempts
        self._leave_out_overlong = leave_out_overlong
        self._streams: dict[asyncio.Timeout, Member] = {}

    async def announce(self, replicas: Sequence[AnnouncedReplica]) -> None:
        """Take on a new fleet; streams of replicas that are gone end, their groups go elsewhere."""
        gone = self._queue.announce(replicas)
        now = asyncio.get_running_loop().time()
        for scope, member in self._streams.items():
            if member in gone:
                scope.reschedule(now)
        await self._client.retain({replica.info.address for replica in replicas})

    async def generate(
        self, request: GroupRequest, on_start: StartCallback | None = None
    ) -> RolloutGroup:
        """Generate a whole group.

        Args:
            request: the group.
            on_start: told the oldest version in the group whenever it changes; ``None`` while the
                group holds nothing and waits.

        Raises:
            GroupFailedError: the engine refuses the prompt (`OverlongPromptError`: as too long), or
                too many attempts failed.
            DataError: a row is too long, and such rows are not to be left out.
        """
        collected = _Collected(request)
        notify = on_start or _ignore
        rank = (int(request.priority), request.prompt.sequence)
        failures: list[str] = []
        while missing := collected.missing:
            notify(collected.oldest_version())
            wanted = Wanted(len(missing), request.lowest_version, request.highest_version)
            async with self._queue.room(wanted, rank) as grant:
                failure = await self._attempt(grant, collected, missing, notify)
            failures += [failure] if failure else []
            if len(failures) >= self._max_attempts:
                raise GroupFailedError(f"{len(failures)} attempts failed, the last: {failure}")
        return collected.group()

    async def _attempt(
        self,
        grant: Grant,
        collected: _Collected,
        missing: tuple[int, ...],
        notify: StartCallback,
    ) -> str | None:
        """Receive one stream. Returns why it counts as a failure."""
        member = grant.member
        try:
            await self._receive(grant, collected, missing, notify)
        except PromptTooLongError as error:
            prompt = collected.request.prompt
            if prompt.origin is PromptOrigin.DATASET and not self._leave_out_overlong:
                raise DataError(f"{prompt.place}: {error}") from error
            raise OverlongPromptError(f"{prompt.place or prompt.prompt_id}: {error}") from error
        except InvalidRequestError as error:
            raise GroupFailedError(f"refused by {member.announced.info.name}: {error}") from error
        except ExhaustedError:
            self._queue.pause(member)  # full: neither the group's fault nor the replica's
        except SluiceError as error:
            logger.warning("prompt %s: %s", collected.request.prompt.prompt_id, error)
            self._queue.pause(member)
            return str(error)
        return None

    async def _receive(
        self,
        grant: Grant,
        collected: _Collected,
        missing: tuple[int, ...],
        notify: StartCallback,
    ) -> None:
        """Store what one stream brings; returns early when its replica is withdrawn."""
        info = grant.member.announced.info
        events = self._client.generate(info, collected.request, missing)
        try:
            async with asyncio.timeout(None) as scope:
                with self._registered(scope, grant.member):
                    async with aclosing(events):
                        async for event in events:
                            self._store(grant, collected, event, notify)
        except TimeoutError:
            if not grant.member.withdrawn:
                raise
            logger.info("%s left the fleet; its samples are generated elsewhere", info.name)
            return
        if collected.missing:
            raise EngineError(
                f"{info.name}: its stream ended without {len(collected.missing)} samples"
            )

    def _store(
        self, grant: Grant, collected: _Collected, event: GenerateEvent, notify: StartCallback
    ) -> None:
        if event.started is not None:
            self._queue.answered(grant.member)
            collected.prompt_token_ids, version = event.started
            notify(collected.oldest_version(or_version=version))
        name = grant.member.announced.info.name
        if event.rollouts and collected.prompt_token_ids is None:
            raise PeerError(name, PHASE, "it sent samples before the prompt's tokens")
        finished = [r for r in event.rollouts if r.finish_reason is not FinishReason.ABORTED]
        for rollout in finished:
            if rollout.sample_index not in collected.missing:
                raise PeerError(name, PHASE, f"sample {rollout.sample_index} was not asked for")
            collected.rollouts[rollout.sample_index] = rollout
        if finished:
            self._queue.sequences_ended(grant, len(finished))

    @contextmanager
    def _registered(self, scope: asyncio.Timeout, member: Member) -> Iterator[None]:
        self._streams[scope] = member
        try:
            yield
        finally:
            del self._streams[scope]


def _ignore(_version: int | None) -> None:
    """For callers that do not follow when a group started."""

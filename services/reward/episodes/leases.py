"""Samples that programs of the user work on: each is leased to one program, which asks for answers
and posts its end.

Consumes: episodes, from the loop; requests of programs. Produces: for the loop, observations that
are whole conversations; for the programs, answers, after the loop has recorded them. Waits for:
programs, within the group's rules until one has taken a sample, and within the episode's time from
then on. On failure of a program: its sample fails. When the loop gives a sample up, its lease is
revoked: what its program asks then is refused. Leases are in memory and end with the process.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from services.reward.episodes.drivers import EnvironmentUnavailableError, EpisodeTask
from sluice.algorithm.episode_rules import Observation
from sluice.concurrency.waits import waiting_for
from sluice.errors import LeaseEndedError, NotFoundError
from sluice.types import Answer, ChatMessage, FinishReason, Scored, Tool

MOST_REQUESTS = 1024
"""Most requests of a lease."""
_MOST_ENDS = 1 << 16
_SECRET_BYTES = 24
_AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of the policy.

    Args:
        answer: what it said.
        finish: why it ended.
        num_read: tokens that the policy read.
        num_sampled: tokens of the answer.
        turn: number of the answer in the sample, from 0.
    """

    answer: Answer
    finish: FinishReason
    num_read: int
    num_sampled: int
    turn: int


@dataclass(frozen=True, slots=True)
class PostedEnd:
    """How a program ended its sample.

    Args:
        reward: finite; ``None``: scorers grade the last answer.
        failure: why the program failed; empty: it did not.
    """

    reward: float | None = None
    failure: str = ""


# An error is a value here: nobody may be left who waits for it.
_Result = Reply | NotFoundError | LeaseEndedError


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    result: asyncio.Future[_Result] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def answer(self, result: _Result) -> None:
        if not self.result.done():
            self.result.set_result(result)


class LeasedEpisode:
    """A sample that a program works on; the loop's driver of it.

    Args:
        task: the episode.
        desk: offers it.

    Attributes:
        task: the episode.
        lease_id: secret.
    """

    def __init__(self, task: EpisodeTask, desk: LeaseDesk) -> None:
        self.task, self._desk = task, desk
        self.lease_id = secrets.token_urlsafe(_SECRET_BYTES)
        self._is_taken, self._changed = asyncio.Event(), asyncio.Event()
        self._asked: dict[str, _Asked] = {}
        self._waiting: deque[_Asked] = deque()
        self._answering: _Asked | None = None
        self._counts = (0, 0)
        self._end: PostedEnd | None = None
        self._over = ""

    async def taken(self) -> None:
        """Wait until a program has leased the sample."""
        self._desk.offer(self)
        with waiting_for(_AGENT, "leasing a sample"):
            await self._is_taken.wait()

    def take(self) -> None:
        """Begin the episode's time."""
        self._is_taken.set()

    async def open(self) -> Observation:
        """Wait for the program's first request."""
        asked = await self._next()
        if asked is None:
            raise EnvironmentUnavailableError("agent: it ended before it asked for an answer")
        return Observation(asked.messages, is_whole=True, tools=asked.tools)

    def counted(self, num_read: int, num_sampled: int) -> None:
        """Note the tokens of the next answer."""
        self._counts = (num_read, num_sampled)

    async def step(self, turn: int, answer: Answer, finish: FinishReason) -> Observation:
        """Answer the program; wait for its next request, or for its end."""
        assert self._answering is not None
        self._answering.answer(Reply(answer, finish, *self._counts, turn))
        asked = await self._next()
        if asked is None:
            return Observation(done=True)
        return Observation(asked.messages, is_whole=True, tools=asked.tools)

    async def close(self) -> Scored | None:
        """Return the posted reward; of a sample at one of its limits, wait until it is posted.

        A program that fails after that failed for want of answers: scorers grade the last one.
        """
        if self._end is None:
            self._over = "it has used its tokens or turns: post its end"
            self._refuse_waiting(LeaseEndedError(f"lease: {self._over}"))
            with waiting_for(_AGENT, "ending its sample"):
                while self._end is None:
                    await self._change()
        end = self._end
        self._desk.forget(self)
        return None if end.reward is None else Scored(end.reward, end.reward, {"acc": end.reward})

    async def abandon(self) -> None:
        """Revoke the lease."""
        self._desk.forget(self)
        self._refuse_waiting(_gone())

    async def chat(
        self, digest: str, messages: tuple[ChatMessage, ...], tools: tuple[Tool, ...]
    ) -> Reply:
        """Return the policy's answer; a repeated request gets the answer that it has.

        Args:
            digest: identifies the request within the lease.
            messages: the whole conversation.
            tools: that the policy may call, whatever the request before had.

        Raises:
            LeaseEndedError: the sample has ended, or has used its requests, tokens or turns.
            NotFoundError: the lease was revoked meanwhile.
        """
        asked = self._asked.get(digest)
        if asked is None:
            if self._end is not None:
                raise LeaseEndedError("lease: its end was posted; take another lease")
            if self._over:
                raise LeaseEndedError(f"lease: {self._over}")
            if len(self._asked) >= MOST_REQUESTS:
                raise LeaseEndedError(f"lease: {MOST_REQUESTS} requests were sent; post its end")
            asked = self._asked[digest] = _Asked(messages, tools)
            self._waiting.append(asked)
            self._changed.set()
        # The turn is sampled and recorded, whether its caller still waits or not.
        result = await asyncio.shield(asked.result)
        if isinstance(result, Reply):
            return result
        raise result

    def end(self, end: PostedEnd) -> None:
        """Note the program's end."""
        self._end = end
        self._refuse_waiting(LeaseEndedError("lease: its end was posted"))
        self._changed.set()

    def _refuse_waiting(self, error: NotFoundError | LeaseEndedError) -> None:
        current = () if self._answering is None else (self._answering,)
        for asked in (*current, *self._waiting):
            asked.answer(error)
        self._waiting.clear()

    async def _next(self) -> _Asked | None:
        """Return the next request; ``None``: the program has ended."""
        with waiting_for(_AGENT, "asking for an answer"):
            while not self._waiting and self._end is None:
                await self._change()
        if self._end is None:
            self._answering = self._waiting.popleft()
            return self._answering
        if self._end.failure and not self._over:
            raise EnvironmentUnavailableError(f"agent: {self._end.failure}")
        return None

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


class LeaseDesk:
    """Offers samples, and finds those that are leased. Used from one event loop."""

    def __init__(self) -> None:
        self._offers: deque[LeasedEpisode] = deque()
        self._leases: dict[str, LeasedEpisode] = {}
        self._ends: OrderedDict[str, PostedEnd] = OrderedDict()  # of the last ones that ended
        self._offered = asyncio.Event()

    def begin(self, task: EpisodeTask) -> LeasedEpisode:
        """Return the driver of a new episode."""
        return LeasedEpisode(task, self)

    @property
    def num_offered(self) -> int:
        """Samples that wait to be leased."""
        return len(self._offers)

    @property
    def num_leased(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def offer(self, episode: LeasedEpisode) -> None:
        """Let programs take a sample."""
        self._offers.append(episode)
        self._offered.set()

    async def take(self, count: int, wait_s: float) -> list[LeasedEpisode]:
        """Lease the samples that have waited longest.

        Args:
            count: most samples.
            wait_s: most seconds to wait for the first one; then the list is empty.
        """
        try:
            async with asyncio.timeout(wait_s):
                while not self._offers:
                    self._offered.clear()
                    with waiting_for("reward loop", "offering samples"):
                        await self._offered.wait()
        except TimeoutError:
            return []
        taken = [self._offers.popleft() for _ in range(min(count, len(self._offers)))]
        for episode in taken:
            self._leases[episode.lease_id] = episode
            episode.take()
        return taken

    async def chat(
        self,
        lease_id: str,
        digest: str,
        messages: tuple[ChatMessage, ...],
        tools: tuple[Tool, ...],
    ) -> Reply:
        """Return an answer; see `LeasedEpisode.chat`.

        Raises:
            NotFoundError: the lease is unknown, or has expired.
        """
        episode = self._leases.get(lease_id)
        if episode is not None:
            return await episode.chat(digest, messages, tools)
        if lease_id in self._ends:
            raise LeaseEndedError("lease: its end was posted; take another lease")
        raise _gone()

    def end(self, lease_id: str, end: PostedEnd) -> None:
        """End a sample. A second call with the same end does nothing more.

        Raises:
            LeaseEndedError: it has ended otherwise.
            NotFoundError: the lease is unknown, or has expired.
        """
        before = self._ends.get(lease_id)
        if before is not None:
            if before != end:
                raise LeaseEndedError(f"lease: it has ended with {before}; the first end counts")
            return
        episode = self._leases.get(lease_id)
        if episode is None:
            raise _gone()
        self._ends[lease_id] = end
        if len(self._ends) > _MOST_ENDS:
            self._ends.popitem(last=False)
        episode.end(end)

    def forget(self, episode: LeasedEpisode) -> None:
        """Drop a sample that has ended or was given up."""
        self._leases.pop(episode.lease_id, None)
        if episode in self._offers:
            self._offers.remove(episode)


def _gone() -> NotFoundError:
    return NotFoundError("lease: unknown or expired (its time or its group is over); take another")

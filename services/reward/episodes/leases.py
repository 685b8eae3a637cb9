"""Samples that programs of the user work on: each is leased to one program, which asks for answers
and posts its end.

Consumes: episodes, from the loop; requests of programs. Produces: for the loop, observations that
are whole conversations; for the programs, answers, after the loop has recorded them. Waits for:
programs, within the group's rules until one has taken a sample, and within the episode's time from
then on; of a holder that promised calls, only until these have not come for so long. On failure of
a program: its sample fails. When the loop gives a sample up, its lease is
revoked: what its program asks then is refused.

What a restart keeps of a sample that is trained, with a ledger that has a file: its lease, holder
and deadline, the turns that its program may have seen, and its posted end, until its prompt ends or
starts again. A restarted service answers requests from these turns. When the prompt starts, the
sample continues from them, and needs no program if its end was posted. What was being sampled is
sampled again, when the program repeats its request. Samples that nobody had leased are offered
again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from services.reward.episodes.drivers import EpisodeFailedError, EpisodeTask
from services.reward.ledger.leases import (
    CommittedTurn,
    KeptLeases,
    LeaseRecord,
    PostedEnd,
)
from sluice.algorithm.episode_rules import Observation
from sluice.concurrency.waits import waiting_for
from sluice.errors import LeaseEndedError, NotFoundError, NotReadyError
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


# An error is a value here: nobody may be left who waits for it.
_Refusal = NotFoundError | NotReadyError | LeaseEndedError


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    digest: str
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[Tool, ...] = ()
    result: asyncio.Future[Reply | _Refusal] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def answer(self, result: Reply | _Refusal) -> None:
        if not self.result.done():
            self.result.set_result(result)


class LeaseHolder:
    """Who has leased samples, and is heard of at least every so many seconds.

    Args:
        holder_id: secret.
        keep_alive_s: seconds without a call after which it has left.
    """

    def __init__(self, holder_id: str, keep_alive_s: float) -> None:
        self.holder_id, self.keep_alive_s = holder_id, keep_alive_s
        self.heard()

    def heard(self) -> None:
        """Note a call."""
        self.leaves_at_s = asyncio.get_running_loop().time() + self.keep_alive_s


class LeasedEpisode:
    """A sample that a program works on; the loop's driver of it.

    Args:
        desk: offers it.
        store: keeps it.
        record: what an earlier service left of it; ``None``: it is new.

    Attributes:
        lease_id: secret.
    """

    def __init__(
        self, desk: LeaseDesk, store: KeptLeases, record: LeaseRecord | None = None
    ) -> None:
        self._desk, self._store = desk, store
        self.lease_id = record.lease_id if record else secrets.token_urlsafe(_SECRET_BYTES)
        self._task: EpisodeTask | None = None
        self._expires_s = record.expires_s if record else 0.0
        self._is_kept = record is not None
        self._holder: LeaseHolder | None = None
        self._is_taken, self._changed = asyncio.Event(), asyncio.Event()
        self._asked: dict[str, _Asked] = {}
        self._waiting: deque[_Asked] = deque()
        self._answering: _Asked | None = None
        self._reply: Reply | None = None
        self._end: PostedEnd | None = None
        self._over = ""
        self._recalled: tuple[CommittedTurn, ...] = ()
        self._num_turns = 0
        if record is not None:
            self._restore(record)

    def _restore(self, record: LeaseRecord) -> None:
        self._holder = self._desk.holder(record.holder, record.keep_alive_s)
        self._is_taken.set()
        self._end = record.end
        self._recalled = tuple(record.turns.values())
        for digest, turn in record.turns.items():
            self._asked[digest] = asked = _Asked(digest)
            asked.answer(_reply(turn, self._num_turns))
            self._num_turns += 1

    @property
    def task(self) -> EpisodeTask:
        """The episode; of a lease of an earlier service, once its prompt has started again."""
        assert self._task is not None
        return self._task

    def begin(self, task: EpisodeTask) -> None:
        """Play it."""
        self._task = task

    @property
    def has_lapsed(self) -> bool:
        """Whether it expired before its prompt started again."""
        return self._task is None and self._end is None and time.time() >= self._expires_s

    def seconds_left(self) -> float:
        """Return the seconds until a taken sample expires.

        One whose end was posted expires no more; it has as many as a new one.
        """
        if self._end is not None:
            return self.task.timeout_s
        return max(0.0, self._expires_s - time.time())

    async def taken(self) -> None:
        """Wait until a program has leased the sample."""
        if self._is_taken.is_set():
            return
        self._desk.offer(self)
        with waiting_for(_AGENT, "leasing a sample"):
            await self._is_taken.wait()

    def heard(self) -> None:
        """Note a call of its program."""
        if self._holder is not None:
            self._holder.heard()

    def take(self, holder: LeaseHolder | None) -> None:
        """Begin the episode's time."""
        self._holder = holder
        self._expires_s = time.time() + self.task.timeout_s
        prompt_id, index = self.task.prompt.prompt_id, self.task.sample_index
        record = LeaseRecord(self.lease_id, prompt_id, index, self._expires_s)
        if holder is not None:
            record = replace(record, holder=holder.holder_id, keep_alive_s=holder.keep_alive_s)
        self._is_kept = self.task.is_kept and self._store.taken(record)
        self._is_taken.set()

    async def open(self) -> Observation:
        """Wait for the program's first request."""
        asked = await self._next()
        if asked is None:
            raise EpisodeFailedError("the program ended before it asked for an answer")
        return Observation(asked.messages, is_whole=True, tools=asked.tools)

    def recalled(self) -> tuple[CommittedTurn, ...]:
        """Return, once, the turns of an earlier service."""
        recalled, self._recalled = self._recalled, ()
        self._desk.num_recalled_tokens += sum(one.turn.token_ids.size for one in recalled)
        return recalled

    def commit(self, turn: CommittedTurn) -> None:
        """Keep the turn that `step` answers with; `LeaseDesk.chat` says when it is on the disk."""
        assert self._answering is not None
        self._reply = _reply(turn, self._num_turns)
        if self._is_kept:
            self._store.committed(self.lease_id, self._num_turns, self._answering.digest, turn)
        self._num_turns += 1

    async def step(self, turn: int, answer: Answer, finish: FinishReason) -> Observation:
        """Answer the program; wait for its next request, or for its end."""
        self.heard()  # sampling the answer took time, and its program could only wait
        if self._answering is not None and self._reply is not None:
            self._answering.answer(self._reply)
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
            self.refuse(LeaseEndedError(f"lease: {self._over}"))
            with waiting_for(_AGENT, "ending its sample"):
                while self._end is None:
                    await self._change()
        end = self._end
        self._desk.forget(self)
        return None if end.reward is None else Scored(end.reward, end.reward, {"acc": end.reward})

    async def abandon(self) -> None:
        """Revoke the lease."""
        self._desk.forget(self)
        self.refuse(_gone())

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
            NotReadyError: the service ends.
        """
        asked = self._asked.get(digest)
        if asked is None:
            if self._end is not None:
                raise LeaseEndedError("lease: its end was posted; take another lease")
            if self._over:
                raise LeaseEndedError(f"lease: {self._over}")
            if len(self._asked) >= MOST_REQUESTS:
                raise LeaseEndedError(f"lease: {MOST_REQUESTS} requests were sent; post its end")
            asked = self._asked[digest] = _Asked(digest, messages, tools)
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
        if self._is_kept:
            self._store.ended(self.lease_id, end)
        self.refuse(LeaseEndedError("lease: its end was posted"))
        self._changed.set()

    def refuse(self, error: _Refusal) -> None:
        """Answer the requests that wait with an error."""
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
            raise EpisodeFailedError(self._end.failure)
        return None

    async def _change(self) -> None:
        """Wait for a call of the program, as long as its holder is heard of."""
        self._changed.clear()
        while True:
            holder = self._holder
            try:
                async with asyncio.timeout_at(holder.leaves_at_s if holder else None):
                    await self._changed.wait()
                    return
            except TimeoutError:
                now = asyncio.get_running_loop().time()
                if holder is not None and now >= holder.leaves_at_s:
                    raise EpisodeFailedError(
                        f"its runner left: it made no call for {holder.keep_alive_s:g} s"
                    ) from None


def _reply(committed: CommittedTurn, number: int) -> Reply:
    turn = committed.turn
    answer = turn.answer or Answer(turn.text)
    return Reply(answer, turn.finish_reason, committed.num_read, turn.token_ids.size, number)


class LeaseDesk:
    """Offers samples, and finds those that are leased. Used from one event loop.

    Answer a program only after what the store was given until then is on the disk.

    Args:
        store: keeps leases.

    Attributes:
        num_recalled_tokens: sampled by an earlier service, of samples that continue.
    """

    def __init__(self, store: KeptLeases) -> None:
        self._store = store
        self.num_recalled_tokens = 0
        self._is_closing = False
        self._offers: deque[LeasedEpisode] = deque()
        self._leases: dict[str, LeasedEpisode] = {}
        self._holders = WeakValueDictionary[str, LeaseHolder]()  # their leases keep them
        self._ends: OrderedDict[str, PostedEnd] = OrderedDict()  # of the last ones that ended
        self._offered = asyncio.Event()
        self._to_continue: dict[tuple[str, int], LeasedEpisode] = {}
        for record in self._store.found:
            episode = LeasedEpisode(self, self._store, record)
            self._to_continue[record.prompt_id, record.sample_index] = episode
            self._leases[record.lease_id] = episode
            if record.end is not None:
                self._ends[record.lease_id] = record.end
        self._store.found = ()  # else its turns are held twice
        self._store.on_revoked = self._revoke

    def begin(self, task: EpisodeTask) -> LeasedEpisode:
        """Return the driver of an episode: a new one, or one that an earlier service left."""
        sample = task.prompt.prompt_id, task.sample_index
        earlier = self._to_continue.pop(sample, None) if task.is_kept else None
        episode = earlier or LeasedEpisode(self, self._store)
        episode.begin(task)
        return episode

    def close(self) -> None:
        """Refuse programs from here on: the service ends, and the next one answers them."""
        self._is_closing = True
        for episode in self._leases.values():
            episode.refuse(_ending())

    @property
    def num_offered(self) -> int:
        """Samples that wait to be leased."""
        return len(self._offers)

    @property
    def num_leased(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def holder(self, holder_id: str, keep_alive_s: float) -> LeaseHolder | None:
        """Return who holds leases and is heard of now; ``None``: it promises no calls."""
        if not holder_id or not keep_alive_s:
            return None
        found = self._holders.get(holder_id)
        if found is None:
            found = self._holders[holder_id] = LeaseHolder(holder_id, keep_alive_s)
        found.keep_alive_s = keep_alive_s
        found.heard()
        return found

    def offer(self, episode: LeasedEpisode) -> None:
        """Let programs take a sample."""
        self._offers.append(episode)
        self._offered.set()

    async def take(
        self, count: int, wait_s: float, holder_id: str = "", keep_alive_s: float = 0.0
    ) -> list[LeasedEpisode]:
        """Lease the samples that have waited longest.

        Args:
            count: most samples; with 0 the holder only shows that it lives.
            wait_s: most seconds to wait for the first one; then the list is empty.
            holder_id: of the caller; see `LeaseHolder`.
            keep_alive_s: its promise; 0: none.

        Raises:
            NotReadyError: the service ends.
        """
        self._check_open()
        self.holder(holder_id, keep_alive_s)
        try:
            async with asyncio.timeout(wait_s):
                while count and not self._offers:
                    self._offered.clear()
                    with waiting_for("reward loop", "offering samples"):
                        await self._offered.wait()
        except TimeoutError:
            return []
        taken = [self._offers.popleft() for _ in range(min(count, len(self._offers)))]
        for episode in taken:
            self._leases[episode.lease_id] = episode
            episode.take(self.holder(holder_id, keep_alive_s))
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
            NotReadyError: the service ends.
        """
        self._check_open()
        episode = self._found(lease_id)
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
            NotReadyError: the service ends.
        """
        self._check_open()
        before = self._ends.get(lease_id)
        if before is not None:
            if before != end:
                raise LeaseEndedError(f"lease: it has ended with {before}; the first end counts")
            return
        episode = self._found(lease_id)
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

    def _found(self, lease_id: str) -> LeasedEpisode | None:
        episode = self._leases.get(lease_id)
        if episode is None or episode.has_lapsed:
            return None
        episode.heard()
        return episode

    def _check_open(self) -> None:
        if self._is_closing:
            raise _ending()

    def _revoke(self, prompt_id: str) -> None:
        """Drop what an earlier service left of a prompt that ended or starts again."""
        for sample in [one for one in self._to_continue if one[0] == prompt_id]:
            episode = self._to_continue.pop(sample)
            self.forget(episode)
            episode.refuse(_gone())


def _ending() -> NotReadyError:
    return NotReadyError("the reward service ends; repeat the request")


def _gone() -> NotFoundError:
    return NotFoundError("lease: unknown or expired (its time or its group is over); take another")

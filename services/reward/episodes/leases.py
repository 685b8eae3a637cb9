"""Samples leased to the user's programs: a program holds the lease of a sample, asks for answers
and posts the sample's end.

Consumes: episodes, from the loop; requests of programs. Produces: for the loop, observations that
are whole conversations; for the programs, answers, after the loop has recorded them. Waits for:
programs, within the group's rules until a program takes the sample, and within the episode's time
after that; if the holder promised regular calls, only until they stop for the promised time. On
failure of a program: its sample fails. When the loop gives a sample up, it revokes the lease, and
further requests of the program are refused.

With a ledger in a file, a restart keeps of a training sample: its lease, holder and deadline, the
turns that its program may have seen, the limit that it has reached and its posted end, until its
prompt ends or starts again. A restarted service answers repeated requests from these turns. When
the prompt starts, the sample continues from them, and needs no program if its end was posted. A
turn that was being sampled is sampled again when the program repeats its request. Samples without a
lease are offered again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from services.reward.episodes.drivers import EpisodeFailedError, EpisodeTask
from services.reward.ledger.leases import (
    CommittedTurn,
    LeaseRecord,
    PostedEnd,
    StoredLeases,
)
from sluice.algorithm.episode_rules import Observation
from sluice.concurrency.waits import waiting_for
from sluice.errors import ExhaustedError, LeaseEndedError, NotFoundError, NotReadyError
from sluice.types import Answer, ChatMessage, EpisodeEnd, FinishReason, Scored, Tool

MAX_REQUESTS = 1024
"""Most requests of a lease."""
MAX_WAITING = 8
"""Most requests of a lease that wait for their answers, beside the one that is being answered."""
MAX_WAITING_BYTES = 1 << 24
"""Most bytes of the waiting requests together; a single request may have more."""
_MAX_ENDS = 1 << 16
_SECRET_BYTES = 24
_AGENT = "agent"


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer of the policy.

    Args:
        num_read: tokens that the policy read.
        turn: number of the answer within the sample, from 0.
    """

    answer: Answer
    finish: FinishReason
    num_read: int
    num_sampled: int
    turn: int


# The error is a value: as an exception it would be reported if no caller waits for it.
_Refusal = NotFoundError | NotReadyError | LeaseEndedError


_Result = asyncio.Future[ChatReply | _Refusal]


@dataclass(frozen=True, slots=True, eq=False)
class _PendingRequest:
    """A request without its answer."""

    digest: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    num_bytes: int
    result: _Result

    def answer(self, result: ChatReply | _Refusal) -> None:
        if not self.result.done():
            self.result.set_result(result)


class LeaseHolder:
    """A program that has leased samples and promised to call at a regular interval.

    Args:
        holder_id: secret.
        keep_alive_s: seconds without a call after which it counts as gone.
    """

    def __init__(self, holder_id: str, keep_alive_s: float) -> None:
        self.holder_id, self.keep_alive_s = holder_id, keep_alive_s
        self.note_call()

    def note_call(self) -> None:
        """Note a call."""
        self.leaves_at_s = asyncio.get_running_loop().time() + self.keep_alive_s


class LeasedEpisode:
    """A sample that a program works on; the driver that the loop uses for it.

    Args:
        record: what an earlier service recorded of it; ``None`` if it is new.

    Attributes:
        lease_id: secret.
        limit: the limit that the sample has reached; ``None`` if it takes further requests.
        posted_end: how its program ended it; ``None`` if it has not.
    """

    def __init__(
        self, manager: LeaseManager, store: StoredLeases, record: LeaseRecord | None = None
    ) -> None:
        self._manager, self._store = manager, store
        self.lease_id = record.lease_id if record else secrets.token_urlsafe(_SECRET_BYTES)
        self._task: EpisodeTask | None = None
        self._expires_s = record.expires_s if record else 0.0
        self._is_kept = record is not None
        self._holder: LeaseHolder | None = None
        self._is_taken, self._changed = asyncio.Event(), asyncio.Event()
        self._results: dict[str, _Result] = {}  # by the digests of the requests
        self._waiting: deque[_PendingRequest] = deque()
        self._answering: _PendingRequest | None = None
        self._reply: ChatReply | None = None
        self.posted_end: PostedEnd | None = None
        self.limit: EpisodeEnd | None = None
        self._recalled: tuple[CommittedTurn, ...] = ()
        self._num_turns = 0
        if record is not None:
            self._restore(record)

    def _restore(self, record: LeaseRecord) -> None:
        self._holder = self._manager.holder(record.holder, record.keep_alive_s)
        self._is_taken.set()
        self.posted_end, self.limit = record.end, record.limit
        self._recalled = tuple(record.turns.values())
        for digest, turn in record.turns.items():
            self._results[digest] = result = asyncio.get_running_loop().create_future()
            result.set_result(_reply(turn, self._num_turns))
            self._num_turns += 1

    @property
    def task(self) -> EpisodeTask:
        """The episode; call only while a group plays it."""
        assert self._task is not None
        return self._task

    @property
    def is_played(self) -> bool:
        """Whether a group plays it now."""
        return self._task is not None

    def begin(self, task: EpisodeTask) -> None:
        """Start to play the episode."""
        self._task = task

    @property
    def has_lapsed(self) -> bool:
        """Whether it expired while no group played it."""
        return not self.is_played and self.posted_end is None and time.time() >= self._expires_s

    def seconds_left(self) -> float:
        """Return the seconds until a taken sample expires.

        A sample with a posted end does not expire: the result is that of a new sample.
        """
        if self.posted_end is not None:
            return self.task.timeout_s
        return max(0.0, self._expires_s - time.time())

    async def wait_until_taken(self) -> None:
        """Wait until a program has leased the sample."""
        if self._is_taken.is_set():
            return
        self._manager.offer(self)
        with waiting_for(_AGENT, "leasing a sample"):
            await self._is_taken.wait()

    def note_call(self) -> None:
        """Note a call of its program."""
        if self._holder is not None:
            self._holder.note_call()

    def take(self, holder: LeaseHolder | None) -> None:
        """Lease the sample, and start its time limit."""
        self._holder = holder
        self._expires_s = time.time() + self.task.timeout_s
        prompt_id, index = self.task.prompt.prompt_id, self.task.sample_index
        record = LeaseRecord(self.lease_id, prompt_id, index, self._expires_s)
        if holder is not None:
            record = replace(record, holder=holder.holder_id, keep_alive_s=holder.keep_alive_s)
        self._is_kept = self.task.is_kept and self._store.add_lease(record)

    def note_leased(self) -> None:
        """Note that a program has the lease."""
        self._is_taken.set()

    def give_back(self) -> None:
        """Undo `take`: no program received the lease."""
        if self._is_kept:
            self._store.drop_lease(self.lease_id)
        self._is_kept, self._holder = False, None

    async def open(self) -> Observation:
        """Wait for the program's first request."""
        request = await self._next_request()
        if request is None:
            raise EpisodeFailedError("the program ended before it asked for an answer")
        return Observation(request.messages, is_whole=True, tools=request.tools)

    def take_recalled(self) -> tuple[CommittedTurn, ...]:
        """Return, once, the turns of an earlier service."""
        recalled, self._recalled = self._recalled, ()
        self._manager.num_recalled_tokens += sum(
            committed.turn.token_ids.size for committed in recalled
        )
        return recalled

    def commit(self, turn: CommittedTurn) -> None:
        """Keep the turn that `step` answers with; see `LeaseManager` for when it is on disk."""
        assert self._answering is not None
        self._reply = _reply(turn, self._num_turns)
        if self._is_kept:
            self._store.add_turn(self.lease_id, self._num_turns, self._answering.digest, turn)
        self._num_turns += 1

    async def step(self, turn: int, answer: Answer, finish: FinishReason) -> Observation:
        """Answer the program; wait for its next request, or for its end."""
        self.note_call()  # while the answer was sampled, the program could only wait
        if self._answering is not None and self._reply is not None:
            self._answering.answer(self._reply)
            self._answering = None
        request = await self._next_request()
        if request is None:
            return Observation(done=True)
        return Observation(request.messages, is_whole=True, tools=request.tools)

    def set_limit(self, limit: EpisodeEnd) -> None:
        """Refuse further requests: the sample has reached a limit.

        A later failure of the program is for lack of answers, so scorers grade the last one.
        """
        self.limit = limit
        if self._is_kept:
            self._store.set_limit(self.lease_id, limit)
        self.refuse(_limit_error())

    async def close(self) -> Scored | None:
        """Return the posted reward; if the sample has reached a limit, wait for it."""
        with waiting_for(_AGENT, "ending its sample"):
            while self.posted_end is None:
                await self._wait_for_change()
        end = self.posted_end
        self._manager.forget(self)
        return None if end.reward is None else Scored(end.reward, end.reward, {"acc": end.reward})

    def suspend(self) -> bool:
        """Keep the lease if a restarted service could continue it; return whether it was kept.

        The loop has cancelled its episode: the service ends, or the ledger revokes the lease next.
        """
        if self._is_kept:
            self._manager.suspend(self, self.task.prompt.prompt_id, self.task.sample_index)
            self._task = None
        return self._is_kept

    async def abandon(self) -> None:
        """Revoke the lease."""
        self._manager.forget(self)
        self.refuse(_gone_error())

    async def chat(
        self,
        digest: str,
        messages: tuple[ChatMessage, ...],
        tools: tuple[Tool, ...],
        num_bytes: int,
    ) -> ChatReply:
        """Return the policy's answer; a repeated request gets the same answer.

        Args:
            digest: identifies the request within the lease.
            tools: the tools that the policy may call; they replace those of the request before.

        Raises:
            ExhaustedError: too many requests wait.
            LeaseEndedError: the sample has ended, or has used its requests, tokens or turns.
            NotFoundError: the lease was revoked meanwhile.
            NotReadyError: the service ends.
        """
        answered = self._results.get(digest)
        if answered is None:
            if self.posted_end is not None:
                raise LeaseEndedError("lease: its end was posted; take another lease")
            if self.limit is not None:
                raise _limit_error()
            if len(self._results) >= MAX_REQUESTS:
                raise LeaseEndedError(f"lease: {MAX_REQUESTS} requests were sent; post its end")
            self._check_waiting(num_bytes)
            answered = self._results[digest] = asyncio.get_running_loop().create_future()
            self._waiting.append(_PendingRequest(digest, messages, tools, num_bytes, answered))
            self._changed.set()
        # The turn is sampled and recorded even if its caller no longer waits.
        result = await asyncio.shield(answered)
        if isinstance(result, ChatReply):
            return result
        raise result

    def _check_waiting(self, num_bytes: int) -> None:
        """Raise `ExhaustedError` if the requests that wait leave no space for one of this size."""
        num_waiting, total_bytes = (
            len(self._waiting),
            num_bytes + sum(request.num_bytes for request in self._waiting),
        )
        if num_waiting and (num_waiting >= MAX_WAITING or total_bytes > MAX_WAITING_BYTES):
            raise ExhaustedError(
                f"lease: {num_waiting} requests wait, with this one {total_bytes} bytes; at most "
                f"{MAX_WAITING} wait, of {MAX_WAITING_BYTES} bytes: await their answers first"
            )

    def end(self, end: PostedEnd) -> None:
        """Note the end that the program posted."""
        self.posted_end = end
        if self._is_kept:
            self._store.set_end(self.lease_id, end)
        self.refuse(LeaseEndedError("lease: its end was posted"))
        self._changed.set()

    def refuse(self, error: _Refusal) -> None:
        """Answer the requests that wait with an error."""
        current = () if self._answering is None else (self._answering,)
        for request in (*current, *self._waiting):
            request.answer(error)
        self._waiting.clear()

    async def _next_request(self) -> _PendingRequest | None:
        """Return the next request; ``None``: the program has ended."""
        with waiting_for(_AGENT, "asking for an answer"):
            while not self._waiting and self.posted_end is None:
                await self._wait_for_change()
        if self.posted_end is None:
            self._answering = self._waiting.popleft()
            return self._answering
        if self.posted_end.failure:
            raise EpisodeFailedError(self.posted_end.failure)
        return None

    async def _wait_for_change(self) -> None:
        """Wait for a call of the program, as long as its holder keeps calling."""
        self._changed.clear()
        while True:
            holder = self._holder
            try:
                async with asyncio.timeout_at(holder.leaves_at_s if holder else None):
                    await self._changed.wait()
                    return
            except TimeoutError:
                now_s = asyncio.get_running_loop().time()
                if holder is not None and now_s >= holder.leaves_at_s:
                    raise EpisodeFailedError(
                        f"its runner left: it made no call for {holder.keep_alive_s:g} s"
                    ) from None


def _reply(committed: CommittedTurn, number: int) -> ChatReply:
    turn = committed.turn
    answer = turn.answer or Answer(turn.text)
    return ChatReply(answer, turn.finish_reason, committed.num_read, turn.token_ids.size, number)


class LeaseManager:
    """Offers samples, and finds those that are leased. Used from one event loop.

    Before you answer a program, wait until everything given to the store is on disk.

    Attributes:
        num_recalled_tokens: tokens sampled by an earlier service, of samples that continue.
    """

    def __init__(self, store: StoredLeases) -> None:
        self._store = store
        self.num_recalled_tokens = 0
        self._is_closing = False
        self._offers: deque[LeasedEpisode] = deque()
        self._leases: dict[str, LeasedEpisode] = {}
        self._holders = WeakValueDictionary[str, LeaseHolder]()  # their leases keep them
        self._ends: OrderedDict[str, PostedEnd] = OrderedDict()  # of leases that were dropped
        self._offered = asyncio.Event()
        # Kept samples without a group, until their group starts or the ledger revokes the lease.
        self._to_continue: dict[str, dict[int, LeasedEpisode]] = {}
        for record in self._store.restored:
            episode = LeasedEpisode(self, self._store, record)
            self._leases[record.lease_id] = episode
            self.suspend(episode, record.prompt_id, record.sample_index)
        self._store.restored = ()  # otherwise its turns are held twice
        self._store.on_revoked = self._revoke

    def begin(self, task: EpisodeTask) -> LeasedEpisode:
        """Return the driver of an episode: a new one, or one kept by an earlier service."""
        of_prompt = self._to_continue.get(task.prompt.prompt_id, {}) if task.is_kept else {}
        episode = of_prompt.pop(task.sample_index, None) or LeasedEpisode(self, self._store)
        episode.begin(task)
        return episode

    def close(self) -> None:
        """Refuse programs from now on: the service ends, and the next one answers them."""
        self._is_closing = True
        self._offered.set()  # wakes the callers that wait for samples
        for episode in self._leases.values():
            episode.refuse(_ending_error())

    @property
    def num_offered(self) -> int:
        """Samples that wait to be leased."""
        return len(self._offers)

    @property
    def num_leased(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def holder(self, holder_id: str, keep_alive_s: float) -> LeaseHolder | None:
        """Return the holder and note its call; ``None`` if it promises no regular calls."""
        if not holder_id or not keep_alive_s:
            return None
        holder = self._holders.get(holder_id)
        if holder is None:
            holder = self._holders[holder_id] = LeaseHolder(holder_id, keep_alive_s)
        holder.keep_alive_s = keep_alive_s
        holder.note_call()
        return holder

    def offer(self, episode: LeasedEpisode) -> None:
        """Let programs take a sample."""
        self._offers.append(episode)
        self._offered.set()

    @asynccontextmanager
    async def leasing(
        self, count: int, wait_s: float, holder_id: str = "", keep_alive_s: float = 0.0
    ) -> AsyncIterator[Sequence[LeasedEpisode]]:
        """Lease the samples that have waited longest; offer them again if the block fails.

        Args:
            count: most samples; with 0 the call only shows that the holder is alive.
            wait_s: most seconds to wait for the first sample; then the result is empty.
            holder_id: the caller's id; see `LeaseHolder`.
            keep_alive_s: the interval of calls that it promises; 0 for no promise.

        Raises:
            NotReadyError: the service ends.
        """
        self._check_open()
        self.holder(holder_id, keep_alive_s)
        episodes: list[LeasedEpisode] = []
        if count and await self._is_offered(wait_s):
            episodes = [self._offers.popleft() for _ in range(min(count, len(self._offers)))]
        try:
            for episode in episodes:
                self._leases[episode.lease_id] = episode
                episode.take(self.holder(holder_id, keep_alive_s))
            yield episodes
        except BaseException:
            self._give_back(episodes)
            raise
        for episode in episodes:
            episode.note_leased()

    async def _is_offered(self, wait_s: float) -> bool:
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    self._check_open()
                    if self._offers:
                        return True
                    self._offered.clear()
                    with waiting_for("reward loop", "offering samples"):
                        await self._offered.wait()
        except TimeoutError:
            return False

    def _give_back(self, episodes: Sequence[LeasedEpisode]) -> None:
        for episode in reversed(episodes):
            if self._leases.pop(episode.lease_id, None) is None:  # its group was given up
                continue
            episode.give_back()
            if episode.is_played:  # otherwise it is offered when its group starts again
                self._offers.appendleft(episode)
        self._offered.set()

    async def chat(
        self,
        lease_id: str,
        digest: str,
        messages: tuple[ChatMessage, ...],
        tools: tuple[Tool, ...],
        num_bytes: int,
    ) -> ChatReply:
        """Return an answer; see `LeasedEpisode.chat`.

        Raises:
            NotFoundError: the lease is unknown, or has expired.
            NotReadyError: the service ends.
        """
        self._check_open()
        episode = self._find_open(lease_id)
        if episode is not None:
            return await episode.chat(digest, messages, tools, num_bytes)
        if lease_id in self._ends:
            raise LeaseEndedError("lease: its end was posted; take another lease")
        raise _gone_error()

    def end(self, lease_id: str, end: PostedEnd) -> None:
        """End a sample. Repeating the call with the same end has no effect.

        Raises:
            LeaseEndedError: it has ended in another way.
            NotFoundError: the lease is unknown, or has expired.
            NotReadyError: the service ends.
        """
        self._check_open()
        episode = self._find_open(lease_id)
        previous_end = self._ends.get(lease_id) if episode is None else episode.posted_end
        if previous_end is not None:
            if previous_end != end:
                raise LeaseEndedError(
                    f"lease: it has ended with {previous_end}; the first end counts"
                )
        elif episode is None:
            raise _gone_error()
        else:
            episode.end(end)

    def suspend(self, episode: LeasedEpisode, prompt_id: str, sample_index: int) -> None:
        """Hold a kept lease while no group plays its sample."""
        self._to_continue.setdefault(prompt_id, {})[sample_index] = episode

    def forget(self, episode: LeasedEpisode) -> None:
        """Drop a sample that has ended or was given up, but remember its posted end."""
        if self._leases.pop(episode.lease_id, None) and episode.posted_end is not None:
            self._ends[episode.lease_id] = episode.posted_end
            if len(self._ends) > _MAX_ENDS:
                self._ends.popitem(last=False)
        if episode in self._offers:
            self._offers.remove(episode)

    def _find_open(self, lease_id: str) -> LeasedEpisode | None:
        episode = self._leases.get(lease_id)
        if episode is None or episode.has_lapsed:
            return None
        episode.note_call()
        return episode

    def _check_open(self) -> None:
        if self._is_closing:
            raise _ending_error()

    def _revoke(self, prompt_id: str) -> None:
        """Drop the samples that no group plays, of a prompt that ended or starts again."""
        for episode in self._to_continue.pop(prompt_id, {}).values():
            self.forget(episode)
            episode.refuse(_gone_error())


def _limit_error() -> LeaseEndedError:
    return LeaseEndedError("lease: it has used its tokens or turns: post its end")


def _ending_error() -> NotReadyError:
    return NotReadyError("the reward service ends; repeat the request")


def _gone_error() -> NotFoundError:
    return NotFoundError("lease: unknown or expired (its time or its group is over); take another")

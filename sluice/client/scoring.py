"""Grade responses with the scorers of a run, without training on them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.client.channels import ServiceChannels
from sluice.client.generation_types import check_deadline
from sluice.codec.messages import struct_to_proto
from sluice.codec.reward import score_from_proto
from sluice.errors import (
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    PeerDefectError,
    PeerError,
    SluiceError,
    leaves,
)
from sluice.rpc.client import reward_stub, unary_call
from sluice.rpc.retries import Retries, RetryPolicy
from sluice.types import Failed, FailureKind, Scored

# The deadline of Score in sluice.rpc.policy follows from these two.
ITEMS_PER_CALL = 16
CALLS_UNDER_WAY = 4
MOST_CALLS = 16
"""Calls of one client at once, which is the most that a service accepts."""
_PHASE = "scoring responses"


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """A response to grade; `data_source` chooses the scorer, `extra_info` goes to it."""

    data_source: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, object] = field(default_factory=dict)


async def score_items(
    channels: ServiceChannels,
    reward: str,
    items: Sequence[ScoreItem],
    policy: RetryPolicy,
    *,
    calls: asyncio.Semaphore,
    deadline_s: float | None = None,
) -> list[Scored | Failed]:
    """Grade responses for `AsyncClient.score`, which has the arguments and errors.

    Send calls of at most 16 items, four at a time. A call that ran out of time ends the scoring of
    its items, which are then sent again in calls of half as many.

    Args:
        calls: bounds the calls of all `score_items` of one client.
    """
    check_deadline(deadline_s)
    encoded = [_to_proto(item, f"items[{index}]") for index, item in enumerate(items)]
    retries = Retries(policy, reward, _PHASE, deadline_s=deadline_s)
    try:
        async with asyncio.timeout(deadline_s) as whole:
            grading = _Grading(channels, reward, encoded, retries, calls)
            return await grading.outcomes(deadline_s)
    except TimeoutError as error:
        if not whole.expired():
            raise
        retries.remaining_s()  # names the failure that the deadline passed in
        raise DeadlineError(reward, _PHASE, deadline_s or 0.0) from error


class _Grading:
    """The responses of one `score_items`: those to send, and the outcomes of the others."""

    def __init__(
        self,
        channels: ServiceChannels,
        reward: str,
        items: Sequence[reward_pb2.ScoreItem],
        retries: Retries,
        calls: asyncio.Semaphore,
    ) -> None:
        self._channels = channels
        self._reward = reward
        self._items = items
        self._retries = retries
        self._calls = calls
        self._outcomes: list[Scored | Failed | None] = [None] * len(items)
        # Ranges of indexes; `_take` splits them into calls.
        self._waiting = deque([range(len(items))] if items else [])
        self._most_items = ITEMS_PER_CALL
        self._num_senders = 0
        self._num_calls = 0
        self._changed = asyncio.Event()

    async def outcomes(self, deadline_s: float | None) -> list[Scored | Failed]:
        """Grade all. A call with a single item has until `deadline_s`, if there is one."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CALLS_UNDER_WAY):
                    tasks.create_task(self._send(deadline_s), name="scoring")
        except ExceptionGroup as group:
            raise leaves(group)[0] from group
        found = [outcome for outcome in self._outcomes if outcome is not None]
        if len(found) < len(self._outcomes):
            raise asyncio.CancelledError  # gRPC cancelled the calls: their channel was closed
        return found

    async def _send(self, deadline_s: float | None) -> None:
        """Send waiting items, one call after another."""
        self._num_senders += 1
        while await self._has_more():
            indexes = self._take()
            try:
                results = await self._call(indexes, deadline_s if len(indexes) == 1 else None)
            except SluiceError as error:
                if isinstance(error, ExhaustedError) and self._num_senders > 1:
                    break  # the other senders use the capacity that there is
                await self._recover(error, len(indexes))
            else:
                if len(results) != len(indexes):
                    detail = f"{len(results)} results for {len(indexes)} responses"
                    raise PeerDefectError(self._reward, _PHASE, detail)
                self._outcomes[indexes.start : indexes.stop] = map(_from_proto, results)
                self._retries.note_progress()
        self._num_senders -= 1

    async def _has_more(self) -> bool:
        """Return whether items are to be sent. Items of other senders' calls may come back."""
        while not self._waiting and self._num_calls:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._waiting)

    def _take(self) -> range:
        indexes = self._waiting.popleft()
        if len(indexes) > self._most_items:
            self._waiting.appendleft(indexes[self._most_items :])
        return indexes[: self._most_items]

    async def _call(
        self, indexes: range, deadline_s: float | None
    ) -> Sequence[reward_pb2.ScoreResult]:
        """Grade the items of these indexes, which wait again if the call fails."""
        self._num_calls += 1
        try:
            async with self._calls:
                request = reward_pb2.ScoreRequest(items=self._items[indexes.start : indexes.stop])
                self._channels.check_size("items", request)
                answer = await unary_call(
                    self._stub().Score,
                    request,
                    peer=self._reward,
                    phase=_PHASE,
                    deadline_s=deadline_s,
                )
                return answer.results
        except SluiceError:
            self._waiting.appendleft(indexes)
            raise
        finally:
            self._num_calls -= 1
            self._changed.set()

    async def _recover(self, error: SluiceError, num_items: int) -> None:
        if not isinstance(error, DeadlineError):
            await self._retries.wait_after(error)
        elif num_items == 1:
            raise error
        else:
            # Halving finds the number of items that the scorers manage within the deadline.
            self._most_items = min(self._most_items, num_items // 2)
            try:
                # A service that hangs altogether is no slow scorer.
                await unary_call(
                    self._stub().GetStatus,
                    reward_pb2.GetStatusRequest(),
                    peer=self._reward,
                    phase="asking whether it works, since it took long to score",
                )
            except PeerError as failure:
                await self._retries.wait_after(failure)

    def _stub(self) -> reward_pb2_grpc.RewardServiceAsyncStub:
        return reward_stub(self._channels.to(self._reward))


def _to_proto(item: ScoreItem, owner: str) -> reward_pb2.ScoreItem:
    try:
        return reward_pb2.ScoreItem(
            data_source=item.data_source,
            response=item.response,
            ground_truth=item.ground_truth,
            extra_info=struct_to_proto(item.extra_info, f"{owner}: extra_info"),
        )
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{owner}: not valid Unicode: {error}") from error


def _from_proto(result: reward_pb2.ScoreResult) -> Scored | Failed:
    if result.WhichOneof("result") == "score":
        return score_from_proto(result.score)
    kind, _, detail = result.failure.partition(": ")
    known = kind in set(FailureKind)
    return (
        Failed(FailureKind(kind), detail)
        if known
        else Failed(FailureKind.UNSCORABLE, result.failure)
    )

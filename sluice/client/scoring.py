"""Responses graded by the scorers of a run, without training on them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.api.reward.v1 import reward_pb2
from sluice.client.channels import ServiceChannels
from sluice.client.policy_client import extra_info_to_proto
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

# The deadline of a call in sluice.rpc.policy follows from these two.
ITEMS_PER_CALL = 16
CALLS_UNDER_WAY = 4
MOST_CALLS = 16
"""That one client makes at once, the most that a service takes of one."""
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
    """One grade or failure per item, in order; in calls of at most 16 items, four at a time.

    A call that ran out of its time stops the scoring of its items, and they are sent again in calls
    of half as many.

    Args:
        channels: to the service.
        reward: its address.
        items: the responses.
        policy: how failures are borne.
        calls: held by each call; bounds those of all `score_items` of one client.
        deadline_s: seconds in all, with every retry; none: as long as it takes.

    Raises:
        InvalidRequestError: an item cannot be sent, which is named, or the deadline cannot be.
        DeadlineError: `deadline_s` has passed, a call with one item ran out of its time, or the
            service answers nothing else either.
        CancelledError: the channels were closed meanwhile.
        SluiceError: the service stays away, or refuses the call.
    """
    if deadline_s is not None and not 0 < deadline_s < math.inf:
        raise InvalidRequestError(
            f"deadline_s: {deadline_s} is no finite time above 0; none is no deadline"
        )
    encoded = [_to_proto(item, f"items[{index}]") for index, item in enumerate(items)]
    retries = Retries(policy, None if deadline_s is None else time.monotonic() + deadline_s)
    try:
        async with asyncio.timeout(deadline_s) as whole:
            grading = _Grading(channels, reward, encoded, retries, calls)
            return await grading.outcomes(deadline_s)
    except TimeoutError as error:
        if not whole.expired():
            raise
        retries.remaining_s(reward, _PHASE, deadline_s)  # tells of a failure that it passed in
        raise DeadlineError(reward, _PHASE, deadline_s or 0.0) from error


class _Grading:
    """The responses of one `score_items`: those to be sent, and what became of the others.

    Args:
        retries: failures in a row of all the calls together.
    """

    def __init__(
        self,
        channels: ServiceChannels,
        reward: str,
        items: Sequence[reward_pb2.ScoreItem],
        retries: Retries,
        calls: asyncio.Semaphore,
    ) -> None:
        self._channels, self._reward, self._items = channels, reward, items
        self._retries, self._calls = retries, calls
        self._outcomes: list[Scored | Failed | None] = [None] * len(items)
        self._waiting = deque([range(len(items))] if items else [])
        self._most_items, self._num_senders, self._num_calls = ITEMS_PER_CALL, 0, 0
        self._changed = asyncio.Event()

    async def outcomes(self, deadline_s: float | None) -> list[Scored | Failed]:
        """Grades all; a call with a single item has until `deadline_s`, if there is one."""
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
        """Sends what waits, one call after another."""
        self._num_senders += 1
        while await self._has_more():
            places = self._take()
            try:
                results = await self._counted_call(places, deadline_s)
            except SluiceError as error:
                if isinstance(error, ExhaustedError) and self._num_senders > 1:
                    break  # the others go on with the room that there is
                await self._bear(error, len(places))
            else:
                self._note(places, results)
        self._num_senders -= 1

    async def _has_more(self) -> bool:
        """Whether something is to be sent; what others have sent may come back."""
        while not self._waiting and self._num_calls:
            self._changed.clear()
            await self._changed.wait()
        return bool(self._waiting)

    async def _counted_call(
        self, places: range, deadline_s: float | None
    ) -> Sequence[reward_pb2.ScoreResult]:
        self._num_calls += 1
        try:
            async with self._calls:
                return await self._call(places, deadline_s if len(places) == 1 else None)
        except SluiceError:
            self._waiting.appendleft(places)
            raise
        finally:
            self._num_calls -= 1
            self._changed.set()

    def _take(self) -> range:
        places = self._waiting.popleft()
        if len(places) > self._most_items:
            self._waiting.appendleft(places[self._most_items :])
        return places[: self._most_items]

    async def _bear(self, error: SluiceError, num_items: int) -> None:
        if not isinstance(error, DeadlineError):
            await self._retries.wait_after(error)
        elif num_items == 1:
            raise error
        else:
            self._most_items = min(self._most_items, num_items // 2)
            try:
                await self._check_answers()
            except PeerError as failure:
                await self._retries.wait_after(failure)

    async def _check_answers(self) -> None:
        """A service that hangs altogether is no slow scorer; raises what it fails with."""
        await unary_call(
            self._channels.named(reward_stub(self._channels.to(self._reward)).GetStatus),
            reward_pb2.GetStatusRequest(),
            name="RewardService/GetStatus",
            peer=self._reward,
            phase="asking whether it works, since it took long to score",
        )

    def _note(self, places: range, results: Sequence[reward_pb2.ScoreResult]) -> None:
        if len(results) != len(places):
            detail = f"{len(results)} results for {len(places)} responses"
            raise PeerDefectError(self._reward, _PHASE, detail)
        self._outcomes[places.start : places.stop] = map(_from_proto, results)
        self._retries.got_on()

    async def _call(
        self, places: range, deadline_s: float | None
    ) -> Sequence[reward_pb2.ScoreResult]:
        request = reward_pb2.ScoreRequest(items=self._items[places.start : places.stop])
        self._channels.check_size("items", request)
        answer = await unary_call(
            self._channels.named(reward_stub(self._channels.to(self._reward)).Score),
            request,
            name="RewardService/Score",
            peer=self._reward,
            phase=_PHASE,
            deadline_s=deadline_s,
        )
        return answer.results


def _to_proto(item: ScoreItem, owner: str) -> reward_pb2.ScoreItem:
    try:
        return reward_pb2.ScoreItem(
            data_source=item.data_source,
            response=item.response,
            ground_truth=item.ground_truth,
            extra_info=extra_info_to_proto(item.extra_info, owner),
        )
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{owner}: no text of Unicode: {error}") from error


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

"""Grade responses with the scorers of a run, without training on them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.api.reward.v1 import reward_pb2
from sluice.client.channels import ServiceChannels
from sluice.client.generation_types import check_deadline
from sluice.codec.fields import valid_unicode
from sluice.codec.messages import struct_to_proto
from sluice.codec.reward import score_from_proto
from sluice.errors import (
    DeadlineError,
    ExhaustedError,
    PeerDefectError,
    SluiceError,
    leaves,
)
from sluice.rpc.client import reward_stub, unary_call
from sluice.rpc.retries import Retries, RetryPolicy
from sluice.types import Failed, FailureKind, Scored

ITEMS_PER_CALL, CALLS_UNDER_WAY = 16, 4
MAX_CALLS = 16
"""Calls of one client at once, which is the most that a service accepts."""
_PHASE = "scoring responses"


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """A response to grade; `data_source` chooses the scorer, `extra_info` goes to it.

    `question` is the prompt's last turn; runs whose reward model reads it refuse items without.
    """

    data_source: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, object] = field(default_factory=dict)
    question: str = ""


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

    Send calls of at most 16 items, four at a time.

    Args:
        calls: bounds the calls of all `score_items` of one client.
    """
    check_deadline(deadline_s)
    encoded = [_to_proto(item, f"items[{index}]") for index, item in enumerate(items)]
    retries = Retries(policy, reward, _PHASE, deadline_s=deadline_s)
    try:
        async with asyncio.timeout(deadline_s) as scope:
            return await _Grading(channels, reward, encoded, retries, calls).grade(deadline_s)
    except TimeoutError as error:
        if not scope.expired():
            raise
        retries.remaining_s()  # names the failure that the deadline passed in
        raise DeadlineError(reward, _PHASE, deadline_s or 0.0) from error


@dataclass(slots=True)
class _Grading:
    """The responses of one `score_items`: those to send, and the outcomes of the others."""

    channels: ServiceChannels
    reward: str
    items: Sequence[reward_pb2.ScoreItem]
    retries: Retries
    calls: asyncio.Semaphore
    outcomes: dict[int, Scored | Failed] = field(default_factory=dict)
    num_senders: int = CALLS_UNDER_WAY
    waiting: deque[int] = field(init=False)  # the first item of each call

    def __post_init__(self) -> None:
        self.waiting = deque(range(0, len(self.items), ITEMS_PER_CALL))

    async def grade(self, deadline_s: float | None) -> list[Scored | Failed]:
        """Grade all; a call has until `deadline_s`, if there is one."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CALLS_UNDER_WAY):
                    tasks.create_task(self._send(deadline_s), name="scoring")
        except ExceptionGroup as group:
            raise leaves(group)[0] from group
        if len(self.outcomes) < len(self.items):
            raise asyncio.CancelledError  # gRPC cancelled the calls: their channel was closed
        return [self.outcomes[index] for index in range(len(self.items))]

    async def _send(self, deadline_s: float | None) -> None:
        """Send waiting items, one call after another."""
        while self.waiting:
            first_item = self.waiting.popleft()
            items = self.items[first_item : first_item + ITEMS_PER_CALL]
            try:
                results = await self._call(items, deadline_s)
            except SluiceError as error:
                self.waiting.appendleft(first_item)
                if isinstance(error, ExhaustedError) and self.num_senders > 1:
                    break  # the other senders use the capacity that there is
                await self.retries.wait_after(error)
            else:
                if len(results) != len(items):
                    detail = f"{len(results)} results for {len(items)} responses"
                    raise PeerDefectError(self.reward, _PHASE, detail)
                self.outcomes.update(enumerate(map(_from_proto, results), first_item))
                self.retries.note_progress()
        self.num_senders -= 1

    async def _call(
        self, items: Sequence[reward_pb2.ScoreItem], deadline_s: float | None
    ) -> Sequence[reward_pb2.ScoreResult]:
        async with self.calls:
            request = reward_pb2.ScoreRequest(items=items)
            self.channels.check_size("items", request)
            answer = await unary_call(
                reward_stub(self.channels.to(self.reward)).Score,
                request,
                peer=self.reward,
                phase=_PHASE,
                deadline_s=deadline_s,
            )
            return answer.results


def _to_proto(item: ScoreItem, owner: str) -> reward_pb2.ScoreItem:
    with valid_unicode(owner):
        return reward_pb2.ScoreItem(
            data_source=item.data_source,
            response=item.response,
            ground_truth=item.ground_truth,
            extra_info=struct_to_proto(item.extra_info, f"{owner}: extra_info"),
            question=item.question,
        )


def _from_proto(result: reward_pb2.ScoreResult) -> Scored | Failed:
    if result.WhichOneof("result") == "score":
        return score_from_proto(result.score)
    kind, _, detail = result.failure.partition(": ")
    is_known = kind in set(FailureKind)
    return (
        Failed(FailureKind(kind), detail)
        if is_known
        else Failed(FailureKind.UNSCORABLE, result.failure)
    )

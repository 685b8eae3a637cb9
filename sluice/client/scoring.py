"""Responses graded by the scorers of a run, without training on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sluice.api.reward.v1 import reward_pb2
from sluice.client.policy_client import extra_info_to_proto
from sluice.client.retries import Retries, RetryPolicy
from sluice.client.service_channels import ServiceChannels
from sluice.codec.batch import score_from_proto
from sluice.errors import InvalidRequestError, PeerDefectError, SluiceError
from sluice.rpc.call import unary_call
from sluice.rpc.stubs import reward_stub
from sluice.types import Failed, FailureKind, Scored

ITEMS_PER_CALL = 256
_PHASE = "scoring responses"


@dataclass(frozen=True, slots=True)
class ScoreItem:
    """A response to grade; `data_source` chooses the scorer, `extra_info` goes to it."""

    data_source: str
    response: str
    ground_truth: str
    extra_info: Mapping[str, object] = field(default_factory=dict)


async def score_items(
    channels: ServiceChannels, reward: str, items: Sequence[ScoreItem], policy: RetryPolicy
) -> list[Scored | Failed]:
    """One grade or failure per item, in order; in calls of 256 items.

    Raises:
        InvalidRequestError: an item cannot be sent; names it.
        SluiceError: the service stays away, or refuses the call.
    """
    outcomes: list[Scored | Failed] = []
    encoded = [_to_proto(item, f"items[{index}]") for index, item in enumerate(items)]
    for start in range(0, len(items), ITEMS_PER_CALL):
        call = encoded[start : start + ITEMS_PER_CALL]
        outcomes += await _one_call(channels, reward, call, policy)
    return outcomes


async def _one_call(
    channels: ServiceChannels,
    reward: str,
    items: Sequence[reward_pb2.ScoreItem],
    policy: RetryPolicy,
) -> list[Scored | Failed]:
    request = reward_pb2.ScoreRequest(items=items)
    channels.check_size("items", request)
    stub, retries = reward_stub(channels.to(reward)), Retries(policy)
    while True:
        try:
            answer = await unary_call(
                channels.named(stub.Score),
                request,
                name="RewardService/Score",
                peer=reward,
                phase=_PHASE,
            )
        except SluiceError as error:
            await retries.wait_after(error)
            continue
        if len(answer.results) != len(items):
            detail = f"{len(answer.results)} results for {len(items)} responses"
            raise PeerDefectError(reward, _PHASE, detail)
        return [_from_proto(result) for result in answer.results]


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

"""What calls of the reward service must fulfil. Each function raises InvalidRequestError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict

from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.codec.field_rules import check_name, check_range, check_text
from sluice.codec.fleet_rules import check_replicas
from sluice.codec.numbers import MAX_NUMBER
from sluice.codec.rollout_rules import check_turns
from sluice.errors import InvalidRequestError

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Struct

__all__ = [
    "check_acknowledgement",
    "check_announcement",
    "check_evaluation",
    "check_prompt",
    "check_score",
    "check_take",
    "check_take_images",
    "extra_info_of",
]

MAX_SOURCE_BYTES = 256
MAX_SAMPLES, MAX_TEMPERATURE = 1024, 100.0


def extra_info_of(struct: Struct, field: str, max_bytes: int) -> dict[str, Any]:
    """Further information of a prompt or response as Python values."""
    size = struct.ByteSize()
    if size > max_bytes:
        raise InvalidRequestError(
            f"{field}: {size} bytes; sluice.limits.max_extra_info_kb allows {max_bytes}; send what "
            "the scorer needs only"
        )
    try:
        return dict(MessageToDict(struct))
    except (ValueError, RecursionError) as error:
        # The error shows the value, which may be long.
        raise InvalidRequestError(
            f"{field}: not JSON ({str(error)[:100]}); send texts, finite numbers, lists, mappings"
        ) from error


def check_prompt(request: reward.SubmitPromptsRequest, max_turns: int) -> None:
    """Few turns, with short roles, and a name of the data source."""
    check_turns("messages", request.messages, max_turns)
    check_text("data_source", request.data_source, MAX_SOURCE_BYTES)
    if request.prompt_id and not request.prompt_id.isprintable():
        check_name("prompt_id", request.prompt_id)


def check_score(request: reward.ScoreRequest) -> None:
    """Short names of data sources: what is known of a source is kept by its name."""
    for index, item in enumerate(request.items):
        check_text(f"items[{index}].data_source", item.data_source, MAX_SOURCE_BYTES)


def check_take(request: reward.TakeBatchRequest) -> None:
    """A step and a version that can be."""
    check_range("step", request.step, 1, MAX_NUMBER)
    check_range("policy_version", request.policy_version, 0, MAX_NUMBER)


def check_take_images(request: reward.TakeImagesRequest) -> None:
    """A batch that can be."""
    check_name("batch_id", request.batch_id)


def check_acknowledgement(request: reward.AcknowledgeBatchRequest) -> None:
    """A batch and a step that can be."""
    check_name("batch_id", request.batch_id)
    check_range("step", request.step, 1, MAX_NUMBER)


def check_announcement(request: reward.AnnouncePolicyRequest) -> None:
    """A trainer, a version, replicas, and a position of the data set that can be."""
    check_name("trainer_incarnation", request.trainer_incarnation)
    check_range("policy_version", request.policy_version, 0, MAX_NUMBER)
    check_replicas(request.replicas)
    progress = request.resume_from
    check_range("resume_from.low_water", progress.low_water, 0, MAX_NUMBER)
    before = progress.low_water - 1
    for position in progress.ended_above:
        if not before < position <= MAX_NUMBER:
            raise InvalidRequestError(
                f"resume_from.ended_above: {position} after {before}; send rising positions from "
                "low_water on"
            )
        before = position


def check_evaluation(request: reward.EvaluateRequest) -> None:
    """A version, samples and a temperature that can be."""
    check_range("policy_version", request.policy_version, 0, MAX_NUMBER)
    if request.HasField("n"):
        check_range("n", request.n, 1, MAX_SAMPLES)
    if request.HasField("temperature") and not 0 <= request.temperature <= MAX_TEMPERATURE:
        raise InvalidRequestError(f"temperature: {request.temperature} is not in [0, 100]")

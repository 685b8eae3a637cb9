"""Calls to the reward service: encode and decode batches, scores and progress; check requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from google.protobuf.message import DecodeError, EncodeError

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.codec.bounds import check_fields
from sluice.codec.fields import (
    MAX_NUMBER,
    check_name,
    routing_from_proto,
    routing_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from sluice.codec.messages import check_replicas, check_taken_images, struct_from_proto
from sluice.codec.rollout import check_turns, rollout_from_proto, rollout_to_proto
from sluice.errors import DataError, InvalidRequestError
from sluice.types import DataProgress, PromptEnd, RoutedExperts, Scored, TrainBatch, TrainGroup

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Struct


SampleExperts = tuple[tuple[str, int], RoutedExperts]
"""A sample's prompt id and index in its group, and its experts."""

PROMPT_END_TO_PROTO = {end: reward.PromptEnd.Value(f"PROMPT_END_{end.name}") for end in PromptEnd}


def score_to_proto(scored: Scored) -> common.Score:
    """Encode a score."""
    return common.Score(
        score=scored.score,
        reward=scored.reward,
        metrics=dict(scored.metrics),
        prediction=scored.prediction,
    )


def score_from_proto(message: common.Score) -> Scored:
    """Decode a score."""
    return Scored(
        score=message.score,
        reward=message.reward,
        metrics=dict(message.metrics),
        prediction=message.prediction if message.HasField("prediction") else None,
    )


def progress_to_proto(progress: DataProgress) -> common.DataProgress:
    """Encode data progress."""
    return common.DataProgress(low_water=progress.low_water, ended_above=progress.ended_above)


def progress_from_proto(message: common.DataProgress) -> DataProgress:
    """Decode data progress."""
    return DataProgress(message.low_water, tuple(message.ended_above))


def train_group_to_proto(group: TrainGroup, *, with_images: bool = True) -> reward.TrainGroup:
    """Encode one kept group; without images, only their number; see `expert_messages`."""
    return reward.TrainGroup(
        prompt_id=group.prompt_id,
        prompt_token_ids_u32=token_ids_to_bytes(group.prompt_token_ids),
        rollouts=[rollout_to_proto(rollout, with_routing=False) for rollout in group.rollouts],
        scores=[score_to_proto(scored) for scored in group.scores],
        data_source=group.data_source,
        baseline_reward=group.baseline_reward,
        images=group.images if with_images else (),
        num_images=len(group.images),
        traceparent=group.traceparent,
        num_routed=sum(rollout.routing is not None for rollout in group.rollouts),
    )


def train_group_from_proto(message: reward.TrainGroup) -> TrainGroup:
    """Decode one kept group.

    Raises:
        InvalidRequestError: scores and rollouts, or images and their number, do not fit together.
    """
    if len(message.rollouts) != len(message.scores):
        raise InvalidRequestError(
            f"group {message.prompt_id}: {len(message.scores)} scores for "
            f"{len(message.rollouts)} rollouts; send one each"
        )
    check_taken_images(message, message.images)
    return TrainGroup(
        prompt_id=message.prompt_id,
        prompt_token_ids=token_ids_from_bytes(
            message.prompt_token_ids_u32, "group.prompt_token_ids_u32"
        ),
        rollouts=tuple(rollout_from_proto(rollout) for rollout in message.rollouts),
        scores=tuple(score_from_proto(score) for score in message.scores),
        data_source=message.data_source,
        baseline_reward=(message.baseline_reward if message.HasField("baseline_reward") else None),
        images=tuple(message.images),
        traceparent=message.traceparent,
    )


def train_batch_to_proto(batch: TrainBatch, *, with_images: bool = True) -> reward.TrainBatch:
    """Encode a batch; without images its size does not depend on them."""
    return reward.TrainBatch(
        batch_id=batch.batch_id,
        policy_version=batch.policy_version,
        groups=[train_group_to_proto(group, with_images=with_images) for group in batch.groups],
        progress=progress_to_proto(batch.progress),
        statistics=dict(batch.statistics),
    )


def group_images_to_proto(batch: TrainBatch) -> Iterator[reward.TakeImagesResponse]:
    """Encode the images of a batch, one message for each group with images."""
    for group in batch.groups:
        if group.images:
            yield reward.TakeImagesResponse(prompt_id=group.prompt_id, images=group.images)


def with_group_images(message: reward.TrainBatch, images: Mapping[str, Sequence[bytes]]) -> None:
    """Add the images of groups, by prompt id, to a batch that came without.

    Raises:
        InvalidRequestError: a group has another number of images.
    """
    for group in message.groups:
        found = images.get(group.prompt_id, ())
        check_taken_images(group, found)
        group.images.extend(found)


def expert_messages(batch: TrainBatch) -> Iterator[reward.TakeRoutingResponse]:
    """Encode the experts of a batch, one message for each sample that has them."""
    for group in batch.groups:
        for rollout in group.rollouts:
            if rollout.routing is not None:
                yield reward.TakeRoutingResponse(
                    prompt_id=group.prompt_id,
                    sample_index=rollout.sample_index,
                    routing=routing_to_proto(rollout.routing),
                )


def sample_experts(message: reward.TakeRoutingResponse) -> SampleExperts:
    """Decode one of `expert_messages`.

    Raises:
        InvalidRequestError: the experts do not fit their shape.
    """
    return (message.prompt_id, message.sample_index), routing_from_proto(message.routing, "routing")


def sample_experts_from_bytes(data: bytes) -> SampleExperts:
    """Decode one of `expert_messages` from another rank. Raises as `sample_experts`."""
    return sample_experts(reward.TakeRoutingResponse.FromString(data))


def with_routing(
    batch: TrainBatch, experts: Iterable[SampleExperts], num_routed: int
) -> TrainBatch:
    """Return a batch with the experts of its samples.

    Args:
        batch: as `train_batch_from_proto` returns it.
        experts: of `num_routed` samples.
        num_routed: samples that have experts.

    Raises:
        InvalidRequestError: experts are missing, of no sample of the batch, or do not fit it.
    """
    if not num_routed:
        return batch
    found = dict(experts)
    if len(found) != num_routed:
        raise InvalidRequestError(f"routing: experts of {len(found)} of {num_routed} samples came")
    try:
        groups = tuple(
            replace(
                group,
                rollouts=tuple(
                    rollout.with_routing(found.pop((group.prompt_id, rollout.sample_index), None))
                    for rollout in group.rollouts
                ),
            )
            for group in batch.groups
        )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    for prompt_id, index in found:
        raise InvalidRequestError(
            f"routing: experts of sample {index} of group {prompt_id}, which the batch has not"
        )
    return replace(batch, groups=groups)


def train_batch_from_proto(message: reward.TrainBatch) -> TrainBatch:
    """Decode a batch."""
    return TrainBatch(
        batch_id=message.batch_id,
        policy_version=message.policy_version,
        groups=tuple(train_group_from_proto(group) for group in message.groups),
        progress=progress_from_proto(message.progress),
        statistics=dict(message.statistics),
    )


def train_batch_to_bytes(batch: TrainBatch) -> bytes:
    """Encode a batch without experts as bytes, for the trainer's ranks.

    Raises:
        DataError: the batch is larger than a message can be.
    """
    try:
        return train_batch_to_proto(batch).SerializeToString()
    except (EncodeError, ValueError) as error:
        images = sum(len(image) for group in batch.groups for image in group.images)
        raise DataError(
            f"train batch {batch.batch_id}: with {images >> 20} MiB of images it cannot be sent to "
            "the other trainer ranks, which take less than 2 GiB; lower data.train_batch_size, or "
            "make the images smaller"
        ) from error


def train_batch_from_bytes(data: bytes) -> TrainBatch:
    """Decode what `train_batch_to_bytes` encoded.

    Raises:
        InvalidRequestError: the bytes hold no batch.
    """
    try:
        return train_batch_from_proto(reward.TrainBatch.FromString(data))
    except DecodeError as error:
        raise InvalidRequestError(f"train batch: {len(data)} bytes cannot be parsed") from error


def extra_info_of(struct: Struct, field: str, max_bytes: int) -> dict[str, Any]:
    """Decode further information of a prompt or response; see `struct_from_proto`."""
    return struct_from_proto(struct, field, max_bytes, "sluice.limits.max_extra_info_kb")


def check_prompt(request: reward.SubmitPromptsRequest, max_turns: int) -> None:
    """Check turns, roles, the name of the data source, and the prompt's id."""
    check_turns("messages", request.messages, max_turns)
    check_fields(request)
    if request.prompt_id and not request.prompt_id.isprintable():
        check_name("prompt_id", request.prompt_id)


def check_score(request: reward.ScoreRequest) -> None:
    """Check names of data sources; the service keeps statistics by them."""
    for index, item in enumerate(request.items):
        check_fields(item, f"items[{index}].")


def check_announcement(request: reward.AnnouncePolicyRequest) -> None:
    """Check trainer, version, replicas, and the position in the data set."""
    check_fields(request)
    check_replicas(request.replicas)
    progress = request.resume_from
    check_fields(progress, "resume_from.")
    # Rising positions need no sorting, and none occurs twice.
    before = progress.low_water - 1
    for position in progress.ended_above:
        if not before < position <= MAX_NUMBER:
            raise InvalidRequestError(
                f"resume_from.ended_above: {position} after {before}; send rising positions from "
                "low_water on"
            )
        before = position

"""Train batches: an outline without tokens for all trainer ranks, and each rank's samples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from google.protobuf.message import DecodeError

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.codec.fields import (
    logprobs_from_bytes,
    logprobs_to_bytes,
    routing_from_proto,
    routing_to_proto,
    token_ids_from_bytes,
    token_ids_to_bytes,
)
from sluice.codec.messages import bundles
from sluice.codec.reward import (
    progress_from_proto,
    progress_to_proto,
    score_from_proto,
    score_to_proto,
)
from sluice.codec.rollout import rollout_outline_from_proto, rollout_outline_to_proto
from sluice.codec.turns import with_tokens
from sluice.errors import InvalidRequestError
from sluice.types import Rollout, RoutedExperts, TrainBatch, TrainGroup, absent_tokens


def outline_to_proto(batch: TrainBatch) -> reward.TrainBatch:
    """Encode a batch without tokens, logprobs, texts, answers, experts and images."""
    return reward.TrainBatch(
        batch_id=batch.batch_id,
        policy_version=batch.policy_version,
        groups=[_group_to_proto(group) for group in batch.groups],
        progress=progress_to_proto(batch.progress),
        statistics=dict(batch.statistics),
    )


def outline_from_proto(message: reward.TrainBatch) -> TrainBatch:
    """Decode a batch whose tokens are absent; each image is an empty file.

    Raises:
        InvalidRequestError: a group's parts do not fit together.
    """
    return TrainBatch(
        batch_id=message.batch_id,
        policy_version=message.policy_version,
        groups=tuple(_group_from_proto(group) for group in message.groups),
        progress=progress_from_proto(message.progress),
        statistics=dict(message.statistics),
    )


def outline_to_bytes(batch: TrainBatch) -> bytes:
    """Encode an outline for the trainer's other ranks."""
    return outline_to_proto(batch).SerializeToString()


def outline_from_bytes(data: bytes) -> TrainBatch:
    """Decode what `outline_to_bytes` encoded.

    Raises:
        InvalidRequestError: the bytes hold no batch.
    """
    try:
        return outline_from_proto(reward.TrainBatch.FromString(data))
    except DecodeError as error:
        raise InvalidRequestError(f"train batch: {len(data)} bytes cannot be parsed") from error


def sample_messages(batch: TrainBatch, rows: Sequence[int]) -> Iterator[reward.TakeSamplesResponse]:
    """Encode the samples with these numbers in the batch, each group's after its prompt.

    Raises:
        InvalidRequestError: the numbers do not rise, or the batch has fewer samples.
    """
    places = [(g, i) for g, group in enumerate(batch.groups) for i in range(len(group.rollouts))]
    _check_rows(rows, len(places))
    wanted_rows = set(rows)
    sent = -1
    for row in rows:
        index, member = places[row]
        group = batch.groups[index]
        if index != sent:
            sent, first_row = index, row - member
            yield reward.TakeSamplesResponse(
                prompt=_prompt_to_proto(index, group, first_row, wanted_rows)
            )
        yield reward.TakeSamplesResponse(sample=_sample_to_proto(row, group.rollouts[member]))


def pack_messages(
    parts: Iterable[reward.TakeSamplesResponse], max_bytes: int = 512 << 10
) -> Iterator[reward.TakeSamplesResponse]:
    """Put parts that follow one another into one message, as many as fit into `max_bytes`.

    A message costs the service a turn of its loop, which at a large fleet is longer than what a
    small sample takes. A larger part travels alone.
    """
    for message, *following in bundles(parts, lambda part: part.ByteSize(), max_bytes):
        message.more.extend(following)
        yield message


async def with_samples(
    outline: TrainBatch, rows: Sequence[int], messages: AsyncIterator[reward.TakeSamplesResponse]
) -> TrainBatch:
    """Return a batch with the samples of these numbers, decoded as they come.

    Raises:
        InvalidRequestError: a prompt or a sample is missing, was not asked for, or does not fit the
            outline; names it.
    """
    groups = list(outline.groups)
    rollouts = [list(group.rollouts) for group in groups]
    places = [(g, i) for g, group in enumerate(groups) for i in range(len(group.rollouts))]
    firsts = list(accumulate((len(group.rollouts) for group in groups), initial=0))
    remaining, wanted_rows = iter(rows), set(rows)
    prompted: set[int] = set()
    num_taken = 0
    async for part in _unpack_messages(messages):
        if part.WhichOneof("part") == "prompt":
            prompt = part.prompt
            if prompt.group >= len(groups) or prompt.group in prompted:
                raise InvalidRequestError(f"the prompt of group {prompt.group} is not expected")
            prompted.add(prompt.group)
            groups[prompt.group] = _with_prompt(
                groups[prompt.group], prompt, firsts[prompt.group], wanted_rows
            )
            continue
        expected, row = next(remaining, None), part.sample.row
        if row != expected:
            raise InvalidRequestError(f"sample {row} came instead of {expected}")
        index, member = places[row]
        if index not in prompted:
            raise InvalidRequestError(f"sample {row} came before its prompt")
        name = f"group {groups[index].prompt_id}, sample {rollouts[index][member].sample_index}"
        rollouts[index][member] = _with_sample(rollouts[index][member], part.sample, name)
        num_taken += 1
    if num_taken < len(rows):
        raise InvalidRequestError(f"{num_taken} of {len(rows)} samples came")
    filled = (
        replace(g, rollouts=tuple(samples)) for g, samples in zip(groups, rollouts, strict=True)
    )
    return replace(outline, groups=tuple(filled))


async def _unpack_messages(
    messages: AsyncIterator[reward.TakeSamplesResponse],
) -> AsyncIterator[reward.TakeSamplesResponse]:
    async for message in messages:
        yield message
        for part in message.more:
            yield part


def _group_to_proto(group: TrainGroup) -> reward.TrainGroup:
    return reward.TrainGroup(
        prompt_id=group.prompt_id,
        rollouts=[rollout_outline_to_proto(rollout) for rollout in group.rollouts],
        scores=[score_to_proto(replace(score, prediction=None)) for score in group.scores],
        data_source=group.data_source,
        source=group.source,
        baseline_reward=group.baseline_reward,
        num_images=len(group.images),
        traceparent=group.traceparent,
        num_prompt_tokens=group.prompt_token_ids.size,
    )


def _group_from_proto(message: reward.TrainGroup) -> TrainGroup:
    if len(message.rollouts) != len(message.scores):
        raise InvalidRequestError(
            f"group {message.prompt_id}: {len(message.scores)} scores for "
            f"{len(message.rollouts)} rollouts; send one each"
        )
    return TrainGroup(
        prompt_id=message.prompt_id,
        prompt_token_ids=absent_tokens(message.num_prompt_tokens),
        rollouts=tuple(rollout_outline_from_proto(rollout) for rollout in message.rollouts),
        scores=tuple(score_from_proto(score) for score in message.scores),
        data_source=message.data_source,
        source=message.source,
        baseline_reward=(message.baseline_reward if message.HasField("baseline_reward") else None),
        images=(b"",) * message.num_images,
        traceparent=message.traceparent,
    )


def _check_rows(rows: Sequence[int], num_rows: int) -> None:
    before = -1
    for row in rows:
        if not before < row < num_rows:
            raise InvalidRequestError(
                f"rows: {row} after {before}; send rising numbers below {num_rows}"
            )
        before = row


def _prompt_to_proto(
    index: int, group: TrainGroup, first_row: int, wanted_rows: set[int]
) -> reward.BatchPrompt:
    routing = _unsent_experts(group, first_row, wanted_rows)
    if routing is not None:
        routing = routing[: group.prompt_token_ids.size]
    return reward.BatchPrompt(
        group=index,
        token_ids_u32=token_ids_to_bytes(group.prompt_token_ids),
        images=group.images,
        routing=None if routing is None else routing_to_proto(routing),
    )


def _unsent_experts(
    group: TrainGroup, first_row: int, wanted_rows: set[int]
) -> RoutedExperts | None:
    """Return the experts of the first sample with any, if it is not sent: the prompt brings them.

    Args:
        first_row: number of its first sample in the batch.
        wanted_rows: numbers of the samples to send.
    """
    routed = (
        (row, rollout.routing)
        for row, rollout in enumerate(group.rollouts, first_row)
        if rollout.routing is not None
    )
    row, routing = next(routed, (first_row, None))
    return None if row in wanted_rows else routing


def _sample_to_proto(row: int, rollout: Rollout) -> reward.BatchSample:
    return reward.BatchSample(
        row=row,
        token_ids_u32=token_ids_to_bytes(rollout.token_ids),
        behavior_logprobs_f32=logprobs_to_bytes(rollout.behavior_logprobs),
        routing=None if rollout.routing is None else routing_to_proto(rollout.routing),
        context_token_ids_u32=b"".join(token_ids_to_bytes(t.context) for t in rollout.turns),
    )


def _with_prompt(
    group: TrainGroup, prompt: reward.BatchPrompt, first_row: int, wanted_rows: set[int]
) -> TrainGroup:
    name = f"group {group.prompt_id}"
    tokens = token_ids_from_bytes(prompt.token_ids_u32, f"{name}, token_ids_u32")
    for subject, num_received, expected in (
        ("prompt tokens", tokens.size, group.prompt_token_ids.size),
        ("images", len(prompt.images), len(group.images)),
    ):
        if num_received != expected:
            raise InvalidRequestError(
                f"{name}: {num_received} {subject} came for the {expected} it has"
            )
    routing = _routing_of(prompt, f"{name}, prompt")
    lacks = _unsent_experts(group, first_row, wanted_rows) is not None
    if (routing is not None) != lacks:
        wrong = "no experts came for" if lacks else "unexpected experts came with"
        raise InvalidRequestError(f"{name}: {wrong} the prompt")
    return replace(
        group, prompt_token_ids=tokens, images=tuple(prompt.images), prompt_routing=routing
    )


def _with_sample(rollout: Rollout, sample: reward.BatchSample, name: str) -> Rollout:
    tokens = token_ids_from_bytes(sample.token_ids_u32, f"{name}, token_ids_u32")
    if tokens.size != rollout.num_tokens:
        raise InvalidRequestError(
            f"{name}: {tokens.size} tokens came for the {rollout.num_tokens} it has"
        )
    routing = _routing_of(sample, name)
    if (routing is None) != (rollout.routing is None):
        mismatch = (
            "no experts came for those it has" if routing is None else "unexpected experts came"
        )
        raise InvalidRequestError(f"{name}: {mismatch}")
    logprobs = logprobs_from_bytes(sample.behavior_logprobs_f32, f"{name}, behavior_logprobs_f32")
    unusable = np.flatnonzero(~np.isfinite(logprobs))
    if unusable.size:
        position = int(unusable[0])
        raise InvalidRequestError(
            f"{name}: the logprob of token {position} is {logprobs[position]}"
        )
    context = token_ids_from_bytes(sample.context_token_ids_u32, f"{name}, context_token_ids_u32")
    try:
        return with_tokens(rollout, tokens, logprobs, context).with_routing(routing)
    except ValueError as error:
        raise InvalidRequestError(f"{name}: {error}") from error


def _routing_of(
    message: reward.BatchPrompt | reward.BatchSample, name: str
) -> RoutedExperts | None:
    experts: common.RoutedExperts | None = message.routing if message.HasField("routing") else None
    return None if experts is None else routing_from_proto(experts, f"{name}, routing")

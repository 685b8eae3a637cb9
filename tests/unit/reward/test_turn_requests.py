"""A later turn of an episode is one request: it moves between replicas as samples do, and begins
with the exact tokens before it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import (
    GenerateEvent,
    GroupFailedError,
    GroupProgress,
    GroupRequest,
    TurnRequest,
)
from services.reward.generation.stream import CollectedSamples
from sluice.algorithm.growing_sample import NewTokens
from sluice.errors import EngineError, HistoryRewrittenError, SequenceTooLongError
from sluice.types import ChatMessage, FinishReason, ReplicaInfo, Rollout, VersionSpan
from tests.support.reward_app import replica
from tests.support.scripted_environment import group_request

EARLIER = np.array([7, 8, 9], np.uint32)
ADDED = 50


def turn_request(**changes: Any) -> GroupRequest:
    progress = GroupProgress()
    progress.note_started(EARLIER[:1], 0.0)
    turn = TurnRequest(1, (ChatMessage("tool", "6"),), EARLIER)
    request = group_request(1, progress=progress, turn=turn)
    return replace(request, sample_indexes=(2,), **changes)


def tokens(start: int, end: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.arange(start, end, dtype=np.uint32)


@dataclass
class TurnReplicas:
    """Replicas that read the earlier tokens and one more, and sample tokens 0 to 5.

    `breaks` after some tokens; `reads` another prompt; `refuses` with an error.
    """

    breaks: dict[str, int] = field(default_factory=dict)
    reads: dict[str, list[int]] = field(default_factory=dict)
    refuses: dict[str, Exception] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)

    async def generate(
        self,
        info: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout],
    ) -> AsyncGenerator[GenerateEvent, None]:
        (index,) = sample_indexes
        held = partials[0].num_tokens if partials else 0
        self.calls.append((info.name, held))
        if info.name in self.refuses:
            raise self.refuses[info.name]
        read = np.array(self.reads.get(info.name, [*EARLIER, ADDED]), np.uint32)
        yield GenerateEvent((read, 3), ())
        if info.name in self.breaks:
            ids = tokens(held, self.breaks[info.name])
            new = NewTokens(index, ids, -ids.astype(np.float32), 3)
            yield GenerateEvent(None, (), (new,))
            raise EngineError(f"{info.name}: broken")
        ids, spans = tokens(0, 6), (VersionSpan(3, 0, 6),)
        rollout = Rollout.of_one_turn(
            index, ids, -ids.astype(np.float32), spans, FinishReason.STOP, "text"
        )
        yield GenerateEvent(None, (rollout,))

    async def adopt_fleet(self, replicas: Collection[ReplicaInfo]) -> None:
        """Nothing is held."""

    def after_backlog(self, callback: Callable[[], None]) -> None:
        """Nothing lies unread."""
        callback()


async def collected(replicas: TurnReplicas, request: GroupRequest) -> CollectedSamples:
    dispatcher = GroupDispatcher(replicas, ReplicaQueue(1.0), max_attempts=2)
    await dispatcher.announce([replica("a"), replica("b")])
    samples = CollectedSamples(request)
    await dispatcher.collect(samples)
    return samples


async def test_a_turn_continues_on_another_replica_from_the_tokens_that_came() -> None:
    replicas, request = TurnReplicas(breaks={"a": 2}), turn_request()
    found = await collected(replicas, request)
    assert replicas.calls == [("a", 0), ("b", 2)]
    assert found.rollouts[2].token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.prompt_token_ids is not None
    assert found.prompt_token_ids.tolist() == [*EARLIER, ADDED]
    assert found.replica == "b"
    # The group's own prompt, samples and finished samples are those of its first turns.
    progress = request.progress
    assert progress.prompt_token_ids is not None
    assert progress.prompt_token_ids.tolist() == EARLIER[:1].tolist()
    assert (progress.num_requested, progress.num_received) == (0, 6)
    assert not progress.has_finished_samples


@pytest.mark.parametrize("read", [[7, 8, 10, ADDED], [7, 8]])
async def test_a_prompt_that_does_not_begin_with_the_earlier_tokens_is_the_replicas_fault(
    read: list[int],
) -> None:
    replicas = TurnReplicas(reads={"a": read})
    found = await collected(replicas, turn_request())
    assert replicas.calls == [("a", 0), ("b", 0)]
    assert found.rollouts[2].finish_reason is FinishReason.STOP
    both = TurnReplicas(reads={"a": read, "b": read})
    request = turn_request(allows_missing=False)
    with pytest.raises(GroupFailedError, match="does not begin with the 3 tokens of the turns"):
        await collected(both, request)


async def test_replicas_that_read_a_turn_differently_do_not_share_its_tokens() -> None:
    replicas = TurnReplicas(breaks={"a": 2}, reads={"b": [*EARLIER, ADDED + 1]})
    found = await collected(replicas, turn_request())
    assert found.rollouts[2].finish_reason is FinishReason.ABORTED
    assert found.rollouts[2].token_ids.tolist() == [0, 1]


async def test_a_turn_that_no_replica_can_sample_costs_its_sample_or_a_group_that_needs_all() -> (
    None
):
    request = turn_request()
    found = await collected(TurnReplicas(breaks={"a": 1, "b": 2}), request)
    assert found.rollouts[2].finish_reason is FinishReason.ABORTED
    assert "b: broken" in request.progress.engine_errors[2].detail
    with pytest.raises(GroupFailedError, match="2 attempts failed"):
        await collected(TurnReplicas(breaks={"a": 1, "b": 2}), turn_request(allows_missing=False))


@pytest.mark.parametrize("error", [HistoryRewrittenError("it strips"), SequenceTooLongError("99")])
async def test_what_a_replica_says_about_the_turn_is_no_failure_of_the_replica(
    error: Exception,
) -> None:
    replicas = TurnReplicas(refuses={"a": error})
    with pytest.raises(type(error)):
        await collected(replicas, turn_request())
    assert replicas.calls == [("a", 0)]

"""What became of every token that replicas sent.

A token is pending from its arrival until its group ends; then it is booked, once, under what became
of it. `received` is counted by whoever receives (`ReceivedTokens`), apart from groups: so

    received = sum over all uses + pending

is a check of the books and no identity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum

from services.reward.generation.queue import Priority
from services.reward.generation.request import GenerateEvent, GenerationClient, GroupRequest
from sluice.types import (
    Failed,
    FailureKind,
    GradedGroup,
    PromptEnd,
    ReplicaInfo,
    Rollout,
    SamplingParams,
)


class TokenUse(StrEnum):
    """What became of a token.

    ``aborted``: of samples that were broken off, and of copies that another replica finished first;
    ``failed``: of groups that failed, and of samples without a grade in any group, those that were
    drawn once more included;
    ``withdrawn``: of groups that were preempted when a batch was full
    (`sluice.algorithm.groups.staleness`);
    ``taken_over``: of groups that another trainer made start again.
    """

    TRAINED = "trained"
    FILTERED_ALL_RIGHT = "filtered_all_right"
    FILTERED_ALL_WRONG = "filtered_all_wrong"
    FILTERED_UNIFORM = "filtered_uniform"
    STALE = "stale"
    PREEMPTED = "withdrawn"
    FAILED = "failed"
    ABORTED = "aborted"
    SURPLUS = "surplus"
    TAKEN_OVER = "taken_over"
    EVALUATION = "evaluation"


USE_BY_END = {
    PromptEnd.TRAINED: TokenUse.TRAINED,
    PromptEnd.FILTERED_ALL_RIGHT: TokenUse.FILTERED_ALL_RIGHT,
    PromptEnd.FILTERED_ALL_WRONG: TokenUse.FILTERED_ALL_WRONG,
    PromptEnd.FILTERED_UNIFORM: TokenUse.FILTERED_UNIFORM,
    PromptEnd.DROPPED_STALE: TokenUse.STALE,
    PromptEnd.DROPPED_FAILED: TokenUse.FAILED,
    PromptEnd.DROPPED_SURPLUS: TokenUse.SURPLUS,
}
"""A skipped prompt has no tokens."""


class TokenAccounts:
    """Tokens by use, since the start and since the last train batch."""

    def __init__(self) -> None:
        self._since_start: Counter[TokenUse] = Counter()
        self._interval: Counter[TokenUse] = Counter()

    def assign(self, use: TokenUse, num_tokens: int) -> None:
        """Tokens met their end."""
        self._since_start[use] += num_tokens
        self._interval[use] += num_tokens

    def assign_group(self, use: TokenUse, trace: GroupTrace, graded: GradedGroup | None) -> None:
        """A group ended; see `uses_of_group`."""
        for found, num_tokens in uses_of_group(use, trace, graded).items():
            self.assign(found, num_tokens)

    def since_start(self) -> dict[TokenUse, int]:
        """All uses since the start."""
        return {use: self._since_start[use] for use in TokenUse}

    def close_interval(self) -> dict[TokenUse, int]:
        """All uses since the last call."""
        interval, self._interval = self._interval, Counter()
        return {use: interval[use] for use in TokenUse}


def uses_of_group(
    use: TokenUse, trace: GroupTrace, graded: GradedGroup | None
) -> Counter[TokenUse]:
    """The tokens of a group that ended, by use.

    Args:
        use: of its graded samples, and of its greedy response.
        trace: what was received for it, in all attempts.
        graded: its samples; ``None``: they were never all there, and what was not thrown away is
            of one use.
    """
    num_tokens = trace.num_tokens
    if graded is None:
        lost, replaced = trace.num_thrown_away_tokens, trace.num_replaced_tokens
        found = Counter({TokenUse.FAILED: replaced, TokenUse.ABORTED: lost})
        found[use] += num_tokens - lost - replaced
        return found
    found = Counter({use: graded.greedy.group.num_response_tokens if graded.greedy else 0})
    for rollout, outcome in zip(graded.group.rollouts, graded.outcomes, strict=True):
        if not isinstance(outcome, Failed):
            found[use] += rollout.num_tokens
        elif outcome.kind is FailureKind.ABORTED:
            found[TokenUse.ABORTED] += rollout.num_tokens
        else:
            found[TokenUse.FAILED] += rollout.num_tokens
    found[TokenUse.FAILED] += trace.num_replaced_tokens
    # What is in no sample of the group was drawn by attempts that another one replaced.
    found[TokenUse.ABORTED] += max(0, num_tokens - found.total())
    return found


# Which replicas were asked for a group and how many tokens they gave, for the books and the log.
#
# A group that is broken off or dropped leaves nothing else behind that could tell.


@dataclass(slots=True)
class GroupTrace:
    """What arrived for one group.

    Attributes:
        replicas: by name in the order first asked.
        num_tokens: tokens received, each once, however often a sample was broken off and in how
            many messages it came.
        num_thrown_away_tokens: those of them that no sample holds any more, since the sample was
            not continued from them but started again.
        num_replaced_tokens: tokens of samples without a grade, in whose places others were drawn.
    """

    replicas: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_thrown_away_tokens: int = 0
    num_replaced_tokens: int = 0
    # Tokens held of each sample. One prompt may be asked for in several ways (a greedy response,
    # another seed), each of which numbers its samples from 0; they are told apart by their values.
    _held: dict[tuple[SamplingParams, int], int] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(self.replicas) or "none"

    @property
    def num_samples(self) -> int:
        """Samples that a replica was asked for."""
        return len(self._held)

    def replaced(self, samples: Sequence[Rollout]) -> None:
        """Samples without a grade are drawn once more, by a request of their own."""
        self.num_replaced_tokens += sum(sample.num_tokens for sample in samples)

    def asked(
        self, sampling: SamplingParams, sample_indexes: Sequence[int], partials: Sequence[Rollout]
    ) -> None:
        """Samples are drawn, of which `partials` are continued."""
        continued = {partial.sample_index: partial.num_tokens for partial in partials}
        for index in sample_indexes:
            key, kept = (sampling, index), continued.get(index, 0)
            self.num_thrown_away_tokens += max(0, self._held.get(key, 0) - kept)
            self._held[key] = kept

    def arrived(self, sampling: SamplingParams, event: GenerateEvent) -> None:
        """Tokens came: a whole sample repeats those that came before it."""
        for delta in event.deltas:
            self._count(sampling, delta.sample_index, int(delta.token_ids.size))
        for rollout in event.rollouts:
            held = self._held.get((sampling, rollout.sample_index), 0)
            self._count(sampling, rollout.sample_index, max(0, rollout.num_tokens - held))

    def _count(self, sampling: SamplingParams, sample_index: int, num_new: int) -> None:
        key = (sampling, sample_index)
        self._held[key] = self._held.get(key, 0) + num_new
        self.num_tokens += num_new


class GenerationTrace:
    """A `GenerationClient` that notes what passes through it.

    A trace lives from the first call for a group until `take`, which whoever ends the group calls.

    Args:
        client: how replicas are called.
    """

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._traces: dict[tuple[Priority, str], GroupTrace] = {}

    def __len__(self) -> int:
        return len(self._traces)

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout],
    ) -> AsyncGenerator[GenerateEvent, None]:
        """As the client's."""
        key = (request.priority, request.prompt.prompt_id)
        trace = self._traces.setdefault(key, GroupTrace())
        if replica.name not in trace.replicas:
            trace.replicas.append(replica.name)
        trace.asked(request.sampling, sample_indexes, partials)
        stream = self._client.generate(replica, request, sample_indexes, partials)
        async with aclosing(stream) as events:
            async for event in events:
                trace.arrived(request.sampling, event)
                yield event

    async def retain(self, addresses: Collection[str]) -> None:
        """As the client's."""
        await self._client.retain(addresses)

    def of(self, prompt_id: str, priority: Priority = Priority.TRAINING) -> GroupTrace:
        """The trace of a group; an empty one if nobody was asked."""
        return self._traces.get((priority, prompt_id)) or GroupTrace()

    def take(self, prompt_id: str, priority: Priority = Priority.TRAINING) -> GroupTrace:
        """Forget the trace of a group that ended or starts again, and return it as `of` does."""
        return self._traces.pop((priority, prompt_id), None) or GroupTrace()


# How many response tokens came from replicas, counted where they come in.
#
# It knows nothing of groups and how they end: the books of those (`token_accounts`) are checked
# against it.


class TokenCountingClient:
    """A `GenerationClient` that counts what passes through it.

    Args:
        client: how replicas are called.
    """

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._counts: Counter[Priority] = Counter()

    @property
    def num_training(self) -> int:
        """Tokens for training groups since the start."""
        return self._counts[Priority.TRAINING]

    @property
    def total(self) -> int:
        """All tokens since the start."""
        return self._counts.total()

    async def generate(
        self,
        replica: ReplicaInfo,
        request: GroupRequest,
        sample_indexes: Sequence[int],
        partials: Sequence[Rollout],
    ) -> AsyncGenerator[GenerateEvent, None]:
        """As the client's."""
        known = Counter({partial.sample_index: partial.num_tokens for partial in partials})
        stream = self._client.generate(replica, request, sample_indexes, partials)
        async with aclosing(stream) as events:
            async for event in events:
                self._counts[request.priority] += _num_new(known, event)
                yield event

    async def retain(self, addresses: Collection[str]) -> None:
        """As the client's."""
        await self._client.retain(addresses)


def _num_new(known: Counter[int], event: GenerateEvent) -> int:
    """Tokens of an event that did not come before; they are added to those `known` by sample."""
    before = known.total()
    for delta in event.deltas:
        known[delta.sample_index] += int(delta.token_ids.size)
    for rollout in event.rollouts:  # a whole sample repeats what came of it
        known[rollout.sample_index] = max(known[rollout.sample_index], rollout.num_tokens)
    return known.total() - before

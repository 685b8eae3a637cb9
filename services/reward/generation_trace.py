"""Which replicas were asked for a group and how many tokens they gave, for the books and the log.

A group that is broken off or dropped leaves nothing else behind that could tell.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from services.reward.group_request import GenerateEvent, GenerationClient, GroupRequest
from services.reward.replica_queue import Priority
from sluice.types import ReplicaInfo, Rollout, SamplingParams


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
        num_reused_tokens: tokens that an earlier service received, and that samples went on from;
            they are not among those received.
    """

    replicas: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_thrown_away_tokens: int = 0
    num_replaced_tokens: int = 0
    num_reused_tokens: int = 0
    # Tokens held of each sample. One prompt may be asked for in several ways (a greedy response,
    # another seed), each of which numbers its samples from 0; they are told apart by their values.
    _held: dict[tuple[SamplingParams, int], int] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(self.replicas) or "none"

    @property
    def num_samples(self) -> int:
        """Samples that a replica was asked for, or that were taken up."""
        return len(self._held)

    def resumed(self, sampling: SamplingParams, samples: Sequence[Rollout]) -> None:
        """Samples go on from what an earlier service received of them."""
        for sample in samples:
            self._held[sampling, sample.sample_index] = sample.num_tokens
            self.num_reused_tokens += sample.num_tokens

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
        self.num_reused_tokens = 0  # since the start

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

    def resumed(self, request: GroupRequest, samples: Sequence[Rollout]) -> None:
        """A request goes on from samples that an earlier service received."""
        trace = self._traces.setdefault((request.priority, request.prompt.prompt_id), GroupTrace())
        trace.resumed(request.sampling, samples)
        self.num_reused_tokens += sum(sample.num_tokens for sample in samples)

    async def retain(self, addresses: Collection[str]) -> None:
        """As the client's."""
        await self._client.retain(addresses)

    def of(self, prompt_id: str, priority: Priority = Priority.TRAINING) -> GroupTrace:
        """The trace of a group; an empty one if nobody was asked."""
        return self._traces.get((priority, prompt_id)) or GroupTrace()

    def take(self, prompt_id: str, priority: Priority = Priority.TRAINING) -> GroupTrace:
        """Forget the trace of a group that ended or starts again, and return it as `of` does."""
        return self._traces.pop((priority, prompt_id), None) or GroupTrace()

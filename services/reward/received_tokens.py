"""How many response tokens came from replicas, counted where they come in.

It knows nothing of groups and how they end: the books of those (`token_accounts`) are checked
against it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing

from services.reward.group_request import GenerateEvent, GenerationClient, GroupRequest
from services.reward.replica_queue import Priority
from sluice.types import ReplicaInfo, Rollout


class ReceivedTokens:
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

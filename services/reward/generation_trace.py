"""Which replicas were asked for a group and how many tokens they gave, for the books and the log.

A group that is broken off or dropped leaves nothing else behind that could tell.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from services.reward.dispatcher import GenerateEvent, GenerationClient, GroupRequest
from services.reward.replica_queue import Priority
from sluice.types import ReplicaInfo


@dataclass(slots=True)
class GroupTrace:
    """`replicas` by name in the order first asked; `num_tokens` of the samples they finished."""

    replicas: list[str] = field(default_factory=list)
    num_tokens: int = 0

    def __str__(self) -> str:
        return ", ".join(self.replicas) or "none"


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
        self, replica: ReplicaInfo, request: GroupRequest, sample_indexes: Sequence[int]
    ) -> AsyncGenerator[GenerateEvent, None]:
        """As the client's."""
        key = (request.priority, request.prompt.prompt_id)
        trace = self._traces.setdefault(key, GroupTrace())
        if replica.name not in trace.replicas:
            trace.replicas.append(replica.name)
        async with aclosing(self._client.generate(replica, request, sample_indexes)) as events:
            async for event in events:
                trace.num_tokens += sum(rollout.num_tokens for rollout in event.rollouts)
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

"""Which tokens were handed over to callers, counted where they leave the replica."""

from __future__ import annotations

from collections.abc import Iterable

from services.rollout.engines.protocol import Engine, GenerationRequest, num_tokens
from services.rollout.generation import (
    Delivery,
    Detokenizer,
    Generation,
    GenerationEvent,
    Send,
)
from sluice.types import Rollout

__all__ = ["CountedGeneration", "HandOver"]


class HandOver:
    """Counts the tokens of one call that are new to its caller.

    A sample that is sent whole repeats what was sent of it in deltas before, and what the caller
    gave us to continue from: neither counts.
    """

    def __init__(self, partials: Iterable[Rollout]) -> None:
        self._known = {partial.sample_index: partial.num_tokens for partial in partials}

    def new_tokens(self, event: GenerationEvent) -> int:
        """Tokens of `event` that none before it held; call it once for each, in order."""
        known = self._known
        found = num_tokens(delta.chunk for delta in event.deltas)
        for delta in event.deltas:
            sample = delta.chunk.sample_index
            known[sample] = known.get(sample, 0) + num_tokens([delta.chunk])
        for rollout in event.rollouts:
            found += rollout.num_tokens - known.pop(rollout.sample_index, 0)
        return found


class CountedGeneration(Generation):
    """Runs requests on one engine and enters what became of their tokens into its books."""

    def __init__(self, engine: Engine, detokenizer: Detokenizer) -> None:
        super().__init__(engine, detokenizer)
        self._accounting = engine.accounting

    async def run(
        self,
        request: GenerationRequest,
        partials: Iterable[Rollout],
        delivery: Delivery,
        send: Send,
    ) -> None:
        """As `Generation.run`. An event counts as sent once `send` has returned."""
        partials = tuple(partials)
        hand_over, accounting = HandOver(partials), self._accounting.of(request)

        async def send_counted(event: GenerationEvent) -> None:
            await send(event)
            new_tokens = hand_over.new_tokens(event)
            request.tokens.sent += new_tokens
            accounting.sent += new_tokens

        try:
            await super().run(request, partials, delivery, send_counted)
        finally:
            accounting.unsent += request.tokens.yielded - request.tokens.sent

"""A scripted replica whose samples come in pieces, and that continues parts it is given."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sluice.algorithm.growing_sample import GrowingSample, NewTokens
from sluice.api.rollout.v1 import rollout_pb2
from sluice.codec.fields import logprobs_to_bytes, token_ids_to_bytes
from sluice.codec.rollout import rollout_from_proto, rollout_to_proto
from sluice.types import FinishReason
from tests.support.scripted_rollout import PROMPT_TOKENS, ScriptedReplica, answer_text


@dataclass
class GrowingReplica(ScriptedReplica):
    """Sends `first_tokens` of every sample, and the rest once `may_end` is set.

    The token at place k of a sample is k, so that a wrong continuation is seen.
    """

    first_tokens: int = 10
    more_tokens: int = 6
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    num_sent: int = 0
    partials: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    num_open: int = 0

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Stream the samples asked for."""
        self.num_open += 1
        try:
            await self._stream(request, context)
        finally:
            self.num_open -= 1

    async def _stream(self, request: Any, context: Any) -> None:
        content = request.prompt.chat.messages[-1].content
        grown = {index: GrowingSample() for index in request.sample_indexes}
        self.asked[content] += len(grown)
        for partial in map(rollout_from_proto, request.partials):
            grown[partial.sample_index].adopt(partial)
            self.partials[content] += partial.num_tokens
            assert partial.token_ids.tolist() == list(range(partial.num_tokens))
        accepted = rollout_pb2.PromptAccepted(
            prompt_token_ids_u32=token_ids_to_bytes(PROMPT_TOKENS), policy_version=self.version
        )
        await context.write(rollout_pb2.GenerateResponse(accepted=accepted))
        for index, sample in grown.items():
            piece = self._grow(index, sample, self.first_tokens)
            await context.write(rollout_pb2.GenerateResponse(deltas=[_delta(piece)]))
        await self.may_end.wait()
        for index, sample in grown.items():
            self._grow(index, sample, self.first_tokens + self.more_tokens)
            whole = sample.rollout(index, FinishReason.STOP, answer_text(content, index))
            await context.write(rollout_pb2.GenerateResponse(rollouts=[rollout_to_proto(whole)]))

    def _grow(self, index: int, sample: GrowingSample, size: int) -> NewTokens:
        places = np.arange(sample.num_tokens, max(size, sample.num_tokens), dtype=np.uint32)
        piece = NewTokens(index, places, -places.astype(np.float32), self.version)
        sample.append(piece.token_ids, piece.behavior_logprobs, piece.version)
        self.num_sent += int(places.size)
        return piece


def _delta(piece: NewTokens) -> rollout_pb2.TokenDelta:
    return rollout_pb2.TokenDelta(
        sample_index=piece.sample_index,
        token_ids_u32=token_ids_to_bytes(piece.token_ids),
        behavior_logprobs_f32=logprobs_to_bytes(piece.behavior_logprobs),
        policy_version=piece.version,
    )

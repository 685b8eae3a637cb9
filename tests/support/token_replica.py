"""A replica that draws scripted tokens one by one: real gRPC, no engine.

Token *t* of sample *i* is 100 i + t and its text is that number in brackets, on every replica. A
script says after how many tokens of a call something happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.codec.fields import logprobs_to_bytes, token_ids_to_bytes
from sluice.codec.rollout import rollout_from_proto, rollout_to_proto, scored_prompt_to_proto
from sluice.types import FinishReason, PromptLogprobs, Rollout, ScoredPrompt, VersionSpan

PROMPT = np.array([7, 8, 9], np.uint32)
SCORED = ScoredPrompt(
    PromptLogprobs(
        np.array([-2.0, -0.5], np.float32), PROMPT[:2], np.array([-1.0, -0.25], np.float32)
    ),
    ("[7]", "[8]", "[9]"),
    ("[7]", "[8]"),
)


def text_of(token_ids: Any) -> str:
    """The text of tokens."""
    return "".join(f"[{token}]" for token in token_ids.tolist())


def whole_sample(index: int, length: int, version: int, reason: FinishReason) -> Rollout:
    """A sample of `length` tokens."""
    ids = np.arange(100 * index, 100 * index + length, dtype=np.uint32)
    spans = (VersionSpan(version, 0, length),) if length else ()
    return Rollout.of_one_turn(index, ids, -ids.astype(np.float32) / 8, spans, reason, text_of(ids))


@dataclass
class TokenReplica(rollout_pb2_grpc.RolloutServiceServicer):
    """Draws `length` tokens a sample.

    `breaks_after` tokens of one of its first `num_breaks` calls (``None``: of any) it aborts the
    call with `code`; `aborts_after` tokens it ends its samples as a draining replica does;
    `hangs_after` tokens it waits for ever. Before the first one it says `signs` times that it draws
    for others. It knows logprobs of prompts if it `scores_prompts`.
    """

    length: int = 6
    slots: int = 4
    slots_busy: int = 0
    breaks_after: int | None = None
    num_breaks: int | None = None
    aborts_after: int | None = None
    hangs_after: int | None = None
    signs: int = 0
    scores_prompts: bool = False
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Streams tokens, then each sample."""
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            await self._accept(request, context)
            for number in range(self.signs):
                await context.write(rollout_pb2.GenerateResponse(engine_tokens=number))
            await self._sample(request, context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _accept(self, request: Any, context: Any) -> None:
        accepted = rollout_pb2.PromptAccepted(
            prompt_token_ids_u32=token_ids_to_bytes(PROMPT), policy_version=3
        )
        await context.write(rollout_pb2.GenerateResponse(accepted=accepted))
        if self.scores_prompts and request.with_prompt_logprobs:
            scored = scored_prompt_to_proto(SCORED)
            await context.write(rollout_pb2.GenerateResponse(prompt_logprobs=scored))

    async def _sample(self, request: Any, context: Any) -> None:
        had = {p.sample_index: rollout_from_proto(p).num_tokens for p in request.partials}
        budget = request.token_budget // len(request.sample_indexes) or self.length
        length, sampled = min(self.length, budget), 0
        every_token = request.stream_mode == rollout_pb2.STREAM_MODE_TOKENS
        for index in request.sample_indexes:
            for place in range(had.get(index, 0), length):
                if sampled == self.breaks_after and (
                    self.num_breaks is None or len(self.requests) <= self.num_breaks
                ):
                    await context.abort(self.code, "the replica is gone")
                if sampled == self.hangs_after:
                    await asyncio.Event().wait()
                if sampled == self.aborts_after:
                    aborted = whole_sample(index, place, 3, FinishReason.ABORTED)
                    await _finished(context, aborted)
                    return
                sampled += 1
                if every_token or request.partial_interval_ms:
                    await context.write(_one_token(index, place, with_text=every_token))
            await _finished(context, whole_sample(index, length, 3, FinishReason.STOP))

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Slots, and how many of them are busy."""
        return rollout_pb2.GetStatusResponse(
            name=self.address, policy_version=3, slots=self.slots, slots_busy=self.slots_busy
        )


async def _finished(context: Any, rollout: Rollout) -> None:
    await context.write(rollout_pb2.GenerateResponse(rollouts=[rollout_to_proto(rollout)]))


def _one_token(index: int, place: int, *, with_text: bool) -> Any:
    ids = np.array([100 * index + place], np.uint32)
    delta = rollout_pb2.TokenDelta(
        sample_index=index,
        token_ids_u32=token_ids_to_bytes(ids),
        behavior_logprobs_f32=logprobs_to_bytes(-ids.astype(np.float32) / 8),
        policy_version=3,
        text=text_of(ids) if with_text else "",
    )
    return rollout_pb2.GenerateResponse(deltas=[delta])


@asynccontextmanager
async def token_replicas(*replicas: TokenReplica) -> AsyncIterator[tuple[str, ...]]:
    """Runs replicas for the length of the block; their addresses."""
    servers = []
    for replica in replicas:
        server = grpc.aio.server()
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(replica, server)
        replica.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    try:
        yield tuple(replica.address for replica in replicas)
    finally:
        for server in servers:
            await server.stop(None)


async def until(condition: Callable[[], bool]) -> None:
    """Polls within a deadline."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)

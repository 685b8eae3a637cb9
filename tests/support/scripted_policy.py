"""A replica whose policy is a function of the prompt's text: the real service and tokenizer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from services.rollout.engines.protocol import (
    EngineLoad,
    GenerationRequest,
    RequestTokens,
    SampleChunk,
)
from services.rollout.generation import GenerationRunner
from services.rollout.prompt_encoder import PromptEncoder
from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.rpc.server import RpcServer
from sluice.types import FinishReason
from tests.support.chat_templates import FAMILIES, save_family

Policy = Callable[[str], str]
"""Takes the prompt's text with its control tokens; returns the response without its end token."""


class ScriptedEngine:
    """An engine that samples what a policy says, to its end token or `max_tokens`."""

    max_model_len = 4096
    vocab_size = 1024

    def __init__(self, policy: Policy, encoder: PromptEncoder, end: str) -> None:
        self.accounting = RequestTokens()
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []
        self._policy, self._encoder, self._end = policy, encoder, end

    def load(self) -> EngineLoad:
        """Idle, with weights."""
        return EngineLoad(slots=8, version=3, weight_digest="d")

    async def check_alive(self) -> EngineLoad:
        """As `load`."""
        return self.load()

    async def generate(
        self, request: GenerationRequest, *, every_token: bool, **_: object
    ) -> AsyncIterator[tuple[SampleChunk, ...]]:
        """Yield each sample token by token, or whole."""
        self.prompts.append(request.prompt_token_ids.tolist())
        fast: Any = self._encoder._fast
        prompt = fast.decode(request.prompt_token_ids.tolist(), skip_special_tokens=False)
        said = self._policy(prompt) + self._end
        ids = self._encoder.encode_text(said, add_special_tokens=False)
        kept = ids[: request.sampling.max_tokens]
        self.sampled.append(kept.tolist())
        reason = FinishReason.STOP if kept.size == ids.size else FinishReason.LENGTH
        for index in request.sample_indexes:
            parts = np.array_split(kept, kept.size if every_token else 1)
            for number, part in enumerate(parts, 1):
                request.tokens.sampled += int(part.size)
                ends = reason if number == len(parts) else None
                logprobs = np.full(part.size, -0.5, np.float32)
                yield (SampleChunk(index, part, logprobs, 3, ends),)


@asynccontextmanager
async def scripted_policy(
    family: str, folder: Path, policy: Policy
) -> AsyncIterator[tuple[str, ScriptedEngine]]:
    """The address of a replica with a family's template, and its engine."""
    encoder = PromptEncoder(save_family(family, folder))
    engine = ScriptedEngine(policy, encoder, FAMILIES[family].control[0])
    servicer = RolloutServicer(
        ReplicaIdentity("rollout-0", "one"),
        cast("Any", engine),
        encoder,
        GenerationRunner(cast("Any", engine), encoder.decode),
        engine_name="scripted",
        max_n=8,
    )
    server = RpcServer(
        [lambda grpc_: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, grpc_)],
        ["sluice.api.rollout.v1.RolloutService"],
        host="127.0.0.1",
        port=0,
        max_message_bytes=1 << 24,
    )
    await server.start()
    try:
        yield server.address, engine
    finally:
        await server.stop(0)

"""A rollout replica whose answers are scripted: real gRPC, no engine."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import grpc
import numpy as np

from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.codec.fields import token_ids_to_bytes
from sluice.codec.rollout import rollout_to_proto
from sluice.errors import SluiceError
from sluice.rpc.status import status_of
from sluice.types import FinishReason, ReplicaInfo, Rollout, VersionSpan

PROMPT_TOKENS = np.arange(3, dtype=np.uint32)


def answer_text(content: str, sample_index: int) -> str:
    """``answer=A right=K``: the first K samples answer A, the others something else."""
    found = re.search(r"answer=(\S+) right=(\d+)", content)
    assert found is not None, content
    right = sample_index < int(found.group(2))
    return f"thinking\nAnswer: {found.group(1) if right else 'nothing'}"


def rollout_of(text: str, sample_index: int, version: int, seed: int, num_tokens: int) -> Rollout:
    """A response whose tokens depend on seed and sample alone."""
    digest = hashlib.blake2b(f"{seed}/{sample_index}".encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    return Rollout.of_one_turn(
        sample_index,
        generator.integers(0, 300, num_tokens, dtype=np.uint32),
        -generator.random(num_tokens, dtype=np.float32),
        (VersionSpan(version, 0, num_tokens),) if num_tokens else (),
        FinishReason.STOP,
        text,
    )


@dataclass
class Call:
    """One Generate call as the replica saw it."""

    content: str
    sample_indexes: tuple[int, ...]
    seed: int
    was_cancelled: bool = False
    images: tuple[bytes, ...] = ()


BeforeSample = Callable[["ScriptedReplica", Call, int], Any]


@dataclass
class ScriptedReplica(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers as the prompts say.

    `before_sample(replica, call, sample_index)` is awaited before each sample; it may wait, or
    raise to break the stream.
    """

    name: str = "replica"
    slots: int = 64
    version: int = 0
    num_tokens: int = 8
    before_sample: BeforeSample | None = None
    calls: list[Call] = field(default_factory=list)
    instance_id: str = field(default_factory=lambda: str(uuid4()))
    address: str = ""
    server: Any = None
    num_running: int = 0
    max_running: int = 0

    @property
    def info(self) -> ReplicaInfo:
        """How the trainer would announce it."""
        return ReplicaInfo(self.name, self.instance_id, self.address, self.slots)

    async def start(self) -> None:
        """Listen on a free port."""
        self.server = grpc.aio.server()
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()

    async def die(self) -> None:
        """Break all streams and stop listening."""
        await self.server.stop(None)

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Stream the scripted samples."""
        content = request.prompt.chat.messages[-1].content
        call = Call(content, tuple(request.sample_indexes), request.sampling.seed)
        call.images = tuple(request.prompt.chat.images)
        self.calls.append(call)
        self.num_running += len(call.sample_indexes)
        self.max_running = max(self.max_running, self.num_running)
        try:
            await self._answer(call, context)
        except SluiceError as error:
            await context.abort(*status_of(error))
        except asyncio.CancelledError:
            call.was_cancelled = True
            raise
        finally:
            self.num_running -= len(call.sample_indexes)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Identity and load."""
        return rollout_pb2.GetStatusResponse(
            name=self.name,
            instance_id=self.instance_id,
            policy_version=self.version,
            slots=self.slots,
            slots_busy=min(self.num_running, self.slots),
            engine="scripted",
        )

    async def _answer(self, call: Call, context: Any) -> None:
        accepted = rollout_pb2.PromptAccepted(
            prompt_token_ids_u32=token_ids_to_bytes(PROMPT_TOKENS), policy_version=self.version
        )
        await context.write(rollout_pb2.GenerateResponse(accepted=accepted))
        for index in call.sample_indexes:
            if self.before_sample is not None:
                await self.before_sample(self, call, index)
            text = answer_text(call.content, index)
            rollout = rollout_of(text, index, self.version, call.seed, self.num_tokens)
            await context.write(rollout_pb2.GenerateResponse(rollouts=[rollout_to_proto(rollout)]))


@asynccontextmanager
async def scripted_replicas(*replicas: ScriptedReplica) -> AsyncIterator[None]:
    """Run replicas for the length of the block."""
    for replica in replicas:
        await replica.start()
    try:
        yield
    finally:
        for replica in replicas:
            await replica.server.stop(None)

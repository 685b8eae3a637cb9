"""Replicas in one process whose answers take their time and end with a call of a tool, or without.

``python -m benchmarks.episodes.latency_peer``; `latency` steers it.
"""

# ruff: noqa: ANN401 - messages and contexts of gRPC

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from benchmarks.peers import serve
from sluice.api.common.v1 import common_pb2
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc

_PROMPT = np.arange(200, dtype=np.uint32).tobytes()
_READ = np.arange(20, dtype=np.uint32).tobytes()
_SAMPLED = np.arange(60, dtype=np.uint32).tobytes()
_LOGPROBS = np.full(60, -0.5, np.float32).tobytes()
_LAST_OF = 4
"""Every so many-th turn, on average, calls no tool and ends its episode."""


@dataclass
class WaitingReplica(rollout_pb2_grpc.RolloutServiceServicer):
    """One replica: samples beyond its slots wait.

    Args:
        slots: samples that run at a time.
        turn_s: mean seconds of a turn; each takes from half to one and a half of it.
    """

    slots: int
    turn_s: float
    version: int = 0
    asked: int = 0
    running: int = 0
    used_s: float = 0.0  # of all slots together, until `since`
    since: float = field(default_factory=time.monotonic)
    turns: int = 0
    server: Any = field(default_factory=grpc.aio.server)

    async def start(self) -> str:
        """Listen on a free port; return the address."""
        self.free = asyncio.Semaphore(self.slots)
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return f"127.0.0.1:{port}"

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Return the load."""
        return rollout_pb2.GetStatusResponse(slots_busy=self.running)

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Send the prompt's tokens, then each sample when its time is over."""
        before = request.prompt.continuation.token_ids_u32
        accepted = rollout_pb2.PromptAccepted(
            prompt_token_ids_u32=before + _READ if before else _PROMPT, policy_version=self.version
        )
        await context.write(rollout_pb2.GenerateResponse(accepted=accepted))
        async with asyncio.TaskGroup() as tasks:
            for index in request.sample_indexes:
                tasks.create_task(self._sample(index, request.sampling.seed, context))

    async def _sample(self, index: int, seed: int, context: Any) -> None:
        draws = random.Random(f"{seed}/{index}")
        self.asked += 1
        try:
            async with self.free:
                self.count(1)
                try:
                    await asyncio.sleep(self.turn_s * draws.uniform(0.5, 1.5))
                finally:
                    self.count(-1)
        finally:
            self.asked -= 1
        self.turns += 1
        answer = common_pb2.Answer(content="7")
        if draws.randrange(_LAST_OF):
            answer.tool_calls.add(id="call_0", name="look", arguments_json="{}")
        rollout = common_pb2.Rollout(
            sample_index=index,
            token_ids_u32=_SAMPLED,
            behavior_logprobs_f32=_LOGPROBS,
            version_spans=[common_pb2.VersionSpan(version=self.version, start=0, end=60)],
            finish_reason=common_pb2.FINISH_REASON_STOP,
            text="7",
            answer=answer,
        )
        await context.write(rollout_pb2.GenerateResponse(rollouts=[rollout]))

    def count(self, change: int) -> None:
        """Add what the slots have worked since the last change."""
        now = time.monotonic()
        self.used_s += self.running * (now - self.since)
        self.since = now
        self.running += change


class LatencyPeer:
    """Its public methods are the operations."""

    def __init__(self) -> None:
        self._replicas: list[WaitingReplica] = []

    async def start(self, replicas: int, slots: int, turn_s: float) -> dict[str, Any]:
        """Start the replicas; return their addresses."""
        self._replicas = [WaitingReplica(slots, turn_s) for _ in range(replicas)]
        return {"addresses": [await replica.start() for replica in self._replicas]}

    async def version(self, version: int) -> None:
        """Serve a version from now on."""
        for replica in self._replicas:
            replica.version = version

    async def counts(self) -> dict[str, Any]:
        """Return slot seconds and turns so far, and the samples that are asked for now."""
        for replica in self._replicas:
            replica.count(0)
        return {
            "at_s": time.monotonic(),
            "used_s": sum(replica.used_s for replica in self._replicas),
            "asked": sum(replica.asked for replica in self._replicas),
            "turns": sum(replica.turns for replica in self._replicas),
        }

    async def close(self) -> None:
        """End all replicas."""
        for replica in self._replicas:
            await replica.server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(LatencyPeer()))

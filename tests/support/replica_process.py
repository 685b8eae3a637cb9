"""Rollout replicas in processes of their own: the real engine and service, weights made by a seed.

Each decode step takes at least `step_s`, so that there is time to kill, stop or remove a replica
in the middle of its samples. All replicas of one folder draw the same samples.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import numpy as np

from services.rollout.engines.embedded.loop import GenerationLoop
from services.rollout.generation import GenerationRunner
from services.rollout.servicer import ReplicaIdentity, RolloutServicer
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.rpc.server import RpcServer
from sluice.types import ChatMessage, ReplicaInfo, TokenIds
from tests.support.preloaded import PreloadedProcess

START_TIMEOUT_S = 240.0
MAX_MODEL_LEN = 128
SLOTS = 32


class ToyEncoder:
    """Four tokens that depend on the last turn; a token's text is its number."""

    def encode_chat(
        self, messages: Sequence[ChatMessage], images: Sequence[bytes] = (), **_: object
    ) -> TokenIds:
        """Tokens of a conversation, whatever its images show."""
        return self.encode_text(messages[-1].content)

    def encode_text(self, text: str, **_: object) -> TokenIds:
        """Tokens of plain text."""
        number = zlib.crc32(text.encode())
        return np.array([10 + (number >> shift) % 80 for shift in (0, 6, 12, 18)], np.uint32)

    def decode(self, token_ids: TokenIds) -> str:
        """The text of response tokens."""
        return " ".join(map(str, token_ids.tolist()))


@dataclass
class ReplicaProcess:
    """A running replica; announced like any other."""

    name: str
    process: PreloadedProcess
    address: str
    instance_id: str
    version: int = 0

    @property
    def info(self) -> ReplicaInfo:
        """How the trainer would announce it."""
        return ReplicaInfo(self.name, self.instance_id, self.address, SLOTS)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to this process."""
        self.process.send_signal(number)

    async def generated_tokens(self) -> int:
        """Tokens that its engine has sampled."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
            status = await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=START_TIMEOUT_S)
        return int(status.generated_tokens)


@asynccontextmanager
async def replica_process(folder: Path, name: str, step_s: float) -> AsyncIterator[ReplicaProcess]:
    """Start a replica of the model in `folder`, wait until it serves, end it with the block."""
    process = PreloadedProcess(
        "tests.support.replica_process", [str(folder), name, str(step_s)], {"OMP_NUM_THREADS": "1"}
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await asyncio.to_thread(process.stdout.readline)
        address, instance_id = json.loads(line)
        yield ReplicaProcess(name, process, address, instance_id)
    finally:
        await asyncio.to_thread(process.close)


async def _serve(folder: Path, name: str, step_s: float) -> None:
    from tests.support.causal_lms import (
        load_weights,
        reference_model,
        running_engine,
        weights_of,
    )

    _slow_down(step_s)
    async with running_engine(folder, slots=SLOTS, max_model_len=MAX_MODEL_LEN) as engine:
        await load_weights(engine, weights_of(reference_model(folder), engine), 0, "seeded")
        identity, encoder = ReplicaIdentity(name, str(uuid4())), ToyEncoder()
        servicer = RolloutServicer(
            identity,
            engine,
            encoder,
            GenerationRunner(engine, encoder.decode),
            engine_name="torch",
            max_n=SLOTS,
        )
        server = RpcServer(
            [lambda grpc_: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, grpc_)],
            ["sluice.api.rollout.v1.RolloutService"],
            host="127.0.0.1",
            port=0,
            max_message_bytes=1 << 24,
        )
        await server.start()
        sys.stdout.write(json.dumps([server.address, identity.instance_id]) + "\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def _slow_down(step_s: float) -> None:
    step = GenerationLoop.step

    def slow_step(loop: GenerationLoop) -> None:
        time.sleep(step_s)
        step(loop)

    GenerationLoop.step = slow_step  # type: ignore[assignment, method-assign]


def main() -> int:
    """Serve until a signal."""
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])))
    return 0

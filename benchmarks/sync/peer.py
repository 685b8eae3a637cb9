"""A replica of `make bench-sync`: the torch engine in a process, steered by JSON lines.

Operations: ``start`` (model folder), ``join`` (spec), ``stage`` (epoch, version; digest: whether
it is computed), ``commit`` (epoch, version, digest), ``generate`` (samples that keep the engine
busy until ``quiet``), ``meet`` (a default process group of torch.distributed) and ``bare`` (one
broadcast in it). Each is answered by one line when it is done.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from services.rollout.engines.embedded.engine import TorchEngine, TorchEngineSettings
from services.rollout.engines.protocol import GenerationRequest
from sluice.types import SamplingParams, TransferGroupSpec
from sluice.weights import transfer
from sluice.weights.digest import DIGEST_BYTES, WeightDigests
from sluice.weights.plan import Bucket, TransferPlan

SAMPLES = 32
_MAX_MODEL_LEN = 1024


class NoDigest:
    """In place of `StreamDigest`, to see what that costs."""

    def __init__(self, plan: TransferPlan) -> None:
        self._plan = plan

    def absorb(self, bucket: Bucket, content: torch.Tensor) -> None:
        """Take nothing in."""

    def digests(self) -> WeightDigests:
        """The same for everything."""
        specs = self._plan.tensors
        return WeightDigests(specs, (bytes(DIGEST_BYTES),) * len(specs))


class _Peer:
    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._engine: TorchEngine | None = None
        self._generating: asyncio.Task[None] | None = None
        self._bare = torch.zeros(0, dtype=torch.uint8)

    @property
    def _started(self) -> TorchEngine:
        if self._engine is None:
            raise RuntimeError("no engine was started")
        return self._engine

    async def run(self, command: dict[str, Any]) -> dict[str, Any]:
        """One operation."""
        answer: dict[str, Any] = await getattr(self, command.pop("op"))(**command)
        return answer

    async def start(self, folder: str) -> dict[str, Any]:
        settings = TorchEngineSettings(
            folder, dtype="bfloat16", slots=SAMPLES, max_model_len=_MAX_MODEL_LEN
        )
        self._engine = TorchEngine(settings)
        await self._engine.start()
        return {"layout": msgspec.to_builtins(self._engine.weight_layout)}

    async def join(self, spec: dict[str, Any]) -> dict[str, Any]:
        await self._started.join_group(msgspec.convert(spec, TransferGroupSpec))
        return {}

    async def stage(self, epoch: int, version: int, digest: bool = True) -> dict[str, Any]:
        if digest:
            staged = await self._started.stage(epoch, version)
        else:
            with patch.object(transfer, "StreamDigest", NoDigest):
                staged = await self._started.stage(epoch, version)
        return {"digest": staged.digest}

    async def commit(self, epoch: int, version: int, digest: str) -> dict[str, Any]:
        return {"stall_s": (await self._started.commit(epoch, version, digest)).stall_s}

    async def generate(self) -> dict[str, Any]:
        is_busy = asyncio.Event()
        self._generating = self._tasks.create_task(self._keep_busy(is_busy))
        async with asyncio.timeout(60):
            await is_busy.wait()
        return {}

    async def quiet(self) -> dict[str, Any]:
        if self._generating is not None:
            self._generating.cancel()
            await asyncio.wait([self._generating], timeout=60)
        return {}

    async def meet(self, port: int, rank: int, size: int, num_bytes: int) -> dict[str, Any]:
        self._bare = torch.zeros(num_bytes, dtype=torch.uint8)
        address = f"tcp://127.0.0.1:{port}"
        await asyncio.to_thread(
            dist.init_process_group, "gloo", init_method=address, rank=rank, world_size=size
        )
        return {}

    async def bare(self) -> dict[str, Any]:
        await asyncio.to_thread(dist.broadcast, self._bare, 0)
        return {}

    async def _keep_busy(self, is_busy: asyncio.Event) -> None:
        prompt = np.arange(16, dtype=np.uint32)
        sampling = SamplingParams(1.0, 1.0, -1, _MAX_MODEL_LEN - 16, 0, (), True)
        while True:
            wanted = GenerationRequest("busy", prompt, tuple(range(SAMPLES)), sampling)
            async with aclosing(self._started.generate(wanted, every_token=True)) as chunks:
                async for _ in chunks:
                    is_busy.set()


async def main() -> None:
    """Answer operations until the input ends."""
    async with asyncio.TaskGroup() as tasks:
        peer = _Peer(tasks)
        while line := await asyncio.to_thread(sys.stdin.readline):
            answer = await peer.run(json.loads(line))
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        await peer.quiet()


if __name__ == "__main__":
    asyncio.run(main())

"""The reward service's calls for a batch, in a process of its own, with one made-up batch.

Its argument is a `ServedBatch` in JSON; its first line is its address. Then each line ``counts``
asks for the calls so far. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import grpc
import numpy as np

from services.reward.servicer import RewardServicer
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.types import (
    DataProgress,
    FinishReason,
    Rollout,
    Scored,
    TrainBatch,
    TrainGroup,
    VersionSpan,
)
from tests.support.reward_process import REPOSITORY


@dataclass(frozen=True)
class ServedBatch:
    """Sizes of the batch, and what goes wrong.

    The first stream to send `breaks_after` messages ends there; every one falls silent at
    `hangs_after` messages. The first waits `pause_s` before each message. Samples have `tokens`
    tokens, or, if they `vary`, fewer.
    """

    groups: int
    samples: int
    tokens: int
    prompt_tokens: int
    vary: bool = False
    breaks_after: int | None = None
    hangs_after: int | None = None
    pause_s: float = 0.0

    def make(self) -> TrainBatch:
        """The same in every process. Tokens are views of one array: the largest batch is 2 GB."""
        random = np.random.default_rng(self.groups)
        tokens = random.integers(0, 1 << 17, self.tokens + self.samples, dtype=np.uint32)
        logprobs = -random.random(tokens.size, dtype=np.float32)
        groups = tuple(
            TrainGroup(
                f"p{number}",
                np.roll(tokens, number)[: self.prompt_tokens],
                tuple(
                    self._sample(tokens, logprobs, index, random) for index in range(self.samples)
                ),
                tuple(
                    Scored(float(i % 2), float(i % 2), {"acc": i % 2}) for i in range(self.samples)
                ),
                "made up",
            )
            for number in range(self.groups)
        )
        return TrainBatch("b", 0, groups, DataProgress(self.groups), {})

    def _sample(
        self, tokens: Any, logprobs: Any, index: int, random: np.random.Generator
    ) -> Rollout:
        size = int(random.integers(0, self.tokens + 1)) if self.vary else self.tokens
        own = slice(index, index + size)
        spans = (VersionSpan(0, 0, size),) if size else ()
        return Rollout.of_one_turn(index, tokens[own], logprobs[own], spans, FinishReason.STOP, "")


@dataclass
class Disturbed:
    """A call that goes wrong as a `ServedBatch` asks."""

    context: Any
    served: ServedBatch
    num_sent: int = 0

    async def write(self, message: Any) -> None:
        """Send it; if the call goes wrong, part by part."""
        served = self.served
        if served.breaks_after is None and served.hangs_after is None and not served.pause_s:
            await self.context.write(message)
            return
        following = list(message.more)
        del message.more[:]
        for part in (message, *following):
            await self._write(part)

    async def _write(self, message: Any) -> None:
        """Send it, late or never, or end."""
        await asyncio.sleep(self.served.pause_s)
        if self.num_sent == self.served.breaks_after:
            await self.context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is gone")
        if self.num_sent == self.served.hangs_after:
            await asyncio.Event().wait()
        self.num_sent += 1
        await self.context.write(message)


@dataclass
class Batches:
    """What `TrainBatches` does for one batch."""

    held: TrainBatch
    asked: list[int] = field(default_factory=list)

    async def take(self, step: int, *_: Any) -> TrainBatch:
        """Lease it."""
        self.asked.append(step)
        return self.held

    def batch(self, batch_id: str) -> TrainBatch:
        """The leased batch."""
        assert batch_id == self.held.batch_id
        return self.held


class BatchServicer(RewardServicer):
    """The service's own code around one batch."""

    def __init__(self, served: ServedBatch) -> None:
        async def durable() -> None:
            """Nothing is written."""

        app = SimpleNamespace(
            loop=SimpleNamespace(batches=Batches(served.make())),
            ledger=SimpleNamespace(durable=durable),
            traces=SimpleNamespace(traceparent=lambda _: ""),
        )
        super().__init__(cast("Any", app), cast("Any", None), 0)
        self._served = served
        self.counts: Counter[str] = Counter()

    async def TakeBatch(self, request: Any, context: Any) -> Any:
        """Count it."""
        self.counts["TakeBatch"] += 1
        return await super().TakeBatch(request, context)

    async def TakeSamples(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Count it; disturb it."""
        self.counts["TakeSamples"] += 1
        disturbed = Disturbed(context, self._served)
        self._served = replace(self._served, breaks_after=None, pause_s=0.0)
        await super().TakeSamples(request, disturbed)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Report progress."""
        return reward_pb2.GetStatusResponse(policy_version=0)


async def serve(servicer: BatchServicer) -> None:
    """Serve until the input ends."""
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _answer(f"127.0.0.1:{port}")
    while await asyncio.to_thread(sys.stdin.readline):
        _answer(dict(servicer.counts))
    await server.stop(0)


class BatchServer:
    """A process of this module."""

    def __init__(self, served: ServedBatch) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.batch_server", json.dumps(asdict(served))],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._line()

    def counts(self) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write("counts\n")
        self.process.stdin.flush()
        return self._line()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def _line(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@contextmanager
def serving(served: ServedBatch) -> Iterator[BatchServer]:
    """A server, killed at the end."""
    server = BatchServer(served)
    try:
        yield server
    finally:
        server.end()


def _answer(values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(BatchServicer(ServedBatch(**json.loads(sys.argv[1])))))

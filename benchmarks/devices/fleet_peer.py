"""Many replicas in one process: real gRPC servers, and samples that grow by the clock.

``python -m benchmarks.devices.fleet_peer``; `fleet` steers it. A sample's tokens are a part of one
long array, chosen by the request's seed, so every replica continues a sample of another one.
"""

# ruff: noqa: ANN401 - messages and contexts of gRPC

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.peers import serve
from sluice.api.common.v1 import common_pb2
from sluice.api.rollout.v1 import rollout_pb2
from tests.support.scripted_rollout import ScriptedReplica

_VOCABULARY = 150_000
_PROMPT_TOKENS = 512
_CHARS = 4
"""Of a token's text."""
SHORTEST, LONGEST = 256, 8192
"""Response tokens; lengths are uniform between them."""
TOKENS_PER_S = (SHORTEST + LONGEST) / 2 * 600.0 / 50_000
"""Of a sample, so that 50,000 at a time finish at 600 a second."""
_FIRST_S = 5.0
"""Requests of the first seconds have what is left of samples in a steady state."""
_SAME_MOMENT_S = 0.02
"""Samples that end within this time of each other travel together (`linger_ms`)."""


@dataclass
class Sent:
    """What the fleet has sent so far.

    Attributes:
        running: samples that grow now.
        sample_tokens: of samples that finished.
        tokens: new ones, each once.
    """

    running: int = 0
    sample_tokens: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class _Sample:
    """One sample on its way; tokens are counted from the beginning of the response."""

    index: int
    offset: int  # of its first token in the long array
    first: int  # tokens that came from another replica
    length: int
    ends_at: float
    sent: int
    spans: list[tuple[int, int, int]]  # of the tokens before `first`


class Fleet:
    """What all replicas of the process share."""

    def __init__(self) -> None:
        self.sent = Sent()
        generator = np.random.default_rng(0)
        self.size = 8 * LONGEST
        self.ids = generator.integers(0, _VOCABULARY, self.size, dtype=np.uint32).tobytes()
        self.logprobs = (-generator.random(self.size, dtype=np.float32)).tobytes()
        self.text = "".join(chr(97 + int(value) % 26) for value in generator.integers(0, 26, 1000))
        self.text *= _CHARS * LONGEST // 1000 + 1
        self.prompt = self.ids[: 4 * _PROMPT_TOKENS]
        self.versions: list[tuple[float, int]] = []  # since when
        self.began_at: float | None = None
        self.is_frozen = False

    def length(self, seed: int, index: int, now: float) -> int:
        """Return a sample's length, in tokens."""
        part = random.Random(f"{seed}/{index}").random()
        if self.began_at is None:
            self.began_at = now
        if now - self.began_at < _FIRST_S:
            part = 1 - part**0.5
        return SHORTEST + int(part * (LONGEST - SHORTEST))

    def spans(self, sample: _Sample, since: float, count: int) -> list[tuple[int, int, int]]:
        """Return version, start and end of the sample's first `count` tokens."""
        found = list(sample.spans)
        before = [version for at, version in self.versions if at <= since]
        marks = [(sample.first, before[-1] if before else self.versions[0][1])]
        for at, version in self.versions:
            if at > since:
                marks.append((sample.first + self._grown(at - since), version))
        for (start, version), (end, _) in pairwise([*marks, (count, 0)]):
            end = min(end, count)
            if end > start:
                found.append((version, start, end))
        return found

    def _grown(self, seconds: float) -> int:
        return int(seconds * TOKENS_PER_S)

    def num_tokens(self, sample: _Sample, since: float, now: float) -> int:
        """Return how many tokens a sample has now."""
        return min(sample.length, sample.first + self._grown(now - since))


@dataclass
class ClockReplica(ScriptedReplica):
    """One replica."""

    fleet: Fleet = field(kw_only=True)

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Return the load of the process."""
        return rollout_pb2.GetStatusResponse(slots_busy=self.fleet.sent.running)

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Send the prompt's tokens, then samples and the tokens of unfinished ones."""
        fleet, sent = self.fleet, self.fleet.sent
        accepted = rollout_pb2.PromptAccepted(
            prompt_token_ids_u32=fleet.prompt, policy_version=fleet.versions[-1][1]
        )
        await context.write(rollout_pb2.GenerateResponse(accepted=accepted))
        since = time.monotonic()
        running = sorted(self._samples(request, since), key=lambda sample: sample.ends_at)
        answer = request.prompt.chat.messages[-1].content
        sent.running += len(running)
        try:
            await self._grow(running, since, answer, request.partial_interval_ms / 1000, context)
        finally:
            sent.running -= len(running)

    def _samples(self, request: Any, now: float) -> list[_Sample]:
        partials = {partial.sample_index: partial for partial in request.partials}
        found, seed, fleet = [], request.sampling.seed, self.fleet
        for index in request.sample_indexes:
            spans: list[tuple[int, int, int]] = []
            first, length = 0, fleet.length(seed, index, now)
            if (partial := partials.get(index)) is not None:
                first = len(partial.token_ids_u32) // 4
                spans = [(span.version, span.start, span.end) for span in partial.version_spans]
                length = max(length, first + 1)
            offset = (seed * 31 + index * 7919) % (fleet.size - LONGEST - 1)
            ends_at = now + (length - first) / TOKENS_PER_S
            found.append(_Sample(index, offset, first, length, ends_at, first, spans))
        return found

    async def _grow(
        self, running: list[_Sample], since: float, answer: str, interval_s: float, context: Any
    ) -> None:
        sent, now = self.fleet.sent, since
        # Streams that begin together do not report together: engines have steps of their own.
        next_report = since + interval_s * random.uniform(0.5, 1.0) if interval_s else float("inf")
        while running:
            await asyncio.sleep(min(running[0].ends_at, next_report) - now)
            now = time.monotonic()
            if self.fleet.is_frozen:
                await asyncio.Event().wait()
            message = rollout_pb2.GenerateResponse()
            while running and running[0].ends_at <= now + _SAME_MOMENT_S:
                message.rollouts.append(self._whole(running.pop(0), since, answer))
                sent.running -= 1
            if now >= next_report:
                next_report = now + interval_s
                for sample in running:
                    message.deltas.extend(self._deltas(sample, since, now))
            if message.rollouts or message.deltas:
                await context.write(message)

    def _deltas(self, sample: _Sample, since: float, now: float) -> list[Any]:
        count, fleet = self.fleet.num_tokens(sample, since, now), self.fleet
        found = []
        for version, start, end in fleet.spans(sample, since, count):
            first = max(start, sample.sent)
            if first < end:
                part = slice(4 * (sample.offset + first), 4 * (sample.offset + end))
                found.append(
                    rollout_pb2.TokenDelta(
                        sample_index=sample.index,
                        token_ids_u32=fleet.ids[part],
                        behavior_logprobs_f32=fleet.logprobs[part],
                        policy_version=version,
                    )
                )
        fleet.sent.tokens += count - sample.sent
        sample.sent = count
        return found

    def _whole(self, sample: _Sample, since: float, answer: str) -> Any:
        fleet, count = self.fleet, sample.length
        fleet.sent.tokens += count - sample.sent
        fleet.sent.sample_tokens += count
        part = slice(4 * sample.offset, 4 * (sample.offset + count))
        # Half of each group is right, so that every group is kept.
        end = f"\nAnswer: {answer if sample.index % 2 else 'none'}"
        return common_pb2.Rollout(
            sample_index=sample.index,
            token_ids_u32=fleet.ids[part],
            behavior_logprobs_f32=fleet.logprobs[part],
            version_spans=[
                common_pb2.VersionSpan(version=version, start=start, end=end_)
                for version, start, end_ in fleet.spans(sample, since, count)
            ],
            finish_reason=common_pb2.FINISH_REASON_STOP,
            text=fleet.text[: _CHARS * count - len(end)] + end,
        )


class FleetPeer:
    """Its public methods are the operations."""

    def __init__(self) -> None:
        self._fleet = Fleet()
        self._replicas: list[ClockReplica] = []

    async def start(self, replicas: int) -> dict[str, Any]:
        """Start the replicas; return their addresses."""
        self._replicas = [ClockReplica(fleet=self._fleet) for _ in range(replicas)]
        for replica in self._replicas:
            await replica.start()
        return {"addresses": [replica.address for replica in self._replicas]}

    async def version(self, version: int) -> None:
        """Serve a version from now on."""
        self._fleet.versions.append((time.monotonic(), version))

    async def counts(self) -> dict[str, Any]:
        """Return what was sent so far, and the CPU seconds of the process."""
        return vars(self._fleet.sent) | {"cpu_s": time.process_time()}

    async def freeze(self) -> dict[str, Any]:
        """Send nothing any more; return the counts."""
        self._fleet.is_frozen = True
        await asyncio.sleep(1.0)
        return await self.counts()

    async def close(self) -> None:
        """End all replicas."""
        for replica in self._replicas:
            await replica.die()


if __name__ == "__main__":
    asyncio.run(serve(FleetPeer()))

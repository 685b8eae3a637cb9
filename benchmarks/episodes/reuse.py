"""What the engine's kept prefixes and sticky routing bring to episodes of eight turns.

The figures:

reuse_speedup  time of an episode that computes its whole history at each turn, over that of one
               that reuses it: one torch engine, in turns, the median of the rounds
prefix_hit     four engines behind the reward service's router: of the tokens that turns had before,
               those that their replica had not to compute
load_spread    the most over the mean of the replicas' running turns, at the start of a turn, mean
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch

from benchmarks.engine.__main__ import save_config
from benchmarks.parts import Part
from benchmarks.reporting import print_line
from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.protocol import GenerationRequest
from sluice.algorithm.routing import AnnouncedReplica, ReplicaRequirement, ReplicaRouter
from sluice.types import ReplicaInfo, SamplingParams
from tests.support.causal_lms import reference_model, running_engine

TURNS, READ, SAMPLED = 8, 96, 24
"""Turns of an episode, and tokens that each reads and samples."""
_ROUNDS, _EPISODES = 3, 16
_REPLICAS, _SLOTS, _SESSIONS, _TOTAL = 4, 16, 48, 160
_VOCABULARY = 1024
_MODEL_LENGTH = TURNS * (READ + SAMPLED)
_SLACK = 1.5


def _engine(folder: Path) -> AbstractAsyncContextManager[EmbeddedEngine]:
    """Return an engine with random weights, which runs within the block."""
    model = reference_model(folder)
    return running_engine(folder, model, slots=_SLOTS, max_model_len=_MODEL_LENGTH)


async def _turn(engine: EmbeddedEngine, tokens: list[int], name: str) -> None:
    """Sample one answer and append it to `tokens`."""
    sampling = SamplingParams(1.0, 1.0, -1, SAMPLED, len(tokens), (), ignore_eos=True)
    prompt = np.asarray(tokens, np.uint32)
    request = GenerationRequest(name, prompt, (0,), sampling, affinity=name)
    async with aclosing(engine.generate(request, every_token=False)) as stream:
        async for chunks in stream:
            for chunk in chunks:
                tokens += chunk.token_ids.tolist()


def _observation(rng: np.random.Generator) -> list[int]:
    found: list[int] = rng.integers(0, _VOCABULARY, READ).tolist()
    return found


async def _episode(engine: EmbeddedEngine, number: int, *, reuses: bool) -> None:
    rng, tokens = np.random.default_rng(number), list[int]()
    for _ in range(TURNS):
        tokens += _observation(rng)
        await _turn(engine, tokens, str(number) if reuses else "")


async def _episode_s(engine: EmbeddedEngine, *, reuses: bool) -> float:
    """Return the seconds that an episode takes, with others beside it."""
    started = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for number in range(_EPISODES):
            tasks.create_task(_episode(engine, number, reuses=reuses))
    return (time.perf_counter() - started) / _EPISODES


async def _speedup(folder: Path) -> float:
    async with _engine(folder) as engine:
        await _episode_s(engine, reuses=False)
        ratios = []
        for _ in range(_ROUNDS):
            without = await _episode_s(engine, reuses=False)
            ratios.append(without / await _episode_s(engine, reuses=True))
            print_line(f"an episode takes {without:.4f} s, with reuse 1/{ratios[-1]:.2f} of it")
        return median(ratios)


@dataclass(slots=True)
class _Fleet:
    """Engines behind the router, and what was seen of them."""

    engines: Sequence[EmbeddedEngine]
    router: ReplicaRouter = field(default_factory=lambda: ReplicaRouter(_SLACK))
    spreads: list[float] = field(default_factory=list)
    num_known: int = 0
    loads: list[int] = field(default_factory=lambda: [0] * _REPLICAS)

    def __post_init__(self) -> None:
        self.router.announce(
            [
                AnnouncedReplica(ReplicaInfo(str(number), "i", f"r:{number}", _SLOTS), 1)
                for number in range(len(self.engines))
            ]
        )

    async def play(self, numbers: list[int]) -> None:
        """Play episodes, one after the other, until none is left; tools take a moment."""
        while numbers:
            number = numbers.pop()
            rng, tokens, where = np.random.default_rng(number), list[int](), ""
            for _ in range(TURNS):
                self.num_known += len(tokens)
                tokens += _observation(rng)
                await asyncio.sleep(rng.exponential(0.05))
                where = await self._turn(tokens, str(number), where)

    async def _turn(self, tokens: list[int], name: str, where: str) -> str:
        member = self.router.choose(ReplicaRequirement(1, 0, prefer=where), 0.0)
        assert member is not None  # sessions are fewer than slots
        chosen, reservation = int(member.announced.info.name), self.router.reservation(member, 1)
        self.loads[chosen] += 1
        self.spreads.append(max(self.loads) / fmean(self.loads))
        await _turn(self.engines[chosen], tokens, name)
        self.loads[chosen] -= 1
        self.router.release_sequences(reservation, 1)
        self.router.give_back(reservation)
        return str(chosen)


async def _sticky(folder: Path) -> tuple[float, float]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(_engine(folder)) for _ in range(_REPLICAS)]
        fleet = _Fleet(engines)
        numbers = list(range(_TOTAL))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_SESSIONS):
                tasks.create_task(fleet.play(numbers))
        reused = sum(engine.load().reused_tokens for engine in fleet.engines)
        return reused / fleet.num_known, fmean(fleet.spreads)


def reuse_figures() -> dict[str, float]:
    """Return ``reuse_speedup``, ``prefix_hit`` and ``load_spread``; about half a minute."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_config("tiny", Path(folder))
        speedup = asyncio.run(_speedup(Path(folder)))
        hit, spread = asyncio.run(_sticky(Path(folder)))
    return {"reuse_speedup": speedup, "prefix_hit": hit, "load_spread": spread}


PART = Part(
    lambda _: reuse_figures(),
    most={"load_spread": 1.3},
    least={"prefix_hit": 0.9, "reuse_speedup": 1.5},
)

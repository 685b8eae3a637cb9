"""The transfer of a version beside the next step, and the fleet's capacity while it swaps.

The reward service is a process and the replicas are servers, all with their own calls; the engine
is scripted and the trainer sleeps, inside the real train loop. All times are a quarter of those
that the tables name: a step of 4 s, a transfer of 2 s.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
import numpy as np

from benchmarks.parts import Part
from benchmarks.reporting import print_line
from services.trainer.fleet.publisher import PublishReport
from services.trainer.loop.reward_client import RewardClient
from sluice.algorithm.publishing import may_overlap, swaps_at_once
from sluice.api.rollout.v1 import rollout_pb2
from sluice.codec.fields import token_ids_to_bytes
from sluice.codec.rollout import rollout_to_proto
from sluice.types import FinishReason, Rollout, TrainBatch, VersionSpan
from tests.support.loop_world import World
from tests.support.publisher_fleet import Trainer
from tests.support.reward_process import RewardProcess, reward_process, write_config
from tests.support.reward_scenarios import SAMPLES, mixed, run_tree
from tests.support.scripted_rollout import (
    PROMPT_TOKENS,
    Call,
    ScriptedReplica,
    answer_text,
    scripted_replicas,
)

_Context = grpc.aio.ServicerContext[Any, Any]

_STALENESS = (1, 2, 4)
_SCALE = 4.0
_TRAIN_S, _TRANSFER_S = 4.0 / _SCALE, 2.0 / _SCALE
_GROUPS, _STEPS, _REPEATS = 8, 16, 3
_SWAPPING, _SWAP_S = 8, 1.0


@dataclass(frozen=True, slots=True)
class _Speed:
    """`at_once` groups run in the fleet, `group_s` each, give or take a quarter."""

    at_once: int
    group_s: float


_SPEEDS = {"generation": _Speed(4, 4.0 / _SCALE), "trainer": _Speed(16, 1.0 / _SCALE)}
"""A batch of groups takes 8 s, or half a second."""


@dataclass
class _Engine(ScriptedReplica):
    """Samples a group in its time; half of its tokens are of the version in the beginning."""

    speed: _Speed = _SPEEDS["trainer"]
    free: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    async def _answer(self, call: Call, context: _Context) -> None:
        async with self.free:
            began = self.version
            accepted = rollout_pb2.PromptAccepted(
                prompt_token_ids_u32=token_ids_to_bytes(PROMPT_TOKENS), policy_version=began
            )
            await context.write(rollout_pb2.GenerateResponse(accepted=accepted))
            spread = 0.75 + 0.5 * (call.seed % 1000) / 1000
            await asyncio.sleep(self.speed.group_s * spread)
            for index in call.sample_indexes:
                text = answer_text(call.content, index)
                rollout = _sampled(text, index, began, self.version)
                await context.write(
                    rollout_pb2.GenerateResponse(rollouts=[rollout_to_proto(rollout)])
                )


def _sampled(text: str, index: int, began: int, ended: int) -> Rollout:
    spans: tuple[VersionSpan, ...] = (VersionSpan(began, 0, 8),)
    if ended != began:
        spans = (VersionSpan(began, 0, 4), VersionSpan(ended, 4, 8))
    tokens, logprobs = np.arange(8, dtype=np.uint32), np.full(8, -0.5, np.float32)
    return Rollout.of_one_turn(index, tokens, logprobs, spans, FinishReason.STOP, text)


class _Run(World):
    """What the train loop drives: a reward service, a trainer that sleeps, a slow transfer."""

    def __init__(self, service: RewardProcess, engines: Sequence[_Engine], steps: int) -> None:
        super().__init__(steps=steps)
        self.client = RewardClient(service.stub, "trainer-1", 60.0)
        self._engines = engines
        self.began_s: list[float] = []
        self.ages: list[int] = []
        for engine in engines:
            self.fleet.register(engine.info, "layout", 0.0)

    async def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        self.began_s.append(time.monotonic())
        oldest = [r.oldest_version for group in batch.groups for r in group.rollouts]
        self.ages += [batch.policy_version - version for version in oldest if version is not None]
        await asyncio.sleep(_TRAIN_S)
        return {}

    async def publish(self, version: int) -> PublishReport:
        await asyncio.sleep(_TRANSFER_S if version else 0.0)
        for engine in self._engines:
            engine.version = version
            self.fleet.mark_serving(engine.info, version)
        return PublishReport(len(self._engines), 1, _TRANSFER_S, 0.0)


async def _trained(folder: Path, staleness: int, bound: str, *, overlaps: bool) -> _Run:
    """Run one after the other as many steps as fill what may be ahead, and those that count."""
    speed, steps = _SPEEDS[bound], staleness + 2 + _STEPS
    prompts = mixed(_GROUPS * (steps + staleness + 2))
    tree = run_tree(folder, prompts, sluice__asynchrony__max_staleness=staleness)
    tree["data"]["train_batch_size"] = _GROUPS
    engines = [
        _Engine(
            f"replica-{number}",
            slots=speed.at_once // 2 * SAMPLES,
            speed=speed,
            free=asyncio.Semaphore(speed.at_once // 2),
        )
        for number in range(2)
    ]
    config = write_config(folder / "run.json", tree)
    async with scripted_replicas(*engines), reward_process(config) as service:
        run = _Run(service, engines, steps)
        # Nothing is refused here: what exceeds the bound is counted.
        batch = (f"data.train_batch_size={_GROUPS}", f"actor_rollout_ref.rollout.n={SAMPLES}")
        loop = run.loop(reward=run.client, overlaps=overlaps, staleness=steps, overrides=batch)
        await loop.run()
    return run


async def _compare(staleness: int, bound: str) -> tuple[float, int]:
    """Return the speed with overlap over that without, and how many samples are too old."""
    runs: dict[bool, list[_Run]] = {False: [], True: []}

    async def run(folder: Path, *, overlaps: bool) -> None:
        runs[overlaps].append(
            await _trained(folder, staleness, bound, overlaps=overlaps and may_overlap(staleness))
        )

    with tempfile.TemporaryDirectory() as root:
        # Together, so that what else the machine does slows all of them.
        async with asyncio.TaskGroup() as tasks:
            for _, overlaps in itertools.product(range(_REPEATS), (False, True)):
                folder = Path(tempfile.mkdtemp(dir=root))
                tasks.create_task(run(folder, overlaps=overlaps))
    seconds = {overlaps: [_seconds(one, staleness) for one in runs[overlaps]] for overlaps in runs}
    ages = [age for each in runs.values() for one in each for age in one.ages]
    rates = {
        "overlapped" if overlaps else "awaited": [
            round(_GROUPS * SAMPLES * _STEPS / one / _SCALE, 2) for one in sorted(seconds[overlaps])
        ]
        for overlaps in runs
    }
    found = {"staleness": staleness, "bound": bound, "samples_per_s": rates}
    print_line(json.dumps({**found, "largest_age": max(ages)}))
    ratio = median(seconds[False]) / median(seconds[True])
    return round(ratio, 3), sum(age > staleness for age in ages)


def _seconds(run: _Run, staleness: int) -> float:
    """Return the seconds of the steps that count."""
    assert len(run.began_s) == staleness + 2 + _STEPS
    return run.began_s[-1] - run.began_s[-1 - _STEPS]


async def _min_capacity() -> float:
    """Return the least share of eight replicas that sampled while all took a version."""
    trainer = Trainer(60.0, swaps_at_once=partial(swaps_at_once, max_staleness=1))
    replicas = [trainer.add(f"replica-{number}") for number in range(_SWAPPING)]
    swapping, most = 0, 0

    async def swap() -> None:
        nonlocal swapping, most
        swapping += 1
        most = max(most, swapping)
        await asyncio.sleep(_SWAP_S)
        swapping -= 1

    try:
        await trainer.publish(0)
        for replica in replicas:
            replica.faults["commit"] = swap
        began_s = time.monotonic()
        await trainer.publish(1)
        print_line(f"{_SWAPPING} swaps of {_SWAP_S:g} s: {time.monotonic() - began_s:.1f} s")
        assert trainer.serving() == {replica.info.name: 1 for replica in replicas}
    finally:
        await trainer.publisher.close()
        for replica in replicas:
            replica.end()
    return (_SWAPPING - most) / _SWAPPING


def measure() -> Mapping[str, Any]:
    """Compare trained samples per second with the transfer beside the next step and before it.

    At each staleness, in a run that waits for groups and in one that waits for its trainer.
    """
    speedups: dict[str, float] = {}
    exceeded = 0
    for staleness, bound in itertools.product(_STALENESS, _SPEEDS):
        speedup, too_old = asyncio.run(_compare(staleness, bound))
        speedups[f"{bound}_bound_s{staleness}"] = speedup
        exceeded += too_old
    return {
        "overlap_speedup": speedups,
        "staleness_exceeded": exceeded,
        "fleet_capacity_min": asyncio.run(_min_capacity()),
    }


PART = Part(
    lambda _: measure(),
    most={"staleness_exceeded": 0.0},
    least={
        **{
            f"overlap_speedup.{bound}_bound_s{staleness}": (
                1.2 if bound == "trainer" and may_overlap(staleness) else 0.98
            )
            for staleness, bound in itertools.product(_STALENESS, _SPEEDS)
        },
        "fleet_capacity_min": 7 / 8,
    },
)

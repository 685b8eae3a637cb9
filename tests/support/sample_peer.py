"""A trainer rank that takes its samples of a batch and trains nothing.

Rank 0 obeys lines ``take STEP``, as the train loop does; the end of input stops all ranks. For each
batch every rank answers what it got, in one line of JSON. An error ends the process with its text.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import torch

from services.trainer.learner.batch.train_batch import BatchCut, own_rows
from services.trainer.learner.rank_command import RankLeader, follow
from services.trainer.learner.ranks import TorchDistributed
from services.trainer.learner.sample_reader import RewardSamples
from services.trainer.loop.reward_client import RewardClient
from sluice.device.select import select_device
from sluice.errors import SluiceError
from sluice.rpc.client import reward_stub
from sluice.types import TrainBatch, is_absent
from tests.support.rank_peer import answer


class CountingSamples(RewardSamples):
    """Counts the bytes of the messages that this rank gets."""

    num_bytes = 0

    async def _until_stall(self, answers: Any, phase: str) -> AsyncIterator[Any]:
        async for message in super()._until_stall(answers, phase):
            self.num_bytes += message.ByteSize()
            yield message


class CountingRanks(TorchDistributed):
    """Counts the bytes that are broadcast to this rank."""

    num_bytes = 0

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        """Broadcast."""
        found = super().broadcast_bytes(payload, phase)
        self.num_bytes += len(found)
        return found


class TakingLearner:
    """Divides a batch as the learner does, and reports what came instead of training.

    Args:
        mini_batch_groups: of an optimizer step.
    """

    routing_shape = None

    def __init__(
        self, parallel: CountingRanks, samples: CountingSamples, mini_batch_groups: int
    ) -> None:
        self._parallel = parallel
        self._samples = samples
        self._cut = BatchCut(mini_batch_groups, token_budget=1 << 20, rows_per_micro=None)
        self._own: list[int] = []

    def own_rows(self, outline: TrainBatch, step: int) -> list[int]:
        """The learner's division."""
        self._began_cpu_s = time.process_time()
        self._own = sorted(own_rows(outline.groups, self._cut, self._parallel, step=step))
        return self._own

    def train_step(self, batch: TrainBatch, step: int) -> dict[str, Any]:
        """Answer what came."""
        cpu_s = time.process_time() - self._began_cpu_s
        rows = [rollout for group in batch.groups for rollout in group.rollouts]
        came = [
            row for row, one in enumerate(rows) if one.num_tokens and not is_absent(one.token_ids)
        ]
        prompts = [g.prompt_token_ids for g in batch.groups if not is_absent(g.prompt_token_ids)]
        found = {
            "own": self._own,
            "came": came,
            "sums": [
                [int(rows[row].token_ids.sum()), float(rows[row].behavior_logprobs.sum())]
                for row in came
            ],
            "bytes": self._samples.num_bytes + self._parallel.num_bytes,
            "row_bytes": sum(8 * rows[row].num_tokens for row in came)
            + sum(4 * ids.size for ids in prompts),
            "cpu_s": cpu_s,
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        self._samples.num_bytes = self._parallel.num_bytes = 0
        if self._parallel.rank:
            answer(found)
        return found


async def take(leader: RankLeader, address: str, step: int) -> dict[str, Any]:
    """Take the batch of a step as the train loop does; return what rank 0 got."""

    async def samples(outline: TrainBatch, step: int) -> str:
        return await asyncio.to_thread(leader.take_samples, outline, step)

    async with grpc.aio.insecure_channel(address) as channel:
        client = RewardClient(reward_stub(channel), "trainer-1", 300.0)
        began_s = time.monotonic()
        outline = await client.take_batch(step, step - 1, lambda: 0, samples)
    seconds = time.monotonic() - began_s
    found = await asyncio.to_thread(leader.train_step, outline, step)
    return {**found, "seconds": seconds}


def run(address: str, stall_s: float, mini_batch_groups: int, timeout_s: float = 60.0) -> None:
    """Obey, or follow."""
    parallel = CountingRanks(select_device("cpu"), timeout_s, forming_timeout_s=100.0)
    samples = CountingSamples(address, 64 << 20, stall_s)
    learner = cast("Any", TakingLearner(parallel, samples, mini_batch_groups))
    answer("ready")
    if parallel.rank:
        follow(learner, parallel, samples)
    else:
        leader = RankLeader(learner, parallel, samples)
        for line in sys.stdin:
            answer(asyncio.run(take(leader, address, int(line.split()[1]))))
        leader.stop()
    parallel.close()


def main() -> int:
    """Run; return the exit status."""
    torch.set_num_threads(1)
    try:
        run(**json.loads(sys.argv[1]))
    except SluiceError as error:
        answer(f"{type(error).__name__}: {error}")
        # A broken group may hold its threads; the trainer's ranks leave the same way.
        sys.stdout.flush()
        os._exit(3)
    return 0


if __name__ == "__main__":
    sys.exit(main())

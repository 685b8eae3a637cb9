"""The reward service's process with a fleet of 512 replicas and 50,000 samples that grow.

`fleet_peer` has the replicas: real gRPC servers whose samples grow by the clock, at a rate that
would finish more than the bar. Their lengths are uniform from 256 to 8,192 tokens, so a sample on
its way holds 2,700 on average, and so does a finished one that waits for its group. The trainer
takes batches, reads their samples as its ranks do, sleeps and acknowledges.
"""

# ruff: noqa: ANN401 - messages and calls of gRPC

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.devices.fleet_peer import LONGEST
from benchmarks.parts import Part
from benchmarks.peers import PeerProcess
from benchmarks.reporting import print_line
from sluice.algorithm.groups.stragglers import partial_interval_ms
from sluice.api.reward.v1 import reward_pb2
from sluice.codec.messages import replica_to_proto
from sluice.types import ReplicaInfo
from tests.support.prompt_parquet import prompt_rows, write_prompts
from tests.support.reward_process import RewardProcess, reward_process, write_config

CONCURRENT = 50_000
_REPLICAS, _PROCESSES = 512, 2
_GROUP, _BATCH_GROUPS = 16, 512
_FREE_SHARE = 0.075
"""Slots of a replica that are free on average: a group starts when all of its samples fit."""
_STALENESS = 16
"""A batch takes about 14 s, and the longest sample ten times that."""
_RANKS, _STEP_S, _SCORERS = 4, 2.0, 8
_WARM_S, _WINDOW_S = 170.0, 90.0
"""Seconds after the fill before anything is counted (the longest sample takes 160), and counted."""
_FILL_S, _QUIET_S = 120.0, 60.0
_WARNINGS = 20  # of the reward service, printed
_SPARE_MB = 300.0
_INTERVAL_MS = partial_interval_ms(500, round(CONCURRENT / (1 - _FREE_SHARE)), 7500.0)
_TOKEN_BYTES, _TEXT_BYTES = 8, 4
_TICK = os.sysconf("SC_CLK_TCK")


def measure(concurrent: int) -> Mapping[str, Any]:
    """Run the reward service, the fleet and the trainer; see the module's description.

    The fleet and its rate are in proportion to the samples that grow at the same time.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = [
            stack.enter_context(closing(PeerProcess("benchmarks.devices.fleet_peer")))
            for _ in range(_PROCESSES)
        ]
        return asyncio.run(_Measurement(concurrent, peers).run(_config(folder, concurrent)))


def _config(folder: Path, concurrent: int) -> Path:
    rows = prompt_rows([str(number) for number in range(10_000)])
    return write_config(
        folder / "run.yaml",
        {
            "data": {
                "train_files": str(write_prompts(folder / "train.parquet", rows)),
                "train_batch_size": max(1, round(_BATCH_GROUPS * concurrent / CONCURRENT)),
                "max_prompt_length": 1024,
                "max_response_length": LONGEST,
            },
            "actor_rollout_ref": {"rollout": {"n": _GROUP}},
            "algorithm": {"filter_groups": {"enable": True, "metric": "acc"}},
            "trainer": {"total_epochs": 1000},
            # A group costs one exchange with a scorer; 31 a second are many for one process that
            # shares two cores.
            "reward": {"scorer_pool": {"num_workers": _SCORERS}},
            "sluice": {
                "run_dir": str(folder / "run"),
                "asynchrony": {"max_staleness": _STALENESS},
                # At every scale that of the whole fleet, so that a sample costs the same.
                "reward": {"inflight_slack": 1.0, "partial_interval_ms": _INTERVAL_MS},
            },
        },
    )


@dataclass
class _Mark:
    """Counts at one moment."""

    at_s: float
    reward_cpu_s: float
    loop_cpu_s: float
    memory_mb: float
    sent: dict[str, Any]
    status: Any


@dataclass
class _Measurement:
    """One run."""

    concurrent: int
    peers: list[PeerProcess]
    is_over: bool = False
    slowest_s: dict[str, float] = field(default_factory=dict)
    num_missing: int = 0  # samples of batches
    trained_tokens: int = 0
    replicas: list[ReplicaInfo] = field(default_factory=list)

    async def run(self, config: Path) -> dict[str, Any]:
        """Return the figures."""
        await self._start_fleet()
        async with reward_process(config, has_own_memory=True) as service:
            await self._publish(service, 0)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._train(service))
                await self._filled()
                await asyncio.sleep(_WARM_S)
                before = await self._mark(service)
                await asyncio.sleep(_WINDOW_S)
                after = await self._mark(service)
                self.is_over = True
                found = self._figures(before, after)
            lost = await self._lost(service)
        slowest = {name: round(seconds, 2) for name, seconds in self.slowest_s.items()}
        self._print("slowest calls, s", slowest)
        return found | {"fleet_lost": lost}

    async def _start_fleet(self) -> None:
        num_replicas = max(_PROCESSES, round(_REPLICAS * self.concurrent / CONCURRENT))
        slots = max(_GROUP, round(self.concurrent / num_replicas / (1 - _FREE_SHARE)))
        share = num_replicas // _PROCESSES
        for number, peer in enumerate(self.peers):
            peer.send("start", replicas=share)
            addresses = (await asyncio.to_thread(peer.answer))["addresses"]
            for index, address in enumerate(addresses):
                name = f"rollout-{number * share + index}"
                self.replicas.append(ReplicaInfo(name, f"{name}-1", address, slots))

    async def _all(self, op: str, **arguments: object) -> list[dict[str, Any]]:
        for peer in self.peers:
            peer.send(op, **arguments)
        return [await asyncio.to_thread(peer.answer) for peer in self.peers]

    async def _sent(self, op: str = "counts") -> dict[str, Any]:
        answers = await self._all(op)
        return {key: sum(one[key] for one in answers) for key in answers[0]}

    # --------------------------------------------------------------------------------- the trainer

    async def _publish(self, service: RewardProcess, version: int) -> None:
        await self._all("version", version=version)
        request = reward_pb2.AnnouncePolicyRequest(
            trainer_instance_id="trainer",
            policy_version=version,
            replicas=[replica_to_proto(replica, version) for replica in self.replicas],
        )
        await self._call(service.stub.AnnouncePolicy, request)

    async def _train(self, service: RewardProcess) -> None:
        step = 0
        while not self.is_over:
            step += 1
            batch = await self._take(service, step)
            async with asyncio.TaskGroup() as tasks:
                num_rows = sum(len(group.rollouts) for group in batch.groups)
                for rank in range(_RANKS):
                    rows = range(rank * num_rows // _RANKS, (rank + 1) * num_rows // _RANKS)
                    tasks.create_task(self._read(service, batch.batch_id, rows))
            self.num_missing += len(batch.groups) * _GROUP - num_rows
            await asyncio.sleep(_STEP_S)
            trained = reward_pb2.AcknowledgeBatchRequest(batch_id=batch.batch_id, step=step)
            await self._call(service.stub.AcknowledgeBatch, trained)
            self.trained_tokens += sum(
                rollout.num_tokens for group in batch.groups for rollout in group.rollouts
            )
            await self._publish(service, step)

    async def _take(self, service: RewardProcess, step: int) -> Any:
        request = reward_pb2.TakeBatchRequest(step=step, policy_version=step - 1)
        return (await service.stub.TakeBatch(request, timeout=600)).batch

    async def _read(self, service: RewardProcess, batch_id: str, rows: Sequence[int]) -> None:
        request = reward_pb2.TakeSamplesRequest(batch_id=batch_id, rows=rows)
        num_samples = 0
        async for answer in service.stub.TakeSamples(request, timeout=300):
            num_samples += sum(part.HasField("sample") for part in (answer, *answer.more))
        self.num_missing += len(rows) - num_samples

    async def _call(self, method: Any, request: Any) -> None:
        began_s, name = time.monotonic(), type(request).__name__
        await method(request, timeout=60)
        self.slowest_s[name] = max(self.slowest_s.get(name, 0.0), time.monotonic() - began_s)

    # ---------------------------------------------------------------------------------- the figures

    async def _filled(self) -> None:
        """Wait until the samples that should grow do."""
        ends_s = time.monotonic() + _FILL_S
        while time.monotonic() < ends_s:
            if (await self._sent())["running"] >= 0.95 * self.concurrent:
                break
            await asyncio.sleep(0.5)

    async def _mark(self, service: RewardProcess) -> _Mark:
        sent = await self._sent()
        status = await service.status()
        pid = service.process.pid
        return _Mark(
            time.monotonic(),
            _cpu_s(Path(f"/proc/{pid}/stat")),
            _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat")),
            service.rss_mb(),
            sent,
            status,
        )

    async def _lost(self, service: RewardProcess) -> int:
        """Stop the fleet; count prompts, samples and tokens that have no place."""
        sent = await self._sent("freeze")
        until, missing = time.monotonic() + _QUIET_S, sent["tokens"]
        while missing and time.monotonic() < until:
            await asyncio.sleep(1.0)
            status = await service.status()
            missing = sent["tokens"] - int(status.statistics["reward/tokens/received"])
        lost = {
            "tokens": missing,
            "prompts": int(status.statistics["reward/prompts_lost"]),
            "samples_of_batches": self.num_missing,
            "ended_untrained": sum(status.prompts_by_end.values())
            - status.prompts_by_end["trained"],
        }
        self._print("lost", lost)
        for line in [line for line in service.log if " WARNING " in line][:_WARNINGS]:
            print_line(line.rstrip())
        return sum(map(abs, lost.values()))

    def _figures(self, before: _Mark, after: _Mark) -> dict[str, Any]:
        seconds = after.at_s - before.at_s
        samples = after.status.statistics["reward/samples_graded"]
        samples -= before.status.statistics["reward/samples_graded"]
        groups = max(samples, 1) / _GROUP
        spent = {
            "reward service": after.reward_cpu_s - before.reward_cpu_s,
            "its event loop": after.loop_cpu_s - before.loop_cpu_s,
            "fleet": after.sent["cpu_s"] - before.sent["cpu_s"],
        }
        self._print("CPU ms a group", {who: round(1e3 * s / groups, 2) for who, s in spent.items()})
        allowed = round(samples / max(spent["its event loop"], 1e-9))
        self._print("samples/s that one core would allow the event loop", {"most": allowed})
        held = after.status.statistics["reward/tokens/pending"]
        raw_mb = _TOKEN_BYTES * held / 1e6
        texts_mb = _TEXT_BYTES * (after.sent["sample_tokens"] - self.trained_tokens) / 1e6
        ratio = (after.memory_mb - _SPARE_MB) / (raw_mb + texts_mb)
        self._print(
            "memory, MB",
            {
                "reward service": round(after.memory_mb),
                "tokens": round(raw_mb),
                "texts": round(texts_mb),
                "ratio without texts": round((after.memory_mb - _SPARE_MB) / raw_mb, 3),
            },
        )
        return {"fleet_samples_per_s": samples / seconds, "reward_memory_ratio": ratio}

    def _print(self, what: str, values: Mapping[str, object]) -> None:
        print_line(f"{what}: {json.dumps(values)}")


def _cpu_s(stat: Path) -> float:
    """Return user and system seconds of a process or thread."""
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


PART = Part(
    lambda parsed: measure(parsed.concurrent),
    most={"fleet_lost": 0.0, "reward_memory_ratio": 1.3},
    least={"fleet_samples_per_s": 500.0},
)

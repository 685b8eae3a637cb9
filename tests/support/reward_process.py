"""The real reward service in a process of its own, and a trainer that speaks to it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import grpc
import msgspec

from sluice.api.common.v1 import common_pb2
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.codec.messages import replica_to_proto
from sluice.codec.reward import progress_to_proto
from sluice.codec.train_batch import outline_from_proto, with_samples
from sluice.types import DataProgress, ReplicaInfo, TrainBatch
from tests.support.preloaded import ForkedService, fork_service

REPOSITORY = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0
LISTENING = re.compile(r"listening on (\S+)")


def write_config(path: Path, tree: dict[str, Any]) -> Path:
    """A run configuration; YAML is a superset of JSON."""
    path.write_bytes(msgspec.json.encode(tree))
    return path


class Announced(Protocol):
    """A replica that a trainer would announce, with the version that it serves."""

    version: int

    @property
    def info(self) -> ReplicaInfo:
        """Where it is."""
        ...


@dataclass
class RewardProcess:
    """A running service."""

    process: asyncio.subprocess.Process | ForkedService
    stub: Any
    log: list[str] = field(default_factory=list)

    async def stop(self, timeout_s: float = 120.0) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await self.wait(timeout_s)

    async def wait(self, timeout_s: float = 120.0) -> int:
        """The exit code."""
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()

    def children(self) -> list[int]:
        """Pids of its scorer processes."""
        return children_of(self.process.pid)

    def rss_mb(self) -> float:
        """Resident memory now, MB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    # -- a trainer's calls --------------------------------------------------------------------

    async def announce(
        self,
        version: int,
        replicas: Sequence[Announced],
        *,
        instance_id: str = "trainer-1",
        resume_from: DataProgress | None = None,
    ) -> None:
        """Publish `version` to the replicas and announce it."""
        for replica in replicas:
            replica.version = version
        await self.stub.AnnouncePolicy(
            reward_pb2.AnnouncePolicyRequest(
                trainer_instance_id=instance_id,
                policy_version=version,
                replicas=[replica_to_proto(r.info, version) for r in replicas],
                resume_from=progress_to_proto(resume_from) if resume_from else None,
            ),
            timeout=240,
        )

    async def take(self, step: int, version: int, timeout_s: float = 240.0) -> TrainBatch:
        """Take a batch."""
        request = reward_pb2.TakeBatchRequest(step=step, policy_version=version)
        outline = outline_from_proto((await self.stub.TakeBatch(request, timeout=timeout_s)).batch)
        rows = range(sum(len(group.rollouts) for group in outline.groups))
        return await with_samples(outline, rows, self.samples(outline.batch_id, rows))

    async def awaited(self, step: int, version: int, words: str) -> grpc.StatusCode:
        """Ask for a batch that does not come; return the error's code once it has `words`.

        A busy service may not answer by a short deadline, and its caller then says nothing.
        """
        for timeout_s in (3.0, 60.0):
            try:
                await self.take(step, version, timeout_s)
            except grpc.aio.AioRpcError as error:
                code, said = error.code(), str(error.details())
            else:
                raise AssertionError("there is a batch")
            if words in said:
                return code
        raise AssertionError(f"{words!r} is not in {said!r}")

    def samples(self, batch_id: str, rows: Sequence[int]) -> Any:
        """These samples of a leased batch, and their prompts."""
        request = reward_pb2.TakeSamplesRequest(batch_id=batch_id, rows=rows)
        return self.stub.TakeSamples(request, timeout=240)

    async def acknowledge(self, batch: TrainBatch, step: int) -> None:
        """Report a batch as trained."""
        request = reward_pb2.AcknowledgeBatchRequest(batch_id=batch.batch_id, step=step)
        await self.stub.AcknowledgeBatch(request, timeout=240)

    async def status(self) -> Any:
        """Its status; fails unless the accounts add up and every prompt is where they say."""
        status = await self.stub.GetStatus(reward_pb2.GetStatusRequest(), timeout=240)
        ended = sum(status.prompts_by_end.values())
        assert status.prompts_submitted == ended + status.prompts_pending
        assert status.statistics["reward/prompts_lost"] == 0
        return status


def children_of(pid: int) -> list[int]:
    """Pids of a process's children."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError, IndexError):
            continue
        if parent == pid:
            found.append(int(entry.name))
    return found


@asynccontextmanager
async def reward_process(
    config: Path, *overrides: str, has_own_memory: bool = False
) -> AsyncIterator[RewardProcess]:
    """Start the service, wait until it listens, end it at the end of the block.

    Args:
        config: of the run.
        overrides: of the command line.
        has_own_memory: run its program; a fork also has the memory of others' imports.
    """
    words = ["--config", str(config), *overrides]
    process: asyncio.subprocess.Process | ForkedService
    output: asyncio.StreamReader | None
    pipe: asyncio.BaseTransport | None = None
    if has_own_memory:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.reward", *words),
            cwd=REPOSITORY,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        output = process.stderr
    else:
        process, output, pipe = await fork_service(
            "services.reward", words, {"OMP_NUM_THREADS": "1"}
        )
    assert output is not None
    log: list[str] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            tasks.create_task(_read_log(output, log, address))
            async with asyncio.timeout(START_TIMEOUT_S):
                bound_to = await address
            async with grpc.aio.insecure_channel(bound_to) as channel:
                stub = reward_pb2_grpc.RewardServiceStub(channel)
                yield RewardProcess(process, stub, log)
            if process.returncode is None:
                process.kill()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        if pipe is not None:
            pipe.close()


async def _read_log(
    output: asyncio.StreamReader, log: list[str], address: asyncio.Future[str]
) -> None:
    while line := (await output.readline()).decode():
        log.append(line)
        if not address.done() and (found := LISTENING.search(line)):
            address.set_result(found.group(1))
    if not address.done():
        address.set_exception(RuntimeError("".join(log)))


async def failed_start(config: Path, *overrides: str) -> tuple[int, str]:
    """Start a service that is meant to refuse; returns exit code and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.reward", "--config", str(config), *overrides),
        cwd=REPOSITORY,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_TIMEOUT_S):
        _, error = await process.communicate()
    assert process.returncode is not None
    return process.returncode, error.decode()


def turn(content: str) -> common_pb2.ChatMessage:
    """A user turn."""
    return common_pb2.ChatMessage(role="user", content=content)


def own_children() -> list[int]:
    """Pids of this process's children, without those that serve `tests.support.preloaded`."""
    kept = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    found = []
    for pid in children_of(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            line = Path(f"/proc/{pid}/cmdline").read_text()
            if not any(name in line for name in kept):
                found.append(pid)
    return found

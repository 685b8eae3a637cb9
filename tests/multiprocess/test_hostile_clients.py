"""Callers that speak no gRPC, send nothing, read nothing or vanish cost nobody else anything."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tests.support.replica_process import ReplicaProcess, hold, replica_process
from tests.support.reward_process import RewardProcess, reward_process, turn
from tests.support.reward_scenarios import mixed, until
from tests.support.scripted_rollout import ScriptedReplica, scripted_replicas

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
WAIT_S = 240.0
CALLER = """
import sys, time
import grpc
path, address, request = sys.argv[1], sys.argv[2], bytes.fromhex(sys.argv[3])
def requests():
    yield request
    time.sleep(1000)
with grpc.insecure_channel(address) as channel:
    if "Submit" in path:
        call = channel.stream_stream(path)(requests())
    else:
        call = channel.unary_stream(path)(request)
    next(call)
    print("answered", flush=True)
    time.sleep(1000)
"""


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@asynccontextmanager
async def caller(
    path: str, address: str, request: bytes
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A caller of its own process that has got its first answer."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CALLER, path, address, request.hex()),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            assert await process.stdout.readline() == b"answered\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def prompt(prompt_id: str) -> reward_pb2.SubmitPromptsRequest:
    return reward_pb2.SubmitPromptsRequest(
        prompt_id=prompt_id,
        messages=[turn("answer=1 right=2")],
        data_source="math_dapo",
        ground_truth="1",
    )


def address_of(service: RewardProcess) -> str:
    return next(line for line in service.log if "listening on" in line).split()[-1]


async def is_well(service: RewardProcess) -> bool:
    item = reward_pb2.ScoreItem(data_source="math_dapo", response="Answer: 3", ground_truth="3")
    answer = await service.stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=WAIT_S)
    return bool(answer.results[0].score.score == 1.0)


def first_bytes(seed: int) -> list[bytes]:
    rng = random.Random(seed)
    return [
        b"",
        PREFACE[:7],
        PREFACE,
        PREFACE + SETTINGS,
        PREFACE + SETTINGS + b"\xff" * 100,
        PREFACE + SETTINGS + bytes([0xFF, 0xFF, 0xFF, 1, 4, 0, 0, 0, 1]),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        *(rng.randbytes(size) for size in (1, 24, 1000, 60_000)),
        *(PREFACE + SETTINGS + rng.randbytes(size) for size in (9, 500)),
    ]


async def test_bytes_that_are_no_grpc_take_no_file_and_no_service_from_others(
    configure: Callable[..., Path],
) -> None:
    async with reward_process(configure(mixed(4))) as service:
        assert await is_well(service)
        host, port = address_of(service).rsplit(":", 1)
        before = files_of(service.process.pid)
        writers = []
        for sent in first_bytes(seed=0) * 8:
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            writers.append(writer)
        assert await is_well(service)  # while all of them are connected
        for writer in writers:
            writer.transport.abort()
        await until(lambda: files_of(service.process.pid) <= before + 2)
        assert await is_well(service)


async def test_a_prompt_outlives_the_client_that_was_killed_and_its_outcome_can_be_had(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(0), data__train_files=None, data__train_batch_size=1)
    path = "/sluice.api.reward.v1.RewardService/SubmitPrompts"
    async with scripted_replicas(replica), reward_process(config) as service:
        sent = prompt("mine")
        async with caller(path, address_of(service), sent.SerializeToString()) as process:
            process.send_signal(signal.SIGKILL)
            await process.wait()
        await service.announce(0, [replica])
        batch = await service.take(1, 0)
        await service.acknowledge(batch, 1)
        call = service.stub.SubmitPrompts(timeout=WAIT_S)
        await call.write(sent)
        await call.done_writing()
        events = [event async for event in call]
    assert [group.prompt_id for group in batch.groups] == ["mine"]
    assert events[-1].outcome.end == reward_pb2.PROMPT_END_TRAINED


async def test_streams_that_fall_silent_are_few_and_take_nobodys_place(
    configure: Callable[..., Path],
) -> None:
    async with reward_process(configure(mixed(4)), "sluice.limits.max_submit_streams=8") as service:
        silent = [service.stub.SubmitPrompts(timeout=3 * WAIT_S) for _ in range(8)]
        for number, call in enumerate(silent):
            await call.write(prompt(f"the last word of {number}"))
            assert (await call.read()).HasField("receipt")
        async with asyncio.timeout(WAIT_S):
            code, details = await _first_refusal(service)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_submit_streams" in details
        assert await is_well(service)
        for call in silent:
            call.cancel()

        async def is_taken() -> bool:
            call = service.stub.SubmitPrompts(timeout=WAIT_S)
            try:
                await call.write(prompt("late"))
                return bool((await call.read()).HasField("receipt"))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AttributeError):
                return False
            finally:
                call.cancel()

        async with asyncio.timeout(WAIT_S):
            while not await is_taken():
                await asyncio.sleep(0.05)


async def _first_refusal(service: RewardProcess) -> tuple[grpc.StatusCode, str]:
    while True:
        call: Any = service.stub.SubmitPrompts(timeout=1)
        code = await call.code()
        if code is not grpc.StatusCode.DEADLINE_EXCEEDED:
            return code, str(await call.details())


async def test_a_caller_that_is_killed_in_the_middle_of_its_samples_frees_their_slots(
    small_replica: tuple[Path, ReplicaProcess],
) -> None:
    folder, replica = small_replica
    request = rollout_pb2.GenerateRequest(sample_indexes=range(8))
    request.prompt.tokens.token_ids_u32 = bytes([3, 0, 0, 0])
    request.sampling.ignore_eos = True
    path = "/sluice.api.rollout.v1.RolloutService/Generate"

    with hold(folder):  # so that they end only with their caller
        async with caller(path, replica.address, request.SerializeToString()) as process:
            async with asyncio.timeout(WAIT_S):
                while await replica.samples() < 8:
                    await asyncio.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            await process.wait()
            async with asyncio.timeout(WAIT_S):
                while await replica.samples():
                    await asyncio.sleep(0.01)
    request.sampling.max_tokens = 2
    async with grpc.aio.insecure_channel(replica.address) as channel:
        stub: Any = rollout_pb2_grpc.RolloutServiceStub(channel)
        events = [event async for event in stub.Generate(request, timeout=WAIT_S)]
    assert sum(len(event.rollouts) for event in events) == 8


@pytest.fixture
async def small_replica(tmp_path: Path) -> AsyncIterator[tuple[Path, ReplicaProcess]]:
    """A replica and its folder."""
    from tests.support.causal_lms import save_config

    folder = save_config("qwen3", tmp_path)
    async with replica_process(folder, "small", 0.01) as replica:
        yield folder, replica

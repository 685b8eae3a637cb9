"""A reward service that is killed at any moment loses no prompt and trains none twice."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.api.reward.v1 import reward_pb2
from sluice.types import TrainBatch
from tests.support.reward_process import RewardProcess, failed_start, reward_process, turn
from tests.support.reward_scenarios import WAIT_S, identity, mixed
from tests.support.scripted_rollout import ScriptedReplica, scripted_replicas

BATCH = 8
ROWS = 244
PROMPTS = 40
EXHAUSTED = "the data set is exhausted"


def ids(batch: TrainBatch) -> list[str]:
    return [group.prompt_id for group in batch.groups]


def request(name: str, content: str = "answer=1 right=2") -> reward_pb2.SubmitPromptsRequest:
    return reward_pb2.SubmitPromptsRequest(
        prompt_id=name, messages=[turn(content)], data_source="math_dapo", ground_truth="1"
    )


async def submit(service: RewardProcess, *requests: reward_pb2.SubmitPromptsRequest) -> Any:
    """A call that has its receipts, and the receipts."""
    call = service.stub.SubmitPrompts(timeout=WAIT_S)
    receipts = []
    for each in requests:
        await call.write(each)
        receipts.append((await call.read()).receipt)
    return call, receipts


class Client:
    """Submits prompts one after the other until each has its receipt."""

    def __init__(self) -> None:
        self.sequences: dict[str, int] = {}

    async def run(self, service: RewardProcess) -> None:
        while len(self.sequences) < PROMPTS:
            name = f"client-{len(self.sequences)}"
            _, (receipt,) = await submit(service, request(name))
            assert receipt.HasField("sequence"), receipt.refused_because
            self.sequences[name] = receipt.sequence


class Trainer:
    """Repeats, like the real one, what it could not tell, and trains a batch once it has it."""

    def __init__(self, replica: ScriptedReplica) -> None:
        self.replica, self.version = replica, 0
        self.in_hand: TrainBatch | None = None
        self.trained: list[str] = []

    async def run(self, service: RewardProcess) -> None:
        while True:
            if self.in_hand is None:
                await service.announce(self.version, [self.replica])
                self.in_hand = await service.take(self.version + 1, self.version)
                self.trained += ids(self.in_hand)
            await service.acknowledge(self.in_hand, self.version + 1)
            self.version, self.in_hand = self.version + 1, None


async def quietly(work: Any) -> None:
    """A peer's calls fail when the service is killed."""
    try:
        await work
    except grpc.aio.AioRpcError as error:
        is_gone = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
        # A message that is written while the connection breaks: gRPC's own error.
        is_gone = is_gone or "execute_batch" in error.debug_error_string()
        if not is_gone and EXHAUSTED not in str(error.details()):
            raise


async def live(service: RewardProcess, trainer: Trainer, client: Client, seconds: float) -> None:
    """Trains and submits for a while, then kills the service in the middle of it."""
    async with asyncio.TaskGroup() as tasks:
        working = [
            tasks.create_task(quietly(trainer.run(service))),
            tasks.create_task(quietly(client.run(service))),
        ]
        await asyncio.sleep(seconds)
        service.process.kill()
        await service.wait()
        await asyncio.wait(working)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_kills_at_random_moments_lose_and_double_no_prompt(
    configure: Callable[..., Path], max_staleness: int
) -> None:
    moments = random.Random(max_staleness)

    async def take_a_moment(*_: object) -> None:
        await asyncio.sleep(moments.random() * 0.004)

    replica = ScriptedReplica(before_sample=take_a_moment)
    trainer, client = Trainer(replica), Client()
    config = configure(mixed(ROWS), sluice__asynchrony__max_staleness=max_staleness)
    async with scripted_replicas(replica):
        for _ in range(3):
            async with reward_process(config) as service:
                await service.status()
                await live(service, trainer, client, 0.05 + moments.random() * 0.6)
        async with reward_process(config) as service:
            await client.run(service)
            with pytest.raises(grpc.aio.AioRpcError, match=EXHAUSTED):
                await trainer.run(service)
            status = await service.status()
    total = ROWS + PROMPTS
    assert len(trainer.trained) == len(set(trainer.trained)) == total // BATCH * BATCH
    assert len(set(client.sequences.values())) == PROMPTS
    assert status.prompts_submitted == total
    assert status.prompts_by_end["trained"] == len(trainer.trained)
    assert status.prompts_pending == total % BATCH
    assert status.statistics["reward/groups_acknowledged"] == len(trainer.trained)


async def test_a_client_that_asks_again_after_a_restart_learns_what_became_of_its_prompts(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure([], data__train_files=None, data__train_batch_size=1)
    asked = [request("kept"), request("wrong", "answer=1 right=0"), request("late")]
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            call, before = await submit(service, *asked[:2])
            await service.announce(0, [replica])
            batch = await service.take(1, 0)
            await service.acknowledge(batch, 1)
            await service.announce(1, [replica])
            reported = {(await call.read()).outcome.prompt_id for _ in range(2)}
            await submit(service, asked[2])
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            call, (other,) = await submit(service, request("kept", "another question"))
            assert "used before" in other.refused_because
            call = service.stub.SubmitPrompts(iter(asked), timeout=WAIT_S)
            events = [await call.read() for _ in range(5)]
            await service.announce(1, [replica])
            late = await service.take(2, 1)
            await service.acknowledge(late, 2)
            events.append(await call.read())
            assert await call.read() is grpc.aio.EOF
            status = await service.status()
    assert reported == {"kept", "wrong"}
    receipts = {e.receipt.prompt_id: e.receipt for e in events if e.HasField("receipt")}
    outcomes = {e.outcome.prompt_id: e.outcome for e in events if e.HasField("outcome")}
    assert [receipts[r.prompt_id].sequence for r in before] == [r.sequence for r in before]
    assert outcomes["kept"].end == reward_pb2.PROMPT_END_TRAINED
    assert (outcomes["kept"].step, list(outcomes["kept"].rewards)) == (1, [1.0, 1.0, -1.0, -1.0])
    assert outcomes["wrong"].end == reward_pb2.PROMPT_END_FILTERED_ALL_WRONG
    assert outcomes["late"].step == 2
    assert status.prompts_submitted == 3


async def test_a_batch_acknowledged_after_a_restart_is_trained_and_not_sampled_again(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(24), data__shuffle=False)
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await submit(service, request("mine"))
            await service.announce(0, [replica])
            batch = await service.take(1, 0)
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            num_calls = len(replica.calls)
            await service.announce(0, [replica])
            await asyncio.sleep(0.3)
            # The trainer may hold the batch: groups of its version would be too old for the next.
            assert len(replica.calls) == num_calls
            for _ in range(2):  # repeated like one whose answer was lost
                await service.acknowledge(batch, 1)
            await service.announce(1, [replica])
            following = await service.take(2, 1)
            status = await service.status()
    assert "mine" in ids(batch)
    assert sorted(ids(batch)[1:] + ids(following)) == sorted(f"data-{i}" for i in range(15))
    assert status.prompts_by_end["trained"] == BATCH
    assert status.prompts_by_end["dropped_stale"] == 0
    assert status.statistics["reward/groups_acknowledged"] == BATCH


@pytest.mark.parametrize("service_dies", [True, False])
async def test_a_trainer_that_resumes_gets_the_prompts_of_later_steps_again(
    configure: Callable[..., Path], *, service_dies: bool
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(42), data__shuffle=False)
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            batches = []
            for step in (1, 2, 3):
                await submit(service, *(request(f"step-{step}-{i}") for i in range(2)))
                batches.append(await service.take(step, step - 1))
                await service.acknowledge(batches[-1], step)
                await service.announce(step, [replica])
            if service_dies:
                service.process.kill()
                await service.wait()
            else:
                await resume(service, replica, batches)
        if service_dies:
            async with reward_process(config) as service:
                await resume(service, replica, batches)


async def resume(
    service: RewardProcess, replica: ScriptedReplica, batches: list[TrainBatch]
) -> None:
    """Another trainer resumes from the checkpoint of step 1."""
    checkpoint = batches[0].progress
    await service.announce(1, [replica], instance_id="trainer-2", resume_from=checkpoint)
    again: list[str] = []
    for step in range(2, 7):
        batch = await service.take(step, step - 1)
        await service.acknowledge(batch, step)
        again += ids(batch)
        await service.announce(step, [replica], instance_id="trainer-2", resume_from=batch.progress)
    await service.status()
    clients = {f"step-{step}-{i}" for step in (1, 2, 3) for i in range(2)}
    assert sorted([*ids(batches[0]), *again]) == sorted(clients | {f"data-{i}" for i in range(42)})


async def test_a_run_from_scratch_in_the_folder_of_an_old_one_draws_the_same_batch(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(40))
    async with scripted_replicas(replica):
        async with reward_process(config) as service:
            await service.announce(0, [replica])
            first = await service.take(1, 0)
            await service.acknowledge(first, 1)
            await service.announce(1, [replica])
            await service.take(2, 1)
            service.process.kill()
            await service.wait()
        async with reward_process(config) as service:
            await service.announce(0, [replica], instance_id="trainer-2")
            again = await service.take(1, 0)
            await service.status()
    assert identity(again) == identity(first)


async def test_a_trainer_that_begins_again_without_a_checkpoint_gets_every_prompt_again(
    configure: Callable[..., Path],
) -> None:
    replica = ScriptedReplica()
    config = configure(mixed(38), data__shuffle=False)
    async with scripted_replicas(replica), reward_process(config) as service:
        await service.announce(0, [replica])
        await submit(service, request("one"), request("two"))
        for step in (1, 2):
            batch = await service.take(step, step - 1)
            await service.acknowledge(batch, step)
            await service.announce(step, [replica])
        again: list[str] = []
        for step in range(1, 6):
            await service.announce(step - 1, [replica], instance_id="trainer-2")
            batch = await service.take(step, step - 1)
            await service.acknowledge(batch, step)
            again += ids(batch)
        await service.status()
    assert sorted(again) == sorted(["one", "two", *(f"data-{i}" for i in range(38))])


async def test_a_damaged_ledger_is_refused_at_the_start_with_the_remedy(
    configure: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "run" / "reward" / "ledger.sqlite"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no ledger" * 999)
    code, error = await failed_start(configure(mixed(8)))
    assert code == 1
    assert "ledger.sqlite: the ledger cannot be used: file is not a database" in error
    assert "move it away" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
async def test_the_ledger_is_in_the_runs_folder_unless_it_is_to_be_in_memory(
    configure: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    config = configure(mixed(8), sluice__reward__ledger=kind)
    async with reward_process(config) as service:
        await submit(service, request("mine"))
        assert await service.stop() == 0
    path = tmp_path / "run" / "reward" / "ledger.sqlite"
    assert path.exists() == (kind == "sqlite")
    if kind == "sqlite":
        with closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT prompt_id FROM pending").fetchall() == [("mine",)]

"""Samples of replicas that die, hang, lag behind or leave continue elsewhere, with their tokens.

Real replicas, each with its engine and the same weights in float32, and the real reward service.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sluice.types import TrainBatch
from tests.support.causal_lms import save_config
from tests.support.replica_process import ReplicaProcess, hold, replica_process
from tests.support.reward_process import RewardProcess, reward_process, write_config
from tests.support.reward_scenarios import SAMPLES, identity, mixed, run_tree, train, until
from tests.support.scripted_rollout import Call, ScriptedReplica, scripted_replicas

GROUPS, MAX_TOKENS, MIDDLE = 4, 100, 20
PINGED = ("one: failed while generating", "ping timeout")
LONG_S = 20.0
"""More than a busy machine keeps a process waiting."""
SETTINGS: dict[str, Any] = {
    "data__train_batch_size": GROUPS,
    "data__max_response_length": MAX_TOKENS,
    "algorithm__filter_groups__enable": False,
    # Under S = 0 no stream is moved for being slow.
    "sluice__asynchrony__max_staleness": 1,
    "sluice__reward__partial_interval_ms": 50,
    "sluice__reward__linger_ms": 0,
}
_unbroken: list[list[tuple[str, list[list[int]]]]] = []


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config("qwen3", tmp_path_factory.mktemp("model"))


@dataclass
class Run:
    """A reward service and its replicas."""

    service: RewardProcess
    replicas: dict[str, ReplicaProcess]
    batch: TrainBatch | None = None
    status: Any = None
    sampled: dict[str, int] = field(default_factory=dict)

    async def announce(self, *names: str) -> None:
        await self.service.announce(0, [self.replicas[name] for name in names])

    async def take(self) -> None:
        """Take the batch, and see what was needed for it."""
        self.batch = await self.service.take(1, 0)
        self.status = await self.service.status()
        self.sampled["two"] = await self.replicas["two"].generated_tokens()

    @property
    def tokens(self) -> list[tuple[str, list[list[int]]]]:
        assert self.batch is not None
        return sorted(identity(self.batch))

    def lines(self, *words: str) -> list[str]:
        return [line for line in self.service.log if all(word in line for word in words)]


@asynccontextmanager
async def running(folder: Path, config: Path, **step_s: float) -> AsyncIterator[Run]:
    """Replicas by name with the time that their steps take at least, and a reward service."""
    async with AsyncExitStack() as stack:
        started = [replica_process(folder, name, seconds) for name, seconds in step_s.items()]
        replicas = {}
        for replica in started:
            process = await stack.enter_async_context(replica)
            replicas[process.name] = process
        service = await stack.enter_async_context(reward_process(config))
        yield Run(service, replicas)


def configuration(folder: Path, **settings: Any) -> Path:
    return write_config(
        folder / "run.yaml",
        run_tree(folder, mixed(GROUPS), sluice__log_level="DEBUG", **SETTINGS, **settings),
    )


@pytest.fixture
async def unbroken(tmp_path: Path, model_folder: Path) -> list[tuple[str, list[list[int]]]]:
    """What one replica draws that nothing happens to."""
    if not _unbroken:
        folder = tmp_path / "unbroken"  # a run of its own, with a ledger of its own
        folder.mkdir()
        async with running(model_folder, configuration(folder), two=0.0) as run:
            await run.announce("two")
            await run.take()
        _unbroken.append(run.tokens)
    return _unbroken[0]


async def killed(run: Run) -> None:
    await run.announce("one", "two")
    run.replicas["one"].send(signal.SIGKILL)


async def hung(run: Run) -> None:
    await run.announce("one", "two")
    run.replicas["one"].send(signal.SIGSTOP)


async def drained(run: Run) -> None:
    await run.announce("two")


@pytest.mark.parametrize(
    ("misfortune", "words"),
    [
        (killed, ("one: ", "the group: ", "tokens", "version 0")),
        (hung, ("replica one is stalled", "nothing for ", " tokens; ", "running", "version 0")),
        (drained, ("replica one is removed", "its samples continue elsewhere")),
    ],
    ids=["killed", "hung", "drained"],
)
async def test_samples_continue_elsewhere_token_for_token(
    misfortune: Callable[[Run], Awaitable[None]],
    words: tuple[str, ...],
    tmp_path: Path,
    model_folder: Path,
    unbroken: list[tuple[str, list[list[int]]]],
) -> None:
    # Sooner than a ping of gRPC finds a process that hangs: that is another reason.
    stalls = {"sluice__reward__stall_timeout_s": 1.0} if misfortune is hung else {}
    config = configuration(tmp_path, **stalls)
    async with running(model_folder, config, one=0.02, two=0.0) as run:

        async def some_tokens_came() -> bool:
            received = (await run.service.status()).statistics["reward/tokens/received"]
            return bool(received >= MIDDLE * SAMPLES * GROUPS)

        # No sample is whole before the test acts.
        with hold(model_folder, MAX_TOKENS - 1):
            await run.announce("one")
            await until(some_tokens_came)
            await misfortune(run)
        await run.take()

        async def is_reported() -> bool:
            reported = run.lines("WARNING", "replica one: streams of", "samples continue elsewhere")
            # On a busy machine those that hang, or seem to, may stall one after the other.
            return 1 <= len(reported) < (GROUPS if misfortune is killed else 1000)

        if misfortune is not drained:
            await until(is_reported)
    assert run.tokens == unbroken
    for group in range(GROUPS):
        pinged = misfortune is hung and run.lines(f"prompt data-{group}: ", *PINGED)
        assert pinged or run.lines(f"prompt data-{group}: ", *words)
    assert not run.lines("WARNING", "prompt data-")
    assert not run.lines("sluice.security")
    assert sum(run.status.prompts_by_end.values()) == 0
    assert run.status.statistics["reward/samples_failed"] == 0
    # Without the tokens of replica one the other one would have had to draw all of them.
    in_all = sum(len(tokens) for _, samples in run.tokens for tokens in samples)
    assert 0 < run.sampled["two"] < in_all


async def test_samples_of_a_slow_replica_move_to_a_faster_one(
    tmp_path: Path, model_folder: Path, unbroken: list[tuple[str, list[list[int]]]]
) -> None:
    async with running(model_folder, configuration(tmp_path), one=1.5, two=0.01) as run:
        await run.announce("one", "two")
        await run.take()
    assert run.tokens == unbroken
    moved = run.lines("replica one is slow", "its samples continue elsewhere")
    assert 1 <= len(moved) <= GROUPS
    assert len({line.split("prompt ")[1].split(":")[0] for line in moved}) == len(moved)
    assert not run.lines("stalled")
    assert not run.lines("replica two is")


async def test_a_group_with_a_stuck_sample_is_trained_with_the_others_at_its_deadline(
    configure: Callable[..., Path],
) -> None:
    async def stick(_replica: ScriptedReplica, call: Call, index: int) -> None:
        if index == SAMPLES - 1 and "answer=3 " in call.content:
            await asyncio.Event().wait()

    replica = ScriptedReplica(name="sticky", before_sample=stick)
    config = configure(mixed(8), sluice__reward__group_deadline_s=LONG_S)
    async with scripted_replicas(replica), reward_process(config) as service:
        (batch,) = await train(service, [replica], 1)
        status = await service.status()
    assert {group.prompt_id: len(group.rollouts) for group in batch.groups} == {
        f"data-{i}": SAMPLES - (i == 3) for i in range(8)
    }
    assert status.statistics["reward/samples_failed"] == 1
    assert status.prompts_by_end["trained"] == 8
    reported = [line for line in service.log if "prompt data-3" in line]
    assert any("replica sticky" in line and "nothing for" in line for line in reported)
    assert any(
        "group_deadline_s" in line and "3 of 4 samples finished" in line for line in reported
    )

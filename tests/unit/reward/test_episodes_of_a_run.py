"""Groups of episodes in the reward service: batches, ages, accounts, validation, closed ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.reward.app import RewardApp
from services.reward.episodes.drivers import EpisodeFailedError, EpisodeTask
from services.reward.episodes.loop import EpisodeGenerator
from services.reward.generation.request import GroupRequest
from services.reward.groups.validation import ValidationOrder, Validator
from services.reward.records.group_log import SampleDumps
from sluice.algorithm.episode_rules import Observation
from sluice.config.run import RunConfig
from sluice.errors import EngineError
from sluice.types import (
    Answer,
    ChatMessage,
    FinishReason,
    PromptEnd,
    SamplingParams,
    Scored,
)
from tests.support.reward_app import (
    ScriptedClient,
    publish,
    running_app,
    settled,
    submit,
    train,
)
from tests.support.scripted_environment import index_of
from tests.support.validation_rows import Rows

MORE = Observation((ChatMessage("user", "And?"),))
MIXED = "answer=1 right=1"


@dataclass
class Worlds:
    """Environments in this process: episodes of two turns, in which sample 0 alone is right.

    `gates` hold the first answer of a sample back, by prompt and index; `broken` ones fail at it.
    """

    gates: dict[tuple[str, int], asyncio.Event] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    open_now: set[str] = field(default_factory=set)
    tasks: list[EpisodeTask] = field(default_factory=list)

    def begin(self, task: EpisodeTask) -> World:
        self.tasks.append(task)
        return World(self, task)


@dataclass
class World:
    worlds: Worlds
    task: EpisodeTask

    async def open(self) -> Observation:
        self.worlds.open_now.add(self.task.episode_id)
        return Observation()

    async def step(self, turn: int, _answer: Answer, _finish: FinishReason) -> Observation:
        index = index_of(self.task.episode_id)
        if (gate := self.worlds.gates.get((self.task.prompt.prompt_id, index))) and turn == 0:
            await gate.wait()
        if index in self.worlds.broken:
            raise EpisodeFailedError("environment at unix:one: gone")
        return Observation(done=True) if turn == 1 else MORE

    async def close(self) -> Scored | None:
        self.worlds.open_now.remove(self.task.episode_id)
        right = float(index_of(self.task.episode_id) == 0)
        return Scored(right, right, {"acc": right})

    async def abandon(self) -> None:
        self.worlds.open_now.discard(self.task.episode_id)


def config(**changes: Any) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": 3}},
        "algorithm": {"filter_groups": {"enable": True}},
        "sluice": {
            "asynchrony": {"max_staleness": 1},
            "environment": {"addresses": ["one:1"]},
            **changes,
        },
    }
    return msgspec.convert(tree, RunConfig)


def booked(app: RewardApp) -> float:
    totals = app.statistics()
    uses = sum(count for name, count in totals.items() if name.startswith("reward/tokens/"))
    return uses - 2 * totals["reward/tokens/received"]


async def test_a_batch_holds_episodes_with_the_scores_of_their_environment() -> None:
    client, worlds = ScriptedClient(), Worlds()
    async with running_app(config(), client, drivers=worlds) as app:
        submit(app, [MIXED])
        await publish(app, client, 0)
        batch = await train(app, client, 1)
        assert booked(app) == 0.0
    (group,) = batch.groups
    assert [scored.score for scored in group.scores] == [1.0, 0.0, 0.0]
    for rollout in group.rollouts:
        assert [turn.parent for turn in rollout.turns] == [None, 0]
        assert rollout.turns[1].context.size == 1
    # The first turns of all samples are one request.
    assert [indexes for _, _, indexes in client.calls[:1]] == [(0, 1, 2)]
    assert sorted(indexes for _, _, indexes in client.calls[1:]) == [(0,), (1,), (2,)]
    assert batch.statistics["train/episode_turns_mean"] == 2.0
    assert batch.statistics["train/trained_tokens"] == 3 * 2 * 8
    assert worlds.open_now == set()
    assert len({task.seed for task in worlds.tasks}) == 1


async def test_a_sample_that_no_replica_continues_fails_and_its_environment_is_closed() -> None:
    async def break_one(_name: str, request: GroupRequest, index: int) -> None:
        if request.turn is not None and (request.turn.number, index) == (1, 2):
            raise EngineError("out of memory")

    client, worlds = ScriptedClient(before_sample=break_one), Worlds()
    async with running_app(config(), client, drivers=worlds) as app:
        submit(app, [MIXED])
        await publish(app, client, 0)
        batch = await train(app, client, 1)
        assert booked(app) == 0.0
    assert [rollout.sample_index for rollout in batch.groups[0].rollouts] == [0, 1]
    assert batch.statistics["train/outcomes/engine_error"] == 1
    assert worlds.open_now == set()


async def test_a_failed_environment_leaves_its_sample_out_of_the_group() -> None:
    client, worlds = ScriptedClient(), Worlds(broken={2})
    async with running_app(config(), client, drivers=worlds) as app:
        submit(app, [MIXED])
        await publish(app, client, 0)
        batch = await train(app, client, 1)
        assert booked(app) == 0.0
        assert app.statistics()["reward/tokens/failed"] == 8
    assert [rollout.sample_index for rollout in batch.groups[0].rollouts] == [0, 1]
    assert batch.statistics["train/outcomes/environment"] == 1
    assert worlds.open_now == set()


async def test_an_episode_with_a_turn_that_is_too_old_is_never_trained() -> None:
    """Its first turn is of version 0, and version 2 is trained on when its second would come."""
    gate = asyncio.Event()
    client, worlds = ScriptedClient(), Worlds(gates={("p0", 1): gate})
    async with running_app(
        config(asynchrony={"max_staleness": 1, "on_stale": "drop"}), client, drivers=worlds
    ) as app:
        submit(app, [MIXED] * 3)
        await publish(app, client, 0)
        for step in (1, 2):
            batch = await train(app, client, step)
            assert batch.groups[0].prompt_id != "p0"
        gate.set()
        await settled(lambda: app.ledger.by_end[PromptEnd.DROPPED_STALE] == 1)
        totals = app.statistics()
        assert booked(app) == 0.0
        assert totals["reward/tokens/stale"] >= 3 * 8 + 2 * 8
        assert totals["reward/tokens/stale"] == totals["reward/tokens/received"] - 2 * 3 * 2 * 8
    assert worlds.open_now == set()


async def test_another_trainer_closes_the_episodes_that_run() -> None:
    gate = asyncio.Event()
    client, worlds = ScriptedClient(), Worlds(gates={("p0", 1): gate})
    async with running_app(config(), client, drivers=worlds) as app:
        submit(app, [MIXED])
        await publish(app, client, 0)
        await settled(lambda: len(client.calls) == 3)
        before = set(worlds.open_now)
        assert before
        client.versions["a"] = 0
        await app.loop.announce("another", 0, [*app.queue.fleet.announced], None)
        assert not before & worlds.open_now
        gate.set()
        batch = await app.loop.batches.take(1, 0, 60)
    assert len(batch.groups[0].rollouts) == 3
    assert worlds.open_now == set()


async def test_a_validation_plays_episodes_too() -> None:
    client, worlds = ScriptedClient(), Worlds()
    async with running_app(config(), client, drivers=worlds) as app:
        await publish(app, client, 0)
        validation = Validator(
            lambda: Rows(2),
            app.generator,
            app.grader,
            SampleDumps(None, None),
            lambda: 0,
        )
        sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, seed=1)
        found = await validation.run(ValidationOrder(0, 2, sampling, 1), 60.0)
    assert found.metrics["val-core/math_dapo/acc/mean@2"] == 0.5
    assert found.num_generated_tokens == 2 * 2 * 2 * 8
    assert worlds.open_now == set()


async def test_without_an_environment_the_dispatcher_itself_generates() -> None:
    async with running_app(config(), ScriptedClient()) as app:
        assert app.generator is app.dispatcher
    async with running_app(config(), ScriptedClient(), drivers=Worlds()) as app:
        assert isinstance(app.generator, EpisodeGenerator)

"""A group's deadline and budget hold for all of its requests together; what is over is judged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.reward.app import RewardApp
from services.reward.generation.request import GroupRequest
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.types import PromptEnd
from tests.support.reward_app import (
    InlineScorer,
    ScriptedClient,
    replica,
    running_app,
    settled,
    submit,
)

MIXED = "answer=1 right=1"  # the first of its samples is right
DEADLINE_S = 1.0
pytestmark = pytest.mark.usefixtures("waits_take_no_time")


def config(*, samples: int = 4, probes: int = 2, estimator: str = "grpo") -> RunConfig:
    tree = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": samples}},
        "algorithm": {"filter_groups": {"enable": True}, "adv_estimator": estimator},
        "sluice": {
            "asynchrony": {"max_staleness": 1},
            "sampling": {
                "strategy": "staged",
                "probe_samples": probes,
                "exploration": 1e-9,
                "coverage_guard": False,
            },
            "reward": {"group_deadline_s": DEADLINE_S},
        },
    }
    return msgspec.convert(tree, RunConfig)


@pytest.fixture
def late_grades(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grades of the first samples come when the group has taken its time."""

    async def score(scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        await asyncio.sleep(2 * DEADLINE_S)
        return tuple(scorer._score(item) for item in items)

    monkeypatch.setattr(InlineScorer, "score", score)


async def outcome_of(app: RewardApp, words: str) -> Any:
    session = submit(app, [words])
    await app.loop.announce("trainer", 0, [replica("a")], None)
    await settled(lambda: session.num_open == 0)
    await session.next_event()
    return await session.next_event()


async def test_a_group_over_after_its_first_samples_is_judged_without_asking_for_the_rest(
    late_grades: None,
) -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        submit(app, [MIXED])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        (group,) = (await app.loop.batches.take(1, 0, 60)).groups
    assert [r.sample_index for r in group.rollouts] == [0, 1]
    assert client.calls == [("a", "p0", (0, 1))]


async def test_no_strategy_is_asked_whether_a_group_that_is_over_continues(
    late_grades: None,
) -> None:
    client, asked = ScriptedClient(), []
    async with running_app(config(), client) as app:
        app.sources[""].strategy.after_probes = lambda *a, **_: asked.append(a)  # type: ignore[method-assign]
        outcome = await outcome_of(app, "answer=1 right=4")
    assert (outcome.end, outcome.detail) == (
        PromptEnd.FILTERED_ALL_RIGHT,
        "after 2 of 4 samples",
    )
    assert asked == []
    assert client.calls == [("a", "p0", (0, 1))]


async def test_a_group_over_without_its_baseline_fails(late_grades: None) -> None:
    client = ScriptedClient()
    async with running_app(config(estimator="remax"), client) as app:
        outcome = await outcome_of(app, MIXED)
    assert outcome.end is PromptEnd.DROPPED_FAILED
    assert "no score of the greedy response" in outcome.detail
    assert client.calls == [("a", "p0", (0, 1))]


async def test_parts_under_way_end_together_and_one_without_a_sample_spoils_no_group() -> None:
    async def hold(_name: str, _request: GroupRequest, index: int) -> None:
        if index >= 2:
            await asyncio.Event().wait()

    client = ScriptedClient(before_sample=hold)
    async with running_app(config(probes=3), client) as app:
        submit(app, [MIXED])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        (group,) = (await app.loop.batches.take(1, 0, 60)).groups
    assert [r.sample_index for r in group.rollouts] == [0, 1]
    assert client.calls == [("a", "p0", (0, 1, 2)), ("a", "p0", (3,))]

"""Groups that lost a sample: trained on by most losses, dropped where the loss compares all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sluice.config.derived import needs_greedy_baseline, needs_whole_groups
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.types import Failed, FailureKind, Scored
from tests.support.reward_app import InlineScorer, ScriptedClient, replica, running_app, submit

SAMPLES = 4
CRASH = "Answer: nothing"


def config(loss_mode: str, **algorithm: Any) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {
            "rollout": {"n": SAMPLES},
            "actor": {"policy_loss": {"loss_mode": loss_mode}},
        },
        "algorithm": {"filter_groups": {"enable": True}, **algorithm},
        "sluice": {"asynchrony": {"max_staleness": 1}},
    }
    return msgspec.convert(tree, RunConfig)


@pytest.fixture(autouse=True)
def scorer_that_loses_a_sample_of_p0(monkeypatch: pytest.MonkeyPatch) -> None:
    graded = InlineScorer._score

    def lose(self: InlineScorer, item: ScorerInput) -> Scored | Failed:
        if item.question.endswith("lost") and CRASH in item.response:
            return Failed(FailureKind.SCORER_CRASH, "exit code 3")
        return graded(self, item)

    monkeypatch.setattr(InlineScorer, "_score", lose)


async def first_batch(run: RunConfig) -> tuple[list[tuple[str, int]], dict[str, float]]:
    """Prompt and number of samples of each group, and the statistics."""
    client = ScriptedClient()
    async with running_app(run, client) as app:
        # Of p0's samples the wrong one is lost, of p1's and p2's none.
        submit(app, ["answer=1 right=3 lost", "answer=1 right=3", "answer=1 right=2"])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        batch = await app.loop.batches.take(1, 0, 60)
    return [(g.prompt_id, len(g.rollouts)) for g in batch.groups], dict(batch.statistics)


async def test_adpo_gets_only_groups_without_a_failed_sample() -> None:
    groups, statistics = await first_batch(config("adpo"))
    assert groups == [("p1", SAMPLES), ("p2", SAMPLES)]
    assert statistics["train/groups_failed"] == 1
    assert statistics["train/discarded_tokens/failed"] > 0


async def test_other_losses_train_on_what_is_left_of_a_group() -> None:
    run = config("vanilla", filter_groups={"enable": False})
    groups, statistics = await first_batch(run)
    assert groups == [("p0", SAMPLES - 1), ("p1", SAMPLES)]
    assert statistics["train/groups_failed"] == 0


def test_the_loss_in_use_decides_whether_groups_must_be_whole() -> None:
    assert needs_whole_groups(config("adpo"))
    assert needs_whole_groups(config("adpo", adv_estimator="grpo"))
    assert not needs_whole_groups(config("vanilla", adv_estimator="adpo"))
    assert not needs_whole_groups(config("adpo", rollout_correction={"bypass_mode": True}))


def test_remax_alone_needs_a_greedy_baseline() -> None:
    assert needs_greedy_baseline(config("vanilla", adv_estimator="remax"))
    assert not needs_greedy_baseline(config("vanilla", adv_estimator="rloo"))

"""Every token that is received is booked once, under what became of it, or it is pending."""

from __future__ import annotations

import asyncio
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.reward.app import RewardApp
from services.reward.generation.request import GroupProgress, GroupRequest
from services.reward.records.statistics import (
    GroupStatistics,
    TokenUse,
    repetition_share,
    uses_of_group,
)
from sluice.config.run import RunConfig
from sluice.errors import EngineError, SluiceError
from sluice.types import (
    Failed,
    FailureKind,
    GradedGroup,
    Outcome,
    Rollout,
    RolloutGroup,
    Scored,
)
from tests.support.client_prompt import client_prompt
from tests.support.reward_app import InlineScorer, ScriptedClient, replica, running_app, submit
from tests.support.scripted_rollout import PROMPT_TOKENS, answer_text, rollout_of

RIGHT = Scored(1.0, 1.0, {"acc": 1.0})
UNSCORED = Failed(FailureKind.SCORER_TIMEOUT, "")
ABORTED = Failed(FailureKind.ABORTED, "")


def graded(*samples: tuple[int, Outcome], greedy: int | None = None) -> GradedGroup:
    prompt = client_prompt()
    rollouts = tuple(rollout_of("", i, 0, 1, n) for i, (n, _) in enumerate(samples))
    group = RolloutGroup(prompt, PROMPT_TOKENS, rollouts)
    baseline = None
    if greedy is not None:
        alone = RolloutGroup(prompt, PROMPT_TOKENS, (rollout_of("", 0, 0, 2, greedy),))
        baseline = GradedGroup(alone, (RIGHT,))
    return GradedGroup(group, tuple(outcome for _, outcome in samples), baseline)


def test_a_trained_groups_tokens_are_distinguished_by_what_became_of_each_sample() -> None:
    group = graded((8, RIGHT), (4, UNSCORED), (2, ABORTED), greedy=16)
    found = uses_of_group(TokenUse.TRAINED, GroupProgress(num_received=31), group)
    assert found == {TokenUse.TRAINED: 24, TokenUse.FAILED: 4, TokenUse.ABORTED: 2 + 1}


def test_a_broken_off_group_is_of_one_use_but_for_what_was_thrown_away_before() -> None:
    tokens = GroupProgress(num_received=9, num_thrown_away=3)
    found = uses_of_group(TokenUse.STALE, tokens, None)
    assert found == Counter({TokenUse.STALE: 6, TokenUse.ABORTED: 3})


def test_samples_in_whose_places_others_were_generated_have_failed() -> None:
    tokens = GroupProgress(num_received=20, num_replaced=5)
    broken_off = uses_of_group(TokenUse.STALE, tokens, None)
    assert broken_off == Counter({TokenUse.STALE: 15, TokenUse.FAILED: 5})
    found = uses_of_group(TokenUse.TRAINED, tokens, graded((8, RIGHT), (7, RIGHT)))
    assert found == Counter({TokenUse.TRAINED: 15, TokenUse.FAILED: 5})


def test_an_interval_ends_and_the_totals_continue() -> None:
    statistics = GroupStatistics(Counter(), round_size=1, scorers=InlineScorer())
    statistics.note_validated(5)
    assert statistics.close_interval((), 0)["train/tokens/evaluation"] == 5
    statistics.note_validated(2)
    assert statistics.close_interval((), 0)["train/tokens/evaluation"] == 2
    assert statistics.totals()["reward/tokens/evaluation"] == 7


def balance(app: RewardApp) -> dict[str, float]:
    """The accounts at this moment, which must balance."""
    statistics = app.statistics()
    tokens = {
        name.removeprefix("reward/tokens/"): count
        for name, count in statistics.items()
        if name.startswith("reward/tokens/")
    }
    received = tokens.pop("received")
    assert sum(tokens.values()) == received
    assert all(count >= 0 for count in tokens.values())
    assert statistics["reward/prompts_lost"] == 0
    return tokens | {"received": received}


def config(strategy: str, on_stale: str, max_staleness: int) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 2},
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "algorithm": {"filter_groups": {"enable": True, "min_yield": 0}},
        "sluice": {
            "asynchrony": {"max_staleness": max_staleness, "on_stale": on_stale},
            "sampling": {"strategy": strategy, "probe_samples": 2},
            "reward": {"max_attempts": 2},
        },
    }
    return msgspec.convert(tree, RunConfig)


class Whims:
    """What happens at each sample, by a list of numbers; looks at the accounts every time."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers, self._at = numbers, 0
        self.app: RewardApp | None = None

    def next(self) -> int:
        self._at += 1
        return self._numbers[self._at % len(self._numbers)]

    async def before_sample(self, _name: str, _request: GroupRequest, _index: int) -> None:
        assert self.app is not None
        for _ in range(self.next() % 4):
            await asyncio.sleep(0)
            balance(self.app)
        if self.next() % 13 == 0:
            raise EngineError("the engine is on fire")

    def make(self, _name: str, request: GroupRequest, index: int) -> Rollout:
        text = answer_text(request.prompt.messages[-1].content, index)
        return rollout_of(text, index, 0, request.sampling.seed, 1 + self.next() % 7)


async def drive(whims: Whims, rules: RunConfig) -> dict[str, float]:
    client = ScriptedClient(before_sample=whims.before_sample, make=whims.make)
    async with running_app(rules, client) as app:
        whims.app = app
        submit(app, [f"answer=1 right={whims.next() % 5}" for _ in range(24)])
        trainer, version = "trainer-0", 0
        for turn in range(12):
            if whims.next() % 5 == 0:
                trainer = f"trainer-{turn + 1}"
            await app.loop.announce(trainer, version, [replica("a", version)], None)
            client.versions["a"] = version
            try:
                batch = await app.loop.batches.take(1, version, 0.02)
            except SluiceError:
                continue
            finally:
                balance(app)
            if whims.next() % 3:
                app.loop.batches.acknowledge(batch.batch_id, 1)
                balance(app)
        return balance(app)


@settings(max_examples=12, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 100), min_size=5, max_size=60),
    strategy=st.sampled_from(["stream", "staged", "rounds"]),
    on_stale=st.sampled_from(["wait", "drop"]),
    max_staleness=st.sampled_from([0, 1]),
)
def test_the_accounts_balance_at_every_instant(
    numbers: list[int], strategy: str, on_stale: str, max_staleness: int
) -> None:
    rules = config(strategy, on_stale, 0 if strategy == "rounds" else max_staleness)
    assert asyncio.run(drive(Whims(numbers), rules))["received"] >= 0


async def test_what_an_interval_received_and_trained_is_in_its_batchs_statistics() -> None:
    async with running_app(config("stream", "wait", 1), ScriptedClient()) as app:
        submit(app, ["answer=1 right=1", "answer=1 right=0"] * 4)
        await app.loop.announce("trainer", 0, [replica("a")], None)
        first = await app.loop.batches.take(1, 0, 60)
        app.loop.batches.acknowledge(first.batch_id, 1)
        await app.loop.announce("trainer", 1, [replica("a", 1)], None)
        second = await app.loop.batches.take(2, 1, 60)
    assert first.statistics["train/tokens/trained"] == 0
    assert second.statistics["train/tokens/trained"] == 2 * 4 * 8
    wrong = [b.statistics["train/tokens/filtered_all_wrong"] for b in (first, second)]
    assert sum(wrong) > 0
    assert first.statistics["train/generated_tokens"] >= 2 * 4 * 8 + wrong[0]


@pytest.mark.parametrize("use", TokenUse)
def test_every_use_is_a_counter_from_the_start(use: TokenUse) -> None:
    statistics = GroupStatistics(Counter(), round_size=1, scorers=InlineScorer())
    assert statistics.totals()[f"reward/tokens/{use}"] == 0


@pytest.mark.parametrize(
    ("tokens", "share"),
    [
        ([], 0.0),
        ([1, 2, 3], 0.0),
        ([1, 2, 3, 4, 5], 0.0),
        ([7] * 13, 0.9),
        ([1, 2, 3, 4, 1, 2, 3, 4], 0.2),
        ([4, 3, 2, 1, 1, 2, 3, 4], 0.0),
    ],
)
def test_repetition_counts_runs_of_four_tokens_that_occurred_before(
    tokens: list[int], share: float
) -> None:
    assert repetition_share(np.array(tokens, np.uint32)) == pytest.approx(share)

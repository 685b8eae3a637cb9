"""The way of one group: probes, the rest, one judgement; what it is to the staleness bound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.reward.app import RewardApp
from services.reward.generation.request import GroupRequest
from services.reward.group_table import GroupState
from services.reward.groups.run import merge_groups
from sluice.algorithm.groups.filter import GroupNeeds, filter_probes
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import DeadlineError, InvalidRequestError
from sluice.types import (
    Failed,
    FailureKind,
    GradedGroup,
    Outcome,
    PromptEnd,
    RolloutGroup,
    Scored,
    TrainBatch,
)
from tests.support.client_prompt import client_prompt
from tests.support.reward_app import (
    InlineScorer,
    ScriptedClient,
    replica,
    running_app,
    settled,
    submit,
)
from tests.support.scripted_rollout import PROMPT_TOKENS, rollout_of

RIGHT, WRONG = Scored(1.0, 1.0, {"acc": 1.0}), Scored(-1.0, -1.0, {"acc": 0.0})
UNSCORED = Failed(FailureKind.SCORER_TIMEOUT, "too slow")
MIXED = "answer=1 right=1"  # the first of its samples is right


def config(
    strategy: str = "staged",
    *,
    estimator: str = "grpo",
    samples: int = 4,
    probes: int = 2,
    **sections: Any,
) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": samples}},
        "algorithm": {"filter_groups": {"enable": True}, "adv_estimator": estimator},
        "sluice": {
            "asynchrony": {"max_staleness": 1},
            "sampling": {
                "strategy": strategy,
                "probe_samples": probes,
                "exploration": 1e-9,
                "coverage_guard": False,
            },
            **sections,
        },
    }
    return msgspec.convert(tree, RunConfig)


def stop_all(app: RewardApp) -> None:
    """No group with uniform probes continues."""
    app.sources[""].strategy.after_probes = lambda *_, **__: None  # type: ignore[method-assign]


def group_of(*outcomes: Outcome, first_index: int = 0, greedy: int = 0) -> GradedGroup:
    rollouts = tuple(
        rollout_of("", first_index + i, 0, 1, 2 + first_index + i) for i in range(len(outcomes))
    )
    group = RolloutGroup(client_prompt(), PROMPT_TOKENS, rollouts)
    if not greedy:
        return GradedGroup(group, outcomes)
    alone = RolloutGroup(client_prompt(), PROMPT_TOKENS, (rollout_of("", 0, 0, 2, greedy),))
    return GradedGroup(group, outcomes, GradedGroup(alone, (RIGHT,)))


def test_the_parts_of_a_group_are_joined_in_the_order_of_samples() -> None:
    rest, first = group_of(WRONG, UNSCORED, greedy=5), group_of(RIGHT, first_index=2)
    whole = merge_groups(first, rest)
    assert [r.sample_index for r in whole.group.rollouts] == [0, 1, 2]
    assert whole.outcomes == (WRONG, UNSCORED, RIGHT)
    assert [r.num_tokens for r in whole.group.rollouts] == [2, 3, 4]
    assert whole.greedy is rest.greedy


@pytest.mark.parametrize(
    ("outcomes", "whole_groups", "end"),
    [
        ((RIGHT, RIGHT), False, PromptEnd.FILTERED_ALL_RIGHT),
        ((WRONG, WRONG, UNSCORED), False, PromptEnd.FILTERED_ALL_WRONG),
        ((RIGHT, WRONG), False, None),
        ((RIGHT, UNSCORED), False, None),
        ((UNSCORED, UNSCORED), False, None),
        ((RIGHT, UNSCORED), True, PromptEnd.DROPPED_FAILED),
    ],
)
def test_probes_judge_a_group_only_where_the_rest_could_not_help_or_they_agree(
    outcomes: tuple[Outcome, ...], whole_groups: bool, end: PromptEnd | None
) -> None:
    needs = GroupNeeds(whole_groups=whole_groups)
    decision = filter_probes(group_of(*outcomes), metric="acc", needs=needs)
    assert (decision.end if decision else None) is end


async def first_batch(app: RewardApp) -> TrainBatch:
    await app.loop.announce("trainer", 0, [replica("a")], None)
    return await app.loop.batches.take(1, 0, 60)


async def test_a_staged_group_has_the_tokens_of_one_that_is_generated_at_once() -> None:
    batches = []
    for strategy in ("stream", "staged"):
        async with running_app(config(strategy), ScriptedClient()) as app:
            submit(app, [MIXED])
            batches.append(await first_batch(app))
    (whole,), (staged,) = (batch.groups for batch in batches)
    assert [r.token_ids.tolist() for r in whole.rollouts] == [
        r.token_ids.tolist() for r in staged.rollouts
    ]
    assert [s.score for s in staged.scores] == [1.0, -1.0, -1.0, -1.0]


async def test_a_group_stopped_after_its_probes_tells_its_client_how_many_were_generated() -> None:
    client = ScriptedClient()
    async with running_app(config(), client) as app:
        stop_all(app)
        session = submit(app, ["answer=1 right=2"])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: session.num_open == 0)
        await session.next_event()
        outcome: Any = await session.next_event()
    assert (outcome.end, outcome.detail) == (
        PromptEnd.FILTERED_ALL_RIGHT,
        "after 2 of 4 samples",
    )
    assert outcome.rewards == (1.0, 1.0)
    assert client.calls == [("a", "p0", (0, 1))]


async def test_the_greedy_response_is_generated_only_for_groups_that_continue() -> None:
    client = ScriptedClient()
    async with running_app(config(estimator="remax"), client) as app:
        stop_all(app)
        submit(app, ["answer=1 right=2", MIXED])
        (group,) = (await first_batch(app)).groups
    assert group.prompt_id == "p1"
    assert group.baseline_reward == 1.0
    assert sorted(client.calls) == [
        *(("a", "p0", (0, 1)),),
        *(("a", "p1", (0,)), ("a", "p1", (0, 1)), ("a", "p1", (2, 3))),
    ]


class HeldScorer:
    """Holds the grades of one prompt back, by its words."""

    def __init__(self, words: str) -> None:
        self._words, self.opened = words, asyncio.Event()

    async def __call__(self, scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        if items[0].question == self._words:
            await self.opened.wait()
        return tuple(scorer._score(item) for item in items)


async def test_a_group_that_continues_is_served_before_one_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grades, running = HeldScorer("answer=1 right=1 slow"), asyncio.Event()

    async def hold(_name: str, request: GroupRequest, _index: int) -> None:
        if request.prompt.prompt_id == "p1":
            await running.wait()

    async def score(scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        return await grades(scorer, items)

    monkeypatch.setattr(InlineScorer, "score", score)
    client = ScriptedClient(before_sample=hold)
    settings = config(asynchrony={"max_staleness": 7}, reward={"inflight_slack": 1.0})
    async with running_app(settings, client) as app:
        submit(app, ["answer=1 right=1 slow", *[MIXED] * 7])
        await app.loop.announce("trainer", 0, [replica("a", slots=2)], None)
        await settled(lambda: ("a", "p1", (0, 1)) in client.calls)  # the fleet is full
        grades.opened.set()
        await settled(lambda: app.queue.num_waiting == 1)
        running.set()
        await settled(lambda: app.groups.num_kept >= 3)
    order = [(prompt_id, indexes) for _, prompt_id, indexes in client.calls]
    assert order[:3] == [("p0", (0, 1)), ("p1", (0, 1)), ("p0", (2, 3))]


async def test_a_group_is_as_old_as_its_probes_when_its_rest_is_generated_by_a_newer_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grades, rest = HeldScorer("answer=1 right=1 slow"), asyncio.Event()

    async def hold(_name: str, request: GroupRequest, index: int) -> None:
        if request.prompt.prompt_id == "p0" and index >= 2:
            await rest.wait()

    async def score(scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        return await grades(scorer, items)

    monkeypatch.setattr(InlineScorer, "score", score)
    client = ScriptedClient(before_sample=hold)
    async with running_app(config(), client) as app:
        submit(app, ["answer=1 right=1 slow", MIXED, MIXED])
        assert (await first_batch(app)).groups[0].prompt_id == "p1"
        app.loop.batches.acknowledge(app.ledger.open_lease.batch_id, 1)  # type: ignore[union-attr]
        client.versions["a"] = 1
        await app.loop.announce("trainer", 1, [replica("a", 1)], None)
        grades.opened.set()
        await settled(lambda: ("a", "p0", (2, 3)) in client.calls)
        await settled(lambda: app.groups.num_kept == 1)
        assert app.groups["p0"].state is GroupState.GENERATING
        with pytest.raises(DeadlineError, match="generating 1 groups"):
            await app.loop.batches.take(2, 1, 0.2)
        rest.set()
        batch = await app.loop.batches.take(2, 1, 60)
        assert batch.groups[0].prompt_id == "p0"
        assert [r.oldest_version for r in batch.groups[0].rollouts] == [0, 0, 1, 1]
        assert batch.statistics["train/staleness_max"] == 1


class CountedGrades:
    """Grades as ever, and counts what is graded."""

    def __init__(self) -> None:
        self.num_graded = 0

    def __call__(self, scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        self.num_graded += len(items)
        return tuple(scorer._score(item) for item in items)


async def test_the_rest_of_a_group_does_not_wait_for_a_long_probe_once_two_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grades, long_probe = CountedGrades(), asyncio.Event()

    async def hold(_name: str, _request: GroupRequest, index: int) -> None:
        if index == 2:
            await long_probe.wait()

    async def score(scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        return grades(scorer, items)

    monkeypatch.setattr(InlineScorer, "score", score)
    client = ScriptedClient(before_sample=hold)
    async with running_app(config(samples=5, probes=3), client) as app:
        submit(app, [MIXED])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: ("a", "p0", (3, 4)) in client.calls)
        assert app.groups["p0"].state is GroupState.GENERATING
        assert app.groups.counts["grading"] == 0
        long_probe.set()
        (group,) = (await app.loop.batches.take(1, 0, 60)).groups
        assert app.groups.counts["grading"] == 0
    assert [r.sample_index for r in group.rollouts] == [0, 1, 2, 3, 4]
    assert grades.num_graded == 5  # each sample once


async def test_slow_scorers_grade_a_sample_while_others_are_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graded: list[str] = []

    async def hold(_name: str, _request: GroupRequest, index: int) -> None:
        if index == 3:
            await settled(lambda: len(graded) == 3)

    async def score(scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        graded.extend(item.response for item in items)
        return tuple(scorer._score(item) for item in items)

    monkeypatch.setattr(InlineScorer, "score", score)
    monkeypatch.setattr(InlineScorer, "busy_seconds", 1.0)
    async with running_app(config("stream"), ScriptedClient(before_sample=hold)) as app:
        submit(app, [MIXED])
        (group,) = (await first_batch(app)).groups
        assert app.groups.counts["grading"] == 0
    assert [score.score for score in group.scores] == [1.0, -1.0, -1.0, -1.0]
    assert len(graded) == 4  # each sample once


async def test_with_slow_scorers_a_failure_of_generation_ends_the_group_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graded: list[str] = []

    async def fail(_name: str, _request: GroupRequest, index: int) -> None:
        if index == 2:
            await settled(lambda: len(graded) == 2)
            raise InvalidRequestError("refused")

    async def score(scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        graded.extend(item.response for item in items)
        return tuple(scorer._score(item) for item in items)

    monkeypatch.setattr(InlineScorer, "score", score)
    monkeypatch.setattr(InlineScorer, "busy_seconds", 1.0)
    async with running_app(config("stream"), ScriptedClient(before_sample=fail)) as app:
        session = submit(app, [MIXED])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: session.num_open == 0)
        await session.next_event()
        outcome: Any = await session.next_event()
    assert outcome.end is PromptEnd.DROPPED_FAILED
    assert "refused" in outcome.detail


async def test_a_group_whose_probe_fails_while_its_rest_is_generated_ends_with_that_failure() -> (
    None
):
    async def fail(_name: str, _request: GroupRequest, index: int) -> None:
        if index == 2:
            await settled(lambda: ("a", "p0", (3, 4)) in client.calls)
            raise InvalidRequestError("refused")

    client = ScriptedClient(before_sample=fail)
    async with running_app(config(samples=5, probes=3), client) as app:
        session = submit(app, [MIXED])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        await settled(lambda: session.num_open == 0)
        await session.next_event()
        outcome: Any = await session.next_event()
        await settled(lambda: app.groups.num_in_flight == 0)
    assert outcome.end is PromptEnd.DROPPED_FAILED
    assert "refused" in outcome.detail


async def test_no_group_is_left_over_in_grading_when_probes_and_rest_end_together() -> None:
    client = ScriptedClient()
    async with running_app(config(samples=6, probes=3), client) as app:
        session = submit(app, ["answer=1 right=1", "answer=1 right=2", "answer=1 right=6"] * 6)
        await app.loop.announce("trainer", 0, [replica("a", slots=64)], None)
        for step in range(12):
            await app.loop.batches.take(step + 1, step, 60)
            app.loop.batches.acknowledge(app.ledger.open_lease.batch_id, step + 1)  # type: ignore[union-attr]
            client.versions["a"] = step + 1
            newer = [replica("a", step + 1, slots=64)]
            await app.loop.announce("trainer", step + 1, newer, None)
        await settled(lambda: session.num_open == 0)
        await settled(lambda: app.groups.num_in_flight == 0)
        assert (app.groups.counts["grading"], app.groups.counts["generating"]) == (0, 0)


@pytest.mark.parametrize("words", [MIXED, "answer=1 right=5", "answer=2 right=0"])
async def test_no_probe_is_graded_twice_nor_its_grading_cut_off_though_scorers_take_their_time(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    cut_off: list[str] = []

    async def score(scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        asked.extend(item.response for item in items)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            cut_off.append(items[0].response)
            raise
        return tuple(scorer._score(item) for item in items)

    monkeypatch.setattr(InlineScorer, "score", score)
    client = ScriptedClient()
    async with running_app(config(samples=5, probes=3), client) as app:
        session = submit(app, [words] * 4)
        await app.loop.announce("trainer", 0, [replica("a")], None)
        kept = (lambda: app.groups.num_kept >= 2) if words == MIXED else None
        await settled(kept or (lambda: session.num_open == 0))
        num_sampled = sum(len(indexes) for _, _, indexes in client.calls)
        await settled(lambda: len(asked) >= num_sampled)
        assert len(asked) == num_sampled
    assert cut_off == []


async def test_partial_credit_is_warned_of_once_where_strategies_go_by_right_and_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    grades = iter(range(1000))

    async def score(_scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        shares = [0.1 + 0.001 * next(grades) for _ in items]
        return tuple(Scored(share, share, {"acc": share}) for share in shares)

    monkeypatch.setattr(InlineScorer, "score", score)
    async with running_app(config(), ScriptedClient()) as app:
        submit(app, [MIXED] * 2)
        await first_batch(app)
        await settled(lambda: app.groups.num_kept == 1)
    warnings = [r.message for r in caplog.records if "partial credit" in r.message]
    assert len(warnings) == 1
    assert "sluice.sampling.strategy=stream" in warnings[0]

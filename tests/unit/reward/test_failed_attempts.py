"""Attempts that fail: each sample counts once, and strikes are of a prompt's own making."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from services.reward.app import RewardApp
from services.reward.generation.request import GroupRequest
from services.reward.prompts.submissions import SubmissionSession
from sluice.algorithm.registry import GROUP_LOSSES
from sluice.config.run import RunConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import EngineError, PeerDefectError, PeerError, SluiceError
from sluice.types import Failed, FailureKind, Outcome, PromptEnd, Rollout
from tests.support.client_prompt import client_prompt
from tests.support.reward_app import (
    InlineScorer,
    ScriptedClient,
    replica,
    running_app,
    settled,
    submit,
)
from tests.support.scripted_rollout import rollout_of

pytestmark = pytest.mark.usefixtures("waits_take_no_time")
SAMPLES = 4
MIXED = "answer=1 right=1"
WHOLE_GROUPS = {"policy_loss": {"loss_mode": min(GROUP_LOSSES)}}
LOST = PeerError("a", "generating", "UNAVAILABLE: the connection was reset")
BROKEN = PeerDefectError("a", "generating", "INTERNAL: the engine broke")
CRASH, UNSCORABLE = FailureKind.SCORER_CRASH, FailureKind.UNSCORABLE


def config(
    strategy: str = "stream",
    *,
    actor: dict[str, Any] | None = None,
    estimator: str = "grpo",
    **reward: Any,
) -> RunConfig:
    tree = {
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": SAMPLES}, "actor": actor or {}},
        "algorithm": {
            "filter_groups": {"enable": True, "min_yield": 0},
            "adv_estimator": estimator,
        },
        "sluice": {
            "asynchrony": {"max_staleness": 1},
            "sampling": {"strategy": strategy, "probe_samples": 2, "coverage_guard": False},
            "reward": {"max_attempts": 2, **reward},
        },
    }
    return msgspec.convert(tree, RunConfig)


async def attempted(app: RewardApp, name: str, words: str = MIXED) -> str:
    """The detail of the end of a prompt that fails."""
    app.submissions.submit(client_prompt(words, name), SubmissionSession(app.ledger))
    await settled(lambda: app.ledger.ended.get(name) is not None)
    ended = app.ledger.ended.get(name)
    assert ended is not None
    assert ended.end is PromptEnd.DROPPED_FAILED
    return ended.detail


def outcomes(app: RewardApp) -> dict[str, float]:
    """Samples by how they ended, but for those that are none."""
    prefix = "reward/outcomes/"
    found = app.statistics().items()
    return {name.removeprefix(prefix): n for name, n in found if name.startswith(prefix) and n}


def breaking(indexes: Sequence[int], error: SluiceError) -> Callable[..., Any]:
    async def before_sample(_name: str, _request: GroupRequest, index: int) -> None:
        if index in indexes:
            raise error

    return before_sample


@pytest.mark.parametrize(
    ("broken", "expected"),
    [((2, 3), {"scored": 2, "engine_error": 2}), ((0, 1), {"engine_error": 2})],
)
async def test_samples_of_a_group_whose_rest_fails_count_once_each(
    broken: tuple[int, ...], expected: dict[str, float]
) -> None:
    client = ScriptedClient(before_sample=breaking(broken, EngineError("out of memory")))
    async with running_app(config("staged", actor=WHOLE_GROUPS), client) as app:
        await app.loop.announce("trainer", 0, [replica("a")], None)
        await attempted(app, "p0")
        assert outcomes(app) == expected


async def test_a_group_without_a_sample_in_time_is_aborted_and_no_strike() -> None:
    async def hold(_name: str, _request: GroupRequest, _index: int) -> None:
        await asyncio.Event().wait()

    rules = config(group_deadline_s=0.05, outcomes={"max_strikes": 1})
    async with running_app(rules, ScriptedClient(before_sample=hold)) as app:
        await app.loop.announce("trainer", 0, [replica("a")], None)
        assert (await attempted(app, "p0")).startswith("aborted: no sample finished within")
        assert outcomes(app) == {"aborted": SAMPLES}
        assert app.statistics()["reward/quarantine"] == 0


@pytest.mark.parametrize(
    ("error", "is_quarantined"),
    [(LOST, False), (BROKEN, True), (EngineError("out of memory"), True)],
)
@pytest.mark.parametrize("broken", [(0, 1, 2, 3), (1, 2, 3)])
async def test_lost_replicas_are_no_strike_and_errors_that_an_engine_answers_with_are(
    broken: tuple[int, ...], error: SluiceError, is_quarantined: bool
) -> None:
    client = ScriptedClient(before_sample=breaking(broken, error))
    async with running_app(config(outcomes={"max_strikes": 2}), client) as app:
        await app.loop.announce("trainer", 0, [replica("a"), replica("b")], None)
        details = [await attempted(app, f"p{number}") for number in range(3)]
        assert app.statistics()["reward/quarantine"] == is_quarantined
    assert details[2].startswith("quarantined: ") == is_quarantined


class ScriptedOutcomes(InlineScorer):
    """All samples of an attempt fail in one way, which the words end with."""

    def __init__(self, *kinds: FailureKind) -> None:
        self._kinds = iter(kinds)

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Any, ...]:
        kind = next(self._kinds)
        return tuple(Failed(kind, "as the test says") for _ in items)


@pytest.mark.parametrize(
    ("kinds", "is_quarantined"),
    [((CRASH, UNSCORABLE, CRASH), False), ((UNSCORABLE, CRASH, CRASH), True)],
)
async def test_a_group_that_fails_without_a_strike_takes_earlier_ones_back(
    kinds: tuple[FailureKind, ...], is_quarantined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fates = ScriptedOutcomes(*kinds)
    monkeypatch.setattr("tests.support.reward_app.InlineScorer", lambda: fates)
    rules = config(outcomes={"max_strikes": 2, "scorer_crash": {"action": "leave_out"}})
    async with running_app(rules, ScriptedClient()) as app:
        await app.loop.announce("trainer", 0, [replica("a")], None)
        for number in range(3):
            await attempted(app, f"p{number}")
        assert app.statistics()["reward/quarantine"] == is_quarantined


async def test_an_attempt_that_loses_its_replicas_takes_strikes_back() -> None:
    errors: list[SluiceError] = [BROKEN, BROKEN, PeerError("a", "generating", "lost"), LOST]

    async def fail(_name: str, _request: GroupRequest, _index: int) -> None:
        raise errors.pop(0) if errors else BROKEN

    async with running_app(
        config(outcomes={"max_strikes": 2}), ScriptedClient(before_sample=fail)
    ) as app:
        await app.loop.announce("trainer", 0, [replica("a"), replica("b")], None)
        for number in range(3):
            await attempted(app, f"p{number}")
        assert app.statistics()["reward/quarantine"] == 0


async def test_tokens_of_samples_that_were_generated_again_have_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = Counter[str]()

    def named(_name: str, request: GroupRequest, index: int) -> Rollout:
        text = f"sample {index}\nAnswer: {1 if index % 2 else 2}"
        return rollout_of(text, index, 0, request.sampling.seed, 3)

    async def score(scorer: InlineScorer, items: Sequence[ScorerInput]) -> tuple[Outcome, ...]:
        looks.update(item.response for item in items)
        return tuple(
            Failed(UNSCORABLE, "no number")
            if item.response.startswith("sample 1") and looks[item.response] <= 2
            else scorer._score(item)
            for item in items
        )

    monkeypatch.setattr(InlineScorer, "score", score)
    rules = config(outcomes={"unscorable": {"action": "generate_again", "max_attempts": 3}})
    async with running_app(rules, ScriptedClient(make=named)) as app:
        submit(app, ["first"])
        await app.loop.announce("trainer", 0, [replica("a")], None)
        batch = await app.loop.batches.take(1, 0, 60)
        app.loop.batches.acknowledge(batch.batch_id, 1)
        statistics = app.statistics()
        counted = outcomes(app)
    uses = {use: statistics[f"reward/tokens/{use}"] for use in ("trained", "failed", "aborted")}
    assert uses == {"trained": 3 * SAMPLES, "failed": 2 * 3, "aborted": 0}
    assert counted == {"scored": SAMPLES, "unscorable": 2}

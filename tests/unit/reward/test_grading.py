"""Responses become outcomes: shaping on numbers only, aborted samples never graded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from services.reward.grading.grader import Grader, overlong_shaping
from sluice.algorithm.groups.filter import GroupNeeds, filter_group
from sluice.algorithm.overlong import OverlongShaping
from sluice.config.schema.reward import RewardConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import ConfigError
from sluice.types import (
    ChatMessage,
    Failed,
    FailureKind,
    FinishReason,
    GradedGroup,
    Outcome,
    Prompt,
    PromptEnd,
    PromptOrigin,
    Rollout,
    RolloutGroup,
    Scored,
)
from tests.support.domain_values import with_turn
from tests.support.scripted_rollout import PROMPT_TOKENS, rollout_of

PROMPT = Prompt(
    "p", 0, (ChatMessage("user", "?"),), "math_dapo", "7", PromptOrigin.CLIENT, None, {"index": 3}
)
SHAPING = OverlongShaping(max_response_tokens=20, buffer_tokens=4, penalty_factor=1.0, log=True)


class Scripted:
    """Gives outcomes in turn and remembers what it was asked."""

    busy_seconds, num_asked = 0.0, 0

    def __init__(self, *outcomes: Scored | Failed) -> None:
        self.outcomes, self.items = outcomes, list[ScorerInput]()

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Scored | Failed, ...]:
        self.items += items
        return self.outcomes[: len(items)]


def right(score: float = 1.0) -> Scored:
    return Scored(score, score, {"acc": float(score > 0)})


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(PROMPT, PROMPT_TOKENS, rollouts)


def rollout(index: int, num_tokens: int = 5, **changes: Any) -> Rollout:
    return with_turn(rollout_of(f"text {index}", index, 0, 0, num_tokens), **changes)


async def test_the_scorer_sees_text_and_reference() -> None:
    scorer = Scripted(right())
    await Grader(scorer, None).grade(group(rollout(0)))
    assert scorer.items == [ScorerInput("math_dapo", "text 0", "7", {"index": 3}, question="?")]


async def test_the_scorer_of_an_episode_knows_its_turns() -> None:
    one = rollout(0)
    several = replace(one, turns=(*one.turns, replace(one.turns[0], parent=0)))
    scorer = Scripted(right())
    await Grader(scorer, None).grade(group(several))
    assert [item.num_turns for item in scorer.items] == [4]


async def test_the_overlong_penalty_changes_the_reward_and_not_the_score() -> None:
    graded = await Grader(Scripted(right(), right()), SHAPING).grade(
        group(rollout(0, 16), rollout(1, 18))
    )
    assert [s.reward for s in graded.scored] == [1.0, 0.5]
    assert [s.score for s in graded.scored] == [1.0, 1.0]
    assert graded.scored[1].metrics == {"acc": 1.0, "overlong_reward": -0.5, "overlong": 1.0}
    assert graded.scored[0].metrics["overlong"] == 0.0


async def test_the_greedy_response_is_graded_and_shaped_as_the_samples_are() -> None:
    scorer = Scripted(right(-1.0), right(-1.0), right())
    graded = await Grader(scorer, SHAPING).grade(
        group(rollout(0, 16), rollout(1, 18)), group(rollout(0, 17))
    )
    assert [s.reward for s in graded.scored] == [-1.0, -1.5]
    assert graded.baseline_reward == 0.75
    assert [item.response for item in scorer.items] == ["text 0", "text 1", "text 0"]


async def test_a_failure_stays_a_failure_under_shaping() -> None:
    failed = Failed(FailureKind.SCORER_TIMEOUT, "10 s")
    graded = await Grader(Scripted(failed), SHAPING).grade(group(rollout(0, 20)))
    assert graded.outcomes == (failed,)


async def test_aborted_samples_are_never_graded() -> None:
    scorer = Scripted(right(), right(-1.0))
    cut = rollout(1, finish_reason=FinishReason.ABORTED)
    graded = await Grader(scorer, None).grade(group(rollout(0), cut, rollout(2)))
    assert [item.response for item in scorer.items] == ["text 0", "text 2"]
    assert isinstance(graded.outcomes[1], Failed)
    assert graded.outcomes[1].kind is FailureKind.ABORTED
    assert [s.score for s in graded.scored] == [1.0, -1.0]


def shaping_config(**buffer: Any) -> RewardConfig:
    tree = {"reward_kwargs": {"overlong_buffer_cfg": {"enable": True, **buffer}}}
    return msgspec.convert(tree, RewardConfig)


def test_the_response_limit_is_the_default_of_the_formula() -> None:
    shaping = overlong_shaping(shaping_config(len=8, penalty_factor=1.0), 56)
    assert shaping == OverlongShaping(56, 8, 1.0, log=False, longest_tokens=56)
    assert overlong_shaping(RewardConfig(), 56) is None


@pytest.mark.parametrize("length", [0, 80])
def test_a_buffer_that_no_response_holds_is_refused_at_the_start(length: int) -> None:
    with pytest.raises(ConfigError, match=r"overlong_buffer\.len"):
        overlong_shaping(shaping_config(len=length, penalty_factor=1.0), 56)


def graded_of(*outcomes: Outcome, num_tokens: int = 5) -> GradedGroup:
    return GradedGroup(group(*(rollout(i, num_tokens) for i in range(len(outcomes)))), outcomes)


LOST = Failed(FailureKind.SCORER_CRASH, "exit code 3")


@pytest.mark.parametrize(
    ("outcomes", "end"),
    [
        ([right(), right(-1)], None),
        ([right(), right()], PromptEnd.FILTERED_ALL_RIGHT),
        ([right(-1), right(-1)], PromptEnd.FILTERED_ALL_WRONG),
        ([right(), right(-1), LOST, LOST], None),
        ([right(), LOST, LOST, LOST], PromptEnd.DROPPED_FAILED),
        ([right(), LOST], PromptEnd.DROPPED_FAILED),
        ([right()], None),
        ([LOST], PromptEnd.DROPPED_FAILED),
    ],
)
def test_a_group_is_judged_by_what_could_be_scored(
    outcomes: list[Outcome], end: PromptEnd | None
) -> None:
    assert filter_group(graded_of(*outcomes), metric="acc").end is end


@pytest.mark.parametrize(
    ("outcomes", "detail"),
    [
        ([right(), right(-1)], ""),
        (
            [right(), right(-1), right(), LOST],
            "1 of 4 samples failed and the loss compares whole groups, the first: "
            "scorer_crash: exit code 3",
        ),
    ],
)
def test_where_the_loss_compares_whole_groups_one_sample_lost_is_too_many(
    outcomes: list[Outcome], detail: str
) -> None:
    decision = filter_group(graded_of(*outcomes), metric="acc", needs=GroupNeeds(whole_groups=True))
    end = PromptEnd.DROPPED_FAILED if detail else None
    assert (decision.end, decision.detail) == (end, detail)


@pytest.mark.parametrize("greedy", [right(), right(-1)])
@pytest.mark.parametrize(
    ("outcomes", "end"),
    [
        ([right(), right(-1)], None),
        ([right(), right()], PromptEnd.FILTERED_ALL_RIGHT),
        ([right(-1), right(-1)], PromptEnd.FILTERED_ALL_WRONG),
    ],
)
def test_a_group_is_not_filtered_by_its_greedy_response(
    outcomes: list[Outcome], end: PromptEnd | None, greedy: Scored
) -> None:
    graded = replace(graded_of(*outcomes), greedy=graded_of(greedy))
    assert filter_group(graded, metric="acc").end is end


def test_a_group_without_the_score_of_its_greedy_response_has_failed() -> None:
    graded = replace(graded_of(right(), right(-1)), greedy=graded_of(LOST))
    decision = filter_group(graded, metric="acc")
    assert decision.end is PromptEnd.DROPPED_FAILED
    assert decision.detail == (
        "scorer_crash: no score of the greedy response, the baseline: exit code 3"
    )


def test_an_empty_greedy_response_is_a_baseline_as_any_other() -> None:
    graded = replace(graded_of(right(), right(-1)), greedy=graded_of(right(-1), num_tokens=0))
    assert filter_group(graded, metric="acc").end is None
    assert (graded.baseline_reward, graded.oldest_version) == (-1.0, 0)


def test_without_a_filter_uniform_groups_are_kept() -> None:
    assert filter_group(graded_of(right(), right()), metric=None).end is None


def test_a_group_without_tokens_has_failed() -> None:
    decision = filter_group(graded_of(right(), right(-1), num_tokens=0), metric="acc")
    assert (decision.end, decision.detail) == (PromptEnd.DROPPED_FAILED, "all responses are empty")


def of_data_set(graded: GradedGroup) -> GradedGroup:
    prompt = replace(PROMPT, prompt_id="data-4", origin=PromptOrigin.DATASET, position=4)
    return replace(graded, group=replace(graded.group, prompt=prompt))


def test_a_clients_prompt_without_the_filters_metric_fails_alone() -> None:
    decision = filter_group(graded_of(right(), right(-1)), metric="elegance")
    assert decision.end is PromptEnd.DROPPED_FAILED
    assert decision.detail.startswith(f"{FailureKind.UNSCORABLE}: ")
    assert "no 'elegance'" in decision.detail


def test_a_data_set_prompt_without_the_filters_metric_is_an_error_that_names_it() -> None:
    graded = of_data_set(graded_of(right(), right(-1)))
    with pytest.raises(ConfigError, match=r"data-4 of data source 'math_dapo'.*no 'elegance'"):
        filter_group(graded, metric="elegance")


def test_the_first_failure_is_reported() -> None:
    decision = filter_group(graded_of(LOST, LOST), metric="acc")
    assert decision.detail == "2 of 2 samples failed, the first: scorer_crash: exit code 3"

"""From score to reward as in verl's managers (`verl/workers/reward_manager`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.reward.grading.grader import Grader, overlong_shaping
from services.reward.grading.messages import ScorerNumber
from services.reward.grading.scorer_main import answer_of
from sluice.config.schema.reward import RewardConfig
from sluice.data.scoring import ScorerInput
from sluice.types import ChatMessage, Prompt, PromptOrigin, RolloutGroup, Scored
from tests.support.scripted_rollout import PROMPT_TOKENS, rollout_of

PROMPT = Prompt("p", 0, (ChatMessage("user", "?"),), "mine", "7", PromptOrigin.CLIENT, None)
LIMIT = 20480


class Returns:
    """A pool whose scorer returned `returned`."""

    busy_seconds, num_asked = 0.0, 0

    def __init__(self, returned: object) -> None:
        answer = answer_of(returned)
        assert isinstance(answer, ScorerNumber)
        self.scored = Scored(answer.score, answer.score, answer.metrics, answer.prediction)

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Scored, ...]:
        """The same for every item."""
        return (self.scored,) * len(items)


async def rewarded(
    returned: object, num_tokens: int, *, manager: str = "dapo", **buffer: Any
) -> Scored:
    overlong = {"enable": True, "len": 4096, "penalty_factor": 1.0, **buffer}
    tree = {
        "reward_manager": {"name": manager},
        "reward_kwargs": {"overlong_buffer_cfg": overlong},
    }
    shaping = overlong_shaping(msgspec.convert(tree, RewardConfig), LIMIT)
    group = RolloutGroup(PROMPT, PROMPT_TOKENS, (rollout_of("text", 0, 0, 0, num_tokens),))
    (scored,) = (await Grader(Returns(returned), shaping).grade(group)).scored
    return scored


WRONG = {"score": -1.0, "acc": False, "pred": "8"}


@pytest.mark.parametrize(
    ("num_tokens", "reward"),
    [(100, -1.0), (16384, -1.0), (16385, -1.000244140625), (18432, -1.5), (20480, -2.0)],
)
async def test_dapo_adds_the_overlong_term_to_the_reward_only(
    num_tokens: int, reward: float
) -> None:
    scored = await rewarded(WRONG, num_tokens)
    assert scored == Scored(-1.0, reward, {"acc": 0.0}, "8")


@pytest.mark.parametrize(
    ("num_tokens", "term", "is_overlong"), [(16384, 0.0, 0.0), (16385, -1 / 4096, 1.0)]
)
async def test_with_log_the_term_and_its_sign_are_columns(
    num_tokens: int, term: float, is_overlong: float
) -> None:
    scored = await rewarded(WRONG, num_tokens, log=True)
    assert scored.metrics == {"acc": 0.0, "overlong_reward": term, "overlong": is_overlong}


async def test_the_penalty_factor_scales_the_term() -> None:
    assert (await rewarded(1.0, 18432, penalty_factor=0.5)).reward == 0.75


@pytest.mark.parametrize("manager", ["naive", "dapo", "gdpo"])
async def test_a_bare_number_is_its_own_accuracy(manager: str) -> None:
    scored = await rewarded(0.9, 10, manager=manager)
    assert scored == Scored(0.9, 0.9, {"acc": 0.9})


@pytest.mark.parametrize("manager", ["naive", "dapo", "gdpo"])
async def test_a_mapping_brings_all_its_columns_and_no_others(manager: str) -> None:
    returned = {"score": 0.5, "format": 1, "length": 3.0, "pred": 7, "note": "text"}
    scored = await rewarded(returned, 10, manager=manager)
    assert scored == Scored(0.5, 0.5, {"format": 1.0, "length": 3.0}, "7")


@pytest.mark.parametrize("manager", ["naive", "gdpo"])
async def test_only_dapo_knows_an_overlong_term(manager: str) -> None:
    assert await rewarded(1.0, LIMIT, manager=manager, log=True) == Scored(1.0, 1.0, {"acc": 1.0})

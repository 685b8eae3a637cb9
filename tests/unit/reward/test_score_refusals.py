"""What `Score` refuses before a scorer hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.reward.grading.grader import ScoreRequests
from services.reward.servicer import RewardServicer
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import InvalidRequestError
from tests.support.reward_app import InlineScorer


class Requests:
    """Takes note of what is to be graded."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.clients: list[str | None] = []

    def check_size(self, num_items: int) -> None:
        pass

    async def score(self, items: Any, client: str | None) -> tuple[()]:
        self.clients.append(client)
        self.sources += [item.data_source for item in items]
        self.questions = [item.question for item in items]
        return ()


class Call:
    """Of a client that gives no name."""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:10.0.0.7:4711"


async def test_a_long_name_of_a_data_source_reaches_no_scorer() -> None:
    requests: Any = Requests()
    loop: Any = SimpleNamespace(score_requests=requests)
    servicer, context = RewardServicer(loop, RolloutConfig(), 16), cast("Any", Call())
    items = [reward.ScoreItem(data_source="math"), reward.ScoreItem(data_source="x" * 257)]
    with pytest.raises(InvalidRequestError, match=r"items\[1\]\.data_source: .* at most 256"):
        await servicer.Score(reward.ScoreRequest(items=items), context)
    assert requests.sources == []
    await servicer.Score(reward.ScoreRequest(items=items[:1]), context)
    assert (requests.sources, requests.clients) == (["math"], ["host 10.0.0.7"])


async def test_a_question_reaches_the_scorer() -> None:
    requests: Any = Requests()
    loop: Any = SimpleNamespace(score_requests=requests)
    servicer, context = RewardServicer(loop, RolloutConfig(), 16), cast("Any", Call())
    items = [reward.ScoreItem(data_source="math", question="What is 2 + 2?")]
    await servicer.Score(reward.ScoreRequest(items=items), context)
    assert requests.questions == ["What is 2 + 2?"]


async def test_a_reward_model_that_reads_the_question_grades_nothing_without_one() -> None:
    scorer = InlineScorer()
    asked = ScorerInput("math", "4", "4", question="What is 2 + 2?")
    unasked = ScorerInput("math", "4", "4")
    requests = ScoreRequests(scorer, reads_question=True)
    with pytest.raises(InvalidRequestError, match=r"items\[1\]\.question: empty"):
        await requests.score([asked, unasked])
    assert len(await requests.score([asked])) == 1
    assert len(await ScoreRequests(scorer, reads_question=False).score([unasked])) == 1

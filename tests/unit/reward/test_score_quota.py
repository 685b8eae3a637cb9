"""How much of `Score` one client may have under way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from services.reward.grading.grader import (
    DEFAULT_CLIENT_ITEMS,
    MAX_CLIENT_CALLS,
    MAX_ITEMS,
    ScoreRequests,
)
from sluice.config.schema.service import LimitsConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.types import Scored

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ITEM = ScorerInput("math_dapo", "4", "4", {})


class SlowScorer:
    """Answers when it may."""

    busy_seconds, num_asked = 0.0, 0

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Scored, ...]:
        await self.may_answer.wait()
        return tuple(Scored(1.0, 1.0, {}, "4") for _ in items)


@asynccontextmanager
async def under_way(
    requests: ScoreRequests, scorer: SlowScorer, *, client: str, num_items: int
) -> AsyncIterator[None]:
    """A call that lasts for the length of the block."""
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(requests.score([ITEM] * num_items, client))
        await asyncio.sleep(0)
        yield
        scorer.may_answer.set()
    assert len(call.result()) == num_items


async def test_a_client_has_at_most_its_responses_under_way_and_others_theirs() -> None:
    scorer = SlowScorer()
    requests = ScoreRequests(scorer, 4, reads_question=False)
    reported = r"client 'a': 3 responses to grade .*max_client_score_items allows 4: wait"
    async with asyncio.timeout(60), under_way(requests, scorer, client="a", num_items=3):
        with pytest.raises(ExhaustedError, match=reported):
            await requests.score([ITEM] * 2, "a")
        async with under_way(requests, scorer, client="b", num_items=4):
            pass
    assert len(await requests.score([ITEM] * 4, "a")) == 4  # what ended counts no more


async def test_more_responses_than_a_client_may_ever_have_are_no_request() -> None:
    with pytest.raises(InvalidRequestError, match="max_client_score_items allows 4"):
        await ScoreRequests(SlowScorer(), 4, reads_question=False).score([ITEM] * 5, "a")


async def test_one_client_cannot_take_all_calls() -> None:
    scorer = SlowScorer()
    requests = ScoreRequests(scorer, reads_question=False)
    async with asyncio.timeout(60), AsyncExitStack() as calls:
        for _ in range(MAX_CLIENT_CALLS):
            await calls.enter_async_context(under_way(requests, scorer, client="a", num_items=1))
        with pytest.raises(ExhaustedError, match="client 'a': 16 Score calls"):
            await requests.score([ITEM], "a")
        await calls.enter_async_context(under_way(requests, scorer, client="b", num_items=1))


async def test_by_default_a_client_may_have_four_of_the_largest_calls_at_once() -> None:
    assert LimitsConfig().max_client_score_items == DEFAULT_CLIENT_ITEMS
    scorer = SlowScorer()
    requests = ScoreRequests(scorer, reads_question=False)
    async with asyncio.timeout(60), AsyncExitStack() as calls:
        for _ in range(4):
            call = under_way(requests, scorer, client="a", num_items=MAX_ITEMS)
            await calls.enter_async_context(call)
        with pytest.raises(ExhaustedError, match="client 'a': 16384 responses"):
            await requests.score([ITEM], "a")

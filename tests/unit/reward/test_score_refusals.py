"""What `Score` refuses before a scorer hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.reward.servicer import RewardServicer
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.config.actor_rollout_ref import RolloutConfig
from sluice.errors import InvalidRequestError


class Requests:
    """Takes note of what is to be graded."""

    def __init__(self) -> None:
        self.sources: list[str] = []

    def check_size(self, num_items: int) -> None:
        pass

    async def score(self, items: Any) -> tuple[()]:
        self.sources += [item.data_source for item in items]
        return ()


async def test_a_long_name_of_a_data_source_reaches_no_scorer() -> None:
    requests: Any = Requests()
    loop: Any = SimpleNamespace(score_requests=requests)
    servicer, context = RewardServicer(loop, RolloutConfig(), 16), None
    items = [reward.ScoreItem(data_source="math"), reward.ScoreItem(data_source="x" * 257)]
    with pytest.raises(InvalidRequestError, match=r"items\[1\]\.data_source: .* at most 256"):
        await servicer.Score(reward.ScoreRequest(items=items), context)  # type: ignore[arg-type]
    assert requests.sources == []
    await servicer.Score(reward.ScoreRequest(items=items[:1]), context)  # type: ignore[arg-type]
    assert requests.sources == ["math"]

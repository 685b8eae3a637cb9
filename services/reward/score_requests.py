"""Responses that clients send to be graded: apart from training, and bounded by it."""

from __future__ import annotations

from collections.abc import Sequence

from services.reward.grading import SampleScorer
from services.reward.scorer_messages import ScoreItem
from sluice.errors import ExhaustedError, InvalidRequestError
from sluice.rpc.client_quota import ClientQuota
from sluice.types import Failed, Scored

MAX_ITEMS = 4096
MAX_CALLS = 32
MAX_CLIENT_CALLS = 16
DEFAULT_CLIENT_ITEMS = 4 * MAX_ITEMS
ITEMS_PER_REQUEST = 32


class ScoreRequests:
    """Calls that grade without training.

    Args:
        scorers: the pool.
        max_client_items: responses that one client may have under way.
    """

    def __init__(self, scorers: SampleScorer, max_client_items: int = DEFAULT_CLIENT_ITEMS) -> None:
        self._scorers = scorers
        self._client_calls = ClientQuota(MAX_CLIENT_CALLS, "Score calls", "RewardService/Score")
        self._client_items = ClientQuota(
            max_client_items, "responses to grade", "sluice.limits.max_client_score_items"
        )
        self._num_calls = 0

    def check_size(self, num_items: int) -> None:
        """Raises InvalidRequestError for too many items."""
        if num_items > MAX_ITEMS:
            raise InvalidRequestError(
                f"items: {num_items} sent; send at most {MAX_ITEMS} in one call"
            )

    async def score(
        self, items: Sequence[ScoreItem], client: str | None = None
    ) -> list[Scored | Failed]:
        """One outcome per item, in small requests between those of training.

        Args:
            items: what to grade.
            client: who asks, for quotas; ``None``: nobody's in particular.

        Raises:
            InvalidRequestError: too many items.
            ExhaustedError: too many calls at once, or items of the client.
        """
        self.check_size(len(items))
        with self._client_calls.held(client, 1), self._client_items.held(client, len(items)):
            return await self._score(items)

    async def _score(self, items: Sequence[ScoreItem]) -> list[Scored | Failed]:
        if self._num_calls >= MAX_CALLS:
            raise ExhaustedError(
                f"{self._num_calls} Score calls are running, the most at once; send one later"
            )
        self._num_calls += 1
        try:
            outcomes: list[Scored | Failed] = []
            for start in range(0, len(items), ITEMS_PER_REQUEST):
                outcomes += await self._scorers.score(items[start : start + ITEMS_PER_REQUEST])
            return outcomes
        finally:
            self._num_calls -= 1

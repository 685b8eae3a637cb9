"""Grade samples: run the scorer, then shape the score (verl's reward managers); also grade
responses that clients send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from sluice.algorithm.episodes import response_length
from sluice.algorithm.groups.filter import OutcomeAction, OutcomePolicy
from sluice.algorithm.overlong import OverlongShaping
from sluice.config.schema.reward import RewardConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import ConfigError, ExhaustedError, InvalidRequestError
from sluice.rpc.auth import ClientQuota
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanName
from sluice.types import (
    Failed,
    FailureKind,
    FinishReason,
    GradedGroup,
    Outcome,
    Prompt,
    Rollout,
    RolloutGroup,
    Scored,
)

MAX_ITEMS = 4096
MAX_CALLS = 32
MAX_CLIENT_CALLS = 16
DEFAULT_CLIENT_ITEMS = 4 * MAX_ITEMS
ITEMS_PER_REQUEST = 32
SLOW_S = 0.05
"""Seconds for a response above which scorers count as slow. Far above the cost of a request."""

_NOTHING: Mapping[int, Outcome] = MappingProxyType({})
_NO_RULES = OutcomePolicy()


class SampleScorer(Protocol):
    """Grades response texts, as `ScorerPool` does."""

    busy_seconds: float
    """Seconds that scorers have worked since the start."""
    num_asked: int
    """Responses that they were asked to grade in that time."""

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Scored | Failed, ...]:
        """Return one outcome per item."""
        ...


def overlong_shaping(reward: RewardConfig, max_response_length: int) -> OverlongShaping | None:
    """Return the configured shaping; ``None`` for the naive manager or when it is off.

    Raises:
        ConfigError: the buffer's length is not between 1 and the longest response.
    """
    buffer = reward.reward_kwargs.overlong_buffer_cfg
    if reward.reward_manager.name != "dapo" or not buffer.enable:
        return None
    limit = reward.reward_kwargs.max_resp_len or max_response_length
    if not 0 < buffer.len <= limit:  # the rules of a launch do not reach `sluice eval regrade`
        raise ConfigError(
            f"overlong_buffer.len must lie in 1..{limit} (max_response_length), "
            f"got {buffer.len}; change it or set overlong_buffer.enable=false"
        )
    return OverlongShaping(
        limit, buffer.len, buffer.penalty_factor, buffer.log, max_response_length
    )


class Grader:
    """Grades whole groups."""

    def __init__(
        self,
        scorer: SampleScorer,
        shaping: OverlongShaping | None,
        policy: OutcomePolicy = _NO_RULES,
    ) -> None:
        self._scorer, self._shaping, self._policy = scorer, shaping, policy
        self.num_scored_again = 0

    @property
    def is_slow(self) -> bool:
        """Whether scorers take more than `SLOW_S` for a response, on average so far."""
        return self._scorer.busy_seconds > SLOW_S * self._scorer.num_asked

    async def grade(
        self,
        group: RolloutGroup,
        greedy: RolloutGroup | None = None,
        known_outcomes: Mapping[int, Outcome] = _NOTHING,
    ) -> GradedGroup:
        """Return one outcome per sample; the greedy response has the same scorer and shaping.

        Args:
            known_outcomes: outcomes of samples that need no grading, by their index.
        """
        ungraded = [r for r in group.rollouts if r.sample_index not in known_outcomes]
        greedy_rollouts = greedy.rollouts if greedy else ()
        graded = iter(await self.outcomes(group.prompt, (*ungraded, *greedy_rollouts)))
        outcomes = tuple(
            known_outcomes[r.sample_index] if r.sample_index in known_outcomes else next(graded)
            for r in group.rollouts
        )
        return GradedGroup(group, outcomes, GradedGroup(greedy, tuple(graded)) if greedy else None)

    async def outcomes(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> tuple[Outcome, ...]:
        """Return one outcome per response to a prompt: the environment's if it gave one. Aborted
        responses are never graded."""
        question = prompt.messages[-1].content if prompt.messages else ""
        decided: list[Outcome | None] = []
        items: list[ScorerInput] = []
        for rollout in rollouts:
            outcome = rollout.outcome
            if outcome is None and rollout.finish_reason is FinishReason.ABORTED:
                outcome = Failed(FailureKind.ABORTED, "generation was ended from outside")
            decided.append(outcome)
            if outcome is None:
                item = ScorerInput(
                    prompt.data_source,
                    rollout.text,
                    prompt.ground_truth,
                    prompt.extra_info,
                    question=question,
                    truth_is_json=prompt.truth_is_json,
                    num_turns=2 * len(rollout.turns),
                )
                items.append(item)
        scored = iter(await self._score(items) if items else ())
        return tuple(
            self._shape_reward(next(scored) if outcome is None else outcome, rollout)
            for rollout, outcome in zip(rollouts, decided, strict=True)
        )

    async def _score(self, items: Sequence[ScorerInput]) -> Sequence[Outcome]:
        """Return one outcome per item, after all attempts that the outcome policy allows."""
        with TRACER.span(SpanName.GRADE, {SpanAttribute.NUM_SAMPLES: len(items)}):
            outcomes: list[Outcome] = list(await self._scorer.score(items))
            attempts = 1
            while indexes := self._policy.indexes_to_repeat(
                outcomes, attempts, OutcomeAction.SCORE_AGAIN
            ):
                attempts += 1
                self.num_scored_again += len(indexes)
                answers = await self._scorer.score([items[index] for index in indexes])
                for index, answer in zip(indexes, answers, strict=True):
                    outcomes[index] = answer
        return outcomes

    def _shape_reward(self, outcome: Outcome, rollout: Rollout) -> Outcome:
        if self._shaping is None or isinstance(outcome, Failed):
            return outcome
        penalty = self._shaping.penalty(response_length(rollout.turns))
        metrics = dict(outcome.metrics)
        if self._shaping.log:
            metrics |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        return replace(outcome, reward=outcome.score + penalty, metrics=metrics)


class ScoreRequests:
    """Handles Score calls, which grade without training.

    Args:
        max_client_items: most responses in progress per client.
        reads_question: whether the scorer is a reward model whose template holds the question.
    """

    def __init__(
        self,
        scorers: SampleScorer,
        max_client_items: int = DEFAULT_CLIENT_ITEMS,
        *,
        reads_question: bool,
    ) -> None:
        self._scorers, self._reads_question = scorers, reads_question
        self._client_calls = ClientQuota(MAX_CLIENT_CALLS, "Score calls", "RewardService/Score")
        self._client_items = ClientQuota(
            max_client_items, "responses to grade", "sluice.limits.max_client_score_items"
        )
        self._num_calls = 0

    def check_size(self, num_items: int) -> None:
        """Raise InvalidRequestError for too many items."""
        if num_items > MAX_ITEMS:
            raise InvalidRequestError(
                f"items: {num_items} sent; send at most {MAX_ITEMS} in one call"
            )

    async def score(
        self, items: Sequence[ScorerInput], client: str | None = None
    ) -> list[Scored | Failed]:
        """Return one outcome per item, graded in small requests between those of training.

        Args:
            client: the caller, for quotas; ``None`` if unknown.

        Raises:
            ExhaustedError: too many calls are running, or the client has too many items in
                progress.
            InvalidRequestError: the scorer reads a question, and an item has none.
        """
        for index, item in enumerate(items):
            if self._reads_question and not item.question:
                raise InvalidRequestError(
                    f"items[{index}].question: empty, and this run's reward model reads it "
                    "(reward.reward_model.prompt_template); send the prompt's last turn"
                )
        with self._client_calls.hold(client, 1), self._client_items.hold(client, len(items)):
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

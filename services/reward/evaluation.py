"""Validation: the held-out set sampled and graded with one policy version (verl-semantics §6.3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.reward.dispatcher import GroupDispatcher, GroupFailedError, GroupRequest
from services.reward.grading import Grader
from services.reward.prompt_source import DrawStream
from services.reward.prompts import Draw
from services.reward.replica_queue import Priority
from services.reward.sampling import for_prompt
from sluice.algorithm.validation_metrics import ValidationPrompt, validation_metrics
from sluice.concurrency.deadline import deadline
from sluice.errors import InvalidRequestError, NotReadyError, PeerError
from sluice.types import GradedGroup, Prompt, PromptOrigin, SamplingParams, Scored

logger = logging.getLogger(__name__)

MAX_GROUPS_AT_ONCE = 256
DRAWS_PER_READ = 64


@dataclass(frozen=True, slots=True)
class EvaluationOrder:
    """What is asked for: `num_examples` responses are returned at most."""

    policy_version: int
    samples_per_prompt: int
    sampling: SamplingParams
    num_examples: int


@dataclass(frozen=True, slots=True)
class EvaluationExample:
    """One response to look at."""

    prompt: str
    response: str
    ground_truth: str
    score: float


@dataclass(slots=True)
class EvaluationResult:
    """Numbers so far; complete when `Evaluation.run` returns it."""

    metrics: dict[str, float] = field(default_factory=dict)
    examples: list[EvaluationExample] = field(default_factory=list)
    num_generated_tokens: int = 0


class Evaluation:
    """Validation runs.

    Args:
        open_stream: opens the validation set; ``None``: there is none.
        dispatcher: where groups are generated, before any training group.
        grader: grades them as in training.
        announced_version: the version announced last.
    """

    def __init__(
        self,
        open_stream: Callable[[], DrawStream] | None,
        dispatcher: GroupDispatcher,
        grader: Grader,
        announced_version: Callable[[], int | None],
    ) -> None:
        self._open_stream, self._dispatcher, self._grader = open_stream, dispatcher, grader
        self._announced_version = announced_version

    async def run(self, order: EvaluationOrder, seconds: float) -> EvaluationResult:
        """Sample and grade the whole validation set.

        Raises:
            InvalidRequestError: there is no validation set.
            NotReadyError: another version is announced.
            PeerError: a replica sampled with another version meanwhile.
            DeadlineError: not within `seconds`.
        """
        stream = self._opened()
        announced = self._announced_version()
        if announced != order.policy_version:
            raise NotReadyError(
                f"version {order.policy_version} is to be evaluated, but "
                f"{'none' if announced is None else announced} is announced; announce it first"
            )
        phase = f"evaluating version {order.policy_version}"
        async with deadline(seconds, peer="rollout fleet", phase=phase):
            graded = await self._grade_all(stream, order)
        return _result(graded, order.num_examples)

    def _opened(self) -> DrawStream:
        if self._open_stream is None:
            raise InvalidRequestError("there is no validation set; set data.val_files")
        return self._open_stream()

    async def _grade_all(self, stream: DrawStream, order: EvaluationOrder) -> list[GradedGroup]:
        """All groups that could be generated, in the order of the file."""
        graded: dict[int, GradedGroup] = {}
        room = asyncio.Semaphore(MAX_GROUPS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            while draws := await asyncio.to_thread(stream.take, DRAWS_PER_READ):
                for draw in draws:
                    await room.acquire()
                    task = tasks.create_task(
                        self._grade_one(draw, order, graded), name=f"validation {draw.position}"
                    )
                    task.add_done_callback(lambda _: room.release())
        return [graded[position] for position in sorted(graded)]

    async def _grade_one(
        self, draw: Draw, order: EvaluationOrder, graded: dict[int, GradedGroup]
    ) -> None:
        prompt = _prompt(draw)
        request = GroupRequest(
            prompt,
            order.samples_per_prompt,
            for_prompt(order.sampling, prompt, stage="validation"),
            Priority.EVALUATION,
            lowest_version=order.policy_version,
            highest_version=order.policy_version,
        )
        try:
            group = await self._dispatcher.generate(request)
        except GroupFailedError as error:
            logger.warning("validation prompt %d left out: %s", draw.position, error)
            return
        versions = {span.version for r in group.rollouts for span in r.version_spans}
        if versions - {order.policy_version}:
            raise PeerError(
                "rollout fleet",
                f"evaluating version {order.policy_version}",
                f"samples of versions {sorted(versions)} came; no weights may be published "
                "during an evaluation",
            )
        graded[draw.position] = await self._grader.grade(group)


def _prompt(draw: Draw) -> Prompt:
    row = draw.row
    return Prompt(
        prompt_id=f"validation-{draw.position}",
        sequence=draw.position,
        messages=row.messages,
        data_source=row.data_source,
        ground_truth=row.ground_truth,
        origin=PromptOrigin.DATASET,
        position=draw.position,
        extra_info=row.extra_info,
    )


def _result(graded: Sequence[GradedGroup], num_examples: int) -> EvaluationResult:
    scored = [ValidationPrompt(g.group.prompt.data_source, g.scored) for g in graded if g.scored]
    num_failed = sum(len(g.outcomes) - len(g.scored) for g in graded)
    result = EvaluationResult(validation_metrics(scored))
    result.metrics["val-aux/num_prompts"] = float(len(scored))
    result.metrics["val-aux/num_failed_samples"] = float(num_failed)
    result.num_generated_tokens = sum(g.group.num_response_tokens for g in graded)
    result.examples = [
        example for g in graded[:num_examples] if (example := _example(g)) is not None
    ]
    return result


def _example(graded: GradedGroup) -> EvaluationExample | None:
    prompt = graded.group.prompt
    for rollout, outcome in zip(graded.group.rollouts, graded.outcomes, strict=True):
        if isinstance(outcome, Scored):
            asked = prompt.messages[-1].content
            return EvaluationExample(asked, rollout.text, prompt.ground_truth, outcome.score)
    return None

"""Validation: the held-out set, sampled and graded with one policy version (verl's `_validate`).

A sample that could not be generated or graded, after all retries, has a failure as its outcome: it
is counted and left out of the means. Too many failures end the validation (`check_failures`).

One validation runs at a time; the next one waits, within its deadline. If the trainer publishes a
newer version meanwhile, it holds some replicas at the validated version, and these get the
remaining prompts and the unfinished samples of other replicas.

A stand-alone evaluation is a validation that stores each finished prompt and skips stored ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.reward.generation.request import (
    GroupFailedError,
    GroupProgress,
    GroupRequest,
    OverlongPromptError,
    Purpose,
    SampleGenerator,
    for_prompt,
)
from services.reward.grading.grader import Grader
from services.reward.prompts.dataset import IssuedRow
from services.reward.prompts.source import VALIDATION_ID_PREFIX
from services.reward.records.failures import FailureLog
from services.reward.records.group_log import SampleDumps
from services.reward.records.stored_prompts import PromptStore
from sluice.algorithm.validation_metrics import (
    ValidationPrompt,
    means,
    prompt_values,
    standard_errors,
)
from sluice.concurrency.waits import deadline
from sluice.errors import InvalidRequestError, NotReadyError, ValidationFailedError
from sluice.telemetry.samples import DumpedSample
from sluice.types import (
    Failed,
    FailureKind,
    Outcome,
    Prompt,
    RolloutGroup,
    SamplingParams,
    Scored,
)

MAX_GROUPS_AT_ONCE = 256
ROWS_PER_READ = 64
MAX_FAILED_SHARE = 0.1
"""Largest accepted share of failed samples: beyond it the means would describe another prompt
set."""


@dataclass(frozen=True, slots=True)
class ValidationOrder:
    """A request for a validation that returns at most `num_examples` responses."""

    policy_version: int
    samples_per_prompt: int
    sampling: SamplingParams
    num_examples: int


@dataclass(frozen=True, slots=True)
class ValidatedPrompt:
    """A validated prompt, kept for the means: without tokens, and with texts only if they will be
    written.

    Attributes:
        data_source: the prompt's data source.
        outcomes: one per requested sample.
        num_response_tokens: tokens generated; 0 if the group could not be generated.
        samples: the samples to write to a file.
    """

    data_source: str
    outcomes: tuple[Outcome, ...]
    num_response_tokens: int = 0
    samples: tuple[DumpedSample, ...] = ()

    @property
    def scored(self) -> tuple[Scored, ...]:
        """The outcomes with a score."""
        return tuple(o for o in self.outcomes if isinstance(o, Scored))


@dataclass(frozen=True, slots=True)
class ValidationExample:
    """One response, for display."""

    prompt: str
    response: str
    ground_truth: str
    score: float


@dataclass(frozen=True, slots=True)
class FinishedValidation:
    """Metrics by verl's names, with standard errors, and response tokens generated for them."""

    metrics: dict[str, float]
    examples: list[ValidationExample]
    num_generated_tokens: int
    standard_errors: dict[str, float] = field(default_factory=dict)


class ValidationRun:
    """The validated prompts of one run, by position, and examples, spread over the whole set.

    Args:
        num_examples: largest number of responses to keep for display.
    """

    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples
        self._prompts: dict[int, ValidatedPrompt] = {}
        self._examples: dict[int, ValidationExample] = {}

    @property
    def prompts(self) -> list[ValidatedPrompt]:
        """All prompts in the order of their positions."""
        return [self._prompts[position] for position in sorted(self._prompts)]

    def add(
        self, position: int, prompt: ValidatedPrompt, example: ValidationExample | None
    ) -> None:
        """Add a prompt; keep examples from the same positions in every validation."""
        self._prompts[position] = prompt
        if example is not None:
            self._examples[position] = example
            if len(self._examples) > self._num_examples:
                del self._examples[max(self._examples, key=_shuffle_key)]

    def result(self) -> FinishedValidation:
        """Return verl's metrics over the scored samples, and the examples."""
        prompts = self.prompts
        scored = [ValidationPrompt(p.data_source, p.scored) for p in prompts if p.scored]
        num_failed = sum(len(p.outcomes) - len(p.scored) for p in prompts)
        counts = {
            "val-aux/num_prompts": float(len(scored)),
            "val-aux/num_failed_samples": float(num_failed),
        }
        values = prompt_values(scored)
        return FinishedValidation(
            means(values) | counts,
            [self._examples[position] for position in sorted(self._examples)],
            sum(p.num_response_tokens for p in prompts),
            standard_errors(values),
        )


def _shuffle_key(position: int) -> bytes:
    """Return a position's place in a fixed random order, since files are sorted by data source."""
    return hashlib.blake2b(position.to_bytes(8), digest_size=8).digest()


class ValidationRows(Protocol):
    """A stream of one pass over the validation rows, and their number."""

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the whole set."""
        ...

    def take(self, count: int) -> list[IssuedRow]:
        """Return the next rows; fewer only at the end."""
        ...


class Validator:
    """Runs validations.

    Args:
        open_stream: opens the validation set; ``None`` without one.
        generator: generates groups, with priority over training groups.
        grader: grades them as in training.
        on_tokens: called with the tokens generated for each group, whatever its outcome.
        failures: logs samples without a score.
        dumps: writes the responses to files.
        announced_version: returns the version announced last.
        store: the store of a stand-alone evaluation; ``None`` starts each validation from its first
            prompt.
    """

    def __init__(
        self,
        open_stream: Callable[[], ValidationRows] | None,
        generator: SampleGenerator,
        grader: Grader,
        dumps: SampleDumps,
        announced_version: Callable[[], int | None],
        on_tokens: Callable[[int], None] = lambda _: None,
        failures: FailureLog | None = None,
        store: PromptStore | None = None,
    ) -> None:
        self._store = store
        self._open_stream, self._generator, self._grader = open_stream, generator, grader
        self._dumps, self._announced_version = dumps, announced_version
        self._on_tokens = on_tokens
        self._failures = failures or FailureLog()
        self._turn = asyncio.Lock()
        self._open: set[GroupProgress] = set()  # of prompts under way
        self.num_graded_groups = 0
        self.num_prompts_done = self.num_prompts = 0  # of the validation that runs

    @property
    def num_pending_tokens(self) -> int:
        """Tokens generated for groups that have not ended."""
        return sum(progress.num_received for progress in self._open)

    async def run(self, order: ValidationOrder, seconds: float) -> FinishedValidation:
        """Sample and grade the whole validation set.

        Raises:
            InvalidRequestError: there is no validation set.
            NotReadyError: another version is announced, and no replica is held at this one.
            ValidationFailedError: a replica sampled with another version meanwhile, none that
                serves this one is left, or more than `MAX_FAILED_SHARE` of the samples failed.
            DeadlineError: not finished within `seconds`, including the wait for another validation.
            ExceptionGroup: a group of `DataError`, if the set holds an unusable row.
        """
        if self._open_stream is None:
            raise InvalidRequestError("there is no validation set; set data.val_files")
        version, ends_at = order.policy_version, time.monotonic() + seconds
        phase = f"waiting to validate version {version} after another validation"
        async with deadline(seconds, peer="reward service", phase=phase):
            await self._turn.acquire()
        try:
            announced = self._announced_version()
            if announced != version and not self._generator.may_validate(version):
                raise NotReadyError(
                    f"version {version} is to be validated, but "
                    f"{'none' if announced is None else announced} is announced; announce it first"
                )
            phase = f"validating version {version}"
            async with deadline(ends_at - time.monotonic(), peer="rollout fleet", phase=phase):
                validated = await self._validate_all(self._open_stream(), order)
            prompts = validated.prompts
            await self._dumps.write_validated([s for p in prompts for s in p.samples], version)
            check_failures([o for p in prompts for o in p.outcomes], phase)
            return await asyncio.to_thread(validated.result)
        finally:
            self.num_prompts_done = self.num_prompts = 0
            self._turn.release()

    async def _validate_all(self, stream: ValidationRows, order: ValidationOrder) -> ValidationRun:
        """Validate all prompts of the set."""
        self.num_prompts = stream.rows_per_epoch
        run = ValidationRun(order.num_examples)
        stored_prompts: Mapping[int, ValidationPrompt] = {}
        if self._store is not None:
            stored_prompts = await asyncio.to_thread(
                self._store.load_finished, order.samples_per_prompt
            )
        capacity = asyncio.Semaphore(MAX_GROUPS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            while issued_rows := await asyncio.to_thread(stream.take, ROWS_PER_READ):
                for issued in issued_rows:
                    if (stored_prompt := stored_prompts.get(issued.position)) is not None:
                        prompt = ValidatedPrompt(stored_prompt.data_source, stored_prompt.scores)
                        run.add(issued.position, prompt, None)
                        self.num_prompts_done += 1
                        continue
                    await capacity.acquire()
                    task = tasks.create_task(
                        self._validate_prompt(issued, order, run),
                        name=f"validation {issued.position}",
                    )
                    task.add_done_callback(lambda _: capacity.release())
        return run

    async def _validate_prompt(
        self, issued: IssuedRow, order: ValidationOrder, run: ValidationRun
    ) -> None:
        """Add the outcomes of one prompt."""
        prompt = issued.prompt(f"{VALIDATION_ID_PREFIX}{issued.position}", issued.position)
        progress = GroupProgress()
        self._open.add(progress)
        try:
            group = await self._generate(prompt, order, progress)
        except OverlongPromptError as error:
            self._failures.note(str(error), "prompts left out", prompt.prompt_id)
            return
        except GroupFailedError as error:
            failed = Failed(error.kind or FailureKind.ENGINE_ERROR, str(error))
            outcomes: tuple[Outcome, ...] = (failed,) * order.samples_per_prompt
            run.add(issued.position, ValidatedPrompt(prompt.data_source, outcomes), None)
            self._note_failure(prompt, failed, progress)
            await self._store_outcomes(prompt, None, outcomes)
        else:
            outcomes = await self._grade(group, progress)
            samples = self._dumps.validation_rows(group, outcomes)
            validated = ValidatedPrompt(
                prompt.data_source, outcomes, group.num_response_tokens, samples
            )
            run.add(issued.position, validated, example_of(group, outcomes))
            await self._store_outcomes(prompt, group, outcomes)
        finally:
            self.num_prompts_done += 1
            self._open.discard(progress)
            self._on_tokens(progress.num_received)
        self.num_graded_groups += 1

    async def _store_outcomes(
        self, prompt: Prompt, group: RolloutGroup | None, outcomes: Sequence[Outcome]
    ) -> None:
        if self._store is not None:
            await self._store.add(prompt, group, outcomes)

    async def _generate(
        self, prompt: Prompt, order: ValidationOrder, progress: GroupProgress
    ) -> RolloutGroup:
        request = GroupRequest(
            prompt,
            tuple(range(order.samples_per_prompt)),
            for_prompt(order.sampling, prompt, label="validation"),
            Purpose.VALIDATION,
            lowest_version=order.policy_version,
            highest_version=order.policy_version,
            progress=progress,
        )
        group = await self._generator.generate(request)
        versions = {span.version for r in group.rollouts for span in r.version_spans}
        if versions - {order.policy_version}:
            raise ValidationFailedError(
                f"validating version {order.policy_version}: samples of versions "
                f"{sorted(versions)} came; no weights may be published during a validation"
            )
        return group

    async def _grade(self, group: RolloutGroup, progress: GroupProgress) -> tuple[Outcome, ...]:
        outcomes = (await self._grader.grade(group)).outcomes
        for outcome in outcomes:
            if isinstance(outcome, Failed):
                self._note_failure(group.prompt, outcome, progress)
        return outcomes

    def _note_failure(self, prompt: Prompt, failed: Failed, progress: GroupProgress) -> None:
        place = f"{prompt.prompt_id} (replica {progress.replica_names})"
        self._failures.note_failure(failed, place)


def check_failures(outcomes: Sequence[Outcome], phase: str) -> None:
    """Raise `ValidationFailedError` if more than `MAX_FAILED_SHARE` of the samples failed."""
    failed = [outcome for outcome in outcomes if isinstance(outcome, Failed)]
    if len(failed) <= MAX_FAILED_SHARE * len(outcomes):
        return
    counts = Counter(outcome.kind for outcome in failed)
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    commonest = counts.most_common(1)[0][0]
    example = next(outcome for outcome in failed if outcome.kind is commonest)
    raise ValidationFailedError(
        f"{phase}: {len(failed)} of {len(outcomes)} samples failed ({summary}), more than the "
        f"{MAX_FAILED_SHARE:.0%} that may be left out of the means; for example {commonest}: "
        f"{example.detail}",
    )


def example_of(group: RolloutGroup, outcomes: Sequence[Outcome]) -> ValidationExample | None:
    """Return the first scored response; ``None`` if there is none."""
    prompt = group.prompt
    for rollout, outcome in zip(group.rollouts, outcomes, strict=True):
        if isinstance(outcome, Scored):
            question = prompt.messages[-1].content
            return ValidationExample(question, rollout.text, prompt.ground_truth, outcome.score)
    return None

"""Run one attempt: generate, grade and filter the samples of a group.

Consumes: a group that starts. Waits for: a replica, samples, grades. Produces: a kept group, or the
end of its prompt. With probes, a few samples are generated first. A second request generates the
rest as soon as two probes differ, or when all have arrived and the strategy continues. Both
requests queue by the prompt's number, so a group that continues precedes one that starts. The
samples are those that a single request would return. The last request also generates the greedy
response, if needed. All requests share one `GroupProgress`; a group that has used its time or
tokens ends with the samples it has.

A sample without a score is scored again by the grader, generated again here, or left out, as the
policy decides (`sluice.algorithm.groups.filter`); a group is trained on its scored samples if
enough of them are left.

On failure: an error of this group alone ends its prompt as ``DROPPED_FAILED``, and may be a strike
against it (`quarantine`); an engine error is a strike only if a replica answered with it, not if
replicas were lost. An error that every group would meet also stops the loop. Nothing starts a
failed group again: `sluice.reward.max_attempts` counts streams to replicas within this attempt
(`generation.dispatcher`), and the loop requeues only groups that it cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.reward.generation.request import (
    GroupFailedError,
    GroupRequest,
    OverlongPromptError,
    Purpose,
    SampleCallback,
    SampleGenerator,
    decisive_error,
    for_prompt,
)
from services.reward.grading.grader import Grader
from services.reward.group_table import EndCause, Group, GroupEnding, GroupTable
from services.reward.groups.batches import TrainBatches
from services.reward.groups.sources import TrainingSources
from services.reward.prompts.quarantine import Quarantine
from sluice.algorithm.groups.filter import (
    FilterDecision,
    OutcomeAction,
    filter_group,
    filter_probes,
    first_strike,
    is_right,
    samples_differ,
)
from sluice.errors import SluiceError
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanName
from sluice.types import (
    Failed,
    FailureKind,
    GradedGroup,
    Outcome,
    Prompt,
    PromptEnd,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Scored,
)

logger = logging.getLogger(__name__)


class GroupRun:
    """Runs attempts of groups, each in the caller's task."""

    def __init__(
        self,
        *,
        sources: TrainingSources,
        groups: GroupTable,
        generator: SampleGenerator,
        grader: Grader,
        quarantine: Quarantine,
        batches: TrainBatches,
    ) -> None:
        self._sources = sources
        self._groups = groups
        self._generator = generator
        self._grader = grader
        self._quarantine = quarantine
        self._batches = batches
        # All sources have the same filter.
        self._metric = next(iter(sources.values())).settings.filter_metric
        self._is_warned = False

    async def run(self, group: Group) -> None:
        """Run one attempt until its group is kept or its prompt has ended."""
        try:
            graded, decision = await self._grade_and_filter(group)
        except OverlongPromptError as error:
            group.check_cancelled()
            self._quarantine.clear_strikes(group.prompt)
            ending = GroupEnding(PromptEnd.DROPPED_FAILED, str(error), cause=EndCause.OVERLONG)
            self._groups.end(group, ending)
            return
        except SluiceError as error:
            group.check_cancelled()
            self._end_failed(group, error)
            return
        group.check_cancelled()
        detail = decision.detail
        if decision.end is PromptEnd.DROPPED_FAILED:
            detail = self._count_strike(group, graded.outcomes) or detail
        else:
            self._quarantine.clear_strikes(group.prompt)
            self._notify_strategy(group, graded, is_kept=decision.end is None)
        if decision.end is None:
            self._groups.keep(group, graded)
            self._batches.cancel_without_slot()
        else:
            self._groups.end(group, GroupEnding(decision.end, detail), graded)

    def _end_failed(self, group: Group, error: SluiceError) -> None:
        """End a group that was not generated."""
        detail, failed = str(error), None
        if isinstance(error, GroupFailedError) and error.kind is not None:
            failed = Failed(error.kind, detail)
            detail = f"{error.kind}: {detail.removeprefix(f'{error.kind}: ')}"
        detail = self._count_strike(group, (failed,) if failed else ()) or detail
        self._groups.end(group, GroupEnding(PromptEnd.DROPPED_FAILED, detail, failed=failed))
        if not isinstance(error, GroupFailedError):
            self._batches.fail(error)

    def _count_strike(self, group: Group, outcomes: Sequence[Outcome]) -> str | None:
        """Count a strike against a failed group's prompt, or clear its strikes. Return the reason
        if the strike puts the prompt into quarantine."""
        failed = first_strike(outcomes, engine_answered=group.progress.engine_answered)
        if failed is not None:
            return self._quarantine.add_strike(group.prompt, failed)
        self._quarantine.clear_strikes(group.prompt)
        return None

    async def _grade_and_filter(self, group: Group) -> tuple[GradedGroup, FilterDecision]:
        """Return the graded samples and the filter's decision, perhaps after only the probes."""
        settings = self._sources[group.prompt.source].settings
        num_samples, num_probes = settings.samples_per_group, group.attempt.first_samples
        new_indexes = range(num_samples)
        if num_probes >= num_samples:
            graded = await self._sample_and_grade(group, new_indexes, settings.greedy)
        else:
            graded, others = await self._sample_probes(group, range(num_probes))
            if others is None:
                graded = await self._regenerate(group, graded, range(num_probes))
                decision = self._after_probes(group, graded)
                if decision is not None:
                    return graded, decision
                # If the group is over, this request reaches no replica, and its samples return as
                # aborted.
                self._groups.note_more(group, is_sure=samples_differ(graded.scored, self._metric))
                new_indexes = range(num_probes, num_samples)
                others = await self._sample_and_grade(group, new_indexes, settings.greedy)
            graded = merge_groups(graded, others)
        graded = await self._regenerate(group, graded, new_indexes)
        with TRACER.span(SpanName.FILTER) as span:
            decision = filter_group(graded, metric=self._metric, needs=settings.needs)
            span.set({SpanAttribute.PROMPT_END: decision.end.value if decision.end else "none"})
        return graded, decision

    async def _sample_probes(
        self, group: Group, indexes: range
    ) -> tuple[GradedGroup, GradedGroup | None]:
        """Return the first samples and, if two of them differed before all had arrived, the
        rest."""
        early_grades = EarlyGrades(self._grader, group.prompt, self._metric)
        name, other_samples = f"prompt {group.prompt.prompt_id}", None
        settings = self._sources[group.prompt.source].settings
        try:
            async with asyncio.TaskGroup() as tasks:
                probes = tasks.create_task(
                    self._sample_and_grade_early(group, indexes, early_grades),
                    name=f"{name}, probes",
                )
                differ = tasks.create_task(early_grades.differs.wait(), name=f"{name}, differ")
                await asyncio.wait((probes, differ), return_when=asyncio.FIRST_COMPLETED)
                if probes.done():
                    differ.cancel()
                else:
                    self._groups.note_more(group, is_sure=True)
                    other_indexes = range(indexes.stop, settings.samples_per_group)
                    generating = self._sample_and_grade(group, other_indexes, settings.greedy)
                    other_samples = tasks.create_task(generating, name=f"{name}, rest")
        except ExceptionGroup as errors:
            raise decisive_error(errors) from errors
        return probes.result(), other_samples.result() if other_samples else None

    async def _sample_and_grade_early(
        self, group: Group, indexes: Sequence[int], early_grades: EarlyGrades, regeneration: int = 0
    ) -> GradedGroup:
        """Return samples of a group, each graded on arrival."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    early_grades.run(), name=f"prompt {group.prompt.prompt_id}, grades"
                )
                samples, _ = await self._generate(
                    group, indexes, None, regeneration, early_grades.arrived.put_nowait
                )
                early_grades.arrived.put_nowait(None)
        except ExceptionGroup as errors:
            raise decisive_error(errors) from errors
        # Every sample that finished has a grade; the others were aborted.
        return await self._grade_samples(group, samples, known_outcomes=early_grades.outcomes)

    def _after_probes(self, group: Group, probes: GradedGroup) -> FilterDecision | None:
        """Return how a group ends after its first samples; ``None`` to generate the others.

        The strategy does not decide about a group that has used its time or its tokens.
        """
        source = self._sources[group.prompt.source]
        with TRACER.span(SpanName.FILTER) as span:
            decision = filter_probes(probes, metric=self._metric, needs=source.settings.needs)
            span.set(
                {
                    SpanAttribute.PROMPT_END: decision.end.value
                    if decision and decision.end
                    else "none"
                }
            )
        if decision is None:
            return None
        samples_text = (
            f"after {len(probes.outcomes)} of {source.settings.samples_per_group} samples"
        )
        if decision.end is PromptEnd.DROPPED_FAILED:
            return FilterDecision(decision.end, f"{decision.detail} ({samples_text})")
        if group.progress.check(asyncio.get_running_loop().time()):
            return FilterDecision(decision.end, samples_text)
        continued = source.strategy.after_probes(
            group.attempt,
            num_right=_num_right(probes.scored),
            num_scored=len(probes.scored),
            version=self._groups.policy_version or 0,
        )
        if continued is None:
            return FilterDecision(decision.end, samples_text)
        group.attempt = continued
        return None

    async def _sample_and_grade(
        self,
        group: Group,
        indexes: Sequence[int],
        greedy: SamplingParams | None = None,
        regeneration: int = 0,
    ) -> GradedGroup:
        """Return graded samples of a group and its greedy response, if there is one.

        With slow scorers, grade while other samples are still generated, as verl does.
        """
        if greedy is None and self._grader.is_slow:
            early_grades = EarlyGrades(self._grader, group.prompt, self._metric)
            return await self._sample_and_grade_early(group, indexes, early_grades, regeneration)
        samples, response = await self._generate(group, indexes, greedy, regeneration)
        return await self._grade_samples(group, samples, response)

    async def _regenerate(
        self, group: Group, graded: GradedGroup, new_indexes: range
    ) -> GradedGroup:
        """Return the group with new samples in place of those that the outcome policy generates
        again.

        Each regeneration has its own seed: with the same seed the same samples would come again.

        Args:
            group: the group.
            graded: all of its samples so far.
            new_indexes: indexes of the samples that no earlier call has generated again.
        """
        policy, num_regenerations = self._sources[group.prompt.source].settings.needs.policy, 0
        while True:
            num_regenerations += 1
            positions = policy.indexes_to_repeat(
                graded.outcomes, num_regenerations, OutcomeAction.GENERATE_AGAIN
            )
            replaced = [
                rollout
                for index in positions
                if (rollout := graded.group.rollouts[index]).sample_index in new_indexes
            ]
            if not replaced:
                return graded
            self._groups.note_more(
                group, is_sure=samples_differ(graded.scored, self._metric), replaced=replaced
            )
            indexes = [rollout.sample_index for rollout in replaced]
            graded = merge_groups(
                graded, await self._sample_and_grade(group, indexes, regeneration=num_regenerations)
            )

    async def _generate(
        self,
        group: Group,
        indexes: Sequence[int],
        greedy: SamplingParams | None = None,
        regeneration: int = 0,
        on_sample: SampleCallback | None = None,
    ) -> tuple[RolloutGroup, RolloutGroup | None]:
        """Return samples of a group and its greedy response, if there is one."""
        source, version = self._sources[group.prompt.source], self._groups.policy_version or 0
        label = f"train, regeneration {regeneration}" if regeneration else "train"
        request = GroupRequest(
            group.prompt,
            tuple(indexes),
            for_prompt(source.settings.sampling, group.prompt, label=label),
            Purpose.TRAINING,
            lowest_version=version - source.strategy.rules.max_staleness,
            progress=group.progress,
            allows_missing=not source.settings.needs.whole_groups,
        )
        group.num_ungraded += len(indexes) + (greedy is not None)
        response: RolloutGroup | None = None
        with TRACER.span(SpanName.GENERATE, {SpanAttribute.NUM_SAMPLES: len(indexes)}):
            if greedy is None:
                samples = await self._generator.generate(request, on_sample)
            else:
                samples, response = await with_greedy(self._generator, request, greedy)
        self._groups.note_generated(group, response.num_response_tokens if response else 0)
        return samples, response

    async def _grade_samples(
        self,
        group: Group,
        samples: RolloutGroup,
        response: RolloutGroup | None = None,
        known_outcomes: Mapping[int, Outcome] | None = None,
    ) -> GradedGroup:
        known_outcomes = {**(known_outcomes or {}), **group.progress.engine_errors}
        graded = await self._grader.grade(samples, response, known_outcomes)
        self._groups.note_graded(group, graded)
        return graded

    def _notify_strategy(self, group: Group, graded: GradedGroup, *, is_kept: bool) -> None:
        scores, num_samples = graded.scored, len(graded.outcomes)
        num_right = _num_right(scores)
        if is_kept and num_right in (0, len(scores)):
            self._warn_of_partial_credit(group.prompt)
        self._sources[group.prompt.source].strategy.note_ended(
            group.attempt,
            num_right=num_right,
            num_scored=len(scores),
            mean_tokens=graded.group.num_response_tokens / num_samples,
            is_kept=is_kept,
            version=self._groups.policy_version or 0,
            seconds=time.monotonic() - group.started_s,
        )

    def _warn_of_partial_credit(self, prompt: Prompt) -> None:
        """Warn once that a pass rate is meaningless with partial credit."""
        name = self._sources[prompt.source].strategy.rules.strategy
        if self._is_warned or not (name.uses_probes or name.uses_memory):
            return
        self._is_warned = True
        logger.warning(
            "prompt %s is kept though none of its samples is right, or all are: sluice.sampling."
            "strategy=%s counts right and wrong samples, and '%s' gives partial credit; "
            "choose sluice.sampling.strategy=stream, or filter by a metric of 0 and 1",
            prompt.prompt_id,
            name,
            self._metric,
        )


async def with_greedy(
    generator: SampleGenerator, request: GroupRequest, greedy: SamplingParams
) -> tuple[RolloutGroup, RolloutGroup]:
    """Generate a prompt's samples and its greedy response, the baseline of ReMax.

    See arXiv 2310.10505.

    Args:
        generator: generates them.
        request: the samples; the greedy response keeps to the same versions.
        greedy: sampling parameters of the greedy response.

    Raises:
        GroupFailedError: samples or response cannot be generated; the detail of the response's
            failure begins with its `FailureKind`.
        SluiceError: another error; if both requests failed, the one that `decisive_error` chooses.
    """
    greedy_request = replace(
        request,
        sample_indexes=(0,),
        sampling=for_prompt(greedy, request.prompt, label="greedy"),
        allows_missing=False,
        is_baseline=True,
    )
    name = f"prompt {request.prompt.prompt_id}"
    try:
        async with asyncio.TaskGroup() as tasks:
            samples = tasks.create_task(generator.generate(request), name=f"{name}, samples")
            response = tasks.create_task(
                _greedy_response(generator, greedy_request), name=f"{name}, greedy"
            )
    except ExceptionGroup as group:
        raise decisive_error(group) from group
    return samples.result(), response.result()


async def _greedy_response(generator: SampleGenerator, request: GroupRequest) -> RolloutGroup:
    try:
        return await generator.generate(request)
    except GroupFailedError as error:
        if type(error) is not GroupFailedError:
            raise  # the prompt itself is refused, and the type of the error names the reason
        kind = error.kind or FailureKind.ENGINE_ERROR
        raise GroupFailedError(
            f"{kind}: no greedy response, the baseline of its samples: {error}",
            error.kind,
        ) from error


def merge_groups(first: GradedGroup, other: GradedGroup) -> GradedGroup:
    """Return one group of all samples in their order; `other` replaces samples of `first`."""
    pairs = {
        rollout.sample_index: (rollout, outcome)
        for part in (first, other)
        for rollout, outcome in zip(part.group.rollouts, part.outcomes, strict=True)
    }
    ordered = [pairs[index] for index in sorted(pairs)]
    group = RolloutGroup(
        first.group.prompt, first.group.prompt_token_ids, tuple(rollout for rollout, _ in ordered)
    )
    outcomes = tuple(outcome for _, outcome in ordered)
    return GradedGroup(group, outcomes, other.greedy or first.greedy)


def _num_right(scores: Sequence[Scored]) -> int:
    return sum(is_right(scored) is True for scored in scores)


class EarlyGrades:
    """The samples of a group, graded on arrival.

    As soon as two probes differ, the group is certain to be mixed, and its rest need not wait for
    the longest probe. Grading ends when all samples are graded. Only the end of the group cancels
    it, which kills a working scorer.

    Attributes:
        arrived: samples that have finished, then ``None``.
        outcomes: by the samples' indexes.
        differs: two of them differ.
    """

    def __init__(self, grader: Grader, prompt: Prompt, metric: str | None) -> None:
        self._grader, self._prompt, self._metric = grader, prompt, metric
        # Bounded by the request, since a sample finishes once.
        self.arrived: asyncio.Queue[Rollout | None] = asyncio.Queue()
        self.outcomes: dict[int, Outcome] = {}
        self.differs = asyncio.Event()

    async def run(self) -> None:
        """Grade what arrives until ``None``; set `differs` as soon as two samples differ."""
        is_over = False
        while not is_over:
            arrived = [await self.arrived.get()]
            while not self.arrived.empty():
                arrived.append(self.arrived.get_nowait())
            is_over = None in arrived
            rollouts = [rollout for rollout in arrived if rollout is not None]
            if rollouts:
                await self._grade(rollouts)

    async def _grade(self, rollouts: list[Rollout]) -> None:
        outcomes = await self._grader.outcomes(self._prompt, rollouts)
        for rollout, outcome in zip(rollouts, outcomes, strict=True):
            self.outcomes[rollout.sample_index] = outcome
        scores = [o for o in self.outcomes.values() if isinstance(o, Scored)]
        if samples_differ(scores, self._metric):
            self.differs.set()

"""One attempt: the samples of a group are generated, graded and filtered.

Consumes: a group that starts. Waits for: a replica, samples, grades. Produces: a kept group, or an
end of its prompt. With probes a few samples are generated first, and the rest by a second request:
as soon as two of the first differ, or when all have come and the strategy continues. Both requests
have the prompt's rank, so a group that continues is served before one that starts. The samples are
those that one request for all of them would give. The greedy response, where one is needed, comes
with the last request. All requests share one budget of time and tokens; a group that has used it
ends as it stands.

A sample without a score is scored again by the grader, generated again here, or left out, as the
policy decides (`sluice.algorithm.groups.outcomes`); a group is trained on its scored samples if
enough of them are left.

On failure: what this group meets ends its prompt, and may be a strike against it (`quarantine`):
an engine's error is one only if a replica answered with it, and none where replicas were lost.
What all groups would meet also stops the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.reward.generation.dispatcher import GeneratedGroup, GroupDispatcher, generate_group
from services.reward.generation.queue import Priority
from services.reward.generation.request import (
    GroupFailedError,
    GroupRequest,
    OldestStart,
    OverlongPromptError,
    SampleCallback,
    StartCallback,
    decisive,
    for_prompt,
)
from services.reward.grading.grader import Grader
from services.reward.group import EndCause, Ending, Group, Groups
from services.reward.groups.leases import TrainBatches
from services.reward.groups.settings import GroupNeeds, PipelineSettings
from services.reward.prompts.quarantine import Quarantine
from sluice.algorithm.groups.filter import (
    LEAST_SAMPLES,
    fewest_samples,
    filter_group,
    filter_scores,
    is_right,
)
from sluice.algorithm.groups.outcomes import striking
from sluice.algorithm.sampling.strategy import SamplingStrategy
from sluice.errors import ConfigError, SluiceError
from sluice.telemetry.tracing import TRACER, Key, Span, SpanName
from sluice.types import (
    Failed,
    FailureKind,
    GradedGroup,
    Outcome,
    Prompt,
    PromptEnd,
    PromptOrigin,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Scored,
)

logger = logging.getLogger(__name__)


class GroupRun:
    """Runs groups, each in the task of its caller.

    Args:
        settings: of groups.
        groups: all groups.
        dispatcher: generates samples.
        grader: grades them.
        quarantine: counts strikes.
        strategy: decides about the rest of a group, and learns from its end.
        batches: cancels groups that have no slot any more, and is given what all groups would meet.
    """

    def __init__(
        self,
        *,
        settings: PipelineSettings,
        groups: Groups,
        dispatcher: GroupDispatcher,
        grader: Grader,
        quarantine: Quarantine,
        strategy: SamplingStrategy,
        batches: TrainBatches,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._dispatcher = dispatcher
        self._grader = grader
        self._quarantine = quarantine
        self._strategy = strategy
        self._batches = batches
        self._metric = settings.filter_metric
        self._is_warned = False

    async def run(self, group: Group) -> None:
        """Run one attempt, to its judgement."""
        try:
            graded, verdict = await self._judged(group)
        except OverlongPromptError as error:
            group.check_cancelled()
            self._quarantine.cleared(group.prompt)
            ending = Ending(PromptEnd.DROPPED_FAILED, str(error), cause=EndCause.OVERLONG)
            self._groups.end(group, ending)
            return
        except SluiceError as error:
            group.check_cancelled()
            self._not_generated(group, error)
            return
        group.check_cancelled()
        detail = verdict.detail
        if verdict.end is PromptEnd.DROPPED_FAILED:
            detail = self._quarantined(group, graded.outcomes) or detail
        else:
            self._quarantine.cleared(group.prompt)
            self._notify_strategy(group, graded, kept=verdict.end is None)
        if verdict.end is None:
            self._groups.keep(group, graded)
            self._batches.cancel_expired()
        else:
            self._groups.end(group, Ending(verdict.end, detail), graded)

    def _not_generated(self, group: Group, error: SluiceError) -> None:
        """End a group without its samples."""
        detail, failed = str(error), None
        if isinstance(error, GroupFailedError) and error.kind is not None:
            failed = Failed(error.kind, detail)
            detail = f"{error.kind}: {detail.removeprefix(f'{error.kind}: ')}"
        detail = self._quarantined(group, (failed,) if failed else ()) or detail
        self._groups.end(group, Ending(PromptEnd.DROPPED_FAILED, detail, failed=failed))
        if not isinstance(error, GroupFailedError):
            self._batches.fail(error)

    def _quarantined(self, group: Group, outcomes: Sequence[Outcome]) -> str | None:
        """Count a strike against the prompt of a failed group, or clear those before it. Return the
        reason if the strike puts the prompt into quarantine."""
        failed = striking(outcomes, engine_answered=group.budget.engine_answered)
        if failed is not None:
            return self._quarantine.struck(group.prompt, failed)
        self._quarantine.cleared(group.prompt)
        return None

    async def _judged(self, group: Group) -> tuple[GradedGroup, Judgement]:
        num_samples, first = self._settings.samples_per_group, group.attempt.first_samples
        start = OldestStart(self._start_callback(group))
        if first >= num_samples:
            graded = await self._sampled(group, range(num_samples), start.of("samples"))
        else:
            graded, rest = await self._staged(group, range(first), start)
            if rest is None:
                graded = await self._regenerated(group, graded, start)
                others = range(first, num_samples)
                beyond = self._request(group, others)
                is_over = self._dispatcher.is_over(beyond)
                verdict = self._after_probes(group, graded, is_over=is_over)
                if verdict is not None:
                    return graded, verdict
                # Of a group that is over no replica is asked for these: they come broken off.
                self._groups.continued(group, is_sure=samples_differ(graded.scored, self._metric))
                rest = await self._sampled(group, others, start.of("rest"))
            graded = joined(graded, rest)
        graded = await self._regenerated(group, graded, start)
        return graded, judge(graded, metric=self._metric, needs=self._settings.needs)

    async def _staged(
        self, group: Group, indexes: range, start: OldestStart
    ) -> tuple[GradedGroup, GradedGroup | None]:
        """Return the first samples and, if two of them differed before all had come, the rest."""
        watch = ProbeWatch(self._grader, group.prompt, self._metric)
        name, rest = f"prompt {group.prompt.prompt_id}", None
        try:
            async with asyncio.TaskGroup() as tasks:
                probing = self._probes(group, indexes, start.of("probes"), watch)
                probes = tasks.create_task(probing, name=f"{name}, probes")
                differ = tasks.create_task(watch.differs.wait(), name=f"{name}, differ")
                await asyncio.wait((probes, differ), return_when=asyncio.FIRST_COMPLETED)
                if probes.done():
                    differ.cancel()
                else:
                    self._groups.continued(group, is_sure=True)
                    others = range(indexes.stop, self._settings.samples_per_group)
                    generating = self._sampled(group, others, start.of("rest"))
                    rest = tasks.create_task(generating, name=f"{name}, rest")
        except ExceptionGroup as errors:
            raise decisive(errors) from errors
        return probes.result(), rest.result() if rest else None

    async def _probes(
        self,
        group: Group,
        indexes: range,
        on_start: StartCallback,
        watch: ProbeWatch,
    ) -> GradedGroup:
        async with asyncio.TaskGroup() as tasks:
            grading = f"prompt {group.prompt.prompt_id}, grades of probes"
            tasks.create_task(watch.run(), name=grading)
            request = self._request(group, indexes)
            sampled = await self._generated(group, request, None, on_start, watch.finished)
            watch.over()
        # What is left are samples that were broken off.
        graded = await self._grader.grade(
            sampled.samples, known=watch.outcomes, engine_errors=group.budget.engine_errors
        )
        self._groups.graded(group, graded)
        return graded

    def _after_probes(
        self, group: Group, probes: GradedGroup, *, is_over: bool
    ) -> Judgement | None:
        """Return how a group ends after its first samples; ``None``: the others are generated.

        The strategy does not decide about a group that has used its time or its tokens.
        """
        verdict = judge_probes(probes, metric=self._metric, needs=self._settings.needs)
        if verdict is None:
            return None
        after = f"after {len(probes.outcomes)} of {self._settings.samples_per_group} samples"
        if verdict.end is PromptEnd.DROPPED_FAILED:
            return Judgement(verdict.end, f"{verdict.detail} ({after})")
        if is_over:
            return Judgement(verdict.end, after)
        continued = self._strategy.after_probes(
            group.attempt,
            num_right=_num_right(probes),
            num_scored=len(probes.scored),
            version=self._groups.policy_version or 0,
        )
        if continued is None:
            return Judgement(verdict.end, after)
        group.attempt = continued
        return None

    async def _sampled(
        self,
        group: Group,
        indexes: range,
        on_start: StartCallback,
    ) -> GradedGroup:
        """Return the last samples of a group and its greedy response, graded."""
        sampled = await self._generated(
            group, self._request(group, indexes), self._settings.greedy, on_start
        )
        graded = await self._grader.grade(
            sampled.samples, sampled.greedy, engine_errors=group.budget.engine_errors
        )
        self._groups.graded(group, graded)
        return graded

    async def _regenerated(
        self,
        group: Group,
        graded: GradedGroup,
        start: OldestStart,
    ) -> GradedGroup:
        """Return the group with other samples for those that the policy generates again.

        They have seeds of their own, or they would be the same once more.
        """
        policy, num_rounds = self._settings.needs.policy, 1
        while places := policy.to_generate_again(graded.outcomes, num_rounds):
            num_rounds += 1
            replaced = [graded.group.rollouts[place] for place in places]
            indexes = [rollout.sample_index for rollout in replaced]
            self._groups.continued(
                group, is_sure=samples_differ(graded.scored, self._metric), replaced=replaced
            )
            request = self._request(group, indexes, round_number=num_rounds)
            sampled = await self._generated(group, request, None, start.of(f"draw {num_rounds}"))
            again = await self._grader.grade(
                sampled.samples, engine_errors=group.budget.engine_errors
            )
            self._groups.graded(group, again)
            graded = joined(graded, again)
        return graded

    async def _generated(
        self,
        group: Group,
        request: GroupRequest,
        greedy: SamplingParams | None,
        on_start: StartCallback,
        on_sample: SampleCallback | None = None,
    ) -> GeneratedGroup:
        group.num_ungraded += request.num_samples + (greedy is not None)
        with TRACER.stage(SpanName.GENERATE, {Key.NUM_SAMPLES: request.num_samples}):
            sampled = await generate_group(self._dispatcher, request, greedy, on_start, on_sample)
        self._groups.generated(group, sampled.num_greedy_tokens)
        return sampled

    def _start_callback(self, group: Group) -> StartCallback:
        def note_start(version: int | None) -> None:
            self._groups.set_start_version(group, version)
            if version is not None:
                self._batches.cancel_expired()

        return note_start

    def _request(
        self,
        group: Group,
        indexes: Sequence[int],
        round_number: int = 1,
    ) -> GroupRequest:
        version, is_first = self._groups.policy_version or 0, round_number == 1
        stage = "train" if is_first else f"train, draw {round_number}"
        sampling = for_prompt(self._settings.sampling, group.prompt, stage=stage)
        return GroupRequest(
            group.prompt,
            tuple(indexes),
            sampling,
            Priority.TRAINING,
            lowest_version=version - self._settings.rules.max_staleness,
            budget=group.budget,
            tokens=group.tokens,
            allows_missing=not self._settings.needs.whole_groups,
        )

    def _notify_strategy(self, group: Group, graded: GradedGroup, *, kept: bool) -> None:
        rollouts, num_right = graded.group.rollouts, _num_right(graded)
        if kept and num_right in (0, len(graded.scored)):
            self._warn_of_partial_credit(group.prompt)
        self._strategy.ended(
            group.attempt,
            num_right=num_right,
            num_scored=len(graded.scored),
            mean_tokens=graded.group.num_response_tokens / len(rollouts),
            kept=kept,
            version=self._groups.policy_version or 0,
            seconds=time.monotonic() - group.started_s,
        )

    def _warn_of_partial_credit(self, prompt: Prompt) -> None:
        """Warn once: pass rates mean nothing where samples are more or less right."""
        name = self._strategy.rules.strategy
        if self._is_warned or not (name.uses_probes or name.uses_memory):
            return
        self._is_warned = True
        logger.warning(
            "prompt %s is kept though none of its samples is right, or all are: sluice.sampling."
            "strategy=%s judges prompts by right and wrong samples, and '%s' gives partial credit; "
            "choose sluice.sampling.strategy=stream, or filter by a metric of 0 and 1",
            prompt.prompt_id,
            name,
            self._metric,
        )


@dataclass(frozen=True, slots=True)
class Judgement:
    """`end` is how the prompt ends now; ``None``: its group is kept.

    `detail` of a failure begins with its `FailureKind` or with how many samples had one.
    """

    end: PromptEnd | None
    detail: str = ""


_NO_NEEDS = GroupNeeds()


def judge(graded: GradedGroup, *, metric: str | None, needs: GroupNeeds = _NO_NEEDS) -> Judgement:
    """Apply the group filter to what could be scored.

    A group fails when fewer than `fewest_samples` were scored, or when a sample failed in a way
    that costs the group. It fails as well when its greedy response, if it has one, was not scored.
    That response is not filtered by.

    Args:
        graded: the group.
        metric: the filter's metric; ``None``: no filter.
        needs: what the group has to have.

    Raises:
        ConfigError: the scorer does not return `metric` for a prompt of the data set, as it then
            would for all of them. A client's prompt fails alone.
    """
    with TRACER.stage(SpanName.FILTER) as span:
        failure = _failure(graded, needs)
        if failure:
            verdict = Judgement(PromptEnd.DROPPED_FAILED, failure)
        else:
            verdict = _filtered(graded, metric)
        _notify(span, verdict)
    return verdict


def judge_probes(
    probes: GradedGroup, *, metric: str | None, needs: GroupNeeds = _NO_NEEDS
) -> Judgement | None:
    """What a group's first samples say about it; ``None``: the rest is needed.

    A judgement is how the group would end if no more were generated: filtered, if all graded
    samples have the same metric, or failed, if nothing that comes could make the group whole. A
    lone graded sample decides nothing, and neither do samples that differ.

    Raises:
        ConfigError: as `judge`.
    """
    is_short = needs.whole_groups and len(probes.scored) < len(probes.outcomes)
    if is_short or needs.policy.decisive(probes.outcomes) is not None:
        return judge(probes, metric=metric, needs=needs)
    if len(probes.scored) < LEAST_SAMPLES:
        return None
    with TRACER.stage(SpanName.FILTER) as span:
        verdict = _filtered(probes, metric)
        _notify(span, verdict)
    return None if verdict.end is None else verdict


def samples_differ(scores: Sequence[Scored], metric: str | None) -> bool:
    """Whether a group with these samples is mixed, whatever its others are."""
    try:
        return len(scores) >= LEAST_SAMPLES and filter_scores(scores, metric=metric) is None
    except ConfigError:
        return False  # the judgement of the whole group names what is missing


def _notify(span: Span, verdict: Judgement) -> None:
    span.set({Key.PROMPT_END: "none" if verdict.end is None else verdict.end.value})


def _filtered(graded: GradedGroup, metric: str | None) -> Judgement:
    prompt = graded.group.prompt
    try:
        return Judgement(filter_group(graded, metric=metric))
    except ConfigError as error:
        if prompt.origin is PromptOrigin.CLIENT:
            return Judgement(PromptEnd.DROPPED_FAILED, f"{FailureKind.UNSCORABLE}: {error}")
        raise ConfigError(
            f"prompt {prompt.prompt_id} of data source '{prompt.data_source}': {error}"
        ) from error


def _failure(graded: GradedGroup, needs: GroupNeeds) -> str:
    """Why a group is of no use whatever its scores say; empty if it is of use."""
    num_samples, num_scored = len(graded.outcomes), len(graded.scored)
    if (decisive := needs.policy.decisive(graded.outcomes)) is not None:
        rule = f"sluice.reward.outcomes.{decisive.kind} costs the group"
        return f"{decisive.kind}: {rule}: {decisive.detail}"
    if num_scored < fewest_samples(
        num_samples, whole_groups=needs.whole_groups, least_share=needs.least_share
    ):
        first = next(o for o in graded.outcomes if isinstance(o, Failed))
        return (
            f"{num_samples - num_scored} of {num_samples} samples failed"
            f"{' and the loss compares whole groups' if needs.whole_groups else ''}, the first: "
            f"{first.kind}: {first.detail}"
        )
    if not graded.group.num_response_tokens:
        return "all responses are empty"
    unscored = [o for o in graded.greedy.outcomes if isinstance(o, Failed)] if graded.greedy else []
    if unscored:
        first = unscored[0]
        return f"{first.kind}: no score of the greedy response, the baseline: {first.detail}"
    return ""


def joined(first: GradedGroup, rest: GradedGroup) -> GradedGroup:
    """One group of all samples, in their order; of two with the same index that of `rest`."""
    pairs = {
        rollout.sample_index: (rollout, outcome)
        for part in (first, rest)
        for rollout, outcome in zip(part.group.rollouts, part.outcomes, strict=True)
    }
    ordered = [pairs[index] for index in sorted(pairs)]
    group = RolloutGroup(
        first.group.prompt, first.group.prompt_token_ids, tuple(rollout for rollout, _ in ordered)
    )
    outcomes = tuple(outcome for _, outcome in ordered)
    return GradedGroup(group, outcomes, rest.greedy or first.greedy)


def _num_right(graded: GradedGroup) -> int:
    return sum(is_right(scored) is True for scored in graded.scored)


# A group's first samples, graded as they come: two that differ decide before the others end.
#
# Consumes: finished samples of one request, and its end. Waits for: the next of them, and for
# its grade. Produces: their outcomes, each sample graded once, and the moment from which the
# group is sure to be mixed, so that the rest of it need not wait for the longest of the first
# samples. It ends once all samples are graded; it is never cut off while a scorer
# works for it, which would cost the scorer's process.


class ProbeWatch:
    """The first samples of one group.

    Args:
        grader: grades them.
        prompt: what they answer.
        metric: the group filter's.
    """

    def __init__(self, grader: Grader, prompt: Prompt, metric: str | None) -> None:
        self._grader, self._prompt, self._metric = grader, prompt, metric
        # Bounded by the request: a sample finishes once. ``None``: no more will come.
        self._arrived: asyncio.Queue[Rollout | None] = asyncio.Queue()
        self.outcomes: dict[int, Outcome] = {}
        self.differs = asyncio.Event()

    def finished(self, rollout: Rollout) -> None:
        """A sample has come."""
        self._arrived.put_nowait(rollout)

    def over(self) -> None:
        """No more samples come."""
        self._arrived.put_nowait(None)

    async def run(self) -> None:
        """Grade what comes until `over`; sets `differs` as soon as two samples do."""
        is_over = False
        while not is_over:
            arrived = [await self._arrived.get()]
            while not self._arrived.empty():
                arrived.append(self._arrived.get_nowait())
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

"""The way of one group: its samples are generated, graded and judged.

Consumes: a visit that starts. Waits for: a replica, samples, grades. Produces: a kept group, or an
end of its prompt. A strategy with probes has a few samples generated first, and the rest by a
request of its own: as soon as two of the first differ, or when all have come and the strategy says
so. Its rank is the prompt's, so a group that goes on is served before one that starts. The samples
are those that one request for all of them would give. The greedy response, where one is asked for,
comes with the last request. All requests share one allowance of time and tokens; a group that has
used it ends as it stands.

A sample without a score is scored again by the grader, drawn again here, or left out, as the
policy says (`outcome_policy`); a group is trained on its scored samples if enough of them are left.

On failure: what this group meets ends its prompt, and may be a strike against it (`quarantine`):
an engine's error is one only if a replica answered with it, and none where replicas were lost.
What all groups would meet is also handed on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.greedy import GeneratedGroup, generate_group
from services.reward.generation.queue import Priority
from services.reward.generation.request import (
    GroupBudget,
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
from services.reward.groups.filter import Judgement, judge, judge_probes, samples_differ
from services.reward.groups.group import InFlightItem, InFlightTable
from services.reward.groups.settings import PipelineSettings
from services.reward.prompts.quarantine import Quarantine
from services.reward.records.group_log import GroupLog
from services.reward.records.outcomes import OutcomeRecorder
from sluice.algorithm.groups.filter import is_right
from sluice.algorithm.groups.outcomes import striking
from sluice.algorithm.sampling.strategy import SamplingStrategy
from sluice.errors import SluiceError
from sluice.telemetry.tracing import TRACER, Key, SpanName
from sluice.types import (
    Failed,
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


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The stages a group passes, and who is told.

    `version` gives the version announced (``None``: a trainer takes over), `on_start` is told that
    a group holds tokens of a version, `on_kept` that it was kept, `on_error` what all groups would
    meet.
    """

    dispatcher: GroupDispatcher
    grader: Grader
    quarantine: Quarantine
    recorder: OutcomeRecorder
    strategy: SamplingStrategy
    in_flight: InFlightTable
    log: GroupLog
    version: Callable[[], int | None]
    on_start: Callable[[], None]
    on_kept: Callable[[InFlightItem], None]
    on_error: Callable[[SluiceError], None]


class GroupRun:
    """Runs groups, each in the task of its caller."""

    def __init__(self, settings: PipelineSettings, parts: GroupParts) -> None:
        self._settings, self._parts = settings, parts
        self._metric = settings.filter_metric
        self._is_warned = False

    async def run(self, item: InFlightItem) -> None:
        """One group, to its judgement."""
        recorder, budget = self._parts.recorder, GroupBudget()
        try:
            graded, verdict = await self._judged(item, budget)
        except OverlongPromptError as error:
            item.check_cancelled()
            self._parts.quarantine.cleared(item.prompt)
            recorder.left_out(item.prompt, str(error))
            return
        except SluiceError as error:
            item.check_cancelled()
            self._not_generated(item, error, budget)
            return
        item.check_cancelled()
        detail = verdict.detail
        if verdict.end is PromptEnd.DROPPED_FAILED:
            detail = self._quarantined(item.prompt, graded.outcomes, budget) or detail
        else:
            self._parts.quarantine.cleared(item.prompt)
            self._notify_strategy(item, graded, kept=verdict.end is None)
        if verdict.end is None:
            recorder.kept(graded)
            self._parts.on_kept(item)
        else:
            recorder.ended(item.prompt, verdict.end, graded=graded, detail=detail)

    def _not_generated(self, item: InFlightItem, error: SluiceError, budget: GroupBudget) -> None:
        """A group ends without its samples."""
        detail, failures = str(error), list[Failed]()
        if isinstance(error, GroupFailedError) and error.kind is not None:
            failures.append(Failed(error.kind, detail))
            self._parts.recorder.not_generated(failures[0], item.num_ungraded)
            detail = f"{error.kind}: {detail.removeprefix(f'{error.kind}: ')}"
        detail = self._quarantined(item.prompt, failures, budget) or detail
        self._parts.recorder.ended(item.prompt, PromptEnd.DROPPED_FAILED, detail=detail)
        if not isinstance(error, GroupFailedError):
            self._parts.on_error(error)

    def _quarantined(
        self, prompt: Prompt, outcomes: Sequence[Outcome], budget: GroupBudget
    ) -> str | None:
        """A group has failed: a strike against its prompt, or the end of those before it. Returns
        the reason if the prompt is quarantined by it."""
        failed = striking(outcomes, engine_answered=budget.engine_answered)
        if failed is not None:
            return self._parts.quarantine.struck(prompt, failed)
        self._parts.quarantine.cleared(prompt)
        return None

    async def _judged(
        self, item: InFlightItem, budget: GroupBudget
    ) -> tuple[GradedGroup, Judgement]:
        num_samples, first = self._settings.samples_per_group, item.attempt.first_samples
        start = OldestStart(self._start_callback(item))
        item.num_requests = 1
        if first >= num_samples:
            graded = await self._sampled(item, range(num_samples), budget, start.of("samples"))
        else:
            graded, rest = await self._staged(item, range(first), budget, start)
            if rest is None:
                graded = await self._regenerated(item, graded, budget, start)
                others = range(first, num_samples)
                beyond = self._request(item, others, budget)
                is_over = self._parts.dispatcher.is_over(beyond)
                verdict = self._after_probes(item, graded, is_over=is_over)
                if verdict is not None:
                    return graded, verdict
                # Of a group that is over no replica is asked for these: they come broken off.
                self._continue_group(item, is_sure=samples_differ(graded.scored, self._metric))
                rest = await self._sampled(item, others, budget, start.of("rest"))
            graded = joined(graded, rest)
        graded = await self._regenerated(item, graded, budget, start)
        return graded, judge(graded, metric=self._metric, needs=self._settings.needs)

    async def _staged(
        self, item: InFlightItem, indexes: range, budget: GroupBudget, start: OldestStart
    ) -> tuple[GradedGroup, GradedGroup | None]:
        """The first samples and, if two of them differed before all had come, the rest."""
        watch = ProbeWatch(self._parts.grader, item.prompt, self._metric)
        name, rest = f"prompt {item.prompt.prompt_id}", None
        try:
            async with asyncio.TaskGroup() as tasks:
                probing = self._probes(item, indexes, budget, start.of("probes"), watch)
                probes = tasks.create_task(probing, name=f"{name}, probes")
                differ = tasks.create_task(watch.differs.wait(), name=f"{name}, differ")
                await asyncio.wait((probes, differ), return_when=asyncio.FIRST_COMPLETED)
                if probes.done():
                    differ.cancel()
                else:
                    self._continue_group(item, is_sure=True)
                    others = range(indexes.stop, self._settings.samples_per_group)
                    generating = self._sampled(item, others, budget, start.of("rest"))
                    rest = tasks.create_task(generating, name=f"{name}, rest")
        except ExceptionGroup as group:
            raise decisive(group) from group
        return probes.result(), rest.result() if rest else None

    async def _probes(
        self,
        item: InFlightItem,
        indexes: range,
        budget: GroupBudget,
        on_start: StartCallback,
        watch: ProbeWatch,
    ) -> GradedGroup:
        async with asyncio.TaskGroup() as tasks:
            grading = f"prompt {item.prompt.prompt_id}, grades of probes"
            tasks.create_task(watch.run(), name=grading)
            request = self._request(item, indexes, budget)
            sampled = await self._generated(item, request, None, on_start, watch.finished)
            watch.over()
        # What is left are samples that were broken off.
        graded = await self._parts.grader.grade(
            sampled.samples, known=watch.outcomes, engine_errors=budget.engine_errors
        )
        self._count(item, graded)
        return graded

    def _count(self, item: InFlightItem, graded: GradedGroup) -> None:
        """Samples have their outcomes, each of which counts once."""
        num_greedy = len(graded.greedy.outcomes) if graded.greedy else 0
        item.num_ungraded -= len(graded.outcomes) + num_greedy
        self._parts.recorder.graded(graded)

    def _continue_group(self, item: InFlightItem, *, is_sure: bool) -> None:
        """Another request follows; told before it begins, so that the first is not the last."""
        item.num_requests += 1
        self._parts.recorder.continued(item.prompt)
        self._parts.in_flight.continue_group(item, is_sure=is_sure)

    def _after_probes(
        self, item: InFlightItem, probes: GradedGroup, *, is_over: bool
    ) -> Judgement | None:
        """How a group ends after its first samples; ``None``: its others are to be had.

        The strategy is not asked about a group that has taken its time or its tokens.
        """
        verdict = judge_probes(probes, metric=self._metric, needs=self._settings.needs)
        if verdict is None:
            return None
        after = f"after {len(probes.outcomes)} of {self._settings.samples_per_group} samples"
        if verdict.end is PromptEnd.DROPPED_FAILED:
            return Judgement(verdict.end, f"{verdict.detail} ({after})")
        if is_over:
            return Judgement(verdict.end, after)
        continued = self._parts.strategy.after_probes(
            item.attempt,
            num_right=_num_right(probes),
            num_scored=len(probes.scored),
            version=self._parts.version() or 0,
        )
        if continued is None:
            return Judgement(verdict.end, after)
        item.attempt = continued
        self._parts.log.continued(item.prompt, continued)
        return None

    async def _sampled(
        self,
        item: InFlightItem,
        indexes: range,
        budget: GroupBudget,
        on_start: StartCallback,
    ) -> GradedGroup:
        """The last samples of a group and its greedy response, graded."""
        sampled = await self._generated(
            item, self._request(item, indexes, budget), self._settings.greedy, on_start
        )
        graded = await self._parts.grader.grade(
            sampled.samples, sampled.greedy, engine_errors=budget.engine_errors
        )
        self._count(item, graded)
        return graded

    async def _regenerated(
        self,
        item: InFlightItem,
        graded: GradedGroup,
        budget: GroupBudget,
        start: OldestStart,
    ) -> GradedGroup:
        """The group, with other samples in the place of those that the policy has drawn again.

        They are drawn from seeds of their own, or they would be the same once more.
        """
        policy, num_rounds = self._settings.needs.policy, 1
        while places := policy.to_generate_again(graded.outcomes, num_rounds):
            num_rounds += 1
            replaced = [graded.group.rollouts[place] for place in places]
            indexes = [rollout.sample_index for rollout in replaced]
            self._continue_group(item, is_sure=samples_differ(graded.scored, self._metric))
            self._parts.recorder.generated_again(item.prompt, replaced)
            request = self._request(item, indexes, budget, round_number=num_rounds)
            sampled = await self._generated(item, request, None, start.of(f"draw {num_rounds}"))
            again = await self._parts.grader.grade(
                sampled.samples, engine_errors=budget.engine_errors
            )
            self._count(item, again)
            graded = joined(graded, again)
        return graded

    async def _generated(
        self,
        item: InFlightItem,
        request: GroupRequest,
        greedy: SamplingParams | None,
        on_start: StartCallback,
        on_sample: SampleCallback | None = None,
    ) -> GeneratedGroup:
        item.num_ungraded += request.num_samples + (greedy is not None)
        with TRACER.stage(SpanName.GENERATE, {Key.NUM_SAMPLES: request.num_samples}):
            sampled = await generate_group(
                self._parts.dispatcher, request, greedy, on_start, on_sample
            )
        item.num_requests -= 1
        self._parts.recorder.generated(sampled, is_last=not item.num_requests)
        if not item.num_requests:
            self._parts.in_flight.start_grading(item)
        return sampled

    def _start_callback(self, item: InFlightItem) -> StartCallback:
        def note_start(version: int | None) -> None:
            self._parts.in_flight.asked(item)
            item.start_version = version
            if version is not None:
                self._parts.on_start()

        return note_start

    def _request(
        self,
        item: InFlightItem,
        indexes: Sequence[int],
        budget: GroupBudget,
        round_number: int = 1,
    ) -> GroupRequest:
        version, is_first = self._parts.version() or 0, round_number == 1
        stage = "train" if is_first else f"train, draw {round_number}"
        sampling = for_prompt(self._settings.sampling, item.prompt, stage=stage)
        return GroupRequest(
            item.prompt,
            tuple(indexes),
            sampling,
            Priority.TRAINING,
            lowest_version=version - self._settings.rules.max_staleness,
            budget=budget,
            allows_missing=not self._settings.needs.whole_groups,
        )

    def _notify_strategy(self, item: InFlightItem, graded: GradedGroup, *, kept: bool) -> None:
        rollouts, num_right = graded.group.rollouts, _num_right(graded)
        if kept and num_right in (0, len(graded.scored)):
            self._warn_of_partial_credit(item.prompt)
        self._parts.strategy.ended(
            item.attempt,
            num_right=num_right,
            num_scored=len(graded.scored),
            mean_tokens=graded.group.num_response_tokens / len(rollouts),
            kept=kept,
            version=self._parts.version() or 0,
            seconds=time.monotonic() - item.began_s,
        )

    def _warn_of_partial_credit(self, prompt: Prompt) -> None:
        """Once: beliefs about pass rates mean nothing where samples are more or less right."""
        name = self._parts.strategy.rules.strategy
        if self._is_warned or not (name.uses_probes or name.uses_memory):
            return
        self._is_warned = True
        logger.warning(
            "prompt %s is kept though none of its samples is right, or all are: sluice.sampling."
            "strategy=%s judges prompts by right and wrong samples, and '%s' gives partial credit; "
            "choose sluice.sampling.strategy=stream, or filter by a metric of 0 and 1",
            *(prompt.prompt_id, name, self._metric),
        )


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
# samples. It ends by itself once all samples are graded; it is never cut off while a scorer
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

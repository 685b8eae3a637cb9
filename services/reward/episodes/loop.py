"""The episodes of a group: play each sample of a prompt with its environment.

Consumes: requests for samples, like the dispatcher. Each sample has a task. All tasks open their
environments first; then the first turns of samples with equal prompts travel in one request, so
that the replica reads the prompt once. A sample whose environment opens `PATIENCE_S` after the
group's first one gets a separate request, as does every further turn. Waits for: environments and
the dispatcher, see `episode`. Produces: whole groups, whose samples may hold their outcomes. On
failure: an environment fails its sample alone; a refused prompt fails the group. On shutdown:
cancelling a call closes its episodes, each within `drivers.ABANDON_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from services.reward.episodes.drivers import EpisodeDrivers, EpisodeTask
from services.reward.episodes.episode import (
    READ_TEXT,
    AnsweredTurn,
    Episode,
    EpisodeNotes,
    unreadable,
)
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.request import (
    GroupFailedError,
    GroupRequest,
    Purpose,
    SampleCallback,
    TurnRequest,
    decisive_error,
    for_prompt,
)
from services.reward.generation.stream import CollectedSamples
from sluice.algorithm.episode_rules import EpisodeRules, environment_of, same_prompt_key
from sluice.types import (
    ChatMessage,
    Failed,
    FailureKind,
    FinishReason,
    Rollout,
    RolloutGroup,
    Tool,
)

PATIENCE_S = 1.0
"""Longest wait of a sample's first turn for those of its siblings."""


class EpisodeGenerator:
    """Generates groups whose samples are episodes.

    Args:
        are_leased: whether programs take samples when they can, one after the other; a first turn
            then waits for no sibling.
        by_default: whether rows that name no environment have one (`environment_of`).
        seed: the run's seed; an environment's seed depends on it and on the prompt.
    """

    def __init__(
        self,
        dispatcher: GroupDispatcher,
        drivers: EpisodeDrivers,
        rules: EpisodeRules,
        *,
        by_default: bool,
        seed: int,
        are_leased: bool = False,
    ) -> None:
        self._dispatcher, self._drivers = dispatcher, drivers
        self._rules, self._by_default, self._seed = rules, by_default, seed
        self._are_leased = are_leased
        self.notes = EpisodeNotes()

    def may_validate(self, version: int) -> bool:
        """Return whether a replica, busy or paused, serves validations of `version`."""
        return self._dispatcher.may_validate(version)

    async def generate(
        self, request: GroupRequest, on_sample: SampleCallback | None = None
    ) -> RolloutGroup:
        """Play the requested samples.

        If an environment fails, only its sample gets the failure as its outcome.

        Raises:
            GroupFailedError: the prompt is refused or has images, no sample could begin, or the
                group was over before any of its samples finished.
        """
        prompt, progress = request.prompt, request.progress
        environment = environment_of(prompt.extra_info, by_default=self._by_default)
        if environment is None:
            return await self._dispatcher.generate(request, on_sample)
        if prompt.images:
            raise GroupFailedError(
                f"{prompt.place or prompt.prompt_id}: {len(prompt.images)} images in a row with an "
                "environment; train rows with images without one (sluice.environment)"
            )
        rollouts = await self._play_samples(request, environment, on_sample)
        ordered = tuple(rollouts[index] for index in sorted(rollouts))
        if progress.is_over and not progress.has_finished_samples:
            raise GroupFailedError(
                "no episode finished within sluice.reward.group_deadline_s or group_token_budget",
                FailureKind.ABORTED,
            )
        if progress.prompt_token_ids is None:
            failed = next((r.outcome for r in ordered if isinstance(r.outcome, Failed)), None)
            detail = f", the first: {failed.detail}" if failed else ""
            raise GroupFailedError(
                f"none of {len(ordered)} episodes began{detail}",
                failed.kind if failed else FailureKind.ENGINE_ERROR,
            )
        return RolloutGroup(prompt, progress.prompt_token_ids, ordered)

    async def _play_samples(
        self, request: GroupRequest, environment: str, on_sample: SampleCallback | None
    ) -> dict[int, Rollout]:
        rollouts: dict[int, Rollout] = {}
        name, batch = f"prompt {request.prompt.prompt_id}", uuid4().hex
        try:
            async with asyncio.TaskGroup() as tasks:
                first_turns = FirstTurns(
                    tasks, self._dispatcher, request, batch, alone=self._are_leased
                )
                seed = self._environment_seed(request)
                is_kept = request.purpose is Purpose.TRAINING and not request.is_baseline
                for index in request.sample_indexes:
                    task = EpisodeTask(
                        f"{batch}.{index}",
                        environment,
                        request.prompt,
                        seed,
                        self._rules.timeout_s,
                        index,
                        is_kept,
                    )
                    tasks.create_task(
                        _play_sample(
                            self._episode(request, task),
                            index,
                            first_turns,
                            request,
                            rollouts,
                            on_sample,
                        ),
                        name=f"{name}, episode {index}",
                    )
        except ExceptionGroup as errors:
            raise decisive_error(errors) from errors
        return rollouts

    def _environment_seed(self, request: GroupRequest) -> int:
        """Return the seed that all environments of the prompt share."""
        base = replace(request.sampling, seed=self._seed)
        label = f"environment, {request.purpose.value}"
        return for_prompt(base, request.prompt, label=label).seed

    def _episode(self, request: GroupRequest, task: EpisodeTask) -> Episode:
        return Episode(
            task.sample_index,
            task.episode_id,
            request,
            self._rules,
            self._drivers.begin(task),
            self._dispatcher,
            self.notes,
        )


async def _play_sample(
    episode: Episode,
    index: int,
    first_turns: FirstTurns,
    request: GroupRequest,
    rollouts: dict[int, Rollout],
    on_sample: SampleCallback | None,
) -> None:
    try:
        rollout = rollouts[index] = await episode.run(first_turns.turn)
    finally:
        first_turns.stop_waiting_for(index)
    if rollout.end is None:
        return
    request.progress.has_finished_samples = True
    if on_sample is not None:
        on_sample(rollout)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    messages: tuple[ChatMessage, ...]
    tools: tuple[Tool, ...]
    since: float
    answered: asyncio.Future[AnsweredTurn]


class FirstTurns:
    """Requests the first turns as soon as every sample of a group waits for its turn or has failed.

    It waits at most `PATIENCE_S` after the first sample is ready.

    Args:
        alone: send a separate request for each sample's turn, at once.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        dispatcher: GroupDispatcher,
        request: GroupRequest,
        batch: str,
        *,
        alone: bool = False,
    ) -> None:
        self._tasks, self._dispatcher, self._request = tasks, dispatcher, request
        self._batch, self._alone, self._is_late = batch, alone, False
        self._awaited = set(request.sample_indexes)
        self._waiters: dict[int, _Waiter] = {}
        self._requests: dict[int, tuple[asyncio.Task[None], Sequence[int]]] = {}
        self._ready: list[int] = []
        self._keys: set[str] = set()

    async def turn(
        self, index: int, messages: Sequence[ChatMessage], tools: Sequence[Tool]
    ) -> AnsweredTurn:
        """Return the first turn of a sample, once it has been sampled.

        A cancelled call ends its request if all other samples of the request are cancelled or have
        their turns.
        """
        answered: asyncio.Future[AnsweredTurn] = asyncio.get_running_loop().create_future()
        self._waiters[index] = _Waiter(tuple(messages), tuple(tools), _now_s(), answered)
        self.stop_waiting_for(index)
        try:
            return await answered
        except asyncio.CancelledError:
            task, indexes = self._requests.get(index, (None, ()))
            if task is not None and all(
                self._waiters[other_index].answered.done() for other_index in indexes
            ):
                task.cancel()
            raise

    def stop_waiting_for(self, index: int) -> None:
        """Wait no longer for a sample: it waits for its turn, or has ended."""
        if index not in self._awaited:
            return
        self._awaited.remove(index)
        if index in self._waiters:
            self._ready.append(index)
        if self._alone or self._is_late or not self._awaited:
            self._start_ready()
        elif len(self._ready) == 1:
            asyncio.get_running_loop().call_later(PATIENCE_S, self._start_late)

    def _start_late(self) -> None:
        """Request the turns that are ready now, and each later one alone."""
        if self._awaited:
            self._is_late = True
            self._start_ready()

    def _start_ready(self) -> None:
        bundles: dict[str, list[int]] = {}
        for number in sorted(self._ready):
            waiter = self._waiters[number]
            if not waiter.answered.done():  # else its episode ran out of time or was cancelled
                key = same_prompt_key(waiter.messages, waiter.tools)
                bundles.setdefault(key, []).append(number)
        self._ready.clear()
        self._keys.update(bundles)
        for indexes in bundles.values():
            name = f"prompt {self._request.prompt.prompt_id}, first turns {indexes}"
            task = self._tasks.create_task(self._request_turns(indexes), name=name)
            self._requests.update(dict.fromkeys(indexes, (task, indexes)))

    async def _request_turns(self, indexes: Sequence[int]) -> None:
        waiter = self._waiters[indexes[0]]
        alone = f"{self._batch}.{indexes[0]}" if len(indexes) == 1 else ""
        turn = TurnRequest(
            0,
            waiter.messages,
            tools=waiter.tools,
            tool_format="" if waiter.tools else READ_TEXT,
            affinity=alone or self._batch,
        )
        request = replace(self._request, sample_indexes=tuple(indexes), turn=turn)

        def on_sample(rollout: Rollout) -> None:
            self._deliver(collected, rollout.sample_index, began)

        collected, began = CollectedSamples(request, on_sample), _now_s()
        try:
            await self._dispatcher.collect(collected)
        except GroupFailedError as error:
            is_of_all = len(self._keys) == 1 and not self._alone  # as far as is known
            if is_of_all or error.kind is not None:
                raise
            self._fail_samples(indexes, error)
        for index, rollout in collected.rollouts.items():
            if rollout.finish_reason is FinishReason.ABORTED:
                self._deliver(collected, index, began)

    def _fail_samples(self, indexes: Sequence[int], error: GroupFailedError) -> None:
        """Fail samples whose first prompt differs from their siblings'."""
        for index in indexes:
            answered = self._waiters[index].answered
            if not answered.done():
                answered.set_exception(unreadable(error))

    def _deliver(self, collected: CollectedSamples, index: int, began: float) -> None:
        waiter = self._waiters[index]
        if not waiter.answered.done():
            waiter.answered.set_result(AnsweredTurn.of(collected, index, began - waiter.since))


def _now_s() -> float:
    return asyncio.get_running_loop().time()

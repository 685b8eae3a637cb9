"""What the train loop drives, as it sees them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.fleet.publisher import PublishReport
from services.trainer.loop.accounting import RunAccountant, acknowledged_groups, settled_accounts
from services.trainer.loop.batch_check import BatchTerms, check_batch
from services.trainer.loop.reward_client import ValidationReport
from services.trainer.loop.run_state import RunPhase, RunState, StepRecord, under_control
from services.trainer.metrics.step_metrics import (
    FleetInterval,
    RunScale,
    StepTimes,
    account_metrics,
    step_metrics,
)
from sluice.concurrency.deadlines import deadline
from sluice.errors import DataExhaustedError, SluiceError
from sluice.telemetry.tracing import (
    TRACER,
    Attributes,
    Key,
    RecordedSpan,
    SpanName,
    TraceContext,
    Tracer,
    parse_traceparent,
)
from sluice.types import DataProgress, ReplicaInfo, TrainBatch


class Policy(Protocol):
    """The trained model, behind a thread of its own."""

    async def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """Updates the policy with one batch; metrics by verl's names."""
        ...

    async def freeze(self, version: int) -> None:
        """Copies the present weights so that `version` can be published while training goes on."""
        ...

    async def save(self, step: int, progress: DataProgress) -> str:
        """Writes a checkpoint; its folder."""
        ...


class TrainData(Protocol):
    """The reward service; see `RewardClient` for what each call raises."""

    async def announce(
        self,
        version: int,
        replicas: Sequence[ReplicaInfo],
        progress: Callable[[], DataProgress | None],
        /,
    ) -> None:
        """Tells the current version, who serves it and where the data set stands by then."""
        ...

    async def take_batch(
        self, step: int, version: int, generated_tokens: Callable[[], int], /
    ) -> TrainBatch:
        """The next batch, as long as there is progress."""
        ...

    async def acknowledge(self, batch_id: str, step: int) -> None:
        """Reports a batch as trained."""
        ...

    async def evaluate(
        self, version: int, examples: int, generated_tokens: Callable[[], int], /
    ) -> ValidationReport:
        """Validates the announced policy, as long as there is progress."""
        ...

    async def accounts(self) -> Mapping[str, float]:
        """How the run's prompts ended."""
        ...


class Publisher(Protocol):
    """Brings weights to replicas; see `WeightPublisher`."""

    async def publish(self, version: int) -> PublishReport:
        """Sends a frozen version to the fleet."""
        ...

    async def seed_newcomers(self) -> None:
        """Sends the newest version to replicas that have none."""
        ...


class RunReporter(Protocol):
    """The run's record; see `Reporter`."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a finished step."""
        ...

    def evaluation(self, step: int, evaluation: ValidationReport, seconds: float) -> None:
        """Records a validation."""
        ...

    def evaluation_failed(self, step: int, seconds: float) -> None:
        """Records that a validation gave no numbers."""
        ...

    def accounts(self, accounts: Mapping[str, float]) -> None:
        """Records how prompts and tokens ended."""
        ...


# The trace of one train step, and what it adds to the traces of the prompts it trains.
#
# A step has a trace of its own, whose first span links to the span of every recorded prompt in
# its batch. Each of those traces gets the step that trained it, and the publication, as spans
# below the prompt's; they link back.


class StepTrace:
    """One step; nothing happens where the run is not traced.

    Args:
        step: from 1.
        tracer: records it.
    """

    def __init__(self, step: int, tracer: Tracer = TRACER) -> None:
        self._step, self._tracer = step, tracer
        self._span = tracer.trace(SpanName.STEP, is_always=True, attributes={Key.STEP: step})
        self._prompts: dict[str, TraceContext] = {}

    def __enter__(self) -> Self:
        self._span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._span.__exit__(kind, error, trace)

    def takes(self, batch: TrainBatch) -> None:
        """The batch that it trains."""
        if not self._tracer.is_on:
            return
        found = ((group.prompt_id, parse_traceparent(group.traceparent)) for group in batch.groups)
        self._prompts = {prompt_id: context for prompt_id, context in found if context is not None}
        self._span.set({Key.BATCH_ID: batch.batch_id, Key.NUM_GROUPS: len(batch.groups)})
        self._span.link(tuple(self._prompts.values()))

    @contextmanager
    def stage(self, name: SpanName) -> Iterator[None]:
        """A stage of the step, and of the traces of all prompts in its batch."""
        attributes: Attributes = {Key.STEP: self._step}
        span = self._tracer.stage(name, attributes)
        try:
            with span:
                yield
        finally:
            if isinstance(span, RecordedSpan):
                for prompt_id, context in self._prompts.items():
                    span.again_under(context, {**attributes, Key.PROMPT_ID: prompt_id})


# Tells the reward service which version is served by whom, once for each change.
#
# Announcements have an order: a version only after the batch it was trained from is
# acknowledged, and never an older version after a newer one.


class AnnounceCall(Protocol):
    """The reward service's end."""

    async def __call__(
        self,
        version: int,
        replicas: Sequence[ReplicaInfo],
        progress: Callable[[], DataProgress | None],
        /,
    ) -> None:
        """Makes the announcement known, again and with the latest progress to who forgot it."""
        ...


class PolicyAnnouncer:
    """Announces what `state` and `fleet` say at the moment.

    Args:
        send: the reward service's end.
        fleet: who serves.
        state: which version.
        progress: where the data set stands, with the batch in hand counted as trained; told every
            time. A reward service that starts anew goes on from there and draws no prompt of that
            batch again; any other one ignores it. None before the first batch of a run from the
            start.
    """

    def __init__(
        self,
        send: AnnounceCall,
        fleet: Fleet,
        state: RunState,
        progress: Callable[[], DataProgress | None],
    ) -> None:
        self._send, self._fleet, self._state = send, fleet, state
        self._progress = progress
        self._one_at_a_time = asyncio.Lock()
        self._last: tuple[int, tuple[ReplicaInfo, ...]] | None = None

    async def announce(self, *, after: Callable[[], Awaitable[None]] | None = None) -> None:
        """Announces if version or serving replicas have changed; nothing before a first version.

        Args:
            after: done first, while no other announcement can be made.
        """
        async with self._one_at_a_time:
            if after is not None:
                await after()
            version = self._state.version
            if version is None:
                return
            current = (version, self._fleet.in_state(MemberState.SERVING))
            if current == self._last:
                return
            await self._send(*current, self._progress)
            self._last = current


# The run: batches in, weights out.
#
#                  .------------------------- announce(v) --------------------------.
#                  v                                                                |
#     reward: fill batch --take_batch--> train (learner thread) --snapshot--> publish(v+1)
#                  ^                                                                |
#                  '---- rollout replicas <---- stage, commit (weight transfer) ----'
#
# Consumes: train batches from the reward service, one at a time.
# Waits for: replicas (before the first step), a batch, the learner, the weight transfer, and a
#     validation that must see one version only (it runs while the next batch trains, and is awaited
#     before the next version is published).
# Unblocked by: a registration; the reward service's answer or its deadline; the learner's thread;
#     the transfer's deadlines. `Stop`, `Pause` and `SaveCheckpoint` are obeyed during the waits for
#     replicas and for a batch; a batch whose wait was broken off is asked for again.
# Produces: one policy version per step (version = finished steps), metrics, checkpoints.
# On failure: the error ends the run with exit code 1; the last checkpoint stands. A validation that
#     fails is recorded and the run goes on; if it was the last one, the run fails after its end.
# At the end of the data set: the run ends like at its last step if any step was trained, else with
#     the error; kept groups that fill no batch stay pending in the accounts.
# On shutdown: a `Stop` call lets the step under way end like the last one. SIGTERM cancels: an
# update
#     under way still ends in the learner's thread but is not published, and nothing is saved.

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What the loop does when. Frequencies are in steps; 0 or less is never.

    `val_only` ends the run after the validation of its first weights.
    """

    test_freq: int
    save_freq: int
    val_before_train: bool
    val_only: bool
    validates: bool
    min_replicas: int
    replica_wait_timeout_s: float
    examples: int
    scale: RunScale
    terms: BatchTerms


@dataclass(frozen=True, slots=True)
class LoopParts:
    """What the loop drives, and what it shares with the service's calls (`fleet`, `state`)."""

    policy: Policy
    data: TrainData
    publisher: Publisher
    record: RunReporter
    accounting: RunAccountant
    fleet: Fleet
    state: RunState


class TrainLoop:
    """Runs all steps of one run.

    Args:
        settings: what is done when.
        parts: what is driven.
        resume_from: the checkpoint's data progress; ``None`` for a run from the start.
    """

    def __init__(
        self, settings: LoopSettings, parts: LoopParts, resume_from: DataProgress | None
    ) -> None:
        self._settings = settings
        self._policy, self._data, self._record = parts.policy, parts.data, parts.record
        self._publisher, self._fleet, self._state = parts.publisher, parts.fleet, parts.state
        self._accounting = parts.accounting
        # Of finished steps, for checkpoints; and with the batch in hand, for the reward service.
        self._progress = self._progress_in_hand = resume_from
        self._announcer = PolicyAnnouncer(
            parts.data.announce, parts.fleet, parts.state, lambda: self._progress_in_hand
        )
        self._evaluation: asyncio.Task[None] | None = None
        self._evaluation_error: SluiceError | None = None
        self._saved_step = self._evaluated_step = parts.state.step
        self._groups_trained = 0
        self._acknowledged_before: float | None = None
        self._accounts: Mapping[str, float] = {}

    @property
    def accounts(self) -> Mapping[str, float]:
        """What was recorded as the run's accounts; empty before its end."""
        return self._accounts

    async def run(self) -> None:
        """From the first announcement to the last checkpoint.

        Raises:
            ExceptionGroup: with what ended the run, or with why its last validation failed.
        """
        async with asyncio.TaskGroup() as tasks:
            await self._under_control(
                self._wait_for_replicas(), RunPhase.WAITING_FOR_REPLICAS, self._is_stopped
            )
            watcher = None if self._is_stopped() else await self._begin(tasks)
            while not (self._settings.val_only or await self._is_over()):
                step = self._state.step + 1
                with StepTrace(step) as trace:
                    await self._step(tasks, step, trace)
            await self._finish(tasks)
            if watcher is not None:
                watcher.cancel()

    async def _begin(self, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        await self._publish(self._state.step)
        await self._announcer.announce()
        # Only now: a trainer that takes over from another one settles that one's batches first.
        self._acknowledged_before = acknowledged_groups(await self._data.accounts())
        validates_first = self._settings.val_before_train or self._settings.val_only
        if self._settings.validates and validates_first:
            self._start_evaluation(tasks, self._state.step)
        return tasks.create_task(self._watch_fleet(), name="fleet")

    async def _is_over(self) -> bool:
        """Whether no step follows; holds a paused run, which still saves when asked."""
        while self._state.is_paused and not self._state.is_over:
            if self._state.is_save_wanted:
                await self._save_now()
                continue
            self._state.enter(RunPhase.PAUSED)
            await self._state.control_call()
        return self._state.is_over

    async def _step(self, tasks: asyncio.TaskGroup, step: int, trace: StepTrace) -> None:
        began_s, fleet_began = time.monotonic(), self._fleet.totals()
        with TRACER.stage(SpanName.TAKE_BATCH):
            batch = await self._next_batch(step)
        if batch is None:
            return
        check_batch(batch, self._settings.terms, step)
        trace.takes(batch)
        self._progress_in_hand = batch.progress
        taken_s = time.monotonic()
        # Beside training, so that a step does not wait for the answers.
        accounting = tasks.create_task(self._accounting.take(), name=f"books-{step}")
        self._state.enter(RunPhase.TRAINING)
        with trace.stage(SpanName.TRAIN_STEP):
            learner = await self._policy.train(batch, step)
        trained_s = time.monotonic()
        await self._await_evaluation()
        published_from_s = time.monotonic()
        with trace.stage(SpanName.PUBLISH):
            report = await self._publish(step)
        await self._announcer.announce(after=lambda: self._acknowledge(batch, step))
        published_s = time.monotonic()
        await self._save_if_due(step)
        ended_s = time.monotonic()
        times = StepTimes(
            taken_s - began_s,
            trained_s - taken_s,
            published_s - published_from_s,
            ended_s - published_s,
            ended_s - began_s,
        )
        metrics = {
            **step_metrics(
                step,
                batch,
                learner,
                times,
                self._fleet_interval(fleet_began),
                scale=self._settings.scale,
                stall_s=report.stall_s,
            ),
            **report.traffic,
            **account_metrics(await accounting),
        }
        self._record.step(step, metrics)
        await self._state.record(StepRecord(step, metrics))
        if self._settings.validates and _is_due(
            step, self._settings.test_freq, self._state.is_over
        ):
            self._start_evaluation(tasks, step)

    async def _next_batch(self, step: int) -> TrainBatch | None:
        """The batch of `step`; None if a control call or the end of the data set came first."""
        batch = None
        try:
            batch = await self._under_control(
                self._data.take_batch(step, step - 1, self._generated_tokens),
                RunPhase.WAITING_FOR_BATCH,
                lambda: self._is_stopped() or self._state.is_paused,
            )
        except* DataExhaustedError as ended:
            if self._state.step == 0:
                raise
            logger.info("no batch for step %d: %s", step, ended.exceptions[0])
            self._state.stop(f"the data set has ended after {self._state.step} steps")
        return batch

    async def _acknowledge(self, batch: TrainBatch, step: int) -> None:
        await self._data.acknowledge(batch.batch_id, step)
        self._groups_trained += len(batch.groups)
        self._progress = batch.progress

    async def _under_control(
        self,
        work: Coroutine[None, None, ResultT],
        phase: RunPhase,
        gives_way: Callable[[], bool],
    ) -> ResultT | None:
        return await under_control(
            work, self._state, phase, gives_way=gives_way, save=self._save_now
        )

    def _is_stopped(self) -> bool:
        return self._state.stop_reason is not None

    async def _wait_for_replicas(self) -> None:
        wanted = self._settings.min_replicas
        async with deadline(
            self._settings.replica_wait_timeout_s,
            peer="rollout fleet",
            phase=f"waiting for {wanted} replicas to register",
            remedy="start rollout replicas, or raise sluice.trainer.replica_wait_timeout_s",
        ):
            while len(self._fleet.in_state(MemberState.PENDING, MemberState.SERVING)) < wanted:
                self._fleet.changed.clear()
                await self._fleet.changed.wait()

    async def _publish(self, version: int) -> PublishReport:
        self._state.enter(RunPhase.PUBLISHING)
        await self._policy.freeze(version)
        report = await self._publisher.publish(version)
        self._state.version = version
        return report

    async def _watch_fleet(self) -> None:
        """Seeds newcomers and tells the reward service whenever the fleet has changed."""
        while True:
            await self._fleet.changed.wait()
            self._fleet.changed.clear()
            # Those who left first: a newcomer may take long.
            await self._announcer.announce()
            await self._publisher.seed_newcomers()
            await self._announcer.announce()

    def _start_evaluation(self, tasks: asyncio.TaskGroup, step: int) -> None:
        self._evaluated_step = step
        self._evaluation = tasks.create_task(self._evaluate(step), name=f"evaluation-{step}")

    async def _evaluate(self, step: int) -> None:
        began_s = time.monotonic()
        self._evaluation_error = None
        try:
            with TRACER.stage(SpanName.EVALUATE):
                evaluation = await self._data.evaluate(
                    step, self._settings.examples, self._generated_tokens
                )
        except SluiceError as error:
            logger.error("no validation of version %d: %s", step, error)  # noqa: TRY400 - no bug
            self._evaluation_error = error
            self._record.evaluation_failed(step, time.monotonic() - began_s)
            return
        self._record.evaluation(step, evaluation, time.monotonic() - began_s)

    async def _await_evaluation(self) -> None:
        if self._evaluation is not None:
            self._state.enter(RunPhase.EVALUATING)
            await self._evaluation
            self._evaluation = None

    async def _save_if_due(self, step: int) -> None:
        last = step >= self._state.total_steps or self._state.stop_reason is not None
        if self._state.is_save_wanted or _is_due(step, self._settings.save_freq, last):
            await self._save(step)

    async def _save_now(self) -> None:
        await self._save(self._state.step)

    async def _save(self, step: int) -> None:
        self._state.enter(RunPhase.SAVING)
        with TRACER.stage(SpanName.SAVE):
            path = await self._policy.save(step, self._progress or DataProgress(0))
        self._saved_step = step
        logger.info("checkpoint of step %d saved", step)
        self._state.answer_saves(step, path)

    async def _finish(self, tasks: asyncio.TaskGroup) -> None:
        await self._await_evaluation()
        step = self._state.step
        validates = self._settings.validates and self._settings.test_freq > 0
        if validates and step > self._evaluated_step:  # stopped before it was due
            self._start_evaluation(tasks, step)
            await self._await_evaluation()
        if self._state.is_save_wanted or (self._settings.save_freq > 0 and step > self._saved_step):
            await self._save(step)
        self._accounts = await self._final_accounts()
        self._record.accounts(self._accounts)
        logger.info("the run ends at step %d: %s", step, self._state.stop_reason or "the last one")
        await self._state.finish()
        if self._evaluation_error is not None:
            raise self._evaluation_error

    async def _final_accounts(self) -> dict[str, float]:
        accounting = await self._accounting.settle()
        tokens, busy_s = self._fleet.totals()
        known = {"generated_tokens": tokens, "rollout_busy_s": busy_s, **accounting}
        try:
            counted = await self._data.accounts()
        except SluiceError as error:
            logger.warning("accounts.json holds only what the trainer knows: %s", error)
            return {"groups_trained": float(self._groups_trained), **known}
        return {**self._settled(counted), **known}

    def _settled(self, counted: Mapping[str, float]) -> dict[str, float]:
        before = self._acknowledged_before
        accounts = settled_accounts(
            counted,
            groups_trained=self._groups_trained,
            acknowledged_before=acknowledged_groups(counted) if before is None else before,
        )
        if accounts["prompts_lost"]:
            logger.error(
                "%d prompts are lost: %d groups were trained, the reward service counts %d as "
                "trained; see accounts.json and the logs for a restart of the reward service",
                accounts["prompts_lost"],
                accounts["groups_trained"],
                accounts["groups_acknowledged"],
            )
        return accounts

    def _generated_tokens(self) -> int:
        return self._fleet.totals()[0]

    def _fleet_interval(self, began: tuple[int, float]) -> FleetInterval:
        tokens, busy_s = self._fleet.totals()
        replicas = len(self._fleet.in_state(MemberState.SERVING))
        return FleetInterval(tokens - began[0], busy_s - began[1], replicas)


def _is_due(step: int, every: int, last: bool) -> bool:
    """Every `every` steps and at the last one; `every` <= 0 is never, even then (verl §12.8)."""
    return every > 0 and (last or step % every == 0)

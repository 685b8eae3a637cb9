"""The run: batches in, weights out.

                 .------------------------- announce(v) --------------------------.
                 v                                                                |
    reward: fill batch --take_batch--> train (learner thread) --snapshot--> publish(v+1)
                 ^                                                                |
                 '---- rollout replicas <---- stage, commit (weight transfer) ----'

Consumes: train batches from the reward service, one at a time.
Waits for: replicas (before the first step), a batch, the learner, the weight transfer, and a
    validation that must see one version only (it runs while the next batch trains, and is awaited
    before the next version is published).
Unblocked by: a registration; the reward service's answer or its deadline; the learner's thread;
    the transfer's deadlines. `Stop`, `Pause` and `SaveCheckpoint` are obeyed during the waits for
    replicas and for a batch; a batch whose wait was broken off is asked for again.
Produces: one policy version per step (version = finished steps), metrics, checkpoints.
On failure: the error ends the run with exit code 1; the last checkpoint stands. A validation that
    fails is recorded and the run goes on; if it was the last one, the run fails after its end.
At the end of the data set: the run ends like at its last step if any step was trained, else with
    the error; kept groups that fill no batch stay pending in the accounts.
On shutdown: a `Stop` call lets the step under way end like the last one. SIGTERM cancels: an update
    under way still ends in the learner's thread but is not published, and nothing is saved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TypeVar

from services.trainer.batch_check import BatchTerms, check_batch
from services.trainer.bookkeeper import RunAccountant
from services.trainer.control import under_control
from services.trainer.fleet import Fleet, MemberState
from services.trainer.loop_parts import Policy, Publisher, RunRecord, TrainData
from services.trainer.metrics.step_metrics import (
    FleetInterval,
    RunScale,
    StepTimes,
    account_metrics,
    step_metrics,
)
from services.trainer.policy_announcer import PolicyAnnouncer
from services.trainer.prompt_accounts import acknowledged_groups, settled_accounts
from services.trainer.run_state import RunPhase, RunState, StepRecord
from services.trainer.step_trace import StepTrace
from services.trainer.weight_publisher import PublishReport
from sluice.concurrency.deadline import deadline
from sluice.errors import DataExhaustedError, SluiceError
from sluice.telemetry.span_names import SpanName
from sluice.telemetry.tracing import TRACER
from sluice.types import DataProgress, TrainBatch

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
    record: RunRecord
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

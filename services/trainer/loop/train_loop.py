"""The train loop: batches in, weights out.

                 .------------------------- announce(v) --------------------------.
                 v                                                                |
    reward: fill batch --take_batch--> train (learner thread) --snapshot--> publish(v+1)
                 ^                                                                |
                 '---- rollout replicas <---- stage, commit (weight transfer) ----'

Consumes: train batches from the reward service, one at a time.
Waits for: replicas (before the first step), a batch, the learner, the weight transfer, and a
    validation. A validation must see one version only: it runs while the next batch trains. If it
    still runs when the next version is to be published, some replicas are held at its version
    (`num_held_for_validation`) until it ends; else the loop awaits it before it publishes. It also
    awaits it before the next validation and at the end.
With `overlaps` the transfer of a version runs beside the next step. The batch is acknowledged when
    its version is frozen, since only one batch is leased at a time; a checkpoint may hold a version
    that no replica serves yet. The version is announced once the replicas serve it, as without
    `overlaps`. The loop awaits the transfer before it freezes the next version, before a validation
    of the version, before a pause and at the end.
Unblocked by: a registration; the reward service's answer or its deadline; the learner's thread;
    the transfer's deadlines. During the waits for replicas and for a batch the loop obeys `Stop`,
    `Pause` and `SaveCheckpoint`; after an interrupted wait it requests the same batch again.
Produces: one policy version per step (version = finished steps), metrics, checkpoints. A rollback
    is a step without a batch: the weights of a checkpoint become the next version.
On failure: the error ends the run with exit code 1; the last checkpoint stands. A validation that
    fails is recorded and the run continues; if it was the last one, the run fails at its end.
At the end of the data set: if any step was trained, the run ends as at its last step, else with the
    error. Kept groups that fill no batch stay pending in the accounts.
On shutdown: a `Stop` call makes the current step the last one; with `skip_validation` it also ends
    a running validation. SIGTERM cancels: an update that
    runs still ends in the learner's thread, but it is not published, and nothing is saved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.fleet.publisher import PublishReport, WeightPublisher
from services.trainer.loop.accounting import ACKNOWLEDGED, RunAccountant, settled_accounts
from services.trainer.loop.batch_check import batch_terms, check_batch
from services.trainer.loop.guards import RunGuards
from services.trainer.loop.learner_thread import LearnerThread
from services.trainer.loop.reward_client import PolicyAnnouncer, RewardClient
from services.trainer.loop.run_state import RunPhase, RunState, StepRecord, under_control
from services.trainer.loop.step_trace import StepTrace, step_trace
from services.trainer.metrics.sinks import Reporter
from services.trainer.metrics.step_metrics import (
    FleetInterval,
    StepTimes,
    account_metrics,
    host_memory_metrics,
    step_metrics,
)
from sluice.algorithm.accounting import DATA_EXHAUSTED, ReplicaCounters, fleet_counters
from sluice.algorithm.guards import GuardAction, Verdict
from sluice.algorithm.publishing import num_held_for_validation
from sluice.concurrency.waits import deadline
from sluice.config.deadlines import replica_wait_timeout_s
from sluice.config.derived import overlaps_transfers, sleeps_while_training, world_size
from sluice.config.run import RunConfig
from sluice.errors import BatchUnfillableError, DataExhaustedError, SluiceError
from sluice.telemetry.tracing import TRACER, SpanName
from sluice.types import DataProgress, TrainBatch

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
_NUM_EXAMPLES = 16
_LAST_ACCOUNTS_WITHIN_S = 20.0  # an ended run must not keep its devices for them


class TrainLoop:
    """All steps of one run. `fleet` and `state` are shared with the service's calls.

    Args:
        resume_from: data progress of the checkpoint; None for a new run.
    """

    def __init__(  # noqa: PLR0913 - everything that a run touches
        self,
        config: RunConfig,
        dataset_rows: int,
        *,
        learner: LearnerThread,
        reward: RewardClient,
        publisher: WeightPublisher,
        reporter: Reporter,
        accounting: RunAccountant,
        fleet: Fleet,
        state: RunState,
        guards: RunGuards,
        resume_from: DataProgress | None,
    ) -> None:
        self._config = config
        self._validates = config.data.val_files is not None
        # They share devices with the trainer.
        self._engines_sleep = sleeps_while_training(config)
        self._ranks, self._dataset_rows = world_size(config), dataset_rows
        self._terms = batch_terms(config)
        self._learner = learner
        self._reward = reward
        self._publisher = publisher
        self._reporter = reporter
        self._accounting = accounting
        self._fleet = fleet
        self._state = state
        self._guards = guards
        # A checkpoint stores the progress of finished steps. The progress announced to the reward
        # service also counts the batch in training, so that service does not sample it again after
        # a restart.
        self._progress = resume_from
        self._progress_in_hand = resume_from
        self._announcer = PolicyAnnouncer(reward, fleet, state, lambda: self._progress_in_hand)
        self._delivery: asyncio.Task[None] | None = None
        self._delivered = PublishReport(0, 0, 0.0, 0.0)
        # Held by training and by seeding if engines sleep, so that one of them has the memory.
        self._devices = asyncio.Lock()
        self._validation: asyncio.Task[None] | None = None
        self._validation_error: SluiceError | None = None
        self._saved_step = state.step
        self._validated_step = state.step
        self._data_exhausted = False
        self._unfillable_step = -1
        self._groups_trained = 0
        self._acknowledged_before: float | None = None
        self._accounts: Mapping[str, float] = {}

    @property
    def accounts(self) -> Mapping[str, float]:
        """Return the accounts recorded at the end of the run; empty before."""
        return self._accounts

    async def run(self) -> None:
        """Run from the first announcement to the last checkpoint.

        Raises:
            ExceptionGroup: holds the error that ended the run, or the error of its last validation.
        """
        async with asyncio.TaskGroup() as tasks:
            skipping = tasks.create_task(self._skip_validation(), name="skipped validation")
            await self._under_control(
                self._wait_for_replicas(), RunPhase.WAITING_FOR_REPLICAS, self._is_stopped
            )
            watcher = None if self._is_stopped() else await self._begin(tasks)
            while not (self._config.trainer.val_only or await self._is_over(tasks)):
                step = self._state.step + 1
                with step_trace(step) as trace:
                    await self._step(tasks, step, trace)
                    await self._validate_if_due(tasks, step)
            await self._finish(tasks)
            skipping.cancel()
            if watcher is not None:
                watcher.cancel()

    async def _begin(self, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        await self._freeze(self._state.step)
        await self._deliver(self._state.step)
        # A trainer that died in a rollback may have saved the version and not announced it.
        await self._announcer.announce(rolled_back_to=self._guards.restored_step(self._state.step))
        # Only now: the announcement makes the reward service settle the batches of an earlier
        # trainer, which do not count as this one's.
        self._acknowledged_before = (await self._reward.accounts())[ACKNOWLEDGED]
        trainer = self._config.trainer
        if self._validates and (trainer.val_before_train or trainer.val_only):
            await self._start_validation(tasks, self._state.step)
        return tasks.create_task(self._watch_fleet(), name="fleet")

    async def _is_over(self, tasks: asyncio.TaskGroup) -> bool:
        """Return whether no step follows. While the run is paused, wait and save on request."""
        while not self._state.is_over:
            await self._act_on_guards(tasks)
            if not self._state.is_paused:
                break
            await self._await_delivery()
            if self._state.is_save_wanted:
                await self._save_now()
            elif self._stays_paused():  # as before the delivery
                self._state.enter(RunPhase.PAUSED)
                await self._state.next_control_call()
        return self._state.is_over

    async def _act_on_guards(self, tasks: asyncio.TaskGroup) -> None:
        """Hold, stop or roll back the run if a rule is broken."""
        verdict = self._guards.verdict(self._learner.saved_steps)
        if verdict is not None and verdict.action is GuardAction.ROLLBACK:
            await self._await_delivery()
            await self._await_validation()
            await self._learner.wait_until_saved()  # a save deletes older checkpoints
            # A pause, a stop or a newer value may have come meanwhile.
            verdict = self._guards.verdict(self._learner.saved_steps)
        if verdict is None:
            return
        logger.warning("%s", verdict.reason)
        match verdict.action:
            case GuardAction.HOLD:
                fills_none = self._unfillable_step == self._state.step
                ends = "; the policy fills no batch, so that a resume ends the run"
                self._state.hold(verdict.reason + ends * fills_none)
            case GuardAction.STOP:
                self._state.stop(verdict.reason)
            case GuardAction.ROLLBACK:
                await self._roll_back(tasks, verdict)

    async def _roll_back(self, tasks: asyncio.TaskGroup, verdict: Verdict) -> None:
        """Make the weights of a checkpoint the next version; the data set continues.

        The version is saved first, and the record of the guards before that: a trainer that dies on
        the way finds the rule broken again, or continues from the restored weights.
        """
        version, restored = self._state.step + 1, verdict.restores
        factor = self._guards.note_rollback(verdict, version)
        async with self._engines_asleep():
            await self._learner.load(restored, factor)
        self._state.restore(version)
        await self._save(version)
        await self._freeze(version)
        await self._deliver(version)
        await self._announcer.announce(rolled_back_to=restored)
        logger.warning("version %d has the weights of step %d again", version, restored)
        self._reporter.step(version, self._guards.metrics(version))
        if self._validates:
            await self._start_validation(tasks, version)

    async def _step(self, tasks: asyncio.TaskGroup, step: int, trace: StepTrace) -> None:
        began_s = time.monotonic()
        fleet_began = {id_: newest for id_, (_, newest) in self._fleet.reports().items()}
        with TRACER.span(SpanName.TAKE_BATCH):
            batch = await self._next_batch(tasks, step)
        if batch is None:
            return
        trace.link_prompts(batch)
        self._progress_in_hand = batch.progress
        taken_s = time.monotonic()
        # Concurrent with training, so that a step does not wait for the answers.
        accounting = tasks.create_task(self._accounting.take(), name=f"accounting-{step}")
        learned, train_s = await self._train(batch, step, trace)
        await self._hold_for_validation()
        published_from_s = time.monotonic()
        await self._publish(tasks, batch, step, trace)
        published_s = time.monotonic()
        await self._save_if_due(step)
        ended_s = time.monotonic()
        times = StepTimes(
            wait_batch_s=taken_s - began_s,
            train_s=train_s,
            update_weights_s=published_s - published_from_s,
            save_checkpoint_s=ended_s - published_s,
            step_s=ended_s - began_s,
        )
        metrics = {
            **step_metrics(
                step,
                batch,
                learned,
                times,
                self._fleet_interval(fleet_began),
                ranks=self._ranks,
                dataset_rows=self._dataset_rows,
            ),
            **self._delivered.metrics,
            **self._learner.take_memory_metrics(),
            **host_memory_metrics(),
            **account_metrics(await accounting),
            **self._guards.metrics(step),
        }
        self._guards.note_step(step, metrics)
        self._reporter.step(step, metrics)
        await self._state.record(StepRecord(step, metrics))

    async def _validate_if_due(self, tasks: asyncio.TaskGroup, step: int) -> None:
        """Start the validation of a step, once the guards are content with the one before it.

        A collapse that it shows is thus answered before a second validation shows it again.
        """
        is_due = _is_due(step, self._config.trainer.test_freq, self._state.is_over)
        if not (self._validates and is_due and self._state.step == step):
            return
        await self._await_validation()  # of an earlier version, if replicas are held at it
        await self._act_on_guards(tasks)
        if self._state.step == step:
            await self._start_validation(tasks, step)

    async def _train(
        self, batch: TrainBatch, step: int, trace: StepTrace
    ) -> tuple[Mapping[str, float], float]:
        """Return the metrics and the seconds of an update."""
        if self._engines_sleep:
            await self._await_validation()  # it samples
        async with self._engines_asleep():
            began_s = time.monotonic()
            self._state.enter(RunPhase.TRAINING)
            with trace.span(SpanName.TRAIN_STEP):
                learned = await self._learner.train(batch, step)
            return learned, time.monotonic() - began_s

    @asynccontextmanager
    async def _engines_asleep(self) -> AsyncIterator[None]:
        """Let engines that share the learner's devices sleep, and seed no newcomer meanwhile."""
        if not self._engines_sleep:
            yield
            return
        async with self._devices:
            await self._publisher.sleep_replicas()
            yield

    async def _next_batch(self, tasks: asyncio.TaskGroup, step: int) -> TrainBatch | None:
        """Return the batch of `step`; None if a control call, a guard or the end of the data came
        first."""
        batch = None
        try:
            batch = await self._under_control(
                self._reward.take_batch(step, step - 1, self._generated_tokens, self._take_samples),
                RunPhase.WAITING_FOR_BATCH,
                lambda: self._is_stopped() or self._state.is_paused or self._guards.is_due,
            )
        except* DataExhaustedError as ended:
            if self._state.step == 0:  # a run that cannot train one step is an error
                raise
            logger.info("no batch for step %d: %s", step, ended.exceptions[0])
            self._data_exhausted = True
            self._state.stop(f"the data set has ended after {self._state.step} steps")
        except* BatchUnfillableError:
            if not await self._has_collapsed(tasks):
                raise
            self._unfillable_step = self._state.step
        return batch

    async def _has_collapsed(self, tasks: asyncio.TaskGroup) -> bool:
        """Return whether a guard acts on the policy that cannot fill a batch.

        Its next validation would come with a later step, and there will be none.
        """
        if self._guards.rules and self._validates:
            await self._await_validation()
            if not self._guards.has_validated(self._state.step):
                await self._start_validation(tasks, self._state.step)
                await self._await_validation()
        return self._guards.is_broken

    async def _take_samples(self, batch: TrainBatch, step: int) -> str:
        check_batch(batch, self._terms, step)
        return await self._learner.take_samples(batch, step)

    async def _acknowledge(self, batch: TrainBatch, step: int) -> None:
        await self._reward.acknowledge(batch.batch_id, step)
        self._groups_trained += len(batch.groups)
        self._progress = batch.progress

    async def _under_control(
        self, work: Coroutine[None, None, ResultT], phase: RunPhase, gives_way: Callable[[], bool]
    ) -> ResultT | None:
        return await under_control(
            work, self._state, phase, gives_way=gives_way, save=self._save_now
        )

    def _stays_paused(self) -> bool:
        return self._state.is_paused and not self._state.is_over

    def _is_stopped(self) -> bool:
        return self._state.stop_reason is not None

    async def _wait_for_replicas(self) -> None:
        least = self._config.sluice.trainer.min_replicas
        async with deadline(
            replica_wait_timeout_s(self._config),
            peer="rollout fleet",
            phase=f"waiting for {least} replicas to register",
            remedy="start rollout replicas, or raise sluice.trainer.replica_wait_timeout_s",
        ):
            while len(self._fleet.in_state(MemberState.PENDING, MemberState.SERVING)) < least:
                self._fleet.changed.clear()
                await self._fleet.changed.wait()

    async def _publish(
        self, tasks: asyncio.TaskGroup, batch: TrainBatch, step: int, trace: StepTrace
    ) -> None:
        """Make the version of `step` known; its batch is acknowledged before."""
        if not overlaps_transfers(self._config):
            with trace.span(SpanName.PUBLISH):
                await self._freeze(step)
                await self._deliver(step)
            # The announcer's lock covers both: no other announcement of the new version may come
            # before the acknowledgement of the batch that made it.
            await self._announcer.announce(preparation=lambda: self._acknowledge(batch, step))
            return
        await self._await_delivery()
        await self._freeze(step)
        # The next batch can be leased only then. A trainer that dies before the replicas serve the
        # version loses what one that dies before its checkpoint does: the step.
        await self._acknowledge(batch, step)
        self._delivery = tasks.create_task(
            self._deliver_and_announce(step, trace), name=f"delivery-{step}"
        )

    async def _freeze(self, version: int) -> None:
        self._state.enter(RunPhase.PUBLISHING)
        await self._publisher.wait_for_free_snapshot()
        await self._learner.freeze(version)

    async def _deliver(self, version: int) -> None:
        self._delivered = await self._publisher.publish(version)
        self._state.version = version

    async def _deliver_and_announce(self, version: int, trace: StepTrace) -> None:
        with trace.span(SpanName.PUBLISH):
            await self._deliver(version)
        await self._announcer.announce()

    async def _await_delivery(self) -> None:
        """Wait until the replicas serve the last version and it is announced.

        An error of the delivery ends the run through the group of its task.
        """
        if self._delivery is not None and not self._delivery.done():
            self._state.enter(RunPhase.PUBLISHING)
            await asyncio.wait([self._delivery])

    async def _watch_fleet(self) -> None:
        """Seed newcomers and notify the reward service whenever the fleet has changed."""
        while True:
            await self._fleet.changed.wait()
            self._fleet.changed.clear()
            # Report lost replicas first: seeding a newcomer may take long.
            await self._announcer.announce()
            if self._devices.locked():
                continue  # the version that is trained goes to newcomers too
            async with self._devices:
                await self._publisher.seed_newcomers()
            await self._announcer.announce()

    async def _start_validation(self, tasks: asyncio.TaskGroup, step: int) -> None:
        if self._state.no_validation.is_set():
            return
        self._validated_step = step
        self._guards.note_validating(step)
        self._validation = tasks.create_task(self._validate(step), name=f"validation-{step}")
        self._validation.add_done_callback(self._end_validation)

    def _end_validation(self, _: asyncio.Task[None]) -> None:
        self._fleet.release()
        self._guards.note_validating(None)

    async def _validate(self, step: int) -> None:
        if self._delivery is not None:  # of `step`: the next one begins after this validation
            await asyncio.wait([self._delivery])
        began_s = time.monotonic()
        self._validation_error = None
        try:
            with TRACER.span(SpanName.EVALUATE):
                examples = max(_NUM_EXAMPLES, self._config.trainer.log_val_generations)
                report = await self._reward.evaluate(step, examples, self._generated_tokens)
        except SluiceError as error:
            logger.error("no validation of version %d: %s", step, error)  # noqa: TRY400 - no bug
            self._validation_error = error
            self._reporter.validation_failed(step, time.monotonic() - began_s)
            self._guards.note_failed_validation(step, str(error))
            return
        self._guards.note_validated(step, report)
        self._reporter.validation(step, report, time.monotonic() - began_s)

    async def _hold_for_validation(self) -> None:
        """Before a publish, hold replicas for a running validation, or wait for its end."""
        if self._validation is None or self._fleet.held_version is not None:
            return
        await self._await_delivery()  # of the version that is validated
        version = self._validated_step
        num_held = partial(num_held_for_validation, max_staleness=self._terms.max_staleness)
        held_replicas = () if self._validation.done() else self._fleet.hold(version, num_held)
        if not held_replicas:
            await self._await_validation()
            return
        names = ", ".join(info.name for info in held_replicas)
        logger.info("the validation of version %d continues: %s held at it", version, names)
        # Only now may the others swap: the reward service has taken the validation from them.
        await self._announcer.announce()

    async def _await_validation(self) -> None:
        if self._validation is not None:
            self._state.enter(RunPhase.EVALUATING)
            await asyncio.wait([self._validation])
            self._validation = None

    async def _skip_validation(self) -> None:
        """End the validation that runs when a `Stop` call wants none."""
        await self._state.no_validation.wait()
        self._validation_error = None
        if self._validation is not None:
            self._validation.cancel()

    async def _save_if_due(self, step: int) -> None:
        is_last = step >= self._state.total_steps or self._state.stop_reason is not None
        if self._state.is_save_wanted or _is_due(step, self._config.trainer.save_freq, is_last):
            await self._save(step)

    async def _save_now(self) -> None:
        await self._save(self._state.step)

    async def _save(self, step: int) -> None:
        self._state.enter(RunPhase.SAVING)
        with TRACER.span(SpanName.SAVE):
            path = await self._learner.save(step, self._progress or DataProgress(0))
        self._saved_step = step
        self._guards.note_saved(step)
        if self._state.is_save_wanted:
            await self._learner.wait_until_saved()
        self._state.answer_saves(step, path)

    async def _finish(self, tasks: asyncio.TaskGroup) -> None:
        await self._await_delivery()
        await self._await_validation()
        step = self._state.step
        validates = self._validates and self._config.trainer.test_freq > 0
        if validates and step > self._validated_step:  # stopped before it was due
            await self._start_validation(tasks, step)
            await self._await_validation()
        saves = self._config.trainer.save_freq > 0 or self._state.saves_at_end
        if self._state.is_save_wanted or (saves and step > self._saved_step):
            await self._save(step)
        await self._learner.wait_until_saved()
        self._accounts = await self._final_accounts()
        self._reporter.accounts(self._accounts)
        logger.info("the run ends at step %d: %s", step, self._state.stop_reason or "the last one")
        if best := self._guards.describe_best(self._learner.saved_steps()):
            logger.info("%s", best)
        await self._state.finish()
        if self._validation_error is not None:
            raise self._validation_error

    async def _final_accounts(self) -> dict[str, float]:
        accounting = await self._accounting.settle()
        tokens, busy_s = self._fleet.totals()
        accounts = {"generated_tokens": tokens, "rollout_busy_s": busy_s, **accounting}
        accounts[DATA_EXHAUSTED] = float(self._data_exhausted)
        try:
            counted = await self._reward.accounts(_LAST_ACCOUNTS_WITHIN_S)
        except SluiceError as error:
            logger.warning("accounts.json holds only what the trainer knows: %s", error)
            return {"groups_trained": float(self._groups_trained), **accounts}
        return {**self._settle_accounts(counted), **accounts}

    def _settle_accounts(self, counted: Mapping[str, float]) -> dict[str, float]:
        acknowledged = self._acknowledged_before
        accounts = settled_accounts(
            counted,
            groups_trained=self._groups_trained,
            acknowledged_before=counted[ACKNOWLEDGED] if acknowledged is None else acknowledged,
        )
        if accounts["prompts_lost"]:
            logger.error(
                "%d prompts are lost: %d groups were trained, the reward service counts %d as "
                "trained; see accounts.json and the logs for a restart of the reward service",
                accounts["prompts_lost"],
                accounts["groups_trained"],
                accounts[ACKNOWLEDGED],
            )
        return accounts

    def _generated_tokens(self) -> int:
        return self._fleet.totals()[0]

    def _fleet_interval(self, began: Mapping[str, ReplicaCounters]) -> FleetInterval:
        # What a process did before its first report was not done in this step.
        work = {
            id_: (began.get(id_, oldest), newest)
            for id_, (oldest, newest) in self._fleet.reports().items()
        }
        before, after = (fleet_counters(pair[end] for pair in work.values()) for end in (0, 1))
        busy_s = {id_: newest.busy_seconds - b.busy_seconds for id_, (b, newest) in work.items()}
        serving = self._fleet.in_state(MemberState.SERVING, MemberState.HELD)
        return FleetInterval(
            after.generated_tokens - before.generated_tokens,
            after.busy_seconds - before.busy_seconds,
            len(serving),
            prompt_tokens=after.prompt_tokens - before.prompt_tokens,
            reused_tokens=after.reused_tokens - before.reused_tokens,
            replica_busy_s=tuple(busy_s.get(info.instance_id, 0.0) for info in serving),
        )


def _is_due(step: int, interval: int, is_last: bool) -> bool:
    """Return whether `step` is a multiple of `interval` or the last one; never if it is 0 or less.

    As in verl, a frequency of 0 or less excludes the last step too
    (`verl/trainer/ppo/ray_trainer.py`, `fit`).
    """
    return interval > 0 and (is_last or step % interval == 0)

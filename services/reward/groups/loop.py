"""The group loop: prompts in, kept groups out.

Consumes: prompts (clients' first come first served, then the data set) and the trainer's
announcements. One task admits; each admitted group has a task of its own that generates, grades
and filters it (`run`). `services.reward.group_table` has its states.

Waits for                      unblocked by
  the first announcement         `announce`
  capacity for another group     a group or sequence that ended, an announcement, a batch leased
  a replica, samples             `dispatcher`, within the prompt's own task
  grades                         `grading.pool`, within the prompt's own task
  a full batch                   `batches`, in the trainer's call: a kept group, its deadline

Produces: kept groups for `batches`; one end for every prompt; at every new version, an update of
the prompt memory from the groups that ended.

On failure: an error of one group (replica gone, scorer killed, prompt refused) ends that prompt, in
its own task, and frees its slot. An error that every group would meet (unreadable data, a metric
that the scorer does not return, a strategy that gives up) stops admission, and the trainer's calls
for a batch raise it. If the prompt memory cannot be written, the loop logs a warning and the run
continues. Anything else is a defect and ends the service.

On shutdown: cancelling `run` cancels its tasks and their streams, which frees the replicas' slots.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.group_table import (
    IN_FLIGHT,
    CancelReason,
    EndCause,
    Group,
    GroupEnding,
    GroupState,
    GroupTable,
)
from services.reward.groups.batches import TrainBatches
from services.reward.groups.run import GroupRun
from services.reward.groups.sources import (
    SourceLoad,
    TrainingSource,
    TrainingSources,
)
from services.reward.prompts.history import PromptMemoryStore
from services.reward.prompts.quarantine import Quarantine
from services.reward.prompts.source import prompt_key
from services.reward.records.traces import PromptTraces
from sluice.algorithm.groups.staleness import reserves_slot
from sluice.algorithm.routing import AnnouncedReplica
from sluice.algorithm.sampling.admission import groups_with_capacity
from sluice.algorithm.sampling.attempt import Attempt, RememberedAttempt
from sluice.algorithm.sampling.coverage_guard import Side
from sluice.algorithm.sampling.strategy import LoopLoad
from sluice.concurrency.waits import Waiting, deadline
from sluice.errors import DataError, SluiceError
from sluice.telemetry.tracing import TRACER
from sluice.types import DataProgress, Prompt, PromptEnd, PromptOrigin

logger = logging.getLogger(__name__)

TAKE_OVER_TIMEOUT_S = 10.0


class GroupLoop:
    """The group loop. All methods run in one event loop.

    The sampling strategy decides which prompts start, and when. A client's prompt is never skipped:
    the client waits for its outcome, so what earlier attempts showed does not count. A whole epoch
    is not skipped either: once as many prompts in a row were skipped as the data set has rows, the
    next one is treated like an unknown one. A prompt in quarantine ends at once, whether a client
    or the data set brought it.

    Every change notifies `TrainBatches.changes` and with it `ReplicaQueue.capacity`, for which the
    loop waits. `memory` is ``None`` for strategies that need none.
    """

    def __init__(
        self,
        *,
        groups: GroupTable,
        sources: TrainingSources,
        batches: TrainBatches,
        memory: PromptMemoryStore | None,
        quarantine: Quarantine,
        dispatcher: GroupDispatcher,
        runs: GroupRun,
        traces: PromptTraces,
    ) -> None:
        self._groups = groups
        self._sources = sources
        self.batches = batches
        self._ledger = groups.ledger
        self._memory = memory
        self._quarantine = quarantine
        self._queue = dispatcher.queue
        self._dispatcher = dispatcher
        self._runs = runs
        self._traces = traces
        self._changes = batches.changes
        # By the kind of wait, as callers see it; the watchdog asks every second.
        self._awaited_since: dict[str, float] = {}
        self._announce_lock = asyncio.Lock()
        self._trainer: str | None = None
        self._was_exhausted = False
        self._learned_version: int | None = None
        self._memory_is_writable = True
        self._memory_lock = asyncio.Lock()
        self.batches.reason = self._reason

    async def run(self) -> None:
        """Admit prompts until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                change = self._queue.capacity.next_change
                try:
                    if self.batches.error is None:
                        await self._admit(tasks)
                    is_exhausted = self._sources.is_exhausted
                    if is_exhausted and not self._was_exhausted:
                        self._changes.notify()  # no batch may come any more
                    self._was_exhausted = is_exhausted
                except SluiceError as error:
                    self.batches.fail(error)
                await change.wait()

    def submit(self, prompt: Prompt) -> None:
        """Accept a client's prompt; raise `InvalidRequestError` if its id was used before."""
        self._groups.accept(prompt)
        self._sources[prompt.source].prompts.put(prompt)
        self._changes.notify()

    async def announce(
        self,
        trainer: str,
        version: int,
        replicas: Sequence[AnnouncedReplica],
        resume_from: DataProgress | None,
        rolled_back_to: int | None = None,
    ) -> None:
        """Adopt a version and its fleet; let a new trainer take over all pending prompts.

        Args:
            trainer: the trainer's instance id.
            version: the current policy version.
            replicas: the replicas in use.
            resume_from: the position in the data set, for a service that has none.
            rolled_back_to: the earlier version whose weights `version` has again.
        """
        async with self._announce_lock:
            if trainer != self._trainer:
                # The takeover awaits; without a version, nothing is admitted meanwhile.
                self._groups.policy_version = None
                await self._take_over(trainer, version, resume_from)
            if rolled_back_to is not None and not self._ledger.is_rolled_back(version):
                await self._roll_back(version, rolled_back_to)
            self.batches.settle_recovered(version)
            if version != self._learned_version:
                await self._update_memory()
                # Only now: a call that is cancelled while it learns is repeated.
                for source in self._sources.values():
                    source.strategy.forecast.note_announced(time.monotonic())
            self._learned_version = self._groups.policy_version = version
        await self._dispatcher.announce(replicas)
        logger.info("version %d on %d replicas", version, len(replicas))
        self._changes.notify()

    def waits(self) -> dict[str, Waiting]:
        """Return what the loop waits for, by the kind of wait, the most direct cause first."""
        lease, sources, counts = self._ledger.open_lease, self._sources, self._groups.counts
        outside_waits = self._dispatcher.awaited_outside
        status = LoopStatus(
            is_announced=self._groups.policy_version is not None,
            num_replicas=len(self._queue.fleet.announced),
            leased_step=lease.version + 1 if lease else None,
            batch_asked=self.batches.num_asking > 0,
            num_generating=counts[GroupState.GENERATING],
            num_grading=counts[GroupState.GRADING],
            num_kept=sum(
                min(source.groups.num_kept, source.num_groups) for source in sources.values()
            ),
            batch_size=sources.batch_size,
            num_batches_in_training=self.batches.num_batches_in_training,
            has_dataset=sources.has_dataset,
            is_exhausted=sources.is_exhausted,
            lacking=sources.lacking(),
            outside=outside_waits.peer if outside_waits else "",
            is_untaken=outside_waits is not None and outside_waits.are_untaken,
        )
        now_s, previous_since, reasons = (
            time.monotonic(),
            self._awaited_since,
            waits_by_kind(status),
        )
        self._awaited_since = {kind: previous_since.get(kind, now_s) for kind in reasons}
        return {
            kind: Waiting(peer, phase, now_s - self._awaited_since[kind])
            for kind, (peer, phase) in reasons.items()
        }

    async def _update_memory(self) -> None:
        """Update the memory of prompts from ended groups, before another version starts."""
        attempts = [
            attempt
            for source in self._sources.values()
            for attempt in source.strategy.new_version()
        ]
        if self._memory is not None:
            # A call that repeats a cancelled one finds no attempts, and waits for the first call's
            # writes.
            await asyncio.shield(self._write_memory(self._memory, attempts))

    async def _write_memory(
        self, memory: PromptMemoryStore, attempts: Sequence[tuple[str, RememberedAttempt]]
    ) -> None:
        async with self._memory_lock:
            if not attempts or not self._memory_is_writable:
                return
            try:
                await asyncio.to_thread(memory.add, attempts)
            except DataError as error:
                logger.warning("attempts are no longer remembered: %s", error)
                self._memory_is_writable = False

    # --------------------------------------------------------------------------------- admission

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start as many groups as allowed, while there are prompts.

        Raises:
            BatchUnfillableError: the strategy gives up.
            DataError: the data set or the memory of prompts cannot be read.
        """
        without_prompt: set[str] = set()
        while (source := self._source_to_start(without_prompt)) is not None:
            version = self._groups.policy_version or 0
            prompt = await source.prompts.next_prompt(version, time.monotonic())
            if prompt is None:
                without_prompt.add(source.name)
            elif not await self._admit_prompt(tasks, source, prompt):
                return

    def _source_to_start(self, without_prompt: Collection[str]) -> TrainingSource | None:
        """Return the source whose group starts next; ``None`` if none may start or has a prompt.

        Choose the source that has filled its part of the batches least; in a tie the first.
        """
        version = self._groups.policy_version
        if version is None:
            return None
        chosen, lowest_fill = None, math.inf
        for source in self._sources.values():
            if source.name not in without_prompt and not source.is_exhausted:
                load = self._load(source, version)
                if load.num_to_start > 0 and load.fill < lowest_fill:
                    chosen, lowest_fill = source, load.fill
        return chosen

    def _load(self, source: TrainingSource, version: int) -> SourceLoad:
        """Return how many groups of a source may start now, by its strategy and the fleet's
        capacity, and how far it has filled its part of the batches."""
        strategy = source.strategy
        first_sequences = source.first_sequences(source.settings.first_samples)
        # Replicas with an older version than this could only add groups that are too old.
        lowest = version - strategy.rules.max_staleness
        free = self._queue.num_free_sequences(lowest, first_sequences)
        capacity = groups_with_capacity(
            free - self._groups.num_unrequested,  # these wait for a replica, or will soon
            first_sequences=first_sequences,
            is_idle=not self._groups.num_in_flight,
        )
        groups, num_groups = source.groups, source.num_groups
        load = LoopLoad(
            num_in_flight=groups.num_in_flight,
            num_kept=groups.num_kept,
            num_in_training=self.batches.num_batches_in_training * num_groups,
            capacity=capacity,
            num_sure=groups.num_sure,
        )
        return SourceLoad(load, num_groups, strategy.estimate.mean, strategy.num_to_start(load))

    async def _admit_prompt(
        self, tasks: asyncio.TaskGroup, source: TrainingSource, prompt: Prompt
    ) -> bool:
        """Start or end a prompt's group; return ``False`` if it waits, since no group may start
        now."""
        group = self._groups[prompt.prompt_id]
        if (reason := self._quarantine.reason(prompt)) is not None:
            ending = GroupEnding(PromptEnd.DROPPED_FAILED, reason, cause=EndCause.QUARANTINE)
            self._groups.end(group, ending)
            return True
        source.prompts.has_one_in_hand = True
        try:
            attempt = await self._decide_attempt(source, prompt)
        except (SluiceError, asyncio.CancelledError):
            source.prompts.put(prompt)
            raise
        finally:
            source.prompts.has_one_in_hand = False
        if attempt is None:  # the state changed while the data set or the memory was read
            source.prompts.put(prompt)
            return False
        if not attempt.first_samples:
            source.num_skipped += 1
            source.strategy.note_skipped(attempt)
            self._groups.end(group, GroupEnding(PromptEnd.SKIPPED, why_skipped(attempt)))
        else:
            source.num_skipped = 0
            self._start(tasks, source, group, attempt)
        return True

    async def _decide_attempt(self, source: TrainingSource, prompt: Prompt) -> Attempt | None:
        """Return the strategy's decision about a prompt; ``None`` if no group may start now."""
        key, history = prompt_key(prompt), None
        is_client = prompt.origin is PromptOrigin.CLIENT
        may_skip = not is_client and source.num_skipped < source.settings.epoch_rows
        if self._memory is not None and may_skip:
            history = await asyncio.to_thread(self._memory.read, key)
        version = self._groups.policy_version
        if version is None or not self._load(source, version).num_to_start:
            return None
        return source.strategy.attempt(key, prompt.sequence, history, version)

    def _start(
        self, tasks: asyncio.TaskGroup, source: TrainingSource, group: Group, attempt: Attempt
    ) -> None:
        source.strategy.note_started(attempt)
        reserves = source.strategy.preempts and reserves_slot(
            group.num_preemptions, source.groups.num_reserved, source.num_groups
        )
        num_sequences = source.first_sequences(attempt.first_samples)
        self._groups.admit(group, attempt, num_sequences, reserves_slot=reserves)
        if reserves:  # it may have taken the last slot for a running group
            self.batches.cancel_without_slot()
        with self._traces.within(group.prompt_id) if TRACER.is_on else nullcontext():
            group.task = tasks.create_task(self._run(group), name=f"prompt {group.prompt_id}")

    # ---------------------------------------------------------------------------------- attempts

    async def _run(self, group: Group) -> None:
        """Run an attempt to its end. If cancelled, requeue its prompt or end it as stale.

        Any other error, including an observer's, is a defect: the task group ends the service. Only
        the group log survives its own errors.
        """
        group.is_running, progress = True, group.progress
        progress.rules = self._dispatcher.rules
        progress.on_oldest_version = partial(self._note_oldest_version, group)
        try:
            group.check_cancelled()
            await self._runs.run(group)
        except asyncio.CancelledError:
            self._give_up(group)
            raise
        finally:
            # Break the reference cycle of group and progress, which would keep the samples in
            # memory.
            progress.on_oldest_version = lambda _version: None
            group.task = None
            self._changes.notify()

    def _note_oldest_version(self, group: Group, version: int | None) -> None:
        self._groups.set_oldest_version(group, version)
        if version is not None:
            self.batches.cancel_without_slot()

    def _give_up(self, group: Group) -> None:
        """End the attempt of a cancelled task.

        Without a reason the service is ending: programs continue their samples in the next one.
        """
        if group.cancel_reason is not None:
            self._ledger.leases.revoke(group.prompt_id)
        if group.cancel_reason is CancelReason.TOO_OLD:
            detail = f"its oldest token is of version {group.oldest_version}, too old to be trained"
            self._groups.end(group, GroupEnding(PromptEnd.DROPPED_STALE, detail))
            return
        self._sources[group.prompt.source].strategy.note_restarted(group.admitted_as)
        self._requeue(group, group.cancel_reason or CancelReason.TAKEN_OVER)

    async def _take_over(
        self, trainer: str, version: int, resume_from: DataProgress | None
    ) -> None:
        """Start with a new trainer, perhaps from an older policy: generate pending groups again.

        The trainer that the ledger knows continues, since only this service has restarted.
        """
        ledger = self._ledger
        if trainer == ledger.trainer:
            self._start_data(ledger.progress())
            self._trainer = trainer
            return
        await self._cancel_running(CancelReason.TAKEN_OVER)
        if self._trainer is None:  # the trainer knows the data position of an earlier service
            self._groups.forget_data()
            for source in self._sources.values():
                source.prompts.forget_data()
        self._requeue_kept(resume_from)
        prompts = await ledger.trained_after(version)
        if prompts:
            logger.warning("%d clients' prompts of later steps are issued again", len(prompts))
        self._groups.reissue(prompts)
        for prompt in prompts:
            self._sources[prompt.source].prompts.put(prompt)
        # In all other cases the trainer sends no position, and the data set continues where it is.
        if self._trainer is None or resume_from is not None or version == 0:
            self._start_data(resume_from or DataProgress(0))
        ledger.begin_trainer(trainer, version)
        self._trainer = trainer

    def _start_data(self, progress_at_start: DataProgress) -> None:
        """Continue every source after the rows that ended or are pending."""
        progress = self._ledger.restart_data(progress_at_start)
        for source in self._sources.values():
            source.prompts.start_data(progress.of(source.name))

    async def _roll_back(self, version: int, restored: int) -> None:
        """Drop everything sampled by policies after `restored`; the prompts start again.

        The data set continues, since trained batches stay trained.
        """
        logger.warning("version %d has the weights of version %d again", version, restored)
        # Cancelling awaits; without a version, nothing is admitted meanwhile.
        self._groups.policy_version = None
        await self._cancel_running(CancelReason.ROLLED_BACK)
        self._ledger.leases.revoke_all()  # a restarted service would continue from their turns
        leased = []
        lease = self._ledger.open_lease
        if lease is not None and lease.version < version:  # formed but never trained
            leased = self.batches.void_lease()
        for group in [*leased, *self._groups.in_state(GroupState.KEPT)]:
            self._requeue(group, CancelReason.ROLLED_BACK)
        self.batches.begin_again()
        self._ledger.note_rollback(version, restored)

    async def _cancel_running(self, why: CancelReason) -> None:
        """Cancel all running groups; before the first announcement there are none."""
        if self._trainer is None:
            return
        logger.warning("pending groups start again: %s", why)
        running = self._groups.in_state(*IN_FLIGHT)
        tasks = [group.task for group in running if group.task is not None]
        for group in running:
            group.cancel(why)
        async with deadline(TAKE_OVER_TIMEOUT_S, peer="rollout fleet", phase="cancelling"):
            if tasks:
                await asyncio.wait(tasks)
        for group in self._groups:  # counted for the previous trainer's batches
            group.num_preemptions = 0
        for source in self._sources.values():  # the waves of the current batch no longer count
            source.strategy.batch_formed()

    def _requeue_kept(self, resume_from: DataProgress | None) -> None:
        """Requeue kept and leased prompts, except those that the resumed policy was trained on."""
        leased = self.batches.void_lease()
        kept = self._groups.in_state(GroupState.KEPT)
        for group in sorted([*leased, *kept], key=lambda group: group.prompt.sequence):
            if resume_from is not None and _covers(resume_from, group.prompt):
                self._groups.end(group, GroupEnding(PromptEnd.TRAINED))
            else:
                self._requeue(group, CancelReason.TAKEN_OVER)

    def _requeue(self, group: Group, why: CancelReason) -> None:
        self._groups.requeue(group, why)
        self._sources[group.prompt.source].prompts.put(group.prompt)

    def _reason(self) -> str:
        waits = [f"{w.peer}: {w.phase} (for {w.seconds:.1f} s)" for w in self.waits().values()]
        return "; ".join(waits) or "nothing"


def _covers(resumed: DataProgress, prompt: Prompt) -> bool:
    position, progress = prompt.position, resumed.of(prompt.source)
    ended_above = progress.ended_above
    return position is not None and (position < progress.low_water or position in ended_above)


def why_skipped(attempt: Attempt) -> str:
    """Return the detail of a skipped prompt's outcome, with the results of earlier attempts."""
    thinned = attempt.side is Side.PLAIN
    why = "left out to keep the share of hard prompts" if thinned else "not worth its tokens"
    history = attempt.history
    if history is None:
        return why
    graded = history.num_right + history.num_wrong
    return f"{why}: {history.num_right:.1f} of {graded:.1f} samples right in earlier attempts"


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """The state of the loop that decides what it waits for.

    Args:
        num_kept: groups for the next batch, at most its part for each source.
        lacking: text about the named sources that lack groups (`TrainingSources.lacking`).
        outside: the peer of `GroupDispatcher.awaited_outside`; may be empty.
        is_untaken: whether no agent has taken any of the samples that wait outside.
    """

    is_announced: bool
    num_replicas: int
    leased_step: int | None
    batch_asked: bool
    num_generating: int
    num_grading: int
    num_kept: int
    batch_size: int
    num_batches_in_training: int
    has_dataset: bool
    is_exhausted: bool
    lacking: str = ""
    outside: str = ""
    is_untaken: bool = False


def waits_by_kind(status: LoopStatus) -> dict[str, tuple[str, str]]:
    """Return everything that the loop waits for, the most direct cause first: by the kind of wait,
    the process that must act and what it must do."""
    if not status.is_announced:
        return {"announce": ("trainer", "announcing a policy")}
    reasons: dict[str, tuple[str, str]] = {}
    if status.num_replicas == 0:
        reasons["replica"] = ("rollout fleet", "registering a replica: none is announced")
    if status.outside:
        phase = "taking samples" if status.is_untaken else "working on samples"
        reasons[status.outside] = (status.outside, phase)
    elif status.num_generating:
        progress = f"{status.num_kept} of {status.batch_size} groups kept"
        phase = f"generating {status.num_generating} groups ({progress}{status.lacking})"
        reasons["generating"] = ("rollout fleet", phase)
    if status.num_grading:
        reasons["grading"] = ("scorer pool", f"grading {status.num_grading} groups")
    is_idle = not status.num_generating and not status.num_grading
    if (step := status.leased_step) is not None:
        reasons[f"lease {step}"] = ("trainer", f"training the batch of step {step}")
    elif is_idle and status.num_kept < status.batch_size and status.num_replicas:
        reasons |= _idle_reason(status)
    elif is_idle and status.num_kept >= status.batch_size and not status.batch_asked:
        reasons["take"] = ("trainer", "taking the batch that is ready")
    return reasons


def _idle_reason(status: LoopStatus) -> dict[str, tuple[str, str]]:
    if status.num_batches_in_training:
        return {"publish": ("trainer", "announcing the next policy version")}
    if status.is_exhausted:
        return {"prompts": ("clients", "submitting prompts: the data set is exhausted")}
    if not status.has_dataset:
        return {"prompts": ("clients", "submitting prompts: there is no data set")}
    return {"data": ("data set", f"reading prompts{status.lacking}")}

"""The coordinator: prompts in, kept groups out.

Consumes: prompts (clients' first come first served, then the data set) and the trainer's
announcements. One task admits (`admission`); each admitted prompt has a task of its own that
generates, grades and judges its group (`group_run`).

Waits for                      unblocked by
  the first announcement         `announce`
  room for another group         a group or sequence that ended, an announcement, a batch leased
  a replica, samples             `dispatcher`, within the prompt's own task
  grades                         `scorer_pool`, within the prompt's own task
  a full batch                   `train_batches`, in the trainer's call: a kept group, its deadline

Produces: kept groups for `train_batches`; one end for every prompt; at every new version, what the
ended groups taught about their prompts, in the memory of prompts.

On failure: what one group meets (replica gone, scorer killed, prompt refused) ends that prompt, in
its own task, and frees its place. What all groups would meet (unreadable data, a metric that the
scorer does not return, a strategy that gives up) stops admission and is raised to whoever takes a
batch. A memory of prompts that cannot be written is told in the log, and the run goes on. Anything
else is a defect and ends the service.

On shutdown: `run` is cancelled; its tasks cancel their streams, which frees the replicas' slots.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.queue import ReplicaQueue
from services.reward.grading.grader import Grader
from services.reward.groups.admission import GroupAdmission, GroupAdmissionParts, StaleGroups
from services.reward.groups.batcher import Batcher
from services.reward.groups.group import CancelReason, InFlightItem, InFlightTable
from services.reward.groups.leases import BatchParts, ChangeSignal, TrainBatches
from services.reward.groups.run import GroupParts, GroupRun
from services.reward.groups.settings import PipelineSettings
from services.reward.ledger.ledger import PromptLedger, PromptState
from services.reward.prompts.history import PromptMemoryStore
from services.reward.prompts.quarantine import Quarantine
from services.reward.prompts.source import PromptSource
from services.reward.records.group_log import GroupLog
from services.reward.records.outcomes import OutcomeRecorder
from services.reward.records.saved_samples import SampleSaver
from services.reward.records.statistics import Discard, StagePrompts, YieldGuard
from services.reward.records.tokens import GenerationTrace
from services.reward.records.traces import PromptTraces
from sluice.algorithm.routing import AnnouncedReplica
from sluice.algorithm.sampling.attempt import Attempt
from sluice.algorithm.sampling.strategy import SamplingStrategy
from sluice.concurrency.deadlines import deadline
from sluice.concurrency.waits import Waiting
from sluice.errors import DataError, SluiceError
from sluice.types import DataProgress, Prompt, PromptEnd

logger = logging.getLogger(__name__)

TAKE_OVER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """The stages the coordinator connects.

    `changes` is notified when a group moved on, `capacity` when there may be room for another
    (which every change of a group may give too). `memory` is ``None`` for strategies without one.
    """

    ledger: PromptLedger
    source: PromptSource
    queue: ReplicaQueue
    dispatcher: GroupDispatcher
    trace: GenerationTrace
    grader: Grader
    batcher: Batcher
    guard: YieldGuard
    strategy: SamplingStrategy
    recorder: OutcomeRecorder
    log: GroupLog
    memory: PromptMemoryStore | None
    changes: ChangeSignal
    capacity: ChangeSignal
    quarantine: Quarantine
    samples: SampleSaver


class Pipeline:
    """The loop; all methods run in one event loop."""

    def __init__(
        self, settings: PipelineSettings, parts: PipelineParts, traces: PromptTraces
    ) -> None:
        self._settings, self._parts, self._traces = settings, parts, traces
        self._in_flight = InFlightTable(parts.batcher.ages)
        self._stale_groups = StaleGroups(parts.batcher, self._in_flight, parts.strategy.rules)
        self._awaited_clock = AwaitedClock()
        self._announce_lock = asyncio.Lock()
        self._trainer: str | None = None
        self._was_exhausted = False
        self.policy_version: int | None = None
        self._learned_version: int | None = None
        self._memory_is_writable = True
        self._admission = GroupAdmission(
            settings,
            GroupAdmissionParts(
                parts.strategy,
                parts.source,
                parts.queue,
                parts.batcher,
                self._in_flight,
                parts.recorder,
                parts.memory,
                parts.quarantine,
            ),
            self._version_to_sample,
        )
        self.batches = TrainBatches(self._batch_parts(), settings.rules.batch_size)
        self._groups = GroupRun(settings, self._group_parts())
        if (lease := parts.ledger.open_lease) is not None:
            parts.batcher.recovered(lease.version)

    @property
    def num_generating(self) -> int:
        """Groups being generated, those that wait for a replica included."""
        return len(self._in_flight) - self._in_flight.num_grading

    @property
    def num_grading(self) -> int:
        """Groups being graded."""
        return self._in_flight.num_grading

    @property
    def held(self) -> StagePrompts:
        """The pending prompts as the stages hold them."""
        lease, recovered = self._parts.batcher.lease, self._parts.ledger.open_lease
        num_recovered = len(recovered.prompt_ids) if recovered else 0
        return StagePrompts(
            num_waiting=self._parts.source.num_waiting,
            num_in_flight=len(self._in_flight),
            num_kept=self._parts.batcher.num_kept,
            num_leased=len(lease.groups) if lease else num_recovered,
        )

    async def run(self) -> None:
        """Admit prompts until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._parts.log.run(), name="group log")
            tasks.create_task(self._parts.samples.run(), name="saved samples")
            while True:
                change = self._parts.capacity.next_change()
                try:
                    if self.batches.error is None:
                        await self._admit(tasks)
                except SluiceError as error:
                    self.batches.fail(error)
                self.awaited()
                await change.wait()

    def submit(self, prompt: Prompt) -> None:
        """Accept a client's prompt; `InvalidRequestError` if its id was used before."""
        self._parts.ledger.accept(prompt)
        self._parts.source.put(prompt)
        self._parts.changes.notify()

    async def announce(
        self,
        trainer: str,
        version: int,
        replicas: Sequence[AnnouncedReplica],
        resume_from: DataProgress | None,
    ) -> None:
        """Take on a version and its fleet; another trainer takes over all that is pending."""
        async with self._announce_lock:
            if trainer != self._trainer:
                self.policy_version = None  # nothing is admitted meanwhile
                await self._take_over(trainer, version, resume_from)
            if self._parts.batcher.lease is None:
                self.batches.recovered.announced(version)
            if version != self._learned_version:
                self._parts.strategy.forecast.announced(time.monotonic())
                await self._learn()
            self._learned_version = self.policy_version = version
        await self._parts.dispatcher.announce(replicas)
        self._parts.batcher.published(version)
        logger.info("version %d on %d replicas", version, len(replicas))
        self._parts.changes.notify()

    def awaited(self) -> list[tuple[Blocker, float]]:
        """What is waited for, and for how many seconds."""
        now = time.monotonic()
        found = awaited_now(self._facts())
        self._awaited_clock.update(found, now)
        return [(wait, self._awaited_clock.seconds(wait, now)) for wait in found]

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start as many groups as may."""
        if await self._admission.admit(partial(self._start, tasks)):
            self._note_exhaustion()

    async def _learn(self) -> None:
        """Take in what ended groups taught, before any prompt is drawn under the next version."""
        attempts = self._parts.strategy.new_version()
        memory = self._parts.memory
        if memory is None or not attempts or not self._memory_is_writable:
            return
        try:
            await asyncio.to_thread(memory.add, attempts)
        except DataError as error:
            logger.warning("visits are no longer remembered: %s", error)
            self._memory_is_writable = False

    def _version_to_sample(self) -> int | None:
        """The version that groups may start under; ``None``: none may."""
        version = self.policy_version
        if version is None or self._parts.batcher.lease is not None:
            return version
        if self._settings.rules.max_staleness:
            return version  # that batch counts as in training: room is left for the next ones
        return None if self.batches.recovered.holds_back(version) else version

    def _note_exhaustion(self) -> None:
        """Whoever takes a batch learns, once, that the data set has ended."""
        if self._parts.source.is_exhausted and not self._was_exhausted:
            self._parts.changes.notify()
        self._was_exhausted = self._parts.source.is_exhausted

    def _start(self, tasks: asyncio.TaskGroup, prompt: Prompt, attempt: Attempt) -> None:
        self._parts.strategy.started(attempt)
        has_reservation = self._stale_groups.reserves_slot(prompt.prompt_id)
        reserved_for = self.policy_version if has_reservation else None
        item = self._in_flight.add(
            prompt, attempt, self._num_sequences(attempt), reserved_for=reserved_for
        )
        if has_reservation:  # it takes a place that others may be running for
            self._stale_groups.check(self.policy_version)
        self._parts.ledger.move(prompt.prompt_id, PromptState.GENERATING)
        is_staged = attempt.first_samples < self._settings.samples_per_group
        self._parts.log.started(
            prompt,
            attempt,
            probes=attempt.first_samples if is_staged else 0,
            version=self.policy_version or 0,
        )
        with self._traces.within(prompt.prompt_id):
            item.task = tasks.create_task(self._groups.run(item), name=f"prompt {prompt.prompt_id}")
        item.task.add_done_callback(partial(self._left, item))

    def _num_sequences(self, attempt: Attempt) -> int:
        """Sequences that a group asks the fleet for at first."""
        is_whole = attempt.first_samples >= self._settings.samples_per_group
        return attempt.first_samples + (is_whole and self._settings.greedy is not None)

    def _batch_parts(self) -> BatchParts:
        parts = self._parts
        return BatchParts(
            parts.batcher,
            parts.recorder,
            parts.ledger,
            self._in_flight,
            self._stale_groups,
            parts.source,
            parts.guard,
            parts.strategy,
            self._admission.load,
            parts.changes,
            self._reason,
        )

    def _group_parts(self) -> GroupParts:
        parts, stale = self._parts, self._stale_groups
        return GroupParts(
            parts.dispatcher,
            parts.grader,
            parts.quarantine,
            parts.samples,
            parts.recorder,
            parts.strategy,
            self._in_flight,
            parts.log,
            version=lambda: self.policy_version,
            on_start=lambda: stale.check(self.policy_version),
            on_kept=lambda item: stale.check(self.policy_version, but_for=item.prompt.prompt_id),
            on_error=self.batches.fail,
        )

    def _left(self, item: InFlightItem, task: asyncio.Task[None]) -> None:
        """A group's task ended: free its place; if it was cancelled, its prompt meets its fate."""
        self._in_flight.remove(item)
        no_place = self._stale_groups.left(item, is_cancelled=task.cancelled())
        if task.cancelled() and item.cancel_reason is CancelReason.STALE:
            detail = f"started under version {item.start_version}, too old to be trained"
            self._parts.recorder.ended(item.prompt, PromptEnd.DROPPED_STALE, detail=detail)
        elif task.cancelled():
            self._parts.strategy.restarted(item.admitted_as)
            self._restart(item.prompt, no_place or Discard.TAKEN_OVER)
        self._parts.changes.notify()

    async def _take_over(
        self, trainer: str, version: int, resume_from: DataProgress | None
    ) -> None:
        """A trainer begins, perhaps from an older policy: what is pending is generated anew.

        The trainer that the ledger knows goes on: only this service has started anew.
        """
        ledger = self._parts.ledger
        if trainer == ledger.trainer:
            self._parts.source.start_data(ledger.restart_data(ledger.progress()))
            self._trainer = trainer
            return
        self.batches.recovered.forget()
        await self._end_what_runs()  # before it has ended, what it received may still be saved
        # Tokens of this trainer's way are of use again; those that came meanwhile are of another.
        keeps_samples = self._trainer is None and resume_from is not None
        self._parts.samples.change_trainer(version if keeps_samples else None)
        if self._trainer is None:  # the trainer says where an earlier service's draws stand
            ledger.forget_data()
            self._parts.source.forget_data()
        self._give_back_kept(resume_from)
        for prompt in await self._trained_in_vain(version):
            self._parts.source.put(prompt)
        if self._trainer is None or resume_from is not None or version == 0:
            self._parts.source.start_data(ledger.restart_data(resume_from or DataProgress(0)))
        ledger.begin_trainer(trainer)
        self._trainer = trainer

    async def _end_what_runs(self) -> None:
        """End groups under way; before the first announcement there are none."""
        if self._trainer is None:
            return
        logger.warning("another trainer announces itself; pending groups start again")
        running = self._in_flight.cancel_all(CancelReason.REQUEUED)
        async with deadline(TAKE_OVER_TIMEOUT_S, peer="rollout fleet", phase="cancelling"):
            if running:
                await asyncio.wait(running)
        self._stale_groups.forget()
        self._parts.strategy.batch_formed()  # waves of the batch under way count no more

    async def _trained_in_vain(self, version: int) -> tuple[Prompt, ...]:
        """Clients' prompts of steps that `version` knows nothing of: accepted once more."""
        ledger = self._parts.ledger
        prompts = await ledger.trained_after(version)
        if prompts:
            logger.warning("%d clients' prompts of later steps are issued again", len(prompts))
        ledger.reissue(prompts)
        return prompts

    def _give_back_kept(self, resume_from: DataProgress | None) -> None:
        """Kept and leased prompts wait again, but for those the resumed policy was trained on."""
        ledger = self._parts.ledger
        self._parts.batcher.clear()
        is_leased = {prompt.prompt_id for prompt in ledger.release_lease()}
        for prompt in ledger.pending():
            is_kept = ledger.state(prompt.prompt_id) is PromptState.KEPT
            is_waiting = ledger.state(prompt.prompt_id) is PromptState.WAITING
            if resume_from is not None and _covers(resume_from, prompt.position):
                if prompt.prompt_id in is_leased or not is_waiting:
                    self._parts.recorder.ended(prompt, PromptEnd.TRAINED)
            elif is_kept or prompt.prompt_id in is_leased:
                self._restart(prompt, Discard.TAKEN_OVER)

    def _restart(self, prompt: Prompt, why: Discard) -> None:
        self._parts.recorder.restarted(prompt, why)
        if why is not Discard.TAKEN_OVER:
            self._parts.samples.forget(prompt.prompt_id)
        self._parts.source.put(prompt)

    def _reason(self) -> str:
        waits = [f"{w.peer}: {w.phase} (for {seconds:.1f} s)" for w, seconds in self.awaited()]
        return "; ".join(waits) or "nothing"

    def _facts(self) -> LoopFacts:
        lease, source = self._parts.ledger.open_lease, self._parts.source
        return LoopFacts(
            is_announced=self.policy_version is not None,
            num_replicas=len(self._parts.queue.replicas),
            leased_batch=lease.batch_id if lease else None,
            batch_asked=self.batches.is_asked,
            num_generating=self.num_generating,
            num_grading=self.num_grading,
            num_kept=self._parts.batcher.num_kept,
            batch_size=self._settings.rules.batch_size,
            num_in_training=self._parts.batcher.num_in_training,
            has_dataset=source.has_dataset,
            is_exhausted=source.is_exhausted,
        )


def _covers(progress: DataProgress, position: int | None) -> bool:
    ended_above = progress.ended_above
    return position is not None and (position < progress.low_water or position in ended_above)


@dataclass(frozen=True, slots=True)
class Blocker:
    """Someone who has to act before a batch can be filled; `key` names the kind of wait."""

    key: str
    peer: str
    phase: str


@dataclass(frozen=True, slots=True)
class LoopFacts:
    """The loop as far as it decides what is waited for."""

    is_announced: bool
    num_replicas: int
    leased_batch: str | None
    batch_asked: bool
    num_generating: int
    num_grading: int
    num_kept: int
    batch_size: int
    num_in_training: int
    has_dataset: bool
    is_exhausted: bool


def awaited_now(facts: LoopFacts) -> tuple[Blocker, ...]:
    """Everything that is waited for, the nearest cause first; empty while nothing is wanted."""
    if not facts.is_announced:
        return (Blocker("announce", "trainer", "announcing a policy"),)
    found: list[Blocker] = []
    if facts.num_replicas == 0:
        found.append(Blocker("replica", "rollout fleet", "serving a replica: no replica announced"))
    if facts.num_generating:
        progress = f"{facts.num_kept} of {facts.batch_size} groups kept"
        what = f"generating {facts.num_generating} groups ({progress})"
        found.append(Blocker("generating", "rollout fleet", what))
    if facts.num_grading:
        what = f"grading {facts.num_grading} groups"
        found.append(Blocker("grading", "scorer pool", what))
    is_idle = not facts.num_generating and not facts.num_grading
    if facts.leased_batch is not None:
        what = f"training batch {facts.leased_batch}"
        found.append(Blocker(f"lease {facts.leased_batch}", "trainer", what))
    elif is_idle and facts.num_kept < facts.batch_size and facts.num_replicas:
        found.append(_idle_reason(facts))
    elif is_idle and facts.num_kept >= facts.batch_size and not facts.batch_asked:
        found.append(Blocker("take", "trainer", "taking the batch that is ready"))
    return tuple(found)


def _idle_reason(facts: LoopFacts) -> Blocker:
    if facts.num_in_training:
        return Blocker("publish", "trainer", "announcing the next policy version")
    if facts.is_exhausted:
        return Blocker("prompts", "clients", "submitting prompts: the data set is exhausted")
    if not facts.has_dataset:
        return Blocker("prompts", "clients", "submitting prompts: there is no data set")
    return Blocker("data", "data set", "reading prompts")


def as_waits(awaited: Sequence[tuple[Blocker, float]]) -> tuple[Waiting, ...]:
    """Return the same as waits of the whole service."""
    return tuple(Waiting(one.peer, one.phase, seconds) for one, seconds in awaited)


class AwaitedClock:
    """Remembers since when each kind of wait lasts."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def update(self, awaited: Sequence[Blocker], now: float) -> None:
        """Note what is waited for at `now`; what is no longer waited for is forgotten."""
        self._since = {wait.key: self._since.get(wait.key, now) for wait in awaited}

    def seconds(self, wait: Blocker, now: float) -> float:
        """How long `wait` has lasted."""
        return now - self._since.get(wait.key, now)

"""The state of the run: progress for status calls, and control calls that steer the train loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from sluice.algorithm.accounting import TOKENS_AGE
from sluice.algorithm.guards import GuardRule, Judgement
from sluice.concurrency.waits import Waiting
from sluice.errors import NotReadyError

_STEPS_KEPT = 1024
_GUARDS = "sluice.guards"
"""The holder of the guards' pauses."""

ResultT = TypeVar("ResultT")


class RunPhase(StrEnum):
    """The current activity of the trainer."""

    STARTING = "starting"
    WAITING_FOR_REPLICAS = "waiting_for_replicas"
    WAITING_FOR_BATCH = "waiting_for_batch"
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    SAVING = "saving"
    PAUSED = "paused"
    FINISHED = "finished"


# Peer and activity that each phase waits for.
_AWAITED_IN = {
    RunPhase.WAITING_FOR_REPLICAS: ("rollout fleet", "registering replicas"),
    RunPhase.WAITING_FOR_BATCH: ("reward service", "filling a batch"),
    RunPhase.TRAINING: ("learner thread", "updating the policy"),
    RunPhase.PUBLISHING: ("rollout fleet", "taking the weights"),
    RunPhase.EVALUATING: ("reward service", "validating"),
    RunPhase.SAVING: ("learner thread", "saving a checkpoint"),
    RunPhase.PAUSED: ("operator", "resuming the run"),
}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metrics of one finished step, from 1."""

    step: int
    metrics: Mapping[str, float]


class RunState:
    """Progress and control of one run; used from one event loop.

    Args:
        instance_id: UUID of this start of the trainer.
        step: finished steps (above 0 after a resume).
        elapsed_s: seconds since the start of the process.

    Attributes:
        hold_reason: why a guard pauses the run; empty: none does.
        num_rollbacks: steps that trained no batch, since the process started.
        judgements: returns the rules of the guards and their state.
    """

    def __init__(
        self, instance_id: str, total_steps: int, step: int, elapsed_s: float = 0.0
    ) -> None:
        self.instance_id = instance_id
        self.total_steps = total_steps
        self.step = step
        self.version: int | None = None
        self.phase = RunPhase.STARTING
        self.stop_reason: str | None = None
        self.saves_at_end = False
        self.no_validation = asyncio.Event()
        self.hold_reason = ""
        self.num_rollbacks = 0
        self.judgements: Callable[[], Sequence[tuple[GuardRule, Judgement]]] = tuple
        self._accounts: Mapping[str, float] = {}
        self._accounts_taken_s = time.monotonic()
        self._phase_since_s = time.monotonic() - elapsed_s
        self._seconds_by_phase: dict[RunPhase, float] = {}
        self._records: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._advanced = asyncio.Condition()
        self._control = asyncio.Event()
        # The end of each holder's lease; None: the pause has no end.
        self._holds: dict[str, asyncio.TimerHandle | None] = {}
        self._save_requests: list[asyncio.Future[tuple[int, str]]] = []

    def enter(self, phase: RunPhase) -> None:
        now_s = time.monotonic()
        spent_s = now_s - self._phase_since_s
        self._seconds_by_phase[self.phase] = self._seconds_by_phase.get(self.phase, 0.0) + spent_s
        self.phase, self._phase_since_s = phase, now_s

    @property
    def phase_seconds(self) -> float:
        return time.monotonic() - self._phase_since_s

    def seconds_by_phase(self) -> Mapping[RunPhase, float]:
        """Return the seconds in each phase so far, including the current one."""
        totals = dict(self._seconds_by_phase)
        totals[self.phase] = totals.get(self.phase, 0.0) + self.phase_seconds
        return totals

    @property
    def accounts(self) -> Mapping[str, float]:
        """Return the newest accounts by their names in `accounts.json`; empty before the first.

        The age of their token counts is as of now.
        """
        if TOKENS_AGE not in self._accounts:
            return self._accounts
        age_s = self._accounts[TOKENS_AGE] + time.monotonic() - self._accounts_taken_s
        return {**self._accounts, TOKENS_AGE: age_s}

    @accounts.setter
    def accounts(self, taken: Mapping[str, float]) -> None:
        self._accounts, self._accounts_taken_s = taken, time.monotonic()

    @property
    def is_paused(self) -> bool:
        return bool(self._holds)

    @property
    def holders(self) -> Collection[str]:
        """Return the holders that pause the run; an empty name is the operator."""
        return self._holds.keys()

    @property
    def is_over(self) -> bool:
        """Return whether no other step begins."""
        return self.step >= self.total_steps or self.stop_reason is not None

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """Return metrics of the last finished step; empty before the first."""
        return self._records[-1].metrics if self._records else {}

    def pause(self, lease_s: float | None = None, holder: str = "") -> None:
        """Pause the run after the current step.

        Args:
            lease_s: seconds until this pause ends, unless the call is repeated. None: it
                lasts until `resume`, and a later lease of this holder does not shorten it.
            holder: the name of the holder; empty: the operator.
        """
        if lease_s is not None and holder in self._holds and self._holds[holder] is None:
            return  # this pause lasts until `resume`
        self._end_pause(holder)
        self._holds[holder] = (
            None
            if lease_s is None
            else asyncio.get_running_loop().call_later(lease_s, self._end_pause, holder)
        )

    def hold(self, reason: str) -> None:
        """Pause the run until the operator resumes it; the status shows why."""
        self.pause(holder=_GUARDS)
        self.hold_reason = reason

    def resume(self, holder: str = "") -> None:
        """End one holder's pause; the run continues when no holder is left.

        The operator, whose name is empty, ends the guards' pause too.
        """
        self._end_pause(holder)
        if not holder:
            self._end_pause(_GUARDS)

    def restore(self, version: int) -> None:
        """Count a step that trained no batch: its version has the weights of a checkpoint."""
        self.step = version
        self.num_rollbacks += 1

    def stop(self, reason: str, *, skips_validation: bool = False, saves: bool = False) -> None:
        """End the run after the current step; at once if it waits or is paused.

        Args:
            skips_validation: end a running validation too, and start no last one.
            saves: save the last step even in a run that saves no steps.
        """
        self.stop_reason = reason
        self.saves_at_end = self.saves_at_end or saves
        if skips_validation:
            self.no_validation.set()
        for holder in tuple(self._holds):
            self._end_pause(holder)
        self.wake()

    async def next_control_call(self) -> None:
        """Wait for the next call that a paused or waiting run must handle."""
        self._control.clear()
        await self._control.wait()

    def wake(self) -> None:
        """End `next_control_call`."""
        self._control.set()

    async def request_save(self) -> tuple[int, str]:
        """Request a checkpoint and wait for it; return its step and folder.

        Raises:
            NotReadyError: the run ended first.
        """
        if self.phase is RunPhase.FINISHED:
            raise _run_ended_error()
        request: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._save_requests.append(request)
        self.wake()
        return await request

    @property
    def is_save_wanted(self) -> bool:
        """Return whether a call still waits for a checkpoint."""
        return any(not request.done() for request in self._save_requests)

    def answer_saves(self, step: int, folder: str) -> None:
        """Answer all calls that wait for a checkpoint."""
        for request in self._take_save_requests():
            request.set_result((step, folder))

    async def record(self, record: StepRecord) -> None:
        """Add a finished step and wake `records_from`."""
        async with self._advanced:
            self._records.append(record)
            self.step = record.step
            self._advanced.notify_all()

    async def finish(self) -> None:
        """Mark the run as finished: streams of steps end, and waits for a checkpoint fail."""
        if self.phase is RunPhase.FINISHED:
            return
        async with self._advanced:
            self.enter(RunPhase.FINISHED)
            self._advanced.notify_all()
        for request in self._take_save_requests():
            request.set_exception(_run_ended_error())

    async def records_from(self, step: int) -> tuple[StepRecord, ...]:
        """Wait for records of steps from `step` on; return none once the run has finished.

        A resumed run has no records of the steps before its start: the first one comes later.
        """
        async with self._advanced:
            await self._advanced.wait_for(
                lambda: (
                    self.phase is RunPhase.FINISHED
                    or (self._records and self._records[-1].step >= step)
                )
            )
            return tuple(record for record in self._records if record.step >= step)

    def _end_pause(self, holder: str) -> None:
        """End the pause of this holder only."""
        if holder == _GUARDS:
            self.hold_reason = ""
        lease_end = self._holds.pop(holder, None)
        if lease_end is not None:
            lease_end.cancel()
        self.wake()

    def _take_save_requests(self) -> list[asyncio.Future[tuple[int, str]]]:
        requests, self._save_requests = self._save_requests, []
        return [request for request in requests if not request.done()]


def phase_waits(state: RunState) -> tuple[Waiting, ...]:
    """Return the run's wait of the current phase, if it waits."""
    awaited = _AWAITED_IN.get(state.phase)
    return () if awaited is None else (Waiting(*awaited, state.phase_seconds),)


def _run_ended_error() -> NotReadyError:
    return NotReadyError("the run has ended and saves no more; its last checkpoint stands")


async def under_control(
    work: Coroutine[None, None, ResultT],
    state: RunState,
    phase: RunPhase,
    *,
    gives_way: Callable[[], bool],
    save: Callable[[], Awaitable[None]],
) -> ResultT | None:
    """Wait for `work` and handle control calls meanwhile.

    Args:
        work: cancelled if `gives_way` becomes true before its end.
        gives_way: returns whether a control call ends the wait.
        save: saves a checkpoint and answers its requests; `work` continues meanwhile.

    Returns:
        the result of `work`, or None if it was cancelled.

    Raises:
        ExceptionGroup: with the error of `work`.
    """
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work, name=str(phase))
        # The loop below waits for control calls only, so the end of `work` must wake it too.
        task.add_done_callback(lambda _: state.wake())
        while not task.done():
            if gives_way():
                task.cancel()
                break
            if state.is_save_wanted:
                await save()
                continue
            state.enter(phase)
            await state.next_control_call()
    return None if task.cancelled() else task.result()

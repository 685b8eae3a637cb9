"""The state of the run for status, watch and control calls, and waits that control calls can
interrupt.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from sluice.algorithm.accounting import TOKENS_AGE
from sluice.errors import NotReadyError

_STEPS_KEPT = 1024


class RunPhase(StrEnum):
    """What the trainer does at the moment."""

    STARTING = "starting"
    WAITING_FOR_REPLICAS = "waiting_for_replicas"
    WAITING_FOR_BATCH = "waiting_for_batch"
    TRAINING = "training"
    PUBLISHING = "publishing"
    EVALUATING = "evaluating"
    SAVING = "saving"
    PAUSED = "paused"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Metrics of one finished step, from 1."""

    step: int
    metrics: Mapping[str, float]


class RunState:
    """Progress and control of one run; used from one event loop.

    Args:
        instance: UUID of this start of the trainer.
        total_steps: steps of the whole run.
        step: finished steps (above 0 after a resume).
        elapsed_s: seconds that starting has taken already.

    `accounts` are the run's books as they were last taken, by the names of `accounts.json`; of
    their tokens the age is that of the moment at which it is asked for.
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
        self._accounts: Mapping[str, float] = {}
        self._accounts_taken_s = time.monotonic()
        self._phase_since_s = time.monotonic() - elapsed_s
        self._seconds_by_phase: dict[RunPhase, float] = {}
        self._records: deque[StepRecord] = deque(maxlen=_STEPS_KEPT)
        self._advanced = asyncio.Condition()
        self._control = asyncio.Event()
        # The end of each holder's lease; None: it has no end.
        self._holds: dict[str, asyncio.TimerHandle | None] = {}
        self._save_requests: list[asyncio.Future[tuple[int, str]]] = []

    def enter(self, phase: RunPhase) -> None:
        """Notes a change of phase."""
        now_s = time.monotonic()
        spent_s = now_s - self._phase_since_s
        self._seconds_by_phase[self.phase] = self._seconds_by_phase.get(self.phase, 0.0) + spent_s
        self.phase, self._phase_since_s = phase, now_s

    @property
    def phase_seconds(self) -> float:
        """Seconds in the present phase."""
        return time.monotonic() - self._phase_since_s

    def seconds_by_phase(self) -> Mapping[RunPhase, float]:
        """Seconds spent in each phase so far, the present one included."""
        totals = dict(self._seconds_by_phase)
        totals[self.phase] = totals.get(self.phase, 0.0) + self.phase_seconds
        return totals

    @property
    def accounts(self) -> Mapping[str, float]:
        """The books as they were last taken; empty before that."""
        if TOKENS_AGE not in self._accounts:
            return self._accounts
        age_s = self._accounts[TOKENS_AGE] + time.monotonic() - self._accounts_taken_s
        return {**self._accounts, TOKENS_AGE: age_s}

    @accounts.setter
    def accounts(self, taken: Mapping[str, float]) -> None:
        self._accounts, self._accounts_taken_s = taken, time.monotonic()

    @property
    def is_paused(self) -> bool:
        """Whether anybody holds the run."""
        return bool(self._holds)

    @property
    def holders(self) -> Collection[str]:
        """Who holds the run; empty: the operator."""
        return self._holds.keys()

    @property
    def is_over(self) -> bool:
        """Whether no further step is begun."""
        return self.step >= self.total_steps or self.stop_reason is not None

    @property
    def last_metrics(self) -> Mapping[str, float]:
        """Metrics of the last finished step; empty before the first."""
        return self._records[-1].metrics if self._records else {}

    def pause(self, lease_s: float | None = None, holder: str = "") -> None:
        """Holds the run after the current step.

        Args:
            lease_s: seconds after which this hold ends by itself, unless called again. None:
                it lasts until `resume`, which no later lease of this holder shortens.
            holder: whose hold it is; empty: the operator's.
        """
        if lease_s is not None and holder in self._holds and self._holds[holder] is None:
            return
        self._end(holder)
        self._holds[holder] = (
            None
            if lease_s is None
            else asyncio.get_running_loop().call_later(lease_s, self.resume, holder)
        )
        self.wake()

    def resume(self, holder: str = "") -> None:
        """Ends one holder's hold; the run goes on when none is left."""
        self._end(holder)
        self.wake()

    def stop(self, reason: str) -> None:
        """Ends the run after the current step, one that waits or is paused at once."""
        self.stop_reason = reason
        for holder in tuple(self._holds):
            self._end(holder)
        self.wake()

    async def control_call(self) -> None:
        """Waits for the next call that a paused or waiting run has to look at."""
        self._control.clear()
        await self._control.wait()

    def wake(self) -> None:
        """Ends `control_call`: there is something to look at."""
        self._control.set()

    async def saved(self) -> tuple[int, str]:
        """Asks for a checkpoint and waits for it: its step and folder.

        Raises:
            NotReadyError: the run ended before.
        """
        if self.phase is RunPhase.FINISHED:
            raise _ended()
        request: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
        self._save_requests.append(request)
        self.wake()
        return await request

    @property
    def is_save_wanted(self) -> bool:
        """Whether somebody still waits for a checkpoint."""
        return any(not request.done() for request in self._save_requests)

    def answer_saves(self, step: int, folder: str) -> None:
        """Tells all who wait for a checkpoint where it is."""
        for request in self._take_save_requests():
            request.set_result((step, folder))

    async def record(self, record: StepRecord) -> None:
        """Adds a finished step and wakes watchers."""
        async with self._advanced:
            self._records.append(record)
            self.step = record.step
            self._advanced.notify_all()

    async def finish(self) -> None:
        """Marks the run as finished: watchers' streams end, waits for a checkpoint fail."""
        if self.phase is RunPhase.FINISHED:
            return
        async with self._advanced:
            self.enter(RunPhase.FINISHED)
            self._advanced.notify_all()
        for request in self._take_save_requests():
            request.set_exception(_ended())

    async def records_from(self, step: int) -> tuple[StepRecord, ...]:
        """Waits for finished steps numbered `step` or above; empty once the run has finished."""
        async with self._advanced:
            await self._advanced.wait_for(
                lambda: self.phase is RunPhase.FINISHED or self.step >= step
            )
            return tuple(record for record in self._records if record.step >= step)

    def _end(self, holder: str) -> None:
        lease_end = self._holds.pop(holder, None)
        if lease_end is not None:
            lease_end.cancel()

    def _take_save_requests(self) -> list[asyncio.Future[tuple[int, str]]]:
        requests, self._save_requests = self._save_requests, []
        return [request for request in requests if not request.done()]


def _ended() -> NotReadyError:
    return NotReadyError("the run has ended and saves no more; its last checkpoint stands")


ResultT = TypeVar("ResultT")


async def under_control(
    work: Coroutine[None, None, ResultT],
    state: RunState,
    phase: RunPhase,
    *,
    gives_way: Callable[[], bool],
    save: Callable[[], Awaitable[None]],
) -> ResultT | None:
    """Waits for `work` and obeys control calls meanwhile.

    Args:
        work: what is waited for; cancelled when `gives_way` becomes true before its end.
        state: where control calls arrive.
        phase: what the run does while it waits.
        gives_way: whether a control call ends the wait.
        save: saves a checkpoint and answers who asked for it; `work` goes on meanwhile.

    Returns:
        what `work` returned, or None if it had to give way.

    Raises:
        ExceptionGroup: with the error of `work`.
    """
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work, name=str(phase))
        task.add_done_callback(lambda _: state.wake())
        while not task.done():
            if gives_way():
                task.cancel()
                break
            if state.is_save_wanted:
                await save()
                continue
            state.enter(phase)
            await state.control_call()
    return None if task.cancelled() else task.result()

"""Run scorer processes: requests in, one outcome per sample out, even if scorers fail.

Consumes: lists of responses. Waits for: an idle process. Unblocked by: a process that answers, is
killed for taking too long, or dies. Produces: one outcome per response, a number or a typed
failure. On failure of a process: its current item fails, the process is replaced, and the other
items are scored again. A process that uses CPU while idle is replaced as well. On shutdown: all
processes are killed and reaped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import msgspec

from services.reward.grading.containment import (
    IdleCpu,
    end_marked,
    family_of,
    kill_left_behind,
    watch_idle,
)
from services.reward.grading.messages import (
    ScorerAnswer,
    ScorerRefusal,
    ScorerSetup,
    encoding_error,
)
from services.reward.grading.scorer_worker import (
    END_TIMEOUT_S,
    PEER,
    ScorerFault,
    ScorerNotStartedFault,
    ScorerWorker,
    start_with_retries,
    start_worker,
)
from services.reward.grading.scorers.registry import scored_characters
from sluice.concurrency.waits import deadline, run_beside, waiting_for
from sluice.config.schema.reward import RewardConfig
from sluice.config.schema.service import SandboxConfig
from sluice.data.scoring import ScorerInput
from sluice.errors import ConfigError, DeadlineError
from sluice.types import Failed, FailureKind, Scored

logger = logging.getLogger(__name__)

MAX_UNEXPLAINED_FAULTS = 3
LOADS_PER_CORE = 4  # loading may wait for a disk or a network
MAX_KNOWN_SOURCES = 256
MAX_SOURCE_CHARS = 100


@dataclass(slots=True, eq=False)
class _WorkerSlot:
    """A worker slot: holds one process, or none before the first use and after a fault.

    Attributes:
        is_idle: whether it is free for the next request.
        num_uses: requests that have used it.
        last_source: data source of the last item of its last request.
    """

    worker: ScorerWorker | None = None
    is_idle: bool = False
    num_uses: int = 0
    last_source: str = ""


class ScorerPool:
    """`reward.scorer_pool.num_workers` scorer processes. Create it with `running_scorer_pool`.

    Args:
        reward: the scorer and its limits.
        sandbox: where programs run, unless `reward.sandbox_fusion` is configured.
        run_dir: the run's folder; processes that earlier services of the run left behind are
            killed. ``None`` if the pool belongs to no run.
    """

    def __init__(
        self, reward: RewardConfig, sandbox: SandboxConfig, run_dir: Path | None = None
    ) -> None:
        pool, custom = reward.scorer_pool, reward.custom_reward_function
        reward_model = reward.reward_model if reward.reward_model.enable else None
        self._family = family_of(run_dir)
        self._max_chars = pool.max_response_chars
        uses_rules = custom.path is None and reward_model is None
        self._tail_chars = _tail_chars(reward.scorer_routes) if uses_rules else _no_limit
        self._setup = ScorerSetup(
            custom.path,
            custom.name,
            custom.reward_kwargs,
            pool.timeout_s,
            pool.memory_mb * 2**20,
            reward.scorer_routes,
            reward_model,
            sandbox,
            reward.sandbox_fusion,
        )
        self._slots = [_WorkerSlot() for _ in range(pool.num_workers)]
        self._idle: asyncio.LifoQueue[_WorkerSlot] = asyncio.LifoQueue()
        self.busy_seconds = 0.0
        """Total seconds that processes have worked since the start."""
        self.num_asked = 0
        self.num_replaced = 0
        """Processes killed because of a fault or of CPU use while idle, since the start."""
        self.num_ended_idle = 0
        """Processes killed because they used CPU while idle."""

    async def start(self) -> None:
        """Start every process, so that a scorer that cannot be loaded fails at once.

        Kill first what an earlier service left behind.

        Raises:
            ConfigError: the custom function cannot be loaded, a route names no scorer, or a setting
                of the reward model is invalid. DeadlineError: loading takes too long.
        """
        with _log_if_stuck():
            async with deadline(
                END_TIMEOUT_S, peer=PEER, phase="ending what a service left behind"
            ):
                await kill_left_behind(self._family)
        first_slot, *other_slots = self._slots
        await self._fill(first_slot)  # one alone: it reports the error that all would meet
        at_once = asyncio.Semaphore(LOADS_PER_CORE * (os.cpu_count() or 1))

        async def fill(slot: _WorkerSlot) -> None:
            async with at_once:  # more at once would exceed the time limit of one
                await self._fill(slot)

        try:
            async with asyncio.TaskGroup() as tasks:
                for number, slot in enumerate(other_slots, start=1):
                    tasks.create_task(fill(slot), name=f"scorer process {number}")
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def watch(self) -> None:
        """Kill idle processes that use CPU, until cancelled; the next request starts new ones."""
        await watch_idle(self._idle_uses, self._end_idle)

    async def stop(self) -> None:
        """Kill and reap every process and all processes that they started.

        Raises:
            DeadlineError: a process is left (it hangs in the kernel).
        """
        workers = [slot.worker for slot in self._slots if slot.worker is not None]
        for worker in workers:
            worker.kill()
        async with deadline(END_TIMEOUT_S, peer=PEER, phase="ending after SIGKILL"):
            await end_marked(self._family)
            for worker in workers:
                await worker.wait_reaped()

    async def score(self, items: Sequence[ScorerInput]) -> tuple[Scored | Failed, ...]:
        """Grade responses; the reward of a scored response is its score.

        Requests wait for a process in order; the callers limit their number. An item that cannot be
        sent is unscorable.
        """
        sent_items = [self._shorten(item) for item in items]
        outcomes: dict[int, Scored | Failed] = _encoding_failures(sent_items)
        remaining = [i for i in range(len(items)) if i not in outcomes]
        num_unexplained = 0
        while remaining:
            try:
                answers = await self._ask([sent_items[i] for i in remaining])
            except ScorerFault as fault:
                self._log_fault(fault)
                failure = Failed(fault.kind, fault.detail)
                num_unexplained += fault.item is None
                if fault.item is not None:
                    outcomes[remaining.pop(fault.item)] = failure
                elif num_unexplained >= MAX_UNEXPLAINED_FAULTS:
                    outcomes.update(dict.fromkeys(remaining, failure))
                    break
            else:
                outcomes.update(zip(remaining, map(_outcome, answers), strict=True))
                break
        return tuple(outcomes[i] for i in range(len(items)))

    def _log_fault(self, fault: ScorerFault) -> None:
        if isinstance(fault, ScorerNotStartedFault):
            logger.warning("a scorer could not be started: %s", fault.detail)
            return
        self.num_replaced += 1
        logger.warning(
            "scorer replaced (item %s; %d replaced so far): %s",
            *(fault.item, self.num_replaced, fault.detail),
        )

    async def _ask(self, items: Sequence[ScorerInput]) -> tuple[ScorerAnswer, ...]:
        async with self._worker(items[-1].data_source) as worker:
            started_at = time.monotonic()
            try:
                with waiting_for("scorer process", "grading"):
                    return await worker.score(items)
            finally:
                self.busy_seconds += time.monotonic() - started_at
                self.num_asked += len(items)

    @asynccontextmanager
    async def _worker(self, last_source: str) -> AsyncIterator[ScorerWorker]:
        with waiting_for("scorer pool", "freeing a process"):
            slot = await self._idle.get()
        slot.is_idle, slot.last_source = False, last_source
        slot.num_uses += 1
        try:
            yield slot.worker or await self._replace(slot)
        except BaseException:
            # After a fault or cancellation the process may be in the middle of an item.
            await self._discard(slot)
            raise
        finally:
            self._put_back(slot)

    async def _replace(self, slot: _WorkerSlot) -> ScorerWorker:
        """Start a process in an empty slot. Since others have started, a failure may be
        temporary."""
        try:
            slot.worker = worker = await self._new_worker()
        except (ConfigError, DeadlineError) as error:
            raise ScorerNotStartedFault(FailureKind.SCORER_CRASH, None, str(error)) from error
        return worker

    async def _fill(self, slot: _WorkerSlot) -> None:
        slot.worker = await self._new_worker()
        self._put_back(slot)

    async def _new_worker(self) -> ScorerWorker:
        return await start_with_retries(partial(start_worker, self._setup, self._family))

    def _put_back(self, slot: _WorkerSlot) -> None:
        slot.is_idle = True
        self._idle.put_nowait(slot)

    def _take_out(self, slot: _WorkerSlot) -> None:
        """Reserve this idle slot until it is put back; keep the order of the others."""
        idle = [self._idle.get_nowait() for _ in range(self._idle.qsize())]
        for idle_slot in reversed(idle):
            if idle_slot is not slot:
                self._idle.put_nowait(idle_slot)
        slot.is_idle = False

    def _idle_uses(self) -> dict[str, int]:
        """Return the request count of each idle process, by its mark."""
        return {
            slot.worker.mark: slot.num_uses
            for slot in self._slots
            if slot.worker is not None and slot.is_idle
        }

    async def _end_idle(self, mark: str, num_uses: int, used: IdleCpu) -> None:
        idle = [slot for slot in self._slots if slot.is_idle and slot.num_uses == num_uses]
        slot = next(
            (idle_slot for idle_slot in idle if idle_slot.worker and idle_slot.worker.mark == mark),
            None,
        )
        if slot is None or slot.worker is None:  # it got a request since, or was replaced
            return
        self._take_out(slot)
        self.num_replaced += 1
        self.num_ended_idle += 1
        logger.warning(
            "scorer replaced (%d replaced so far, %d of them for this): %s",
            *(self.num_replaced, self.num_ended_idle, _idle_use_text(used, slot.last_source)),
        )
        try:
            slot.worker.kill()
            with _log_if_stuck():
                await slot.worker.wait_ended()
            # Only now: if a shutdown cuts the wait short, `stop` still finds the process.
            slot.worker = None
        finally:
            self._put_back(slot)

    async def _discard(self, slot: _WorkerSlot) -> None:
        worker, slot.worker = slot.worker, None
        if worker is not None:
            worker.kill()
            with _log_if_stuck():  # the caller gets the fault or the cancellation instead
                await worker.wait_ended()

    def _shorten(self, item: ScorerInput) -> ScorerInput:
        """Cut what the scorer does not read: long responses cost more to send."""
        limit = min(self._max_chars, self._tail_chars(item.data_source) or self._max_chars)
        if len(item.response) <= limit:
            return item
        return msgspec.structs.replace(item, response=item.response[-limit:])


@asynccontextmanager
async def running_scorer_pool(
    reward: RewardConfig, sandbox: SandboxConfig, run_dir: Path | None = None
) -> AsyncIterator[ScorerPool]:
    """Run a pool (arguments as for `ScorerPool`); no process outlives the block."""
    scorers = ScorerPool(reward, sandbox, run_dir)
    try:
        await scorers.start()
        async with run_beside(scorers.watch(), "idle scorers"):
            yield scorers
    finally:
        await scorers.stop()


@contextmanager
def _log_if_stuck() -> Iterator[None]:
    try:
        yield
    except DeadlineError as error:
        logger.warning("a scorer process is left behind: %s", error)


def _idle_use_text(used: IdleCpu, last_source: str) -> str:
    return (
        f"it used {used.cpu_s:.1f} s of CPU in {used.idle_s:.1f} s while idle; the last item it "
        f"graded has data_source {last_source[:MAX_SOURCE_CHARS]!r}. Let the reward function end "
        "the threads and processes it starts before it returns or raises"
    )


def _tail_chars(routes: Mapping[str, str]) -> Callable[[str], int | None]:
    return lru_cache(MAX_KNOWN_SOURCES)(partial(scored_characters, routes=routes))


def _no_limit(_data_source: str) -> int | None:
    return None


def _encoding_failures(items: Sequence[ScorerInput]) -> dict[int, Scored | Failed]:
    """Return the failures of items that cannot be encoded, by index; the data may hold such
    items."""
    errors = {i: encoding_error(item) for i, item in enumerate(items)}
    return {
        i: Failed(
            FailureKind.UNSCORABLE,
            f"it cannot be sent to a scorer process: {error}; repair the row's extra_info "
            "(integers of 64 bits, shallow lists and mappings)",
        )
        for i, error in errors.items()
        if error is not None
    }


def _outcome(answer: ScorerAnswer) -> Scored | Failed:
    if isinstance(answer, ScorerRefusal):
        return Failed(FailureKind.UNSCORABLE, answer.detail, answer.frames)
    return Scored(answer.score, answer.score, answer.metrics, answer.prediction)

"""Scorer processes at work: requests in, one outcome per sample out, whatever the scorers do.

Consumes: lists of responses. Waits for: an idle process. Unblocked by: a process that answers, is
killed for taking too long, or dies. Produces: one outcome per response, a number or a typed
failure. On failure of a process: the item it worked on is failed, it is replaced, and the other
items are scored again. On shutdown: all processes are killed and reaped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache, partial

import msgspec

from services.reward.scorer_messages import (
    ScoreItem,
    ScorerAnswer,
    ScorerRefusal,
    ScorerSetup,
    encoding_error,
)
from services.reward.scorer_worker import ScorerFault, ScorerWorker, start_worker
from services.reward.scorers.registry import scored_characters
from services.reward.scorers.reward_model_settings import RewardModelSettings, configured_settings
from sluice.concurrency.waits import waiting_for
from sluice.config.reward import CustomRewardFunctionConfig, RewardConfig, ScorerPoolConfig
from sluice.types import Failed, FailureKind, Scored

logger = logging.getLogger(__name__)

MAX_UNEXPLAINED_FAULTS = 3
MAX_KNOWN_SOURCES = 256


@dataclass(slots=True)
class _Seat:
    """A place for one process; empty before the first use and after a fault."""

    worker: ScorerWorker | None = None


class ScorerPool:
    """`num_workers` scorer processes. Made by `running_scorer_pool`.

    Args:
        pool: limits.
        custom: the user's function, if any.
        routes: built-in scorers by data source, before verl's routing.
        reward_model: whom to ask instead of the built-in scorers, if anyone.
    """

    def __init__(
        self,
        pool: ScorerPoolConfig,
        custom: CustomRewardFunctionConfig,
        routes: Mapping[str, str] | None = None,
        reward_model: RewardModelSettings | None = None,
    ) -> None:
        self._max_chars = pool.max_response_chars
        uses_rules = custom.path is None and reward_model is None
        self._tail_chars = _tail_chars(routes or {}) if uses_rules else _whole
        self._setup = ScorerSetup(
            custom.path,
            custom.name,
            custom.reward_kwargs,
            pool.timeout_s,
            pool.memory_mb * 2**20,
            routes or {},
            reward_model,
        )
        self._seats = [_Seat() for _ in range(pool.num_workers)]
        self._idle: asyncio.LifoQueue[_Seat] = asyncio.LifoQueue()
        self._busy_seconds = 0.0
        self.num_replaced = 0

    @property
    def busy_seconds(self) -> float:
        """Seconds that processes have worked since the start, in sum."""
        return self._busy_seconds

    async def start(self) -> None:
        """Start every process, so that a scorer that cannot be loaded is known at once.

        Raises:
            ConfigError: the custom function cannot be loaded, a route names no scorer, or a setting
                of the reward model is impossible; `DeadlineError`: loading takes too long.
        """
        for seat in self._seats:
            seat.worker = await start_worker(self._setup)
            self._idle.put_nowait(seat)

    async def stop(self) -> None:
        """Kill and reap every process."""
        workers = [seat.worker for seat in self._seats if seat.worker is not None]
        for worker in workers:
            worker.kill()
        for worker in workers:
            await worker.wait_ended()

    async def score(self, items: Sequence[ScoreItem]) -> tuple[Scored | Failed, ...]:
        """Grade responses; the reward of a scored one is its score.

        Requests wait for a process in turn; those who ask bound how many do. An item that cannot
        be sent is unscorable.
        """
        sent = [self._shortened(item) for item in items]
        outcomes: dict[int, Scored | Failed] = _unsendable(sent)
        remaining = [i for i in range(len(items)) if i not in outcomes]
        num_unexplained = 0
        while remaining:
            try:
                answers = await self._ask([sent[i] for i in remaining])
            except ScorerFault as fault:
                logger.warning(
                    "scorer replaced (item %s; %d replaced so far): %s",
                    *(fault.item, self.num_replaced, fault.detail),
                )
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

    async def _ask(self, items: Sequence[ScoreItem]) -> tuple[ScorerAnswer, ...]:
        async with self._worker() as worker:
            started_at = time.monotonic()
            try:
                with waiting_for("scorer process", "grading"):
                    return await worker.score(items)
            finally:
                self._busy_seconds += time.monotonic() - started_at

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[ScorerWorker]:
        with waiting_for("scorer pool", "freeing a process"):
            seat = await self._idle.get()
        try:
            if seat.worker is None:
                seat.worker = await start_worker(self._setup)
            yield seat.worker
        except BaseException:
            # Fault or cancellation: the process may be in the middle of an item.
            await self._discard(seat)
            raise
        finally:
            self._idle.put_nowait(seat)

    async def _discard(self, seat: _Seat) -> None:
        worker, seat.worker = seat.worker, None
        if worker is not None:
            self.num_replaced += 1
            worker.kill()
            await worker.wait_ended()

    def _shortened(self, item: ScoreItem) -> ScoreItem:
        """Leave out what the scorer does not look at: long responses cost more to send."""
        limit = min(self._max_chars, self._tail_chars(item.data_source) or self._max_chars)
        if len(item.response) <= limit:
            return item
        return msgspec.structs.replace(item, response=item.response[-limit:])


@asynccontextmanager
async def running_scorer_pool(
    pool: ScorerPoolConfig,
    custom: CustomRewardFunctionConfig,
    routes: Mapping[str, str] | None = None,
    reward_model: RewardModelSettings | None = None,
) -> AsyncIterator[ScorerPool]:
    """A started pool (arguments of `ScorerPool`); no process outlives the block."""
    scorers = ScorerPool(pool, custom, routes, reward_model)
    try:
        await scorers.start()
        yield scorers
    finally:
        await scorers.stop()


def configured_scorer_pool(reward: RewardConfig) -> AbstractAsyncContextManager[ScorerPool]:
    """The pool that a run's configuration asks for, as `running_scorer_pool`.

    Raises:
        ConfigError: a reward model is enabled without its address or name.
    """
    model = configured_settings(reward.reward_model)
    return running_scorer_pool(
        reward.scorer_pool, reward.custom_reward_function, reward.scorer_routes, model
    )


def _tail_chars(routes: Mapping[str, str]) -> Callable[[str], int | None]:
    return lru_cache(MAX_KNOWN_SOURCES)(partial(scored_characters, routes=routes))


def _whole(_data_source: str) -> int | None:
    return None


def _unsendable(items: Sequence[ScoreItem]) -> dict[int, Scored | Failed]:
    """Failures of the items that cannot be encoded, by index; any data file may hold such a row."""
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
        return Failed(FailureKind.UNSCORABLE, answer.detail)
    return Scored(answer.score, answer.score, answer.metrics, answer.prediction)

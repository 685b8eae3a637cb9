"""Lead one evaluation: wait for a replica, let the reward service validate, write the results.

Consumes: registrations and heartbeats of replicas, which serve the model's files as version 0.
Waits for: the first replica, then the reward service's `Evaluate`, which stores each finished
    prompt and skips stored ones; so it may be asked again after a kill of any process.
Unblocked by: a heartbeat; the answer, or the end of all progress.
Produces: announcements of the replicas in use, and `results.json` from the stored responses.
On failure: the error ends the evaluation with exit code 1; stored prompts stand.
On shutdown: `Stop` or a signal cancels the validation; no results are written.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from pathlib import Path

from services.evaluation.servicer import VERSION
from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.loop.reward_client import PolicyAnnouncer, RewardClient
from services.trainer.loop.run_state import RunPhase, RunState, under_control
from sluice.concurrency.waits import deadline
from sluice.config.deadlines import replica_wait_timeout_s
from sluice.config.run import RunConfig
from sluice.evaluation.results import Results, write_results

logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.5
_REWARD_START_TIMEOUT_S = 120.0


class Evaluator:
    """One evaluation. `fleet` and `state` are shared with the service's calls."""

    def __init__(
        self, config: RunConfig, reward: RewardClient, fleet: Fleet, state: RunState
    ) -> None:
        self._config, self._reward = config, reward
        self._fleet, self._state = fleet, state
        self._announcer = PolicyAnnouncer(reward, fleet, state, lambda: None)
        self._serves = asyncio.Event()  # the first replica

    async def run(self) -> None:
        """Evaluate, unless a `Stop` call comes first.

        Raises:
            ExceptionGroup: holds the error that ended the evaluation.
        """
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            watching = [
                tasks.create_task(self._expire_silent(), name="heartbeats"),
                tasks.create_task(self._announce_changes(), name="fleet"),
            ]
            await self._under_control(self._replica_serves(), RunPhase.WAITING_FOR_REPLICAS)
            if self._state.stop_reason is None:
                await self._under_control(self._validate(began_s), RunPhase.EVALUATING)
            if self._state.stop_reason is not None:
                logger.info("stopped: %s; stored responses stand", self._state.stop_reason)
            for task in watching:
                task.cancel()

    async def _replica_serves(self) -> None:
        await self._reward.wait_until_up(_REWARD_START_TIMEOUT_S)
        self._state.version = VERSION
        async with deadline(
            replica_wait_timeout_s(self._config),
            peer="rollout fleet",
            phase="waiting for a replica that has read the model's files",
            remedy="read logs/rollout-0.log, or raise sluice.trainer.replica_wait_timeout_s",
        ):
            await self._serves.wait()

    async def _validate(self, began_s: float) -> None:
        await self._announcer.announce()
        await self._reward.evaluate(VERSION, 0, lambda: self._fleet.totals()[0])
        await asyncio.to_thread(self._write, time.monotonic() - began_s)

    def _write(self, seconds: float) -> None:
        rollout = self._config.actor_rollout_ref.rollout
        sampling = rollout.val_kwargs
        results = Results(
            model=self._config.actor_rollout_ref.model.path,
            sampling={
                "engine": rollout.name,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": self._config.data.max_response_length,
                "seed": rollout.seed,
            },
            samples_per_prompt=sampling.n,
            seconds=round(seconds, 1),
            benchmarks={},
        )
        write_results(Path(self._config.sluice.run_dir), results)

    async def _under_control(self, work: Coroutine[None, None, None], phase: RunPhase) -> None:
        await under_control(
            work,
            self._state,
            phase,
            gives_way=lambda: self._state.stop_reason is not None,
            save=_never,
        )

    async def _announce_changes(self) -> None:
        while True:
            await self._fleet.changed.wait()
            self._fleet.changed.clear()
            if self._fleet.in_state(MemberState.SERVING):
                self._serves.set()
            await self._announcer.announce()

    async def _expire_silent(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_INTERVAL_S)
            self._fleet.expire(time.monotonic())


async def _never() -> None:
    """Do nothing: `EvaluationServicer` refuses calls for a checkpoint."""

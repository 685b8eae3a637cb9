"""A stand-alone evaluation: `python -m services.evaluation --config FILE [key=value ...]`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path

from services.evaluation.servicer import VERSION, EvaluationServicer
from services.trainer.fleet.members import Fleet, MemberState, drop_silent
from services.trainer.loop.reward_client import PolicyAnnouncer, RewardClient, connect_reward
from services.trainer.loop.run_state import RunPhase, RunState, phase_waits, under_control
from services.trainer.servicer import trainer_server
from sluice.concurrency.process import (
    end_by_sigterm,
    end_with_supervisor,
    exempt_from_gc,
    exit_status,
    process_age_s,
    run_and_exit,
    service_parser,
    until_signal,
)
from sluice.concurrency.waits import deadline, units_done
from sluice.concurrency.watchdog import WorkState, watch_service
from sluice.config.addresses import advertised_address
from sluice.config.deadlines import replica_wait_timeout_s
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.evaluation.results import Results, write_results
from sluice.rpc.credentials import service_credentials
from sluice.rpc.status import expect_no_tls
from sluice.telemetry.logs import configure_logging
from sluice.telemetry.trace_setup import trace_process

logger = logging.getLogger(__name__)

_REWARD_START_TIMEOUT_S = 120.0
NAME = "evaluation"
_LAST_ANSWERS_S = 1.0


class Evaluator:
    """One evaluation: a replica serves, the reward service validates, the results are written.

    `fleet` and `state` are shared with the service's calls.

    Consumes: registrations and heartbeats of replicas, which serve the model's files as version 0.
    Waits for: the first replica, then the reward service's `Evaluate`, which stores each finished
        prompt and skips stored ones; so it may be asked again after a kill of any process.
    Unblocked by: a heartbeat; the answer, or the end of all progress.
    Produces: announcements of the replicas in use, and `results.json` from the stored responses.
    On failure: the error ends the evaluation with exit code 1; stored prompts stand.
    On shutdown: `Stop` or a signal cancels the validation; no results are written.
    """

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
                tasks.create_task(drop_silent(self._fleet), name="heartbeats"),
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
            save=_save_nothing,
        )

    async def _announce_changes(self) -> None:
        while True:
            await self._fleet.changed.wait()
            self._fleet.changed.clear()
            if self._fleet.in_state(MemberState.SERVING):
                self._serves.set()
            await self._announcer.announce()


async def _save_nothing() -> None:
    """Do nothing: `EvaluationServicer` refuses calls for a checkpoint."""


async def _evaluate(config: RunConfig) -> bool:
    """Evaluate to the end, and return true."""
    instance_id, service = str(uuid.uuid4()), config.sluice.trainer
    credentials = service_credentials(config.sluice.security, service.endpoint)
    if not credentials.is_encrypted:
        expect_no_tls()
    state = RunState(instance_id, 0, 0, process_age_s())
    fleet = Fleet(None, service.replica_ttl_s, service.replica_stall_s)
    async with AsyncExitStack() as stack:
        reward = await connect_reward(config, credentials, instance_id, stack)
        servicer = EvaluationServicer(fleet, state, config.sluice)
        server = trainer_server(config, servicer, credentials)
        await server.start()
        stack.push_async_callback(server.stop, _LAST_ANSWERS_S)
        stack.enter_context(_watchdog(config, fleet, state))
        exempt_from_gc()
        # Runs first at shutdown: streams of steps get their end.
        stack.push_async_callback(state.finish)
        await Evaluator(config, reward, fleet, state).run()
    return True


def _watchdog(config: RunConfig, fleet: Fleet, state: RunState) -> AbstractContextManager[None]:
    endpoint = config.sluice.trainer.endpoint
    address = advertised_address(endpoint, endpoint.port)
    work = evaluation_work(config, fleet, state)
    return watch_service(NAME, config.sluice, work, address=address)


def evaluation_work(config: RunConfig, fleet: Fleet, state: RunState) -> Callable[[], WorkState]:
    """Return what reads the evaluation's progress: phases, the fleet's tokens, and what the reward
    service reports as progress."""
    patience_s = config.sluice.trainer.batch_timeout_s

    def work_state() -> WorkState:
        progress = (state.phase, units_done(), fleet.totals())
        has_work = state.phase is not RunPhase.FINISHED
        return WorkState(progress, has_work, patience_s, phase_waits(state))

    return work_state


def _serve(path: Path, overrides: Sequence[str]) -> None:
    config = load_config(path, overrides)
    configure_logging(NAME, config.sluice.log_level)
    farewell = "a signal ends the evaluation; stored responses stand"
    with trace_process(config, "trainer", NAME):
        is_complete = asyncio.run(until_signal(_evaluate(config), farewell))
    if not is_complete:
        end_by_sigterm()


def main() -> int:
    """Run until the results are written, SIGTERM or SIGINT, which end the process by the signal."""
    end_with_supervisor()
    arguments = service_parser(
        "services.evaluation",
        "Leads an evaluation in the trainer's place; sluice eval --model starts it.",
        "--config evals/mine/config.yaml",
    ).parse_args()
    return exit_status(NAME, lambda: _serve(arguments.config, arguments.overrides))


if __name__ == "__main__":
    run_and_exit(main)

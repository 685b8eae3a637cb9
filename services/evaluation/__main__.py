"""A stand-alone evaluation: `python -m services.evaluation --config FILE [key=value ...]`."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path

from services.evaluation.evaluator import Evaluator
from services.evaluation.servicer import EvaluationServicer
from services.trainer.fleet.members import Fleet
from services.trainer.loop.reward_client import connected_reward
from services.trainer.loop.run_state import RunPhase, RunState, phase_waits
from services.trainer.servicer import trainer_server
from sluice.concurrency.process import (
    end_by_sigterm,
    end_with_supervisor,
    exempt_start_up,
    exit_status,
    leave,
    process_age_s,
    service_parser,
    until_signal,
)
from sluice.concurrency.waits import units_done
from sluice.concurrency.watchdog import WorkState, watched_service
from sluice.config.addresses import advertised_address
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.rpc.credentials import service_credentials
from sluice.rpc.status import expect_no_tls
from sluice.telemetry.logs import configure_logging
from sluice.telemetry.trace_setup import traced_process

NAME = "evaluation"
_LAST_ANSWERS_S = 1.0


async def _evaluate(config: RunConfig) -> bool:
    """Evaluate to the end, and return true."""
    instance_id, service = str(uuid.uuid4()), config.sluice.trainer
    credentials = service_credentials(config.sluice.security, service.endpoint)
    if not credentials.is_encrypted:
        expect_no_tls()
    state = RunState(instance_id, 0, 0, process_age_s())
    fleet = Fleet(None, service.replica_ttl_s, service.replica_stall_s)
    async with AsyncExitStack() as stack:
        reward = await connected_reward(config, credentials, instance_id, stack)
        servicer = EvaluationServicer(fleet, state, config.sluice)
        server = trainer_server(config, servicer, credentials)
        await server.start()
        stack.push_async_callback(server.stop, _LAST_ANSWERS_S)
        stack.enter_context(_watching(config, fleet, state))
        exempt_start_up()
        # Runs first at shutdown: streams of steps get their end.
        stack.push_async_callback(state.finish)
        await Evaluator(config, reward, fleet, state).run()
    return True


def _watching(config: RunConfig, fleet: Fleet, state: RunState) -> AbstractContextManager[None]:
    endpoint = config.sluice.trainer.endpoint
    address = advertised_address(endpoint, endpoint.port)
    work = evaluation_work(config, fleet, state)
    return watched_service(NAME, config.sluice, work, address=address)


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
    with traced_process(config, "trainer", NAME):
        is_complete = asyncio.run(until_signal(_evaluate(config), farewell))
    if not is_complete:
        end_by_sigterm()


def main() -> int:
    """Run until the results are written, SIGTERM or SIGINT, which end the process by the signal."""
    end_with_supervisor()
    given = service_parser(
        "services.evaluation",
        "Leads an evaluation in the trainer's place; sluice eval --model starts it.",
        "--config evals/mine/config.yaml",
    ).parse_args()
    return exit_status(NAME, lambda: _serve(given.config, given.overrides))


if __name__ == "__main__":
    leave(main)

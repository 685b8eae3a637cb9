"""A stand-alone evaluation: `python -m services.evaluation --config FILE [key=value ...]`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import uuid
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path

from services.evaluation.evaluator import Evaluator
from services.evaluation.servicer import EvaluationServicer
from services.trainer.fleet.members import Fleet
from services.trainer.loop.reward_client import RewardClient
from services.trainer.loop.run_state import RunPhase, RunState, phase_waits
from sluice.api.trainer.v1 import trainer_pb2_grpc
from sluice.concurrency.process import (
    end_with_supervisor,
    exempt_start_up,
    exit_status,
    leave,
    process_age_s,
    stop_on_signals,
)
from sluice.concurrency.watchdog import WorkState, watched_service
from sluice.config.addresses import advertised_address, peer_address
from sluice.config.derived import message_mb
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.rpc.client import open_channel, reward_stub
from sluice.rpc.credentials import Credentials, service_credentials
from sluice.rpc.server import RpcServer
from sluice.rpc.status import expect_no_tls
from sluice.telemetry.logs import configure_logging
from sluice.telemetry.trace_setup import traced_process

logger = logging.getLogger(__name__)

NAME = "evaluation"
SERVICE = "sluice.api.trainer.v1.TrainerService"
LAST_ANSWERS_S = 1.0


def _parse(argv: list[str]) -> tuple[Path, tuple[str, ...]]:
    parser = argparse.ArgumentParser(
        prog="python -m services.evaluation",
        description="Leads an evaluation in the trainer's place; sluice eval --model starts it.",
        epilog="example: python -m services.evaluation --config evals/mine/config.yaml",
    )
    parser.add_argument("--config", type=Path, required=True, help="configuration (YAML)")
    parser.add_argument("overrides", nargs="*", help="key=value, as in verl")
    given = parser.parse_args(argv)
    return given.config, tuple(given.overrides)


async def _run(config: RunConfig) -> bool:
    """Evaluate; return False if SIGTERM or SIGINT ended it before."""
    stop = asyncio.Event()
    with stop_on_signals(stop):
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(_evaluate(config), name="evaluation")
            signals = tasks.create_task(_cancel_on(stop, running), name="signals")
            running.add_done_callback(lambda _: signals.cancel())
    return not running.cancelled()


async def _cancel_on(stop: asyncio.Event, running: asyncio.Task[None]) -> None:
    await stop.wait()
    logger.info("a signal ends the evaluation; stored responses stand")
    running.cancel()


async def _evaluate(config: RunConfig) -> None:
    instance_id, service = str(uuid.uuid4()), config.sluice.trainer
    credentials = service_credentials(config.sluice.security, service.endpoint)
    if not credentials.is_encrypted:
        expect_no_tls()
    state = RunState(instance_id, 0, 0, process_age_s())
    fleet = Fleet(None, service.replica_ttl_s, service.replica_stall_s)
    async with AsyncExitStack() as stack:
        address = peer_address(config.sluice.reward.endpoint, "sluice.reward.endpoint")
        limit = message_mb(config) << 20
        channel = open_channel(address, max_message_bytes=limit, credentials=credentials)
        stub = reward_stub(await stack.enter_async_context(channel))
        reward = RewardClient(stub, instance_id, service.batch_timeout_s)
        server = _server(config, fleet, state, credentials)
        await server.start()
        stack.push_async_callback(server.stop, LAST_ANSWERS_S)
        stack.enter_context(_watching(config, fleet, state))
        exempt_start_up()
        # Runs first at shutdown: streams of steps get their end.
        stack.push_async_callback(state.finish)
        await Evaluator(config, reward, fleet, state).run()


def _server(
    config: RunConfig, fleet: Fleet, state: RunState, credentials: Credentials
) -> RpcServer:
    servicer = EvaluationServicer(fleet, state, config)
    endpoint = config.sluice.trainer.endpoint
    return RpcServer(
        [lambda server: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, server)],
        (SERVICE,),
        host=endpoint.host,
        port=endpoint.port,
        health_port=endpoint.health_port,
        max_message_bytes=message_mb(config) << 20,
        credentials=credentials,
    )


def _watching(config: RunConfig, fleet: Fleet, state: RunState) -> AbstractContextManager[None]:
    service = config.sluice.trainer

    def work_state() -> WorkState:
        progress, has_work = (state.phase, fleet.totals()), state.phase is not RunPhase.FINISHED
        return WorkState(progress, has_work, service.batch_timeout_s, phase_waits(state))

    address = advertised_address(service.endpoint, service.endpoint.port)
    return watched_service(NAME, config.sluice, work_state, address=address)


def _serve(path: Path, overrides: tuple[str, ...]) -> None:
    config = load_config(path, overrides)
    configure_logging(NAME, config.sluice.log_level)
    with traced_process(config, "trainer", NAME):
        is_complete = asyncio.run(_run(config))
    if not is_complete:  # a supervisor does not take it for an end of its own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Run until the results are written, SIGTERM or SIGINT, which end the process by the signal."""
    end_with_supervisor()
    path, overrides = _parse(sys.argv[1:])
    return exit_status(NAME, lambda: _serve(path, overrides))


if __name__ == "__main__":
    leave(main())

"""The reward service: `python -m services.reward --config FILE [key=value ...]`."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pyarrow as pa

from services.reward.app import RewardApp, open_prompt_sets, open_run_files
from services.reward.episodes.client import ServedEnvironments, spread_over_servers
from services.reward.episodes.leases import LeaseManager
from services.reward.episodes.workers import running_workers
from services.reward.generation.client import RolloutClient
from services.reward.grading.pool import running_scorer_pool
from services.reward.ledger.ledger import PromptLedger
from services.reward.servicer import RewardServicer
from services.reward.telemetry import exported, watching
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.concurrency.process import (
    end_with_supervisor,
    exempt_from_gc,
    exit_status,
    service_parser,
    stop_on_signals,
)
from sluice.config.deadlines import generate_timeout_s
from sluice.config.derived import message_mb, prompt_images, replays_engine_routing
from sluice.config.loading.loader import load_config
from sluice.config.problems import raise_problems
from sluice.config.rules.sampling import longest_interval_ms, strategy_problems
from sluice.config.run import RunConfig
from sluice.environment.source import EnvironmentSource
from sluice.rpc.credentials import Credentials, service_credentials
from sluice.rpc.server import RpcServer
from sluice.rpc.status import expect_no_tls
from sluice.sandbox.choice import as_variable
from sluice.telemetry.logs import configure_logging
from sluice.telemetry.trace_setup import trace_process

logger = logging.getLogger(__name__)

NAME = "reward"
SERVICE = "sluice.api.reward.v1.RewardService"
LAST_ANSWERS_S = 5.0


async def _serve(config: RunConfig) -> None:
    limit = message_mb(config) << 20
    credentials = service_credentials(config.sluice.security, config.sluice.reward.endpoint)
    if not credentials.is_encrypted:
        expect_no_tls()
    logger.info("opening the data set")
    sets = open_prompt_sets(config)
    client = RolloutClient(
        linger_ms=config.sluice.reward.linger_ms,
        timeout_s=generate_timeout_s(config),
        max_message_bytes=limit,
        partial_interval_ms=config.sluice.reward.partial_interval_ms,
        longest_interval_ms=longest_interval_ms(config),
        with_routing=replays_engine_routing(config),
        credentials=credentials,
    )
    stop = asyncio.Event()
    pool = running_scorer_pool(config.reward, config.sluice.sandbox, Path(config.sluice.run_dir))
    with stop_on_signals(stop), open_run_files(config) as files:
        played = _environments(config, limit, credentials, files.ledger)
        async with client, pool as scorers, played as environments:
            app = RewardApp(config, sets, scorers, client, files, environments)
            server = _server(config, app, limit, credentials)
            await server.start()
            try:
                with watching(config, app, server.address), exported(config, app, NAME):
                    exempt_from_gc()
                    await run_until_stopped(app, stop, files.ledger)
            finally:
                await server.stop(min(LAST_ANSWERS_S, config.sluice.shutdown_grace_s / 2))
                app.traces.close()
    logger.info("ended")


@asynccontextmanager
async def _environments(
    config: RunConfig, limit: int, credentials: Credentials, ledger: PromptLedger
) -> AsyncIterator[ServedEnvironments | LeaseManager | None]:
    """Run the workers that play episodes; ``None`` if a sample is one answer."""
    settings, turns = config.sluice.environment, config.actor_rollout_ref.rollout.multi_turn
    source = EnvironmentSource(
        settings.path, settings.name, turns.function_tool_path, turns.tool_config_path
    )
    if settings.agents:
        yield LeaseManager(ledger.leases)
        return
    async with AsyncExitStack() as stack:
        if settings.addresses:
            address_for = spread_over_servers(settings.addresses)
        elif source.is_given:
            workers = running_workers(
                source,
                settings,
                Path(config.sluice.run_dir),
                as_variable(config.sluice.sandbox, config.reward.sandbox_fusion),
            )
            address_for = (await stack.enter_async_context(workers)).address_for
        else:
            yield None
            return
        yield await stack.enter_async_context(
            ServedEnvironments(
                address_for,
                call_timeout_s=settings.call_timeout_s,
                max_message_bytes=limit,
                credentials=credentials,
            )
        )


def _server(config: RunConfig, app: RewardApp, limit: int, credentials: Credentials) -> RpcServer:
    endpoint = config.sluice.reward.endpoint
    servicer = RewardServicer(
        app,
        config.actor_rollout_ref.rollout,
        config.data.max_response_length,
        config.sluice.limits,
        credentials.tokens,
        prompt_images(config),
    )
    return RpcServer(
        [lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)],
        [SERVICE],
        host=endpoint.host,
        port=endpoint.port,
        health_port=endpoint.health_port,
        max_message_bytes=limit,
        credentials=credentials,
    )


async def run_until_stopped(app: RewardApp, stop: asyncio.Event, ledger: PromptLedger) -> None:
    """Run the loop until `stop` is set; raise the error of a ledger that cannot be written."""
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(ledger), name="ledger")
        running = tasks.create_task(app.loop.run(), name="reward loop")
        try:
            await stop.wait()
            logger.info("stopping")
        finally:  # also after an error: programs repeat their requests
            app.end()
        running.cancel()
        watching.cancel()


async def _watch(ledger: PromptLedger) -> None:
    """End the service when the ledger cannot be written, since it can then accept no prompt."""
    if ledger.has_file:
        raise await ledger.failure()


def _run(path: Path, overrides: list[str]) -> None:
    config = load_config(path, overrides)
    configure_logging(NAME, config.sluice.log_level)
    # Check what this service depends on, also without `sluice up`; the trainer checks the rest.
    raise_problems(strategy_problems(config), "checks before the start")
    with trace_process(config, NAME, NAME):
        asyncio.run(_serve(config))


def main() -> int:
    """Run until SIGTERM or SIGINT; exit code 0 when everything ended in order."""
    end_with_supervisor()
    arguments = service_parser(
        "services.reward",
        "Serves prompts, grading and train batches.",
        "--config run.yaml sluice.log_level=DEBUG",
    ).parse_args()
    # Arrow's default allocator keeps the memory of a large row group; the system's frees it.
    pa.set_memory_pool(pa.system_memory_pool())
    return exit_status(NAME, lambda: _run(arguments.config, arguments.overrides))


if __name__ == "__main__":
    sys.exit(main())

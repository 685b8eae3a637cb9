"""One rollout replica: `python -m services.rollout --config FILE --name NAME [key=value ...]`."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.rollout.engines.protocol import Engine
from services.rollout.engines.registry import create_engine
from services.rollout.generation import GenerationRunner
from services.rollout.prompt_encoder import PromptEncoder
from services.rollout.registration import Registration, report_weights
from services.rollout.servicer import (
    ImageRules,
    ReplicaIdentity,
    RolloutServicer,
    WeightSyncServicer,
)
from services.rollout.telemetry import load_readings, work_state
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.api.weights.v1 import weights_pb2_grpc
from sluice.concurrency.process import (
    end_with_supervisor,
    exempt_from_gc,
    exit_status,
    run_and_exit,
    service_parser,
    stop_on_signals,
)
from sluice.concurrency.watchdog import watch_service
from sluice.config.addresses import advertised_address, peer_address
from sluice.config.derived import image_limits, message_mb, replica_devices
from sluice.config.loading.loader import load_config
from sluice.config.problems import raise_problems
from sluice.config.rules.checks import group_capacity_problems
from sluice.config.run import RunConfig
from sluice.data.prompt_length import PromptLimit
from sluice.device.host import prepare_process
from sluice.rpc.auth import ClientQuota
from sluice.rpc.client import open_channel, trainer_stub
from sluice.rpc.credentials import Credentials, service_credentials
from sluice.rpc.metrics import ProcessName, serve_metrics
from sluice.rpc.server import RpcServer
from sluice.rpc.status import expect_no_tls
from sluice.service_contract import WEIGHTS_HEALTH, restarts
from sluice.telemetry.logs import configure_logging
from sluice.telemetry.trace_setup import trace_process
from sluice.types import ReplicaInfo

logger = logging.getLogger(__name__)

_SERVICES = (
    "sluice.api.rollout.v1.RolloutService",
    "sluice.api.weights.v1.WeightSyncService",
)


async def _serve(config: RunConfig, name: str) -> None:
    raise_problems([*group_capacity_problems(config)], f"start of replica {name}")
    configure_logging(name, config.sluice.log_level)
    with trace_process(config, "rollout", name):
        await _run_replica(config, name)


async def _run_replica(config: RunConfig, name: str) -> None:
    prepare_process(
        config,
        config.sluice.rollout.device,
        config.sluice.rollout.endpoint,
        collectives_on_device=config.sluice.weights.backend != "gloo",
        runs_vllm=config.actor_rollout_ref.rollout.name == "vllm",
    )
    credentials = service_credentials(config.sluice.security, config.sluice.rollout.endpoint)
    if not credentials.is_encrypted:
        expect_no_tls()
    encoder = _encoder(config)
    engine = create_engine(config)
    identity = ReplicaIdentity(name, str(uuid.uuid4()))
    stop = asyncio.Event()
    with stop_on_signals(stop):
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        logger.info("loading the model from %s into %s", model.path, rollout.name)
        await engine.start()
        try:
            logger.info("the chat template: %s", encoder.prove_continuations())
            server = _server(config, engine, encoder, identity, credentials)
            await server.start()
            try:
                replica = _replica(config, identity, server.port, engine)
                with _observability(config, replica, engine):
                    exempt_from_gc()  # exclude the model's objects from garbage collection
                    await _stay_registered(config, engine, replica, server, credentials, stop)
            finally:
                await server.stop(config.sluice.rollout.drain_timeout_s)
        finally:
            await engine.stop()


@contextmanager
def _observability(config: RunConfig, replica: ReplicaInfo, engine: Engine) -> Iterator[None]:
    """Run the replica's watchdog and serve its metrics while the block runs."""
    process = ProcessName("rollout", replica.name, restarts())
    endpoint = config.sluice.rollout.endpoint
    with (
        watch_service(
            replica.name,
            config.sluice,
            lambda: work_state(engine.load()),
            address=replica.address,
        ),
        serve_metrics(config.sluice, endpoint, process, lambda: load_readings(engine.load())),
    ):
        yield


def _encoder(config: RunConfig) -> PromptEncoder:
    model = config.actor_rollout_ref.model
    return PromptEncoder(
        Path(model.path),
        template_kwargs=config.data.apply_chat_template_kwargs,
        trust_remote_code=model.trust_remote_code,
        tool_format=config.actor_rollout_ref.rollout.multi_turn.format or "",
    )


def _server(
    config: RunConfig,
    engine: Engine,
    encoder: PromptEncoder,
    identity: ReplicaIdentity,
    credentials: Credentials,
) -> RpcServer:
    service, endpoint = config.sluice.rollout, config.sluice.rollout.endpoint
    rollouts = RolloutServicer(
        identity,
        engine,
        encoder,
        GenerationRunner(engine, encoder.decode),
        engine_name=config.actor_rollout_ref.rollout.name,
        max_n=service.max_n,
        training_prompts=PromptLimit(
            config.data.max_prompt_length,
            config.data.truncation,
            config.data.filter_overlong_prompts,
        ),
        quota=ClientQuota(
            config.sluice.limits.max_client_samples,
            "samples",
            "sluice.limits.max_client_samples",
        ),
        tokens=credentials.tokens,
        max_client_priority=config.sluice.limits.max_client_priority,
        images=ImageRules(
            image_limits(config),
            ClientQuota(
                config.sluice.limits.max_client_images_mb << 20,
                "bytes of images",
                "sluice.limits.max_client_images_mb",
            ),
        ),
    )
    weights = WeightSyncServicer(engine, credentials.for_transfers())
    return RpcServer(
        [
            lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollouts, server),
            lambda server: weights_pb2_grpc.add_WeightSyncServiceServicer_to_server(
                weights, server
            ),
        ],
        _SERVICES,
        host=endpoint.host,
        port=endpoint.port,
        health_port=endpoint.health_port,
        max_message_bytes=message_mb(config) << 20,
        credentials=credentials,
    )


def _replica(
    config: RunConfig, identity: ReplicaIdentity, port: int, engine: Engine
) -> ReplicaInfo:
    """Return the replica as registered with the trainer; the port is known only after binding."""
    return ReplicaInfo(
        identity.name,
        identity.instance_id,
        advertised_address(config.sluice.rollout.endpoint, port),
        config.actor_rollout_ref.rollout.max_num_seqs,
        replica_devices(config),
        kv_tokens=engine.load().kv_tokens,
        shares=tuple(engine.weight_shares),
    )


async def _stay_registered(
    config: RunConfig,
    engine: Engine,
    replica: ReplicaInfo,
    server: RpcServer,
    credentials: Credentials,
    stop: asyncio.Event,
) -> None:
    """Stay registered until `stop`, then report to the trainer that the replica drains."""
    trainer = peer_address(config.sluice.trainer.endpoint, "sluice.trainer.endpoint")
    limit = message_mb(config) << 20
    async with open_channel(trainer, max_message_bytes=limit, credentials=credentials) as channel:
        registration = Registration(trainer_stub(channel), replica, engine)
        health = report_weights(
            engine.load, lambda serving: server.set_named(WEIGHTS_HEALTH, serving=serving)
        )
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(registration.run(), name="registration"),
                tasks.create_task(registration.check_engine(), name="engine liveness"),
                tasks.create_task(health, name="weights health"),
            ]
            await stop.wait()
            for task in running:
                task.cancel()
        await registration.announce_drain()


def main() -> int:
    """Run until SIGTERM or SIGINT; exit code 0 when everything ended in order."""
    end_with_supervisor()
    parser = service_parser(
        "services.rollout", "Serves one rollout replica.", "--config run.yaml --name rollout-0"
    )
    parser.add_argument("--name", required=True, help="stable name, unique in the fleet")
    arguments = parser.parse_args()

    def run() -> None:
        asyncio.run(_serve(load_config(arguments.config, arguments.overrides), arguments.name))

    return exit_status(arguments.name, run)


if __name__ == "__main__":
    run_and_exit(main)

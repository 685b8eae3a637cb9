"""Groups whose samples are leased: a scripted policy, the reward service's calls and the front."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from services.reward.episodes.leases import LeaseManager
from services.reward.episodes.loop import EpisodeGenerator
from services.reward.generation.client import RolloutClient
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.ledger.ledger import PromptLedger
from services.reward.servicer import RewardServicer
from sluice.algorithm.episode_rules import EpisodeRules
from sluice.algorithm.routing import AnnouncedReplica
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.client import AsyncClient, RunAddress
from sluice.config.schema.actor_rollout_ref import RolloutConfig
from sluice.openai_server.web_app import OpenAIServer, OpenAIServerSettings, listening
from sluice.rpc.server import RpcServer
from sluice.types import ReplicaInfo
from tests.support.http_front import QUICK
from tests.support.rpc_server import LIMIT_BYTES
from tests.support.scripted_policy import Policy, ScriptedEngine, scripted_policy


@dataclass
class Leased:
    """A generator of leased samples, and what programs reach."""

    generator: EpisodeGenerator
    desk: LeaseManager
    client: AsyncClient
    engine: ScriptedEngine
    base_url: str


@asynccontextmanager
async def leased(
    folder: Path,
    policy: Policy,
    *,
    ledger: PromptLedger | None = None,
    family: str = "qwen2.5",
    **limits: Any,
) -> AsyncIterator[Leased]:
    """Samples of `policy` with the chat template of `family`, for the length of the block."""
    rules = EpisodeRules(**({"max_sequence_tokens": 4000} | limits))
    rollouts = RolloutClient(linger_ms=0, timeout_s=30.0, max_message_bytes=LIMIT_BYTES)
    ledger = ledger or PromptLedger()
    desk = LeaseManager(ledger.leases)
    app = cast("Any", SimpleNamespace(leases=desk, ledger=ledger))
    servicer = RewardServicer(app, RolloutConfig(), 16)
    server = RpcServer(
        [lambda it: reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, it)],
        ["sluice.api.reward.v1.RewardService"],
        host="127.0.0.1",
        port=0,
        health_port=0,
        max_message_bytes=LIMIT_BYTES,
    )
    async with scripted_policy(family, folder, policy) as (address, engine), rollouts:
        dispatcher = GroupDispatcher(rollouts, ReplicaQueue(1.0), max_attempts=2)
        await dispatcher.announce(
            [AnnouncedReplica(ReplicaInfo("rollout-0", "one", address, 8), 3)]
        )
        generator = EpisodeGenerator(
            dispatcher, desk, rules, by_default=True, seed=7, are_leased=True
        )
        await server.start()
        try:
            async with (
                AsyncClient(RunAddress(reward=server.address), policy=QUICK) as client,
                listening(OpenAIServer(client, OpenAIServerSettings()), "127.0.0.1", 0) as port,
            ):
                yield Leased(generator, desk, client, engine, f"http://127.0.0.1:{port}")
        finally:
            await server.stop(0)

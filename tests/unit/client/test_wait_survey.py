"""What services say they wait for, and what is said of those that do not answer."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.api.common.v1 import common_pb2
from sluice.api.reward.v1 import reward_pb2, reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.client.run_address import RunLocation
from sluice.client.wait_chain import (
    REWARD,
    TRAINER,
    ServiceWaits,
    explain,
    explain_run,
    survey_waits,
)
from sluice.concurrency.process import mark_process
from sluice.concurrency.waits import Waiting
from sluice.config.run import RunConfig
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.server import RpcServer
from tests.support.certified import ACCEPTED
from tests.support.zombie_mark import zombie_mark

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

TIMEOUT_S = 1.0
LONG_S = 60.0
NOWHERE = "127.0.0.1:1"


class Services(
    trainer_pb2_grpc.TrainerServiceServicer,
    reward_pb2_grpc.RewardServiceServicer,
):
    """Trainer or reward service: waits for `peer`, and names a replica."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def GetStatus(self, request: Any, context: Any) -> Any:
        return self._answer


class Replica(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers only if its engine is left alone."""

    async def GetStatus(self, request: Any, context: Any) -> Any:
        assert request.without_engine
        waits = [common_pb2.Wait(peer="torch engine", phase="ending a step", seconds=9, count=1)]
        return rollout_pb2.GetStatusResponse(
            name="rollout-0", wait_report=common_pb2.WaitReport(waits=waits, still_seconds=8.5)
        )


def reports(peer: str, phase: str) -> common_pb2.WaitReport:
    wait = common_pb2.Wait(peer=peer, phase=phase, seconds=34.0, count=12, task="prompt data-3")
    return common_pb2.WaitReport(waits=[wait])


@asynccontextmanager
async def listening(add: Any, servicer: Any, credentials: Credentials = OPEN) -> AsyncIterator[str]:
    server = RpcServer(
        [lambda grpc_server: add(servicer, grpc_server)],
        [],
        host="127.0.0.1",
        port=0,
        max_message_bytes=1 << 20,
        credentials=credentials,
    )
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


@asynccontextmanager
async def running(replicas: dict[str, str]) -> AsyncIterator[tuple[str, str]]:
    """Addresses of a trainer and a reward service that know these replicas."""
    known = [common_pb2.Replica(name=name, address=at) for name, at in replicas.items()]
    trainer = trainer_pb2.GetStatusResponse(
        replicas=[
            trainer_pb2.ReplicaStatus(replica=known[0], state="serving", heartbeat_age_seconds=3.5)
        ],
        wait_report=reports(REWARD, "filling a batch"),
    )
    reward = reward_pb2.GetStatusResponse(
        replicas=known, wait_report=reports("rollout-0", "generating")
    )
    async with (
        listening(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, Services(trainer)) as one,
        listening(reward_pb2_grpc.add_RewardServiceServicer_to_server, Services(reward)) as two,
    ):
        yield one, two


async def test_every_service_reports_its_waits_and_a_silent_one_is_listed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # takes connections, says nothing
        silent = f"127.0.0.1:{frozen.getsockname()[1]}"
        add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        async with (
            listening(add, Replica()) as answering,
            running({"rollout-0": answering, "rollout-1": silent}) as (trainer, reward),
        ):
            for _ in range(10):  # a slow machine's answers may come late
                found = await survey_waits(trainer, reward, tmp_path, timeout_s=TIMEOUT_S)
                if not any(one.failure for one in found[:3]):
                    break
    assert found == (
        ServiceWaits(TRAINER, (Waiting(REWARD, "filling a batch", 34.0, 12, "prompt data-3"),)),
        ServiceWaits(REWARD, (Waiting("rollout-0", "generating", 34.0, 12, "prompt data-3"),)),
        ServiceWaits(
            "rollout-0",
            (Waiting("torch engine", "ending a step", 9.0),),
            8.5,
            unheard_s=3.5,
            is_replica=True,
        ),
        ServiceWaits("rollout-1", failure="no answer within 1 s", is_replica=True),
    )


async def test_a_process_noted_in_the_runs_folder_is_asked_though_nobody_names_it(
    tmp_path: Path,
) -> None:
    with mark_process(tmp_path, "rollout-7", NOWHERE):
        found = await survey_waits(NOWHERE, NOWHERE, tmp_path, timeout_s=LONG_S)
    assert [service.name for service in found] == [TRAINER, REWARD, "rollout-7"]
    assert found[2] == ServiceWaits(
        "rollout-7", failure="no answer", pid=os.getpid(), process="alive", is_replica=True
    )


async def test_the_reward_services_mark_is_found_under_the_name_that_others_wait_for(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "processes"
    folder.mkdir()
    mark = {"name": "reward", "pid": 4711, "host": "elsewhere", "started": 1, "address": NOWHERE}
    (folder / "reward.json").write_text(json.dumps(mark), encoding="utf-8")
    found = await survey_waits(NOWHERE, NOWHERE, tmp_path, timeout_s=LONG_S)
    assert [(s.name, s.pid, s.process) for s in found] == [
        (TRAINER, 0, ""),
        (REWARD, 4711, "out of sight on elsewhere"),
    ]


async def test_a_service_that_refuses_our_token_is_not_called_silent(tmp_path: Path) -> None:
    answer = Services(trainer_pb2.GetStatusResponse())
    add = trainer_pb2_grpc.add_TrainerServiceServicer_to_server
    async with listening(add, answer, Credentials(tokens=ACCEPTED)) as trainer:
        services = await survey_waits(trainer, NOWHERE, tmp_path, timeout_s=LONG_S)
    refused, silent = services
    assert (refused.name, refused.is_refused, silent.is_refused) == (TRAINER, True, False)
    assert "no bearer token came" in refused.failure
    assert explain(services).cause.startswith(
        "trainer: refused while reporting what it waits for: no"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
async def test_a_run_that_left_only_a_zombie_is_over(tmp_path: Path) -> None:
    with zombie_mark(tmp_path, "reward"):
        assert await explain_run(RunLocation(tmp_path, RunConfig(), NOWHERE, NOWHERE)) is None

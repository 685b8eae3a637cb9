"""Clients in other languages, which have the protos or server reflection and nothing of ours.

`make test-clients` installs Node's packages and grpcurl; without them their tests are skipped.
Reflection itself is always tested, by a client that knows no message beforehand.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from services.reward.episodes.client import spread_over_servers
from sluice.api.reward.v1 import reward_pb2_grpc
from sluice.api.rollout.v1 import rollout_pb2_grpc
from sluice.errors import InvalidRequestError
from sluice.rpc.server import RpcServer
from sluice.types import Answer, FinishReason, ReplicaInfo
from tests.support.environments import calls, drivers, episode, row
from tests.support.reward_process import reward_process
from tests.support.reward_scenarios import Announced, mixed
from tests.support.scripted_policy import scripted_policy
from tests.support.scripted_trainer import ScriptedReward
from tests.support.token_replica import TokenReplica

ROOT = Path(__file__).resolve().parents[2]
NODE_CLIENT = ROOT / "tests" / "support" / "node_client"
ROLLOUT, REWARD = "sluice.api.rollout.v1.RolloutService", "sluice.api.reward.v1.RewardService"
WAIT_S = 600

NOT_INSTALLED = "node or its packages are not installed; `make test-clients` installs the packages"

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_CLIENT / "node_modules" / "@grpc").is_dir(),
    reason=NOT_INSTALLED,
)
needs_npm = pytest.mark.skipif(
    shutil.which("npm") is None or not (NODE_CLIENT / "node_modules" / "typescript").is_dir(),
    reason=NOT_INSTALLED,
)
needs_grpcurl = pytest.mark.skipif(
    shutil.which("grpcurl") is None, reason="grpcurl is not installed (see docs/clients.md)"
)


class StrictReplica(TokenReplica):
    """Refuses a request without samples, as a replica does."""

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]
        if not request.sample_indexes:
            raise InvalidRequestError("sample_indexes: 0 given")
        await super().Generate(request, context)


@asynccontextmanager
async def services() -> AsyncIterator[str]:
    """A replica and a reward service at one address, behind our server."""
    replica, reward = StrictReplica(slots=4, slots_busy=1), ScriptedReward()
    server = RpcServer(
        [
            lambda s: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(replica, s),
            lambda s: reward_pb2_grpc.add_RewardServiceServicer_to_server(reward, s),
        ],
        [ROLLOUT, REWARD],
        host="127.0.0.1",
        port=0,
        max_message_bytes=1 << 20,
    )
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


async def ended(*command: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


async def output_of(*command: str) -> str:
    done = await ended(*command)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@needs_node
async def test_node_samples_submits_and_is_refused_from_the_protos_alone() -> None:
    async with services() as address:
        script = str(NODE_CLIENT / "client.mjs")
        printed = await output_of("node", script, address, str(ROOT / "proto"))
    reported = [json.loads(line) for line in printed.splitlines()]
    assert reported[0] == {"prompt": [7, 8, 9], "version": 3}
    tokens = [each for each in reported if "tokens" in each]
    for index in (0, 1):
        mine = [each for each in tokens if each["sample"] == index]
        assert [each["tokens"] for each in mine] == [[100 * index + place] for place in range(6)]
        assert mine[3]["logprobs"] == [-(100 * index + 3) / 8]
    ended = [each for each in reported if "ended" in each]
    assert [each["reason"] for each in ended] == ["FINISH_REASON_STOP"] * 2
    assert ended[0]["text"] == "".join(each["text"] for each in tokens if each["sample"] == 0)
    assert reported[-4:-1] == [
        {"prompt_id": "a", "refused": ""},
        {"prompt_id": "bad", "refused": "the id is taken"},
        {"prompt_id": "a", "end": "PROMPT_END_TRAINED", "step": 1},
    ]
    assert reported[-1] == {
        "code": "INVALID_ARGUMENT",
        "kind": "InvalidRequestError",
        "details": "sample_indexes: 0 given",
    }


@asynccontextmanager
async def node_environment() -> AsyncIterator[str]:
    """The environment server in JavaScript; its address. It ends on its own after the block."""
    script = str(NODE_CLIENT / "environment.mjs")
    process = await asyncio.create_subprocess_exec(
        *("node", script, str(ROOT / "proto")),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_S):
        try:
            yield f"127.0.0.1:{int(await process.stdout.readline())}"
        finally:
            process.stdin.close()
            code = await process.wait()
    assert code == 0


@needs_node
async def test_an_environment_in_javascript_plays_and_grades_episodes() -> None:
    async with (
        node_environment() as address,
        drivers(spread_over_servers([address])) as servers,
    ):
        played = episode(servers, row("5"))
        assert [tool.name for tool in (await played.open()).tools] == ["add"]
        made = calls(("add", {"a": 2, "b": 3}), ("add", "no json"))
        seen = await played.step(0, made, FinishReason.STOP)
        assert (seen.messages[0].content, seen.messages[0].is_error) == ("5", False)
        assert seen.messages[1].content.startswith("Error: SyntaxError")
        assert seen.messages[1].is_error
        assert (await played.step(1, Answer("5"), FinishReason.STOP)).done
        scored = await played.close()
        assert scored is not None
        assert scored.score == 1.0


def adds(prompt: str) -> str:
    """A policy that lets the tool add 0, 1 or 2 to the row's number, and says what it read.

    Where the number is even, its first call cannot be read.
    """
    number = int(prompt.partition("answer=")[2].split()[0])
    read = prompt.count("<tool_response>")
    if read and "Error" not in prompt.rpartition("<tool_response>")[2]:
        return prompt.rpartition("<tool_response>\n")[2].partition("\n")[0]
    wrong = number % 2 == 0 and not read
    arguments = '"none"' if wrong else json.dumps({"a": number, "b": number % 3})
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


@needs_node
async def test_a_reward_service_trains_episodes_that_javascript_plays(
    tmp_path: Path, configure: Callable[..., Path]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = configure(mixed(12), algorithm__filter_groups__enable=False)
    async with (
        node_environment() as environment,
        scripted_policy("qwen2.5", folder, adds) as (replica, _),
        reward_process(config, f"sluice.environment.addresses=[{environment}]") as service,
    ):
        await service.announce(3, [Announced(ReplicaInfo("rollout-0", "one", replica, 8))])
        batch = await service.take(4, 3, WAIT_S)
        await service.acknowledge(batch, 4)
        assert await service.stop() == 0
    # The row's answer is its number, and Node's server grades the sum.
    graded = [{score.score for score in group.scores} for group in batch.groups]
    assert sorted(graded, key=max) == [{0.0}] * (len(graded) - 3) + [{1.0}] * 3
    turns = {len(one.turns) for group in batch.groups for one in group.rollouts}
    assert turns == {2, 3}
    own = "train/environments/served"
    assert batch.statistics[f"{own}/ends/done"] == batch.statistics["train/samples_graded"]
    assert 0 < batch.statistics[f"{own}/tool_errors"] < batch.statistics["train/tool_calls/add"]


@needs_npm
async def test_types_are_generated_from_the_protos_and_nodes_client_fits_them() -> None:
    types = NODE_CLIENT / "node_modules" / "sluice-types"
    shutil.rmtree(types, ignore_errors=True)
    await output_of("npm", "--prefix", str(NODE_CLIENT), "run", "--silent", "check")
    request = types / "sluice" / "api" / "rollout" / "v1" / "GenerateRequest.d.ts"
    assert "'token_budget'?: (number);" in request.read_text()


@needs_grpcurl
async def test_grpcurl_lists_services_asks_and_is_refused_without_proto_files() -> None:
    async with services() as address:
        listed = await output_of("grpcurl", "-plaintext", address, "list")
        method = f"{ROLLOUT}/GetStatus"
        status = await output_of("grpcurl", "-plaintext", "-d", "{}", address, method)
        refused = await ended("grpcurl", "-plaintext", "-d", "{}", address, f"{ROLLOUT}/Generate")
    assert {ROLLOUT, REWARD} <= set(listed.split())
    found = json.loads(status)  # in camel case or not, as grpcurl's version has it
    assert (found.get("slotsBusy") or found.get("slots_busy")) == 1
    assert (refused.returncode, refused.stdout) == (67, "")  # 64 and gRPC's code
    assert "Message: sample_indexes: 0 given" in refused.stderr


async def test_a_client_that_knows_no_message_asks_by_reflection() -> None:
    async with services() as address:
        names, status = await asyncio.to_thread(_reflected_status, address)
    assert {ROLLOUT, REWARD, "grpc.health.v1.Health"} <= names
    assert status["slots_busy"] == 1
    assert status["policy_version"] == "3"


def _reflected_status(address: str) -> tuple[set[str], dict[str, Any]]:
    """What grpcurl does: services by name, a method's types by description, JSON both ways."""
    with grpc.insecure_channel(address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName(ROLLOUT).FindMethodByName("GetStatus")
        asked, answered = (
            message_factory.GetMessageClass(kind)
            for kind in (method.input_type, method.output_type)
        )
        call = channel.unary_unary(
            f"/{ROLLOUT}/GetStatus",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answered.FromString,
        )
        answer = call(json_format.ParseDict({"without_engine": True}, asked()), timeout=WAIT_S)
        found = json_format.MessageToDict(answer, preserving_proto_field_name=True)
        return set(database.get_services()), found

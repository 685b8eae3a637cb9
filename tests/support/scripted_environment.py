"""An environment whose answers are scripted, over real gRPC, and episodes that play with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from services.reward.episodes.client import ServedEnvironments
from services.reward.episodes.drivers import EpisodeFailedError, EpisodeTask
from services.reward.episodes.loop import EpisodeGenerator
from services.reward.generation.client import RolloutClient
from services.reward.generation.dispatcher import GroupDispatcher
from services.reward.generation.replica_queue import ReplicaQueue
from services.reward.generation.request import GroupProgress, GroupRequest, Purpose
from sluice.algorithm.episode_rules import EpisodeRules, Observation
from sluice.algorithm.routing import AnnouncedReplica
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.api.environment.v1 import environment_pb2_grpc
from sluice.types import (
    Answer,
    ChatMessage,
    Failed,
    FinishReason,
    Prompt,
    PromptOrigin,
    ReplicaInfo,
    Rollout,
    SamplingParams,
    Scored,
    TokenIds,
)
from tests.support.scripted_policy import Policy, ScriptedEngine, scripted_policy

LOOK = common.Tool(
    name="look",
    description="Look into a jar.",
    parameters_json='{"type": "object", "properties": {"jar": {"type": "string"}}}',
)
LIMIT_BYTES = 1 << 24


def call_of(jar: str) -> str:
    """What a policy writes to look into a jar."""
    return f'<tool_call>\n{{"name": "look", "arguments": {{"jar": "{jar}"}}}}\n</tool_call>'


def jar_policy(*jars: str) -> Policy:
    """A policy that looks into jars one after the other, and then ends with the last number."""

    def said(prompt: str) -> str:
        parts = prompt.split("<tool_response>\n")[1:]
        if len(parts) < len(jars):
            return call_of(jars[len(parts)])
        return f"Answer: {parts[-1].partition(chr(10))[0]}"

    return said


def tool_says(text: str, call_id: str = "call_0") -> environment.Observation:
    """A tool's answer."""
    message = common.ChatMessage(role="tool", content=text, tool_call_id=call_id)
    return environment.Observation(messages=[message])


def user_says(text: str) -> environment.Observation:
    """A user's turn."""
    return environment.Observation(messages=[common.ChatMessage(role="user", content=text)])


Respond = Callable[[str, int, common.Answer], environment.Observation]
"""Takes the episode's id, the turn and the answer."""


def jars(_episode: str, turn: int, answer: common.Answer) -> environment.Observation:
    """A jar holds the number of the turn; an answer without a call ends the episode."""
    if not answer.tool_calls:
        return environment.Observation(done=True)
    return tool_says(str(turn))


@dataclass
class ScriptedEnvironment(environment_pb2_grpc.EnvironmentServiceServicer):
    """`before(call, episode id)` is awaited before each answer; it may wait, or abort the call."""

    respond: Respond = jars
    opening: Callable[[environment.OpenRequest], environment.Observation] = lambda _: (
        environment.Observation(tools=[LOOK])
    )
    score: Callable[[str], float | None] = lambda _: 1.0
    before: Callable[[str, str, Any], Any] | None = None
    opened: list[environment.OpenRequest] = field(default_factory=list)
    steps: list[environment.StepRequest] = field(default_factory=list)
    closed: dict[str, bool] = field(default_factory=dict)
    address: str = ""

    async def Open(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        """Note and answer."""
        self.opened.append(request)
        await self._before("open", request.episode_id, context)
        return environment.OpenResponse(observation=self.opening(request))

    async def Step(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        """Note and answer."""
        self.steps.append(request)
        await self._before("step", request.episode_id, context)
        seen = self.respond(request.episode_id, request.turn, request.answer)
        return environment.StepResponse(observation=seen)

    async def Close(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        """Note and grade."""
        if not request.is_abandoned:
            await self._before("close", request.episode_id, context)
        self.closed[request.episode_id] = request.is_abandoned
        found = None if request.is_abandoned else self.score(request.episode_id)
        if found is None:
            return environment.CloseResponse()
        score = common.Score(score=found, metrics={"acc": found})
        return environment.CloseResponse(score=score, metrics={"looked": 2.0})

    async def Play(self, request: Any, context: Any) -> None:  # type: ignore[override]
        """Servers need not have it; then calls come one by one."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Play")

    async def GetStatus(self, request: Any, context: Any) -> Any:
        """Nothing is known of calls."""
        return environment.GetStatusResponse()

    async def _before(self, call: str, episode_id: str, context: Any) -> None:
        if self.before is not None:
            await self.before(call, episode_id, context)

    def address_for(self, _episode_id: str) -> str:
        """Where it listens."""
        if not self.address:
            raise EpisodeFailedError("environment workers: none is up")
        return self.address

    def of_sample(self, index: int) -> list[environment.StepRequest]:
        """The steps of one sample."""
        return [one for one in self.steps if index_of(one.episode_id) == index]


def index_of(episode_id: str) -> int:
    """The sample's index."""
    return int(episode_id.rpartition(".")[2])


@asynccontextmanager
async def served(world: ScriptedEnvironment, folder: Path | None = None) -> AsyncIterator[None]:
    """Serve it on a unix socket in a folder, or on a free port, for the length of the block."""
    server = grpc.aio.server()
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(world, server)
    if folder is None:
        world.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        world.address = f"unix:{folder / 'environment.sock'}"
        server.add_insecure_port(world.address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@dataclass
class Played:
    """A generator of episodes over a real replica and a real environment server."""

    generator: EpisodeGenerator
    dispatcher: GroupDispatcher
    engine: ScriptedEngine
    queue: ReplicaQueue


@asynccontextmanager
async def playing(
    folder: Path,
    policy: Policy,
    world: ScriptedEnvironment,
    *,
    family: str = "qwen2.5",
    call_timeout_s: float = 30.0,
    **limits: Any,
) -> AsyncIterator[Played]:
    """Episodes of `policy` in `world`."""
    rules = EpisodeRules(**({"max_sequence_tokens": 4000} | limits))
    client = RolloutClient(linger_ms=0, timeout_s=30.0, max_message_bytes=LIMIT_BYTES)
    drivers = ServedEnvironments(
        world.address_for, call_timeout_s=call_timeout_s, max_message_bytes=LIMIT_BYTES
    )
    async with (
        scripted_policy(family, folder, policy) as (address, engine),
        served(world, folder),
        client,
        drivers,
    ):
        queue = ReplicaQueue(1.0)
        dispatcher = GroupDispatcher(client, queue, max_attempts=2)
        info = ReplicaInfo("rollout-0", "one", address, 8)
        await dispatcher.announce([AnnouncedReplica(info, 3)])
        generator = EpisodeGenerator(dispatcher, drivers, rules, by_default=True, seed=7)
        yield Played(generator, dispatcher, engine, queue)


def group_request(
    n: int = 2, *, progress: GroupProgress | None = None, **changes: Any
) -> GroupRequest:
    """A request for a row's samples."""
    prompt = Prompt(
        "p0",
        0,
        (ChatMessage("user", "Add jars."),),
        "jars",
        "1",
        PromptOrigin.DATASET,
        5,
        extra_info={"index": 3},
    )
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=400, seed=11)
    values = {"lowest_version": 0, "allows_missing": True} | changes
    return GroupRequest(
        prompt,
        tuple(range(n)),
        sampling,
        Purpose.TRAINING,
        progress=progress or GroupProgress(),
        **values,
    )


def path_of(prompt: TokenIds, rollout: Rollout, number: int) -> list[int]:
    """What the policy read and sampled up to the end of a turn."""
    turn = rollout.turns[number]
    own = [*turn.context.tolist(), *turn.token_ids.tolist()]
    if turn.parent is not None:
        return [*path_of(prompt, rollout, turn.parent), *own]
    return own if turn.is_new_root else [*prompt.tolist(), *own]


def read_by(prompt: TokenIds, rollout: Rollout, number: int) -> list[int]:
    """What the policy read before it sampled a turn, by the trainer's rule."""
    path = path_of(prompt, rollout, number)
    return path[: len(path) - rollout.turns[number].token_ids.size]


@dataclass
class ThisProcess:
    """Environments without a server: `respond` takes the turn and the answer."""

    respond: Callable[[int, Answer], Observation]

    def begin(self, task: EpisodeTask) -> ThisProcess:
        """Every episode is alike."""
        return self

    async def open(self) -> Observation:
        """Nothing follows the prompt."""
        return Observation()

    async def step(self, turn: int, answer: Answer, finish: FinishReason) -> Observation:
        """Respond."""
        return self.respond(turn, answer)

    async def close(self) -> Scored | None:
        """Scorers grade."""
        return None

    async def abandon(self) -> None:
        """Nothing is held."""


def failure_of(rollout: Rollout) -> Failed:
    """Return how a sample failed, which it must have."""
    assert isinstance(rollout.outcome, Failed)
    return rollout.outcome


async def eventually(condition: Callable[[], bool]) -> None:
    """Polls within a deadline."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)

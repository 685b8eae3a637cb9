"""EnvironmentService over a loaded environment: its open episodes and their kept answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from sluice.algorithm.episode_rules import Observation
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.api.environment.v1 import environment_pb2_grpc
from sluice.codec.environment import observation_to_proto
from sluice.codec.fields import MAX_NAME_BYTES, check_text
from sluice.codec.reward import score_to_proto
from sluice.codec.tools import answer_from_proto, message_from_proto
from sluice.environment.episodes import AuthorCalls, Environment, PlayedEpisode, PlayedRow
from sluice.errors import (
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    SluiceError,
)
from sluice.types import FinishReason

MAX_EPISODES = 4096
_FINISH = "FINISH_REASON_"


@dataclass(slots=True, eq=False)
class _Open:
    """An open episode.

    Attributes:
        played: it.
        ends_at: when it may be dropped.
        turn: number of the last answer; -1: none.
        kept: what the last answer led to; an error: it has failed.
        lock: a repeated call waits for the first one.
    """

    played: PlayedEpisode
    ends_at: float
    turn: int = -1
    kept: Observation | SluiceError | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Plays episodes of one environment.

    Args:
        world: the environment.
        tasks: hold what lasts as long as an episode.
        calls: run the author's methods.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        world: Environment,
        tasks: asyncio.TaskGroup,
        calls: AuthorCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world, self._tasks, self._calls, self._clock = world, tasks, calls, clock
        self._episodes: dict[str, _Open] = {}

    async def Open(
        self,
        request: environment.OpenRequest,
        _context: Any,  # noqa: ANN401
    ) -> environment.OpenResponse:
        """Begin an episode."""
        await self._drop_expired()
        self._check(request)
        task = PlayedRow(
            tuple(map(message_from_proto, request.messages)), _row(request.row_json), request.seed
        )
        played = self._world.begin(task, self._calls, self._tasks)
        episode = _Open(played, self._clock() + request.timeout_s)
        self._episodes[request.episode_id] = episode
        async with episode.lock:
            seen = await self._observed(episode, -1, played.open())
        return environment.OpenResponse(observation=observation_to_proto(seen))

    async def Step(
        self,
        request: environment.StepRequest,
        _context: Any,  # noqa: ANN401
    ) -> environment.StepResponse:
        """Take an answer; a repeated one has the same answer."""
        episode, turn = self._found(request.episode_id), request.turn
        async with episode.lock:
            if isinstance(episode.kept, SluiceError):
                raise episode.kept
            if turn == episode.turn and episode.kept is not None:
                seen = episode.kept
            elif turn != episode.turn + 1:
                raise InvalidRequestError(
                    f"turn: {turn}; the next one of this episode is {episode.turn + 1}"
                )
            else:
                name = common.FinishReason.Name(request.finish_reason).removeprefix(_FINISH)
                finish = FinishReason.__members__.get(name, FinishReason.STOP)
                answer = answer_from_proto(request.answer)
                seen = await self._observed(episode, turn, episode.played.step(answer, finish))
        return environment.StepResponse(observation=observation_to_proto(seen))

    async def Close(
        self,
        request: environment.CloseRequest,
        _context: Any,  # noqa: ANN401
    ) -> environment.CloseResponse:
        """End an episode, and grade it unless it is given up."""
        episode = self._found(request.episode_id)
        try:
            scored = None
            if not request.is_abandoned:
                async with episode.lock:
                    if isinstance(episode.kept, SluiceError):
                        raise episode.kept
                    scored = await episode.played.score()
        finally:
            self._episodes.pop(request.episode_id, None)
            # A method may still run when the caller has no time left, and is waited for here.
            closing = self._tasks.create_task(_closed(episode), name="closing an episode")
            await asyncio.wait([closing])
        if (error := closing.result()) is not None:
            raise error
        if scored is None:
            return environment.CloseResponse()
        return environment.CloseResponse(score=score_to_proto(scored))

    async def GetStatus(
        self,
        _request: environment.GetStatusRequest,
        _context: Any,  # noqa: ANN401
    ) -> environment.GetStatusResponse:
        """Report the load."""
        return environment.GetStatusResponse(
            episodes=len(self._episodes), longest_call_s=self._calls.longest_s
        )

    async def close(self) -> None:
        """End all episodes."""
        episodes, self._episodes = self._episodes, {}
        for episode in episodes.values():
            if not episode.lock.locked():  # else its method ends with the process
                await _closed(episode)

    async def _observed(
        self, episode: _Open, turn: int, call: Awaitable[Observation]
    ) -> Observation:
        """Wait for a call, and keep what it led to."""
        episode.turn = turn
        # A call that is cut short leaves the author's objects in a state that nobody knows.
        episode.kept = NotFoundError("an earlier call of this episode was cut short")
        try:
            seen = await call
        except SluiceError as error:
            episode.kept = error
            raise
        episode.kept = seen
        return seen

    def _check(self, request: environment.OpenRequest) -> None:
        check_text("episode_id", request.episode_id, MAX_NAME_BYTES)
        if not request.episode_id or request.episode_id in self._episodes:
            raise InvalidRequestError("episode_id: empty, or open already; send a new one")
        if request.environment not in ("", self._world.name):
            raise InvalidRequestError(
                f"environment: {request.environment[:64]!r} is not served here, only "
                f"{self._world.name}; name it in the row's agent_name, or leave that out"
            )
        if len(self._episodes) >= MAX_EPISODES:
            raise ExhaustedError(f"{MAX_EPISODES} episodes are open; add workers or servers")

    def _found(self, episode_id: str) -> _Open:
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise NotFoundError(
                f"episode {episode_id[:64]!r} is not open here: it was closed, its time has "
                "passed, or the process was replaced"
            )
        return episode

    async def _drop_expired(self) -> None:
        now = self._clock()
        for episode_id, episode in list(self._episodes.items()):
            if now >= episode.ends_at and not episode.lock.locked():
                self._episodes.pop(episode_id, None)
                await _closed(episode)


async def _closed(episode: _Open) -> SluiceError | None:
    """Close an episode after its running call; return what went wrong."""
    try:
        async with episode.lock:
            await episode.played.close()
    except SluiceError as error:
        return error
    return None


def _row(text: str) -> dict[str, object]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequestError(f"row_json: {error}; send a JSON object") from error
    if not isinstance(found, dict):
        raise InvalidRequestError("row_json: no JSON object")
    return found

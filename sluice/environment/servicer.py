"""EnvironmentService over a loaded environment: its open episodes, their kept answers, its server.

Each call of an episode is a task, so that a caller whose connection breaks gets the answer of the
first call when it calls again. It ends at its caller's deadline, or when the episode is given up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from sluice.algorithm.episode_rules import Observation
from sluice.api.common.v1 import common_pb2 as common
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.api.environment.v1 import environment_pb2_grpc
from sluice.codec.environment import observation_to_proto
from sluice.codec.fields import MAX_NAME_BYTES, check_text
from sluice.codec.messages import bundles
from sluice.codec.reward import score_to_proto
from sluice.codec.tools import answer_from_proto, message_from_proto
from sluice.environment.episodes import AuthorCalls, Environment, PlayedEpisode, PlayedRow
from sluice.errors import (
    EnvironmentDefectError,
    ExhaustedError,
    InvalidRequestError,
    NotFoundError,
    SluiceError,
)
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.server import RpcServer
from sluice.rpc.status import RPC_ERRORS, status_of
from sluice.types import FinishReason, Scored

logger = logging.getLogger(__name__)

SERVICE = "sluice.api.environment.v1.EnvironmentService"
MAX_MESSAGE_BYTES = 64 << 20
MAX_EPISODES = 4096
MAX_RESULT_BYTES = 16 << 20
"""Of what an answer leads to. A larger message might not be sent, and end calls beside it."""
CLOSE_S = 30.0
"""Most seconds of closing an episode that its caller has left."""
MAX_ENDED = 1024
"""Episodes that ended with a Step whose answer is kept, for a repeated call."""
_FINISH, _PLAY = "FINISH_REASON_", "EnvironmentService/Play"
_QUICK_S = 0.1
"""An answer that took longer leaves the whole time of a call to the grade."""
_TOGETHER_S = 0.002
"""Results that come within these seconds travel together."""

_Result = environment.OpenResponse | environment.StepResponse | Exception
ResponseT = TypeVar("ResponseT")


class _Context(Protocol):
    def time_remaining(self) -> float | None: ...
    async def write(self, message: object) -> None: ...


@dataclass(slots=True, eq=False)
class _Open:
    """An open episode.

    Attributes:
        ends_at: when it may be dropped.
        turn: number of the last answer; -1: none.
        failure: what it has failed with.
        is_closed: the author's object is closed.
        lock: a call waits for the one before.
    """

    played: PlayedEpisode
    ends_at: float
    turn: int = -1
    call: asyncio.Task[_Result] | None = None
    failure: Exception | None = None
    is_closed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def close(self) -> None:
        """Close the author's object, once."""
        if not self.is_closed:
            self.is_closed = True
            await self.played.close()

    async def end_and_grade(self) -> environment.CloseResponse:
        """Grade and close."""
        try:
            scored = await self.played.score()
        finally:
            await self.close()
        return _end(scored)


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Plays episodes of one environment."""

    def __init__(
        self,
        world: Environment,
        tasks: asyncio.TaskGroup,
        calls: AuthorCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world, self._tasks, self._calls, self._clock = world, tasks, calls, clock
        self._episodes: dict[str, _Open] = {}
        self._ended: OrderedDict[str, tuple[int, asyncio.Task[_Result]]] = OrderedDict()
        self._none_expires_before = math.inf

    async def Open(
        self,
        request: environment.OpenRequest,
        context: Any,  # noqa: ANN401
    ) -> environment.OpenResponse:
        """Begin an episode."""
        call = self._begin_open(request, context.time_remaining())
        return await _response(call, environment.OpenResponse)

    async def Step(
        self,
        request: environment.StepRequest,
        context: Any,  # noqa: ANN401
    ) -> environment.StepResponse:
        """Take an answer; a repeated one has the same answer."""
        call = self._begin_step(request, context.time_remaining())
        return await _response(call, environment.StepResponse)

    async def Play(self, request: environment.PlayRequest, context: _Context) -> None:  # type: ignore[override]
        """Make calls side by side; write each result when it is there."""
        time_s, failed = context.time_remaining(), list[environment.PlayResult]()
        calls: dict[asyncio.Task[_Result], str] = {}
        requests: list[environment.OpenRequest | environment.StepRequest] = [*request.opens]
        requests += request.steps
        for part in requests:
            try:
                if isinstance(part, environment.OpenRequest):
                    call = self._begin_open(part, time_s)
                else:
                    call = self._begin_step(part, time_s)
                calls[call] = part.episode_id
            except SluiceError as error:
                failed.append(_result(part.episode_id, error))
        if failed:
            await context.write(environment.PlayResponse(results=failed))
        running = set(calls)
        while running:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            done_calls, running = await asyncio.wait(running, timeout=_TOGETHER_S)
            results_of_done = [_result(calls[call], _result_of(call)) for call in done_calls]
            for results in bundles(results_of_done, environment.PlayResult.ByteSize):
                await context.write(environment.PlayResponse(results=results))

    async def Close(
        self,
        request: environment.CloseRequest,
        _context: Any,  # noqa: ANN401
    ) -> environment.CloseResponse:
        """End an episode, and grade it unless it is given up."""
        episode = self._found(request.episode_id)
        try:
            scored = None
            if request.is_abandoned:
                if episode.call is not None:
                    episode.call.cancel()
            else:
                async with episode.lock:
                    if episode.failure is not None:
                        raise episode.failure
                    scored = await episode.played.score()
        finally:
            self._episodes.pop(request.episode_id, None)
            # A method may still run when the caller has no time left, and is waited for here.
            closing = self._tasks.create_task(_close_episode(episode), name="closing an episode")
            await asyncio.wait([closing])
        if (error := closing.result()) is not None:
            raise error
        return _end(scored)

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
        """End all episodes, within `CLOSE_S`."""
        episodes, self._episodes = self._episodes, {}
        closing = list[asyncio.Task[SluiceError | None]]()
        for episode in episodes.values():
            if not episode.lock.locked():
                closing.append(self._close_later(episode))
            elif episode.call is not None:  # its object ends with the process
                episode.call.cancel()
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)

    def _close_later(self, episode: _Open) -> asyncio.Task[SluiceError | None]:
        """Close an episode that nobody waits for: no call is held by a `close` that hangs."""
        return self._tasks.create_task(_close_episode(episode, CLOSE_S), name="closing an episode")

    def _begin_open(
        self, request: environment.OpenRequest, time_s: float | None
    ) -> asyncio.Task[_Result]:
        """Start to open an episode."""
        self._drop_expired()
        self._check(request)
        task = PlayedRow(
            tuple(map(message_from_proto, request.messages)), _row(request.row_json), request.seed
        )
        played = self._world.begin(task, self._calls, self._tasks)
        episode = _Open(played, self._clock() + request.timeout_s)
        self._episodes[request.episode_id] = episode
        self._none_expires_before = min(self._none_expires_before, episode.ends_at)

        async def opened() -> environment.OpenResponse:
            observation = await played.open()
            return environment.OpenResponse(observation=observation_to_proto(observation))

        return self._start_call(episode, opened, time_s)

    def _begin_step(
        self, request: environment.StepRequest, time_s: float | None
    ) -> asyncio.Task[_Result]:
        """Start to take an answer, or return the call that has taken it."""
        turn, (last_turn, call) = request.turn, self._ended.get(request.episode_id, (-1, None))
        if call is not None and turn == last_turn:
            return call
        episode = self._found(request.episode_id)
        if turn == episode.turn and episode.call is not None:
            return episode.call
        if episode.failure is not None and (episode.call is None or episode.call.done()):
            raise episode.failure
        if turn != episode.turn + 1:
            raise InvalidRequestError(
                f"turn: {turn}; the next one of this episode is {episode.turn + 1}"
            )
        episode.turn = turn
        return self._start_call(episode, partial(self._answer_step, episode, request), time_s)

    async def _answer_step(
        self, episode: _Open, request: environment.StepRequest
    ) -> environment.StepResponse:
        name = common.FinishReason.Name(request.finish_reason).removeprefix(_FINISH)
        finish = FinishReason.__members__.get(name, FinishReason.STOP)
        since = self._clock()
        observation = await episode.played.step(answer_from_proto(request.answer), finish)
        if not (request.may_end and observation.done and self._clock() - since < _QUICK_S):
            return environment.StepResponse(observation=observation_to_proto(observation))
        try:
            end = await episode.end_and_grade()
        finally:
            self._end(request.episode_id, episode)
        # The policy reads nothing more.
        final_observation = observation_to_proto(Observation(done=True, reward=observation.reward))
        return environment.StepResponse(observation=final_observation, end=end)

    def _end(self, episode_id: str, episode: _Open) -> None:
        """Keep only what a repeated call gets."""
        if self._episodes.pop(episode_id, None) is not None and episode.call is not None:
            self._ended[episode_id] = episode.turn, episode.call
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def _start_call(
        self, episode: _Open, work: Callable[[], Awaitable[_Result]], time_s: float | None
    ) -> asyncio.Task[_Result]:
        """Start a call, which ends after `time_s` seconds."""
        call = self._tasks.create_task(
            _run_call(episode, work, time_s), name="a call of an episode"
        )
        episode.call = call
        return call

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

    def _drop_expired(self) -> None:
        now_s = self._clock()
        if now_s < self._none_expires_before:
            return
        for episode_id, episode in list(self._episodes.items()):
            if now_s >= episode.ends_at and not episode.lock.locked():
                self._episodes.pop(episode_id, None)
                self._close_later(episode)
        expiry_times = (episode.ends_at for episode in self._episodes.values())
        self._none_expires_before = min(expiry_times, default=math.inf)


async def _run_call(
    episode: _Open, work: Callable[[], Awaitable[_Result]], time_s: float | None
) -> _Result:
    """Return what a call leads to, errors too: a task that raises them would end the server."""
    async with episode.lock:
        if episode.failure is not None:
            return episode.failure
        # A call that is cut short leaves the author's objects in a state that nobody knows.
        episode.failure = _cut_short_error()
        try:
            async with asyncio.timeout(time_s) as scope:
                result = await work()
            _check_size(result)
        except Exception as error:  # noqa: BLE001  its waiters raise it
            if not scope.expired():
                episode.failure = error
            return episode.failure
        episode.failure = None
        return result


def _check_size(result: _Result) -> None:
    if isinstance(result, Exception) or (size := result.ByteSize()) <= MAX_RESULT_BYTES:
        return
    raise EnvironmentDefectError(
        f"observation: {size} bytes; give the policy at most {MAX_RESULT_BYTES} at once"
    )


async def _close_episode(episode: _Open, time_s: float | None = None) -> SluiceError | None:
    """Close an episode after its running call, within `time_s`; return what went wrong."""
    try:
        async with episode.lock, asyncio.timeout(time_s):
            await episode.close()
    except SluiceError as error:
        return error
    except TimeoutError:
        logger.warning("the close of an episode has not ended within %g s", time_s)
    return None


def _cut_short_error() -> NotFoundError:
    return NotFoundError("an earlier call of this episode was cut short")


async def _response(call: asyncio.Task[_Result], kind: type[ResponseT]) -> ResponseT:
    """Wait for a call, which runs on if the waiter is cancelled; raise its error."""
    await asyncio.wait([call])
    result = _result_of(call)
    if isinstance(result, Exception):
        raise result
    return cast("ResponseT", result)


def _result_of(call: asyncio.Task[_Result]) -> _Result:
    return _cut_short_error() if call.cancelled() else call.result()


def _result(episode_id: str, result: _Result) -> environment.PlayResult:
    if isinstance(result, environment.OpenResponse):
        return environment.PlayResult(episode_id=episode_id, opened=result)
    if isinstance(result, environment.StepResponse):
        return environment.PlayResult(episode_id=episode_id, stepped=result)
    return environment.PlayResult(episode_id=episode_id, failed=_failure(result))


def _failure(error: Exception) -> environment.CallFailure:
    if isinstance(error, SluiceError):
        status = status_of(error)
        code, details = status.code.name, status.details
    else:
        logger.error("%s: unexpected %s", _PLAY, type(error).__name__, exc_info=error)
        code, details = "INTERNAL", f"internal error in {_PLAY}; see its log"
    RPC_ERRORS.add("server", _PLAY, code)
    return environment.CallFailure(code=code, error=type(error).__name__, details=details)


def _end(scored: Scored | None) -> environment.CloseResponse:
    if scored is None:
        return environment.CloseResponse()
    return environment.CloseResponse(score=score_to_proto(scored))


def _row(text: str) -> dict[str, object]:
    try:
        row = json.loads(text or "{}")
    except ValueError as error:
        raise InvalidRequestError(f"row_json: {error}; send a JSON object") from error
    if not isinstance(row, dict):
        raise InvalidRequestError("row_json: no JSON object")
    return row


@asynccontextmanager
async def served_environment(
    world: Environment, host: str, port: int, credentials: Credentials = OPEN
) -> AsyncIterator[str]:
    """Serve for the length of the block; yield the address.

    Args:
        host: to listen on, or ``unix:`` and a path.
        port: 0 lets the system choose.

    Raises:
        ConfigError: the port is taken, or the interface does not exist.
    """
    calls = AuthorCalls()
    async with asyncio.TaskGroup() as tasks:
        servicer = EnvironmentServicer(world, tasks, calls)
        server = RpcServer(
            [
                lambda grpc_server: environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(
                    servicer, grpc_server
                )
            ],
            [SERVICE],
            host=host,
            port=port,
            max_message_bytes=MAX_MESSAGE_BYTES,
            credentials=credentials,
        )
        await server.start()
        try:
            yield server.address
        finally:
            await server.stop(0)
            await servicer.close()
            calls.close()

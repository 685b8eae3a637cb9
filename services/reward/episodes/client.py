"""Run episodes on servers of EnvironmentService, whether ours or the user's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import grpc

from services.reward.episodes.drivers import (
    ABANDON_S,
    AddressFor,
    EpisodeFailedError,
    EpisodeTask,
    server_of,
)
from sluice.algorithm.episode_rules import Observation
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.codec.environment import (
    grade_from_proto,
    observation_from_proto,
    open_to_proto,
    step_to_proto,
)
from sluice.codec.messages import bundles
from sluice.concurrency.waits import waiting_for
from sluice.errors import ExhaustedError, InvalidRequestError, PeerError, SluiceError
from sluice.rpc.client import (
    ChannelPool,
    environment_stub,
    stream_call,
    unary_call,
)
from sluice.rpc.credentials import OPEN, Credentials
from sluice.rpc.status import RPC_ERRORS, error_of
from sluice.telemetry.tracing import TRACER, SpanAttribute, SpanKind, SpanName
from sluice.types import Answer, FinishReason, Scored

_TOGETHER_S = 0.005
"""A call that follows another to the same server within this time waits to share a Play."""
_SENT_AGAIN = frozenset(("UNAVAILABLE", "RESOURCE_EXHAUSTED"))
"""After these failures of a Play, its steps are sent again one by one, which may succeed; and so is
an Open."""
Request = environment.OpenRequest | environment.StepRequest
_RESULT_OF = {environment.OpenRequest: "opened", environment.StepRequest: "stepped"}
_METHOD_OF = {
    environment.OpenRequest: "Open",
    environment.StepRequest: "Step",
    environment.CloseRequest: "Close",
}
ResponseT = TypeVar("ResponseT")
_TLS = "https://"
_STATUS_BYTES = 1 << 16
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0


class EnvironmentServer(NamedTuple):
    """A server that runs episodes."""

    address: str
    channels: ChannelPool

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"environment at {self.address}"


@dataclass(slots=True, eq=False)
class _QueuedCall:
    """A waiting call. Its result is ``None`` if the caller has to make the call alone."""

    request: Request
    answered: asyncio.Future[environment.PlayResult | None]


class CallBatches:
    """Calls to servers. Calls of Open that are due together travel in one Play, and so do Steps.

    Consumes: calls of episodes. Waits for: the server, within the time of a call. On failure: of a
    call: its episode alone; of the connection, or of a result that is too large: episodes that open
    fail, and answers are sent again one by one, since servers repeat theirs. Servers without Play
    get all calls one by one. A Play may arrive after the call that gives one of its episodes up:
    what it opens for nobody is given up again. On shutdown: calls are cancelled.
    """

    def __init__(self, tasks: asyncio.TaskGroup, timeout_s: float) -> None:
        self._tasks, self._timeout_s = tasks, timeout_s
        self._due: dict[tuple[str, type[Request]], list[_QueuedCall]] = {}
        self._without_play: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._sent_at: dict[tuple[str, type[Request]], float] = {}

    async def response(
        self, server: EnvironmentServer, request: Request | environment.CloseRequest, phase: str
    ) -> object:
        """Make a call, if possible in one Play with other calls that are due.

        Raises:
            SluiceError: as from `unary_call`.
        """
        if not isinstance(request, environment.CloseRequest):
            result = await self._play_result(server, request, phase)
            if result is not None:
                return self._decode_result(result, request, server, phase)
        # Only now: making a stub takes longer than a call in a Play.
        stub = environment_stub(server.channels.to(server.address))
        return await unary_call(
            getattr(stub, _METHOD_OF[type(request)]),
            request,
            peer=server.name,
            phase=phase,
            deadline_s=self._timeout_s,
        )

    async def _play_result(
        self, server: EnvironmentServer, request: Request, phase: str
    ) -> environment.PlayResult | None:
        """Return the result from a Play; ``None`` if the call must be made alone."""
        if server.address in self._without_play:
            return None
        loop, key = asyncio.get_running_loop(), (server.address, type(request))
        due = _QueuedCall(request, loop.create_future())
        calls = self._due.setdefault(key, [])
        calls.append(due)
        if len(calls) == 1:  # tasks that are ready now add their calls before this runs
            send_at = max(loop.time(), self._sent_at.get(key, 0.0) + _TOGETHER_S)
            loop.call_at(send_at, self._send, server, key, phase)
        with waiting_for(server.name, phase):
            return await due.answered

    def cancel(self) -> None:
        """Cancel all calls."""
        for task in self._running:
            task.cancel()

    def _send(self, server: EnvironmentServer, key: tuple[str, type[Request]], phase: str) -> None:
        now_s = asyncio.get_running_loop().time()
        self._sent_at = {
            key: sent_at for key, sent_at in self._sent_at.items() if now_s - sent_at < _TOGETHER_S
        }
        self._sent_at[key] = now_s
        calls = [due for due in self._due.pop(key) if not due.answered.done()]
        for bundle in bundles(calls, lambda due: due.request.ByteSize()):
            if len(bundle) == 1:
                bundle[0].answered.set_result(None)
                continue
            task = self._tasks.create_task(self._play(server, bundle, phase), name="calls")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _play(
        self, server: EnvironmentServer, calls: Sequence[_QueuedCall], phase: str
    ) -> None:
        calls_left, unwanted = {due.request.episode_id: due for due in calls}, list[str]()
        opens = [due.request for due in calls if isinstance(due.request, environment.OpenRequest)]
        steps = [due.request for due in calls if isinstance(due.request, environment.StepRequest)]
        messages = stream_call(
            environment_stub(server.channels.acquire(server.address)).Play,
            environment.PlayRequest(opens=opens, steps=steps),
            peer=server.name,
            phase=phase,
            deadline_s=self._timeout_s,
        )
        error: SluiceError
        try:
            async with aclosing(messages):
                async for message in messages:
                    for result in message.results:
                        due = calls_left.pop(result.episode_id, None)
                        if due is None:
                            continue
                        if not _answer(due, result) and result.HasField("opened"):
                            unwanted.append(result.episode_id)
            error = PeerError(
                server.name, phase, f"it sent no result for {len(calls_left)} of its calls"
            )
        except SluiceError as raised:
            error = raised
        finally:
            await server.channels.release(server.address)
        self._resolve_rest(server, calls_left.values(), error)
        async with asyncio.TaskGroup() as tasks:
            for episode_id in unwanted:
                tasks.create_task(give_up(server, episode_id), name="give up")

    def _resolve_rest(
        self, server: EnvironmentServer, calls: Iterable[_QueuedCall], error: SluiceError
    ) -> None:
        """Have calls without a result made alone, or fail them."""
        code = _code_of(error)
        may_pass = code in _SENT_AGAIN or isinstance(error, InvalidRequestError)
        if code == grpc.StatusCode.UNIMPLEMENTED.name:
            self._without_play.add(server.address)
        for due in calls:
            is_step = isinstance(due.request, environment.StepRequest)
            if due.answered.done():
                continue
            if server.address in self._without_play or (is_step and may_pass):
                due.answered.set_result(None)
            else:
                due.answered.set_exception(error)

    def _decode_result(
        self,
        result: environment.PlayResult,
        request: Request,
        server: EnvironmentServer,
        phase: str,
    ) -> object:
        kind, expected_kind = result.WhichOneof("result"), _RESULT_OF[type(request)]
        if kind == expected_kind:
            return getattr(result, kind)
        if kind == "failed":
            raise self._call_error(result.failed, server, phase)
        raise PeerError(
            server.name, phase, f"Play: it answered {kind or 'nothing'}, not {expected_kind}"
        )

    def _call_error(
        self, failed: environment.CallFailure, server: EnvironmentServer, phase: str
    ) -> SluiceError:
        code = grpc.StatusCode.__members__.get(failed.code, grpc.StatusCode.UNKNOWN)
        RPC_ERRORS.add("client", "EnvironmentService/Play", code.name)
        return error_of(
            code,
            failed.details,
            failed.error,
            peer=server.name,
            phase=phase,
            deadline_s=self._timeout_s,
        )


def _answer(due: _QueuedCall, result: environment.PlayResult) -> bool:
    """Hand a result to its caller; return whether the caller still waits."""
    if due.answered.done():
        return False
    due.answered.set_result(result)
    return True


def _code_of(error: BaseException | None) -> str:
    """Return the name of the gRPC code with which a call failed; empty for other errors."""
    return error.detail.partition(":")[0] if isinstance(error, PeerError) else ""


async def give_up(server: EnvironmentServer, episode_id: str) -> None:
    """Give an episode up; a server that is gone holds nothing of it."""
    channel = server.channels.acquire(server.address)
    try:
        await unary_call(
            environment_stub(channel).Close,
            environment.CloseRequest(episode_id=episode_id, is_abandoned=True),
            peer=server.name,
            phase="giving an episode up",
            deadline_s=ABANDON_S,
        )
    except SluiceError:
        return
    finally:
        await server.channels.release(server.address)


class _DownError(EpisodeFailedError):
    """No server takes the episode now; one may soon.

    Args:
        is_full: it has as many episodes as it may, and has not begun this one.
    """

    def __init__(self, detail: str, *, is_full: bool = False) -> None:
        super().__init__(detail)
        self.is_full = is_full


def spread_over_servers(addresses: Sequence[str]) -> AddressFor:
    """Return a function that spreads episodes evenly over a user's own servers.

    Args:
        addresses: host:port of each, at least one; ``https://host:port`` uses TLS.
    """
    return lambda episode_id: addresses[server_of(episode_id, len(addresses))]


class WorkerProbe:
    """Asks a server on this machine how long its calls have run."""

    def __init__(self, address: str, deadline_s: float) -> None:
        self._address, self._deadline_s = address, deadline_s
        self._channels = ChannelPool(_STATUS_BYTES, credentials=OPEN)
        self._stub = environment_stub(self._channels.acquire(address))

    async def longest_call_s(self) -> float:
        """Return the age of the oldest running call, seconds. Raise DeadlineError or PeerError."""
        status = await unary_call(
            self._stub.GetStatus,
            environment.GetStatusRequest(),
            peer=f"environment at {self._address}",
            phase="reporting its calls",
            deadline_s=self._deadline_s,
        )
        return status.longest_call_s

    async def close(self) -> None:
        """Close the channel."""
        await self._channels.close()


class ServedEnvironments:
    """Episodes on servers of EnvironmentService.

    Args:
        credentials: their authorities check servers at https:// addresses. Such servers get no
            credentials, since they are no part of the run.
    """

    def __init__(
        self,
        address_for: AddressFor,
        *,
        call_timeout_s: float,
        max_message_bytes: int,
        credentials: Credentials = OPEN,
    ) -> None:
        self._address_for, self.call_timeout_s = address_for, call_timeout_s
        self._encrypted = ChannelPool(max_message_bytes, credentials.for_outsiders())
        self._plain = ChannelPool(max_message_bytes, credentials=OPEN)
        self._tasks = asyncio.TaskGroup()
        self.batches = CallBatches(self._tasks, call_timeout_s)
        """Batches the calls to servers."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.batches.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)  # keeps the block's error unwrapped
        finally:
            await self._encrypted.close()
            await self._plain.close()

    def begin(self, task: EpisodeTask) -> ServedEpisode:
        """Return the driver of a new episode."""
        return ServedEpisode(task, self)

    def place(self, episode_id: str) -> EnvironmentServer:
        """Return the server of an episode."""
        address = self._address_for(episode_id)
        bare = address.removeprefix(_TLS)
        return EnvironmentServer(bare, self._plain if bare == address else self._encrypted)


class ServedEpisode:
    """An episode on a server."""

    def __init__(self, task: EpisodeTask, environments: ServedEnvironments) -> None:
        self._task, self._environments = task, environments
        self._id, self._num_tries = task.episode_id, 1
        self._server: EnvironmentServer | None = None
        self._is_held = False  # its gRPC channel
        self._end: environment.CloseResponse | None = None  # how a step ended the episode

    async def open(self) -> Observation:
        """Choose a server and begin; while none answers, try again within the time of a call, and
        while it is full, within the time of the episode.

        Without the wait, groups would fail as fast as they start while a server restarts, and use
        up the data set.
        """
        loop, backoff_s = asyncio.get_running_loop(), _FIRST_BACKOFF_S
        began_s = answered_s = loop.time()
        while True:
            try:
                return await self._open()
            except _DownError as error:
                up_to_s = answered_s + self._environments.call_timeout_s
                if error.is_full:
                    answered_s, up_to_s = loop.time(), began_s + self._task.timeout_s
                if loop.time() + backoff_s >= up_to_s:
                    raise EpisodeFailedError(str(error)) from error
                if error.is_full:  # it has not begun the episode, and needs no further calls
                    await self._release()
            await self.abandon()
            with waiting_for("environment", "taking an episode"):
                await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
            # The server may have begun the episode before its answer was lost.
            self._num_tries += 1
            self._id = f"{self._num_tries}-{self._task.episode_id}"

    async def _open(self) -> Observation:
        try:
            self._server = server = self._environments.place(self._id)
        except EpisodeFailedError as error:
            raise _DownError(str(error)) from error
        server.channels.acquire(server.address)
        self._is_held = True
        request = open_to_proto(
            self._task.prompt,
            episode_id=self._id,
            environment_name=self._task.environment,
            seed=self._task.seed,
            timeout_s=self._task.timeout_s,
        )
        phase = "opening an episode"
        try:
            response = await self._call(request, phase, environment.OpenResponse)
        except EpisodeFailedError as error:
            is_full = isinstance(error.__cause__, ExhaustedError)
            if is_full or _code_of(error.__cause__) in _SENT_AGAIN:
                raise _DownError(str(error), is_full=is_full) from error
            raise
        return self._decode_observation(response.observation, phase)

    async def step(self, turn: int, answer: Answer, finish: FinishReason) -> Observation:
        """Send an answer; retry with the same turn after a lost connection.

        If the server ends the episode in its reply, `close` makes no call.
        """
        request = step_to_proto(self._id, turn, answer, finish)
        phase = "answering the policy"
        response = await self._call(request, phase, environment.StepResponse)
        observation = self._decode_observation(response.observation, phase)
        if observation.done and response.HasField("end"):
            self._end = response.end
            await self._release()
        return observation

    async def close(self) -> Scored | None:
        """End and grade."""
        phase, response = "grading an episode", self._end
        if response is None:
            request = environment.CloseRequest(episode_id=self._id)
            response = await self._call(request, phase, environment.CloseResponse)
        try:
            scored = grade_from_proto(response)
        except InvalidRequestError as error:
            raise self._unavailable_error(phase, error) from error
        await self._release()
        return scored

    async def abandon(self) -> None:
        """Give the episode up; see `give_up`."""
        if self._server is None or not self._is_held:
            return
        try:
            await give_up(self._server, self._id)
        finally:
            await self._release()

    async def _release(self) -> None:
        if self._is_held and self._server is not None:
            self._is_held = False
            await self._server.channels.release(self._server.address)

    @property
    def _peer(self) -> str:
        return "environment" if self._server is None else self._server.name

    async def _call(
        self, request: Request | environment.CloseRequest, phase: str, kind: type[ResponseT]
    ) -> ResponseT:
        assert self._server is not None
        try:
            with TRACER.span(SpanName.ENVIRONMENT, {SpanAttribute.DETAIL: phase}, SpanKind.CLIENT):
                response = await self._environments.batches.response(self._server, request, phase)
        except SluiceError as error:
            raise self._unavailable_error(phase, error) from error
        assert isinstance(response, kind)
        return response

    def _decode_observation(self, message: environment.Observation, phase: str) -> Observation:
        try:
            return observation_from_proto(message)
        except InvalidRequestError as error:
            raise self._unavailable_error(phase, error) from error

    def _unavailable_error(self, phase: str, error: SluiceError) -> EpisodeFailedError:
        text, peer = str(error), self._peer
        return EpisodeFailedError(
            text if text.startswith(peer) else f"{peer}: while {phase}: {text}"
        )

"""Call EnvironmentService: episodes on servers, ours or a user's own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self, TypeVar

from services.reward.episodes.batches import CallBatches, Request, Server, give_up
from services.reward.episodes.drivers import (
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
from sluice.concurrency.waits import waiting_for
from sluice.errors import InvalidRequestError, PeerError, SluiceError
from sluice.rpc.client import ChannelPool, environment_stub, unary_call
from sluice.rpc.credentials import OPEN, Credentials
from sluice.telemetry.tracing import TRACER, Key, SpanKind, SpanName
from sluice.types import Answer, FinishReason, Scored

ResponseT = TypeVar("ResponseT")


_TLS = "https://"
_STATUS_BYTES = 1 << 16
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0


class _DownError(EpisodeFailedError):
    """No server answers; one may soon."""


def given_servers(addresses: Sequence[str]) -> AddressFor:
    """Return the choice among a user's own servers: each gets an equal share of the episodes.

    Args:
        addresses: host:port of each, at least one; after ``https://`` with TLS.
    """
    return lambda episode_id: addresses[server_of(episode_id, len(addresses))]


class WorkerProbe:
    """Asks a server on this machine what it does."""

    def __init__(self, address: str, deadline_s: float) -> None:
        self._address, self._deadline_s = address, deadline_s
        self._channels = ChannelPool(_STATUS_BYTES, credentials=OPEN)
        self._stub = environment_stub(self._channels.acquire(address))

    async def longest_call_s(self) -> float:
        """Return the seconds of the oldest running call; DeadlineError and PeerError as usual."""
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
        credentials: their authorities check servers at https:// addresses. Nothing of them is
            shown: such a server is no part of the run.
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
        """What calls travel in."""

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.batches.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)  # an error of the block stays as it is
        finally:
            await self._encrypted.close()
            await self._plain.close()

    def begin(self, task: EpisodeTask) -> ServedEpisode:
        """Return the driver of a new episode."""
        return ServedEpisode(task, self)

    def place(self, episode_id: str) -> Server:
        """Return the server of an episode."""
        address = self._address_for(episode_id)
        bare = address.removeprefix(_TLS)
        return Server(bare, self._plain if bare == address else self._encrypted)


class ServedEpisode:
    """An episode on a server."""

    def __init__(self, task: EpisodeTask, environments: ServedEnvironments) -> None:
        self._task, self._environments = task, environments
        self._id, self._num_tries = task.episode_id, 1
        self._server: Server | None = None
        self._is_held = False  # its channel
        self._end: environment.CloseResponse | None = None  # what the last answer has led to

    async def open(self) -> Observation:
        """Choose a server and begin; wait for one that is down, within the time of a call.

        Otherwise groups would fail as fast as they start, and use the data set up, while a server
        restarts.
        """
        loop, backoff_s = asyncio.get_running_loop(), _FIRST_BACKOFF_S
        ends_at = loop.time() + self._environments.call_timeout_s
        while True:
            try:
                return await self._open()
            except _DownError as error:
                if loop.time() + backoff_s >= ends_at:
                    raise EpisodeFailedError(str(error)) from error
            await self.abandon()
            with waiting_for("environment", "being up"):
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
            cause = error.__cause__
            if isinstance(cause, PeerError) and cause.detail.startswith("UNAVAILABLE"):
                raise _DownError(str(error)) from error
            raise
        return self._observed(response.observation, phase)

    async def step(self, turn: int, answer: Answer, finish: FinishReason) -> Observation:
        """Take an answer; a lost connection is tried again with the same turn.

        The server may end the episode with it; `close` then makes no call.
        """
        request = step_to_proto(self._id, turn, answer, finish)
        phase = "answering the policy"
        response = await self._call(request, phase, environment.StepResponse)
        seen = self._observed(response.observation, phase)
        if seen.done and response.HasField("end"):
            self._end = response.end
            await self._release()
        return seen

    async def close(self) -> Scored | None:
        """End and grade."""
        phase, response = "grading an episode", self._end
        if response is None:
            request = environment.CloseRequest(episode_id=self._id)
            response = await self._call(request, phase, environment.CloseResponse)
        try:
            scored = grade_from_proto(response)
        except InvalidRequestError as error:
            raise self._unavailable(phase, error) from error
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
            with TRACER.span(SpanName.ENVIRONMENT, {Key.DETAIL: phase}, SpanKind.CLIENT):
                found = await self._environments.batches.response(self._server, request, phase)
        except SluiceError as error:
            raise self._unavailable(phase, error) from error
        assert isinstance(found, kind)
        return found

    def _observed(self, message: environment.Observation, phase: str) -> Observation:
        try:
            return observation_from_proto(message)
        except InvalidRequestError as error:
            raise self._unavailable(phase, error) from error

    def _unavailable(self, phase: str, error: SluiceError) -> EpisodeFailedError:
        text, peer = str(error), self._peer
        return EpisodeFailedError(
            text if text.startswith(peer) else f"{peer}: while {phase}: {text}"
        )

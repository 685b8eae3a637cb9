"""Calls of episodes: those of Open and Step that are due at the same moment travel in one Play.

Consumes: calls of episodes. Waits for: the server, within the time of a call. On failure: of a
call: its episode alone; of the connection, or of a result that is too large: episodes that open
fail, and answers are sent again one by one, since servers repeat theirs. Servers without Play get
all calls one by one. A Play may arrive after the call that gives one of its episodes up: what it
opens for nobody is given up again. On shutdown: calls are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

import grpc

from services.reward.episodes.drivers import ABANDON_S
from sluice.api.environment.v1 import environment_pb2 as environment
from sluice.codec.messages import bundles
from sluice.concurrency.waits import waiting_for
from sluice.errors import InvalidRequestError, PeerError, SluiceError
from sluice.rpc.client import (
    ChannelPool,
    environment_stub,
    stream_call,
    unary_call,
)
from sluice.rpc.status import RPC_ERRORS, error_of

_TOGETHER_S = 0.005
"""Calls that follow others to the same server within these seconds wait: one Play takes them."""
_SENT_AGAIN = frozenset(("UNAVAILABLE", "RESOURCE_EXHAUSTED"))
"""After these failures of a Play, its steps are sent again one by one: alone they may succeed."""
Request = environment.OpenRequest | environment.StepRequest
_RESULT_OF = {environment.OpenRequest: "opened", environment.StepRequest: "stepped"}
_METHOD_OF = {
    environment.OpenRequest: "Open",
    environment.StepRequest: "Step",
    environment.CloseRequest: "Close",
}


class Server(NamedTuple):
    """Where an episode runs."""

    address: str
    channels: ChannelPool

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"environment at {self.address}"


@dataclass(slots=True, eq=False)
class _Due:
    """A call; it gets its result, or ``None`` if it shall be made alone."""

    request: Request
    answered: asyncio.Future[environment.PlayResult | None]


class CallBatches:
    """Calls to all servers."""

    def __init__(self, tasks: asyncio.TaskGroup, timeout_s: float) -> None:
        self._tasks, self._timeout_s = tasks, timeout_s
        self._due: dict[tuple[str, type[Request]], list[_Due]] = {}
        self._without_play: set[str] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._sent_at: dict[tuple[str, type[Request]], float] = {}

    async def response(
        self, server: Server, request: Request | environment.CloseRequest, phase: str
    ) -> object:
        """Make a call, with others that are due if a Play takes it.

        Raises:
            SluiceError: as from `unary_call`.
        """
        if not isinstance(request, environment.CloseRequest):
            result = await self._result(server, request, phase)
            if result is not None:
                return self._found(result, request, server, phase)
        # Not before: to make a stub takes longer than a call in a Play.
        stub = environment_stub(server.channels.to(server.address))
        return await unary_call(
            getattr(stub, _METHOD_OF[type(request)]),
            request,
            peer=server.name,
            phase=phase,
            deadline_s=self._timeout_s,
        )

    async def _result(
        self, server: Server, request: Request, phase: str
    ) -> environment.PlayResult | None:
        """Return what a Play found; ``None``: make the call alone."""
        if server.address in self._without_play:
            return None
        loop, key = asyncio.get_running_loop(), (server.address, type(request))
        due = _Due(request, loop.create_future())
        calls = self._due.setdefault(key, [])
        calls.append(due)
        if len(calls) == 1:  # tasks that are ready now add theirs before this runs
            send_at = max(loop.time(), self._sent_at.get(key, 0.0) + _TOGETHER_S)
            loop.call_at(send_at, self._send, server, key, phase)
        with waiting_for(server.name, phase):
            return await due.answered

    def cancel(self) -> None:
        """Cancel all calls."""
        for task in self._running:
            task.cancel()

    def _send(self, server: Server, key: tuple[str, type[Request]], phase: str) -> None:
        now = asyncio.get_running_loop().time()
        self._sent_at = {one: at for one, at in self._sent_at.items() if now - at < _TOGETHER_S}
        self._sent_at[key] = now
        calls = [due for due in self._due.pop(key) if not due.answered.done()]
        for together in bundles(calls, lambda due: due.request.ByteSize()):
            if len(together) == 1:
                together[0].answered.set_result(None)
                continue
            task = self._tasks.create_task(self._play(server, together, phase), name="calls")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _play(self, server: Server, calls: Sequence[_Due], phase: str) -> None:
        left, unwanted = {due.request.episode_id: due for due in calls}, list[str]()
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
                        due = left.pop(result.episode_id, None)
                        if due is None:
                            continue
                        if not _answer(due, result) and result.HasField("opened"):
                            unwanted.append(result.episode_id)
            error = PeerError(server.name, phase, f"it sent no result for {len(left)} of its calls")
        except SluiceError as raised:
            error = raised
        finally:
            await server.channels.release(server.address)
        self._answer_rest(server, left.values(), error)
        async with asyncio.TaskGroup() as tasks:
            for episode_id in unwanted:
                tasks.create_task(give_up(server, episode_id), name="give up")

    def _answer_rest(self, server: Server, left: Iterable[_Due], error: SluiceError) -> None:
        """Let calls without a result be made alone, or fail."""
        code = error.detail.partition(":")[0] if isinstance(error, PeerError) else ""
        may_pass = code in _SENT_AGAIN or isinstance(error, InvalidRequestError)
        if code == grpc.StatusCode.UNIMPLEMENTED.name:
            self._without_play.add(server.address)
        for due in left:
            is_step = isinstance(due.request, environment.StepRequest)
            if due.answered.done():
                continue
            if server.address in self._without_play or (is_step and may_pass):
                due.answered.set_result(None)
            else:
                due.answered.set_exception(error)

    def _found(
        self, result: environment.PlayResult, request: Request, server: Server, phase: str
    ) -> object:
        kind, wanted = result.WhichOneof("result"), _RESULT_OF[type(request)]
        if kind == wanted:
            return getattr(result, kind)
        if kind == "failed":
            raise self._failure(result.failed, server, phase)
        raise PeerError(server.name, phase, f"Play: it answered {kind or 'nothing'}, not {wanted}")

    def _failure(self, failed: environment.CallFailure, server: Server, phase: str) -> SluiceError:
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


def _answer(due: _Due, result: environment.PlayResult) -> bool:
    """Hand a result to its caller; return whether it still waits."""
    if due.answered.done():
        return False
    due.answered.set_result(result)
    return True


async def give_up(server: Server, episode_id: str) -> None:
    """Give an episode up; a server that is gone has nothing left of it."""
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

"""Calls from the replica to each of SGLang's scheduler processes, one a tensor parallel rank.

SGLang itself lets the first rank alone answer, so the others' errors would be lost. Each process
has a pair of sockets with the replica; a call and its answer are a line each: base64 of msgpack.

Consumes: calls of `vendor_engines.worker_group`. Produces: the answers, by rank.
Waits for: the processes, each call with its caller's deadline.
On failure: the end of a process is an EngineError.
On shutdown: the replica closes its ends, and the threads in the schedulers end.
"""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from sluice.errors import EngineError

_LINE_BYTES = 1 << 28
_MessageT = TypeVar("_MessageT")


class _MethodCall(msgspec.Struct, frozen=True, array_like=True):
    number: int
    method: str
    arguments: list[object]


class _MethodResult(msgspec.Struct, frozen=True, array_like=True):
    number: int
    result: object


class SchedulerCalls:
    """The replica's ends. Used in one event loop, from the first call on.

    Args:
        ranks: scheduler processes.
    """

    def __init__(self, ranks: int) -> None:
        pairs = [socket.socketpair() for _ in range(ranks)]
        self._own_ends = [own_end for own_end, _ in pairs]
        self.theirs = [their for _, their in pairs]
        self._streams: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._turns: list[asyncio.Lock] = []
        self._number = 0

    async def open(self) -> None:
        """Begin, as the first call does; the processes have `theirs` by then."""
        for their in self.theirs:
            their.close()  # with the process then ends the stream
        for own_end in self._own_ends:
            opened = await asyncio.open_connection(sock=own_end, limit=_LINE_BYTES)
            self._streams.append(opened)
            self._turns.append(asyncio.Lock())

    async def call(self, method: str, arguments: Sequence[object]) -> list[object]:
        """Return the results of a method of `vendor_engines.weight_worker.WeightWorker`, by rank.

        Raises:
            EngineError: a process has ended.
        """
        if not self._streams:
            await self.open()
        self._number += 1
        line = _line(_MethodCall(self._number, method, list(arguments)))
        async with asyncio.TaskGroup() as tasks:
            waiting = [
                tasks.create_task(self._ask(rank, line, self._number))
                for rank in range(len(self._streams))
            ]
        return [result.result() for result in waiting]

    async def _ask(self, rank: int, line: bytes, number: int) -> object:
        reader, writer = self._streams[rank]
        async with self._turns[rank]:
            try:
                writer.write(line)
                await writer.drain()
                while True:
                    reply_line = await reader.readline()
                    if not reply_line.endswith(b"\n"):
                        raise EngineError(f"SGLang: the process of its rank {rank} has ended")
                    answer = _read(reply_line, _MethodResult)
                    if answer.number == number:  # else of a call that was cancelled
                        return answer.result
            except OSError as error:
                raise EngineError(
                    f"SGLang: the process of its rank {rank} has ended: {error}"
                ) from error

    def close(self) -> None:
        """Close all ends. Repeating it is harmless."""
        for _, writer in self._streams:
            writer.close()
        for end in (*self._own_ends, *self.theirs) if not self._streams else ():
            end.close()


def serve_calls(connection: socket.socket, answer: Callable[[str, list[object]], object]) -> None:
    """Answer calls, one after the other, until the replica closes its end.

    Args:
        connection: of this process.
        answer: takes a method's name and arguments.
    """
    # A replica that closes its end, or has ended, may leave calls behind.
    with suppress(ConnectionError), connection, connection.makefile("rwb") as stream:
        while (line := stream.readline()).endswith(b"\n"):
            call = _read(line, _MethodCall)
            stream.write(_line(_MethodResult(call.number, answer(call.method, call.arguments))))
            stream.flush()


def _line(message: _MethodCall | _MethodResult) -> bytes:
    return base64.b64encode(msgspec.msgpack.encode(message)) + b"\n"


def _read(line: bytes, kind: type[_MessageT]) -> _MessageT:
    return msgspec.msgpack.decode(base64.b64decode(line), type=kind)

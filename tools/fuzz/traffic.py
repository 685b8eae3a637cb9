"""Hostile calls, many at once, counted by their answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from sluice.api.trainer.v1 import trainer_pb2
from tools.fuzz.methods import Method
from tools.fuzz.mutation import corrupted, mutated, random_bytes

DEFECTS = ("UNKNOWN", "INTERNAL", "UNIMPLEMENTED", "DATA_LOSS")
"""Codes that no request may be answered with, whatever it holds."""
MAX_EXAMPLES = 20
NO_ANSWER = "NO_ANSWER"
# Calls that do work for every valid request: a few are enough.
_SHARES = {"SaveCheckpoint": 0.002, "Evaluate": 0.02, "AnnouncePolicy": 0.1, "JoinGroup": 0.3}
_WAITING = ("WatchSteps", "TakeBatch", "StageUpdate", "SaveCheckpoint", "JoinGroup", "Evaluate")
# grpc.aio's caller reports this on its own when it sends while the answer to a stream comes in;
# other callers get the service's answer.
_OWN_FAILURE = "Internal error from Core"
_SHORT_S, _LONG_S = 0.15, 15.0
# Ends the run as it should: only what is no message is sent.
_ONLY_GARBAGE = ("TrainerService/Stop",)


@dataclass(slots=True)
class Tally:
    """Answers by code, and calls that met a defect: how often, and examples."""

    codes: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    examples: list[str] = field(default_factory=list)
    by_method: Counter[str] = field(default_factory=Counter)
    holders: set[str] = field(default_factory=set)

    def note(self, method: Method, code: str, details: str, sent: bytes) -> None:
        """Count one call."""
        self.codes[code] += 1
        self.by_method[method.name] += 1
        if method.name == "TrainerService/Pause" and code in ("OK", "LEFT", "DEADLINE_EXCEEDED"):
            with suppress(DecodeError):
                self.holders.add(trainer_pb2.PauseRequest.FromString(sent).holder)
        if code in DEFECTS:
            self.crashes += 1
            if len(self.examples) < MAX_EXAMPLES:
                self.examples.append(f"{method.name}: {code}: {details[:200]}: {sent[:120].hex()}")

    @property
    def requests(self) -> int:
        """Call made."""
        return self.codes.total()


@dataclass(frozen=True, slots=True)
class Attack:
    """One call: its message, its deadline, and whether the caller leaves early."""

    method: Method
    messages: tuple[bytes, ...]
    timeout_s: float
    leaves_after_s: float | None


class Traffic:
    """Chooses attacks and makes them.

    Args:
        methods: what is called.
        valid: requests to start mutations from, by name of the method.
        channels: by process.
        rng: the only source of randomness.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        valid: Mapping[str, tuple[Message, ...]],
        channels: Mapping[str, grpc.aio.Channel],
        rng: random.Random,
    ) -> None:
        self._methods, self._valid, self._channels, self._rng = methods, valid, channels, rng
        self._weights = [_SHARES.get(m.name.split("/")[1], 1.0) for m in methods]
        self.tally = Tally()

    async def send(self, count: int, in_flight: int) -> None:
        """Make `count` calls, `in_flight` at a time."""
        left = iter(range(count))

        async def caller() -> None:
            for _ in left:
                await self._make(self._draw())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(caller())

    def _draw(self) -> Attack:
        rng = self._rng
        method = rng.choices(self._methods, self._weights)[0]
        num_messages = rng.choice((0, 1, 1, 2, 5)) if method.streams_in else 1
        waits = method.name.split("/")[1] in _WAITING
        leaves = rng.random() < (0.02 if "Score" in method.name else 0.1)
        return Attack(
            method,
            tuple(self._message(method) for _ in range(num_messages)),
            _SHORT_S if waits else _LONG_S,
            rng.choice((0.0, 0.001, 0.01, 0.05)) if leaves else None,
        )

    def _message(self, method: Method) -> bytes:
        rng = self._rng
        if method.name in _ONLY_GARBAGE:
            return _no_message(method, rng)
        valid = rng.choice(self._valid.get(method.name, (method.request(),)))
        match rng.randrange(10):
            case 0:
                return random_bytes(rng)
            case 1 | 2:
                return corrupted(valid.SerializeToString(), rng)
            case _:
                return mutated(valid, rng).SerializeToString()

    async def _make(self, attack: Attack) -> None:
        code, details = NO_ANSWER, ""
        try:
            if attack.leaves_after_s is None:
                code = await self._call(attack)
            else:
                async with asyncio.timeout(attack.leaves_after_s):
                    code = await self._call(attack)
        except grpc.aio.AioRpcError as error:
            code, details = error.code().name, error.details() or ""
            if details == _OWN_FAILURE:
                code = "CALLER_FAILED"
        except TimeoutError:
            code = "LEFT"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            code = "CALLER_FAILED"  # by gRPC, which ends a broken call of its own in this way
        self.tally.note(attack.method, code, details, b"".join(attack.messages))

    async def _call(self, attack: Attack) -> str:
        method = attack.method
        channel: Any = self._channels[method.process]  # typed for messages; these are bytes
        if not method.streams_out:
            await channel.unary_unary(method.path)(attack.messages[0], timeout=attack.timeout_s)
            return "OK"
        if method.streams_in:
            call = channel.stream_stream(method.path)(
                _each(attack.messages), timeout=min(attack.timeout_s, 1.0)
            )
        else:
            call = channel.unary_stream(method.path)(attack.messages[0], timeout=attack.timeout_s)
        try:
            async for _ in call:
                pass
        finally:
            call.cancel()
        return "OK"


async def _each(messages: Sequence[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


def _no_message(method: Method, rng: random.Random) -> bytes:
    while True:
        data = b"\xff" + rng.randbytes(rng.randrange(1, 64))
        try:
            method.request.FromString(data)
        except DecodeError:
            return data

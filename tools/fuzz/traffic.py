"""Hostile calls to every method, many at once, counted by their answers."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from sluice.api.reward.v1 import reward_pb2
from sluice.api.rollout.v1 import rollout_pb2
from sluice.api.trainer.v1 import trainer_pb2
from sluice.api.weights.v1 import weights_pb2
from sluice.rpc.client import reward_stub
from tools.fuzz.messages import corrupted, mutated, plausible, random_bytes
from tools.fuzz.openai_traffic import OpenAITraffic

if TYPE_CHECKING:
    from google.protobuf.descriptor import FileDescriptor, MethodDescriptor

# The launcher's service is left out: it listens on the loopback interface alone.
_PROCESS_OF: tuple[tuple[FileDescriptor, str], ...] = (
    (trainer_pb2.DESCRIPTOR, "trainer"),
    (reward_pb2.DESCRIPTOR, "reward"),
    (rollout_pb2.DESCRIPTOR, "rollout-0"),
    (weights_pb2.DESCRIPTOR, "rollout-0"),
)
# The trainer serves it at a new port while replicas join; tests/unit/weights has its strangers.
_AT_NO_FIXED_ADDRESS = {"RendezvousService", "SendingRankService"}
# No request may be answered so, whatever it holds.
_DEFECTS = (
    *("UNKNOWN", "INTERNAL", "UNIMPLEMENTED", "DATA_LOSS"),
    *("HTTP 500", "HTTP disconnected"),
)
_MAX_EXAMPLES = 20
# Calls that do work for every valid request: a few are enough.
_SHARES = {"SaveCheckpoint": 0.002, "Evaluate": 0.06, "AnnouncePolicy": 0.1, "JoinGroup": 0.3}
_OPENAI_SHARE = 0.1  # of all requests
_LEASE_SHARE = 0.8  # of the requests with a lease: one that the attack has taken
_MAX_LEASES = 64
_WAITING = (
    "LeaseSamples",
    "WatchSteps",
    "TakeBatch",
    "StageUpdate",
    "SaveCheckpoint",
    "JoinGroup",
    "Evaluate",
)
# grpc.aio's caller reports this on its own when it sends while the answer to a stream comes in;
# other callers get the service's answer.
_OWN_FAILURE = "Internal error from Core"
_SHORT_S, _LONG_S = 0.15, 15.0
# A valid request ends the run as it should: only bytes that are no message are sent.
_ONLY_GARBAGE = ("TrainerService/Stop",)


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC, and which process serves it."""

    process: str
    descriptor: MethodDescriptor

    @property
    def name(self) -> str:
        """Return ``TrainerService/Pause``; gRPC's path has the package before it."""
        return f"{self.descriptor.containing_service.name}/{self.descriptor.name}"

    @property
    def request(self) -> type[Message]:
        """Return the class of its requests."""
        return GetMessageClass(self.descriptor.input_type)


def all_methods() -> tuple[Method, ...]:
    """Return the methods of trainer, reward, rollout and weights, from their descriptors."""
    return tuple(
        Method(process, method)
        for file, process in _PROCESS_OF
        for service in file.services_by_name.values()
        if service.name not in _AT_NO_FIXED_ADDRESS
        for method in service.methods
    )


@dataclass(frozen=True, slots=True)
class _Attack:
    """One call: its messages, its deadline, and whether the caller leaves early."""

    method: Method
    messages: tuple[bytes, ...]
    timeout_s: float
    leaves_after_s: float | None


class Traffic:
    """Chooses attacks and makes them.

    Args:
        channels: by process.
        rng: the only source of randomness.
        openai_traffic: sends requests over HTTP.

    Attributes:
        codes: answers by code.
        by_method: calls by method, and requests over HTTP by path.
        crashes: answers with a code of a defect; `examples` describes the first ones.
        holders: of pauses that may be in effect.
        num_leased: samples that the attack has leased.
    """

    def __init__(
        self,
        channels: Mapping[str, grpc.aio.Channel],
        rng: random.Random,
        openai_traffic: OpenAITraffic,
    ) -> None:
        self._channels, self._rng, self._methods = channels, rng, all_methods()
        self._openai_traffic = openai_traffic
        self._leases: deque[str] = deque(maxlen=_MAX_LEASES)
        self.num_leased = 0
        self._weights = [_SHARES.get(m.name.split("/")[1], 1.0) for m in self._methods]
        self.codes: Counter[str] = Counter()
        self.by_method: Counter[str] = Counter()
        self.crashes = 0
        self.examples: list[str] = []
        self.holders: set[str] = set()

    async def lease(self) -> bool:
        """Lease a sample as a program would: a call of the attack may be too short for one.

        Returns:
            whether there was one.
        """
        stub: Any = reward_stub(self._channels["reward"])
        request = reward_pb2.LeaseSamplesRequest(count=1, wait_s=_LONG_S)
        taken = (await stub.LeaseSamples(request, timeout=4 * _LONG_S)).leases
        self._take(taken)
        return bool(taken)

    async def send(self, count: int, in_flight: int) -> None:
        """Make `count` calls, `in_flight` at a time."""
        left = iter(range(count))

        async def caller() -> None:
            for _ in left:
                if self._rng.random() < _OPENAI_SHARE:
                    self._note(*await self._openai_traffic.send(self._leases))
                else:
                    await self._make(self._choose())

        async with asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(caller())

    def _choose(self) -> _Attack:
        rng = self._rng
        method = rng.choices(self._methods, self._weights)[0]
        num_messages = rng.choice((0, 1, 1, 2, 5)) if method.descriptor.client_streaming else 1
        leaves = rng.random() < (0.02 if "Score" in method.name else 0.1)
        return _Attack(
            method,
            tuple(self._message(method) for _ in range(num_messages)),
            _SHORT_S if method.name.split("/")[1] in _WAITING else _LONG_S,
            rng.choice((0.0, 0.001, 0.01, 0.05)) if leaves else None,
        )

    def _message(self, method: Method) -> bytes:
        rng = self._rng
        if method.name in _ONLY_GARBAGE:
            return _no_message(method, rng)
        match rng.randrange(10):
            case 0:
                return random_bytes(rng)
            case 1 | 2:
                return corrupted(self._plausible(method).SerializeToString(), rng)
            case _:
                return mutated(self._plausible(method), rng).SerializeToString()

    def _plausible(self, method: Method) -> Message:
        message: Any = plausible(method.request, self._rng)
        has_lease = "lease_id" in message.DESCRIPTOR.fields_by_name
        if has_lease and self._leases and self._rng.random() < _LEASE_SHARE:
            message.lease_id = self._rng.choice(self._leases)
        found: Message = message
        return found

    async def _make(self, attack: _Attack) -> None:
        code, details = "OK", ""
        try:
            async with asyncio.timeout(attack.leaves_after_s):
                await self._call(attack)
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
        sent = b"".join(attack.messages)
        self._note(attack.method.name, code, details, sent)

    def _note(self, name: str, code: str, details: str, sent: bytes) -> None:
        self.codes[code] += 1
        self.by_method[name] += 1
        if name == "TrainerService/Pause" and code in ("OK", "LEFT", "DEADLINE_EXCEEDED"):
            with suppress(DecodeError):
                self.holders.add(trainer_pb2.PauseRequest.FromString(sent).holder)
        if code in _DEFECTS:
            self.crashes += 1
            if len(self.examples) < _MAX_EXAMPLES:
                self.examples.append(f"{name}: {code}: {details[:200]}: {sent[:120].hex()}")

    async def _call(self, attack: _Attack) -> None:
        method = attack.method
        channel: Any = self._channels[method.process]  # typed for messages; these are bytes
        path = f"/{method.descriptor.containing_service.full_name}/{method.descriptor.name}"
        if not method.descriptor.server_streaming:
            found = await channel.unary_unary(path)(attack.messages[0], timeout=attack.timeout_s)
            if method.name == "RewardService/LeaseSamples":
                self._take(reward_pb2.LeaseSamplesResponse.FromString(found).leases)
            return
        if method.descriptor.client_streaming:
            requests = _each(attack.messages)
            call = channel.stream_stream(path)(requests, timeout=min(attack.timeout_s, 1.0))
        else:
            call = channel.unary_stream(path)(attack.messages[0], timeout=attack.timeout_s)
        try:
            async for _ in call:
                pass
        finally:
            call.cancel()

    def _take(self, leases: Sequence[Any]) -> None:
        self._leases.extend(one.lease_id for one in leases)
        self.num_leased += len(leases)


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

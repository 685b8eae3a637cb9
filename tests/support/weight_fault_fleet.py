"""A publisher whose replicas are processes that fail on command, each in a chosen phase."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import torch

from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.fleet.publisher import WeightPublisher
from services.trainer.learner.sending_ranks import SendingRank, SendingRankClient
from sluice.algorithm.publishing import swaps_at_once
from sluice.device.cpu import CpuDevice
from sluice.errors import DeadlineError, InvalidRequestError, SluiceError, WeightSyncError
from sluice.types import ReplicaInfo, TensorSpec, TransferGroupSpec
from sluice.weight_share import Cut, Holding
from sluice.weights.sender import WeightSender
from sluice.weights.share import pack
from sluice.weights.snapshot import SnapshotBuffers
from tests.support.steered_process import ENDED
from tests.support.weight_fleet import PeerProcess

_LAYOUT = "layout"
_ERRORS: dict[str, Callable[[str, str], SluiceError]] = {
    "InvalidRequestError": lambda name, text: InvalidRequestError(f"{name}: {text}"),
}


class Replica:
    """The calls to one process. `faults` are arguments that a phase's next call has besides, and
    ``before``: a signal that the process gets in front of it, or seconds to wait."""

    def __init__(self, peer: PeerProcess, timeout_s: float) -> None:
        self.peer, self._timeout_s = peer, timeout_s
        self.info = ReplicaInfo(peer.name, f"{peer.name}-1", f"{peer.name}:1", 8)
        self.faults: dict[str, dict[str, Any]] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._calls = 0
        self._ended = False

    async def join(self, spec: TransferGroupSpec) -> None:
        await self._call("join", f"joining epoch {spec.epoch}", spec=msgspec.to_builtins(spec))

    async def stage(self, epoch: int, version: int) -> str:
        answer = await self._call("stage", f"staging version {version}", version=version)
        return str(answer["digest"])

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        phase = f"committing version {version}"
        await self._call("commit", phase, version=version, digest=digest)
        return 0.0

    async def abort(self, epoch: int, reason: str) -> None:
        await self._call(
            "abort", f"aborting epoch {epoch}", timeout_s=probe_s(self._timeout_s), reason=reason
        )

    async def probe(self, timeout_s: float) -> None:
        await self._call("probe", "answering a probe", timeout_s=timeout_s)

    async def close(self) -> None:
        """The process stays."""

    async def held(self) -> tuple[int, str]:
        """Version and digest of what it serves, computed from its memory."""
        answer = await self._call("held", "telling what it holds")
        return answer["version"], answer["recomputed"]

    def _take(self, call: int, phase: str) -> dict[str, Any] | None:
        """The answer to a call, if it came: an earlier one of the same kind may come late."""
        for answer in self.peer.answers_so_far():
            if answer is ENDED:
                self._ended = True
            else:
                self._answers[answer["call"]] = answer
        if self._ended:
            raise WeightSyncError(self.info.name, phase, "its process ended")
        return self._answers.pop(call, None)

    async def _call(
        self, op: str, phase: str, timeout_s: float | None = None, **arguments: Any
    ) -> dict[str, Any]:
        timeout_s = timeout_s or 1.5 * self._timeout_s
        fault = self.faults.pop(op, {})
        await self._break(fault.pop("before", None))
        self._calls = call = self._calls + 1
        try:
            self.peer.send(op, call=call, **arguments, **fault)
            async with asyncio.timeout(timeout_s):
                while (answer := self._take(call, phase)) is None:
                    await asyncio.sleep(0.005)
        except TimeoutError as error:
            raise DeadlineError(self.info.name, phase, timeout_s) from error
        except BrokenPipeError as error:
            raise WeightSyncError(self.info.name, phase, "its process ended") from error
        if answer["ok"]:
            return answer
        if make := _ERRORS.get(answer["error"]):
            raise make(self.info.name, answer["message"])
        raise WeightSyncError(self.info.name, phase, answer["message"])

    async def _break(self, how: signal.Signals | float | None) -> None:
        if isinstance(how, signal.Signals):
            self.peer.signal(how)
        elif how is not None:
            await asyncio.sleep(how)


def probe_s(timeout_s: float) -> float:
    """Seconds to answer a probe or an abort."""
    return timeout_s / 3


def halves(specs: tuple[TensorSpec, ...]) -> tuple[Holding, Holding]:
    """Two ranks' holdings: each half of every tensor, but scalars, which rank 0 has."""
    parts: tuple[list[Any], list[Any]] = ([], [])
    for spec in specs:
        if not spec.shape:
            parts[0].append((spec.name, ()))
            continue
        middle = spec.shape[0] // 2
        for own, start, stop in ((parts[0], 0, middle), (parts[1], middle, spec.shape[0])):
            own.append((spec.name, (Cut(0, ((start, stop - start),)),)))
    return Holding(0, tuple(parts[0])), Holding(1, tuple(parts[1]))


class FaultFleet:
    """The trainer's side: what is frozen, who is a member, and the publisher."""

    def __init__(
        self,
        specs: tuple[TensorSpec, ...],
        timeout_s: float,
        *,
        sends_changes: bool,
        has_halves: bool = False,
    ) -> None:
        self._timeout_s = timeout_s
        self.fleet = Fleet(_LAYOUT, 1e9)
        self._stack = ExitStack()
        self._specs = specs
        holdings = halves(specs) if has_halves else ()
        self.snapshots = SnapshotBuffers(specs, holding=holdings[0] if holdings else None)
        self._second: SnapshotBuffers | None = None
        others: list[SendingRankClient] = []
        if holdings:
            self._second = SnapshotBuffers(specs, holding=holdings[1])
            server = SendingRank(
                1,
                holdings,
                specs,
                self._second,
                device=CpuDevice(),
                timeout_s=timeout_s,
                keeps_base=sends_changes,
                host="127.0.0.1",
                key=b"k",
            )
            self._stack.callback(server.close)
            others.append(SendingRankClient(1, "127.0.0.1", server.port, b"k"))
            self._stack.callback(others[0].close)
        self.replicas: dict[str, Replica] = {}
        self.publisher = WeightPublisher(
            self.fleet,
            self.snapshots,
            specs,
            make_sender=lambda: WeightSender(
                device=CpuDevice(),
                bucket_bytes=1 << 18,
                timeout_s=timeout_s,
                keeps_base=sends_changes,
                holdings=holdings,
                other_ranks=others,
            ),
            connect=lambda info: self.replicas[info.name],
            timeout_s=2 * timeout_s,
            probe_timeout_s=probe_s(timeout_s),
            sends_changes=sends_changes,
            swaps_at_once=partial(swaps_at_once, max_staleness=2),
        )

    def register(self, replica: Replica) -> None:
        self.replicas[replica.info.name] = replica
        self.fleet.register(replica.info, _LAYOUT, 0.0)

    async def publish(self, version: int, weights: Mapping[str, torch.Tensor]) -> Any:
        self.freeze(version, weights)
        return await self.publisher.publish(version)

    def freeze(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        held = [self.snapshots] if self._second is None else [self.snapshots, self._second]
        for snapshots in held:
            part = snapshots.plan
            parts = [
                (spec.name, pack(weights[spec.name], cuts))
                for spec, cuts in zip(part.tensors, part.cuts, strict=True)
            ]
            snapshots.write(parts, version, self._timeout_s)

    async def close(self) -> None:
        await self.publisher.close()
        self._stack.close()

    def serving(self) -> dict[str, int | None]:
        """Versions by name of who serves."""
        return {
            member.info.name: member.version
            for member in self.fleet.members()
            if member.state is MemberState.SERVING
        }


@asynccontextmanager
async def fault_fleet(
    peers: list[PeerProcess],
    specs: tuple[TensorSpec, ...],
    timeout_s: float,
    *,
    sends_changes: bool,
    has_halves: bool = False,
) -> AsyncIterator[FaultFleet]:
    """A fleet of these processes, registered in this order.

    With `has_halves` two ranks send, each its half. `timeout_s` is that of a transfer.
    """
    fleet = FaultFleet(specs, timeout_s, sends_changes=sends_changes, has_halves=has_halves)
    try:
        for peer in peers:
            fleet.register(Replica(peer, timeout_s))
        yield fleet
    finally:
        await fleet.close()

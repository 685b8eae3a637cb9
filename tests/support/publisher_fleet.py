"""A weight publisher with a fleet of receivers in this process; real transfers over Gloo."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from services.trainer.fleet.members import Fleet, MemberState
from services.trainer.fleet.publisher import WeightPublisher
from sluice.device.cpu import CpuDevice
from sluice.types import ReplicaInfo, TensorSpec, TransferGroupSpec
from sluice.weight_share import WHOLE, Holding, WeightShare
from sluice.weights.plan import tensor_specs
from sluice.weights.rank_sender import RemoteRank
from sluice.weights.receiver import StagedWeights, WeightReceiver
from sluice.weights.sender import WeightSender
from sluice.weights.snapshot import SnapshotBuffers

LAYOUT = "layout"
TIMEOUT_S = 60.0


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((2000, 500), float(version)), "b": torch.arange(5.0) + version}


class Replica:
    """A replica's receiver with the calls that steer it; `faults` break phases of it.

    A fault is awaited before the phase's work: it may raise, or wait.
    """

    def __init__(self, name: str, instance_id: str = "1", share: WeightShare = WHOLE) -> None:
        self.info = ReplicaInfo(name, f"{name}-{instance_id}", f"{name}:1", 8, shares=(share,))
        self.faults: dict[str, Callable[[], Any]] = {}
        self.calls: list[str] = []
        self.epochs: list[int] = []
        self.served: StagedWeights | None = None
        self._staged: StagedWeights | None = None
        self._receiver = WeightReceiver(CpuDevice(), share=share)
        self._thread = ThreadPoolExecutor(max_workers=1)

    async def join(self, spec: TransferGroupSpec) -> None:
        await self._enter("join")
        self.epochs.append(spec.epoch)
        self._receiver.abort(f"epoch {spec.epoch} begins")
        await self._run(lambda: self._receiver.join(spec))

    async def stage(self, epoch: int, version: int) -> str:
        await self._enter("stage")
        assert epoch == self.epochs[-1]
        self._staged = await self._run(lambda: self._receiver.stage(version))
        return "other bytes" if "digest" in self.faults else self._staged.digest

    async def commit(self, epoch: int, version: int, digest: str) -> float:
        await self._enter("commit")
        assert self._staged is not None
        assert (self._staged.version, self._staged.digest) == (version, digest)
        self.served = self._staged
        self._receiver.keep(self._staged)
        return 0.25

    async def abort(self, epoch: int, reason: str) -> None:
        await self._enter("abort")
        self._receiver.abort(reason)

    async def probe(self, timeout_s: float) -> None:
        await self._enter("probe")

    async def sleep(self) -> bool:
        await self._enter("sleep")
        return True

    async def close(self) -> None:
        self.calls.append("close")

    @property
    def held(self) -> StagedWeights | None:
        """What later updates may build on."""
        return self._receiver._held

    def forget(self) -> None:
        """Lose what later updates could build on."""
        self._receiver._held = None

    def end(self) -> None:
        self._receiver.close()
        self._thread.shutdown()

    async def _enter(self, phase: str) -> None:
        self.calls.append(phase)
        fault = self.faults.get(phase)
        if fault is not None:
            await fault()

    async def _run(self, call: Callable[[], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except asyncio.CancelledError:
            self._receiver.abort("the call was cancelled")
            raise


class Trainer:
    """A publisher with its fleet and frozen versions; of `weights` unless `specs` say otherwise."""

    def __init__(
        self,
        timeout_s: float,
        *,
        sends_changes: bool = True,
        specs: tuple[TensorSpec, ...] | None = None,
        snapshots: SnapshotBuffers | None = None,
        holdings: Sequence[Holding] = (),
        others: Sequence[RemoteRank] = (),
        swaps_at_once: Callable[[int], int] = int,
    ) -> None:
        specs = specs or tensor_specs(weights(0).items())
        self.fleet = Fleet(LAYOUT, 1e9, weights=specs)
        self.replicas: dict[str, Replica] = {}
        self.snapshots = snapshots or SnapshotBuffers(specs)
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
            connect=lambda info: self.replicas[info.instance_id],
            timeout_s=60.0,
            probe_timeout_s=1.0,
            sends_changes=sends_changes,
            swaps_at_once=swaps_at_once,
        )

    def add(self, name: str, instance_id: str = "1", share: WeightShare = WHOLE) -> Replica:
        replica = Replica(name, instance_id, share)
        self.replicas[replica.info.instance_id] = replica
        self.register(replica)
        return replica

    def register(self, replica: Replica) -> None:
        self.fleet.register(replica.info, LAYOUT, 0.0)

    def freeze(self, version: int) -> None:
        self.snapshots.write(weights(version).items(), version, 1.0)

    async def publish(self, version: int) -> Any:
        await self.publisher.wait_for_free_snapshot()
        self.freeze(version)
        return await self.publisher.publish(version)

    def serving(self) -> dict[str, int]:
        return {
            member.info.name: member.version
            for member in self.fleet.members()
            if member.state is MemberState.SERVING
        }

"""What the trainer's ranks say to each other: a few collectives, each with a deadline.

Gradients are summed on the device they live on. Commands and metrics always travel between CPUs
over Gloo, so that they never queue behind kernels. A collective that fails is never repeated: the
group is broken, and the rank that notices ends the run with an error naming itself and the phase.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from services.trainer.learner.ranks.rendezvous import (
    FORMING,
    LATE_REMEDY,
    RankPlace,
    RankRendezvous,
    rank_place,
)
from sluice.concurrency.waits import waiting_for
from sluice.device.protocol import WITHOUT_GATHER, Device, rank_backends
from sluice.errors import DeadlineError, PeerError, WeightSyncError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


SHARD_DIM, COPY_DIM = "shard", "copy"
"""Dimensions of the mesh that a model is sharded over."""

_GLOO, _LATE = "gloo", "timed out"


class DataParallel(Protocol):
    """Ranks that train different rows of one batch.

    Every method is collective: all ranks call it in the same order. `phase` names the moment in
    errors.

    Raises (all methods):
        DeadlineError: a rank did not arrive in time.
        PeerError: a rank failed or vanished.
    """

    @property
    def rank(self) -> int:
        """This process, 0-based."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce_sum(self, tensors: Sequence[Tensor], phase: str) -> None:
        """Replace each tensor by its sum over ranks, in place; the same bits on every rank."""
        ...

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """The numbers of every rank (as float64), in order of rank; equally many on each."""
        ...

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        """Rank 0's bytes on every rank; the others pass ``None``."""
        ...

    def shard_mesh(self, size: int) -> DeviceMesh | None:
        """Groups of `size` neighbouring ranks that share one model.

        Args:
            size: a divisor of the number of ranks.

        Returns:
            dimensions ``copy`` (if there are several groups) and ``shard``; ``None`` where each
            rank holds the whole model: `size` is 1, or these ranks cannot share.
        """
        ...

    def gather_to_first(self, own: Tensor, group: ProcessGroup, phase: str) -> Tensor | None:
        """Equally long tensors ``[n]`` of a group of ranks that rank 0 is in.

        Returns:
            ``[ranks, n]`` on rank 0, ``None`` on the others.
        """
        ...

    def naming_failures(self, phase: str) -> AbstractContextManager[object]:
        """A block in which torch calls collectives itself: what fails in them is named."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


class SingleProcess:
    """The only rank: nothing to exchange."""

    rank = 0
    world_size = 1

    def all_reduce_sum(self, tensors: Sequence[Tensor], phase: str) -> None:
        """The sum over one rank is what is there."""

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """One rank's numbers."""
        return [list(values)]

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        """The payload itself."""
        assert payload is not None
        return payload

    def shard_mesh(self, size: int) -> DeviceMesh | None:
        """Nobody to share with."""
        return None

    def gather_to_first(self, own: Tensor, group: ProcessGroup, phase: str) -> Tensor | None:
        """One rank's tensor."""
        return own[None]

    def naming_failures(self, phase: str) -> AbstractContextManager[object]:
        """There is nobody who could fail."""
        return nullcontext()

    def close(self) -> None:
        """Nothing was opened."""


class TorchDistributed:
    """Ranks that are told RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT by whoever starts them.

    They meet at a store that rank 0 opens there (`rank_rendezvous`). A torchrun that has a store of
    its own at that address (TORCHELASTIC_USE_AGENT_STORE) offers this one instead: torch's
    ``env://``.

    Args:
        device: where gradients live; decides the backend.
        timeout_s: deadline of every collective.
        forming_timeout_s: deadline of meeting the other ranks; by default `timeout_s`.

    Raises:
        ConfigError: the environment variables are not there, or rank 0 cannot listen.
        DeadlineError: a rank did not come in time.
        PeerError: the group did not form.
    """

    def __init__(
        self, device: Device, timeout_s: float, forming_timeout_s: float | None = None
    ) -> None:
        self._timeout_s = timeout_s
        self._device_type = device.torch_device.type
        self._meshes: dict[int, DeviceMesh] = {}
        backend = rank_backends(device.torch_device.type)
        self._has_gather = device.collective_backend not in WITHOUT_GATHER
        device.set_device()
        place = rank_place(os.environ)
        self._rendezvous: RankRendezvous | None = None
        if not _has_agent_store(os.environ):
            self._rendezvous = RankRendezvous(place, forming_timeout_s or timeout_s)
        try:
            self._form(backend, place)
        except BaseException:
            self._leave_rendezvous()
            raise
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()

    def all_reduce_sum(self, tensors: Sequence[Tensor], phase: str) -> None:
        """Sums on the tensors' device, one collective a tensor."""
        for tensor in tensors:
            self._run(partial(dist.all_reduce, tensor, async_op=True), phase)

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """Over Gloo as float64."""
        own = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        self._run(partial(dist.all_gather, gathered, own, async_op=True), phase)
        return [part.tolist() for part in gathered]

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        """Length, then content, over Gloo."""
        length = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64)
        self._run(partial(dist.broadcast, length, src=0, async_op=True), phase)
        content = torch.empty(int(length), dtype=torch.uint8)
        if payload is not None:
            content.numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        if content.numel():
            self._run(partial(dist.broadcast, content, src=0, async_op=True), phase)
        return content.numpy().tobytes()

    def shard_mesh(self, size: int) -> DeviceMesh | None:
        """Made once a size; all ranks ask for the same sizes in the same order."""
        if size == 1:
            return None
        if size not in self._meshes:
            with self.naming_failures(f"forming groups of {size} ranks that share a model"):
                self._meshes[size] = self._make_mesh(size)
        return self._meshes[size]

    def gather_to_first(self, own: Tensor, group: ProcessGroup, phase: str) -> Tensor | None:
        """On the tensor's device."""
        parts: Tensor | None = None
        if self.rank == 0 or not self._has_gather:
            parts = own.new_empty((dist.get_world_size(group), own.numel()))
        into = None if parts is None else list(parts.unbind())
        if self._has_gather:
            gather = partial(dist.gather, own, into, dst=0, group=group, async_op=True)
        else:
            gather = partial(dist.all_gather, into, own, group=group, async_op=True)
        self._run(gather, phase)
        return parts if self.rank == 0 else None

    @contextmanager
    def naming_failures(self, phase: str) -> Iterator[None]:
        """Tells what a backend raised from other errors by its type or, for Gloo, its text."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if not (isinstance(error, dist.DistError) or _GLOO in text):
                raise
            self._fail(error, phase, is_late=_LATE in text.lower())

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()
        self._leave_rendezvous()

    def _form(self, backend: str, place: RankPlace) -> None:
        form = partial(dist.init_process_group, backend, timeout=timedelta(seconds=self._timeout_s))
        try:
            if self._rendezvous is None:
                form(init_method="env://")
            else:
                store = self._rendezvous.store
                form(store=store, rank=place.rank, world_size=place.world_size)
        except DeadlineError as error:
            raise DeadlineError(error.peer, FORMING, error.seconds, LATE_REMEDY) from error
        except WeightSyncError as error:
            raise PeerError(place.store_name, FORMING, error.detail) from error
        except RuntimeError as error:
            raise PeerError("trainer ranks", FORMING, str(error)) from error

    def _leave_rendezvous(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()

    def _run(self, start: Callable[[], dist.Work | None], phase: str) -> None:
        began_s = time.monotonic()
        try:
            work = start()
            assert work is not None
            with waiting_for("trainer ranks", phase):
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            # Gloo tells a deadline from a lost connection by its text alone, the clock for sure.
            is_late = time.monotonic() - began_s >= 0.9 * self._timeout_s
            self._fail(error, phase, is_late=is_late)

    def _fail(self, error: RuntimeError, phase: str, *, is_late: bool) -> NoReturn:
        peer = f"a trainer rank, seen from rank {self.rank} of {self.world_size}"
        if is_late:
            raise DeadlineError(peer, phase, self._timeout_s, LATE_REMEDY) from error
        raise PeerError(peer, phase, str(error)) from error

    def _make_mesh(self, size: int) -> DeviceMesh:
        """Groups are made here, for those that a mesh makes do not take over the deadline."""
        if size == self.world_size:
            world = dist.group.WORLD
            assert world is not None
            return DeviceMesh.from_group(world, self._device_type, mesh_dim_names=(SHARD_DIM,))
        places = torch.arange(self.world_size).view(-1, size)
        within = [self._new_group(row) for row in places]
        across = [self._new_group(column) for column in places.T]
        own = [across[self.rank % size], within[self.rank // size]]
        return DeviceMesh.from_group(
            own, self._device_type, mesh=places, mesh_dim_names=(COPY_DIM, SHARD_DIM)
        )

    def _new_group(self, ranks: Tensor) -> ProcessGroup:
        """All ranks make every group; those outside one get a stand-in."""
        deadline = timedelta(seconds=self._timeout_s)
        group: ProcessGroup = dist.new_group(ranks.tolist(), timeout=deadline)
        return group


def _has_agent_store(environment: Mapping[str, str]) -> bool:
    """Whether torchrun's agent listens at MASTER_ADDR:MASTER_PORT, so that no rank can."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

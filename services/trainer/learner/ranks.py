"""The trainer's ranks: the store where they meet, and their collectives, each with a deadline.

Torch's own store (``env://``) looks up the name of each address that connects; a lost answer of
the name server costs 5 s. The store of the weight transfers does no such look-up. Rank 0 opens it
at MASTER_ADDR:MASTER_PORT, for one epoch, until the ranks end.

Gradients are summed on their device. Commands and metrics always travel between CPUs over Gloo, so
that they never queue behind kernels. A failed collective is never repeated: the group is broken,
and the rank that notices it ends the run with an error that names itself and the phase.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh

from services.trainer.learner.sequence_share import SequenceShare
from sluice.concurrency.process import START_FIELD, ProcessMark, stat_fields
from sluice.concurrency.waits import waiting_for
from sluice.config.addresses import join_host_port, split_host_port
from sluice.config.parallel_layout import ParallelLayout
from sluice.device.protocol import Device, rank_backends
from sluice.errors import ConfigError, DeadlineError, PeerError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.rendezvous import EpochStore, RendezvousStore, gather

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


FORMING = "forming the trainer ranks' process group"
LATE_REMEDY = (
    "see the other ranks' logs; raise sluice.trainer.command_timeout_s if one of them was only slow"
)
SHARD_DIM, COPY_DIM = "shard", "copy"
"""Dimensions of the mesh that shards a model."""
EXPERT_DIM, EXPERT_SHARD_DIM = "expert", "expert_shard"
"""Dimensions of the mesh that divides its experts, and shards each of them."""

# Texts in the errors of torch's backends.
_GLOO = "gloo"
_LATE = "timed out"
_EPOCH = 0
_RETRY_S = 0.1
_ENDING_S = 1.0
_NOT_ALIVE = frozenset({"gone", "a zombie", "stopped by a signal"})
_PROCESSES = Path("/proc/self/ns/pid")
"""The processes that this one sees, on Linux."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """This process's rank, and the address of rank 0's store."""

    rank: int
    world_size: int
    host: str
    port: int

    @property
    def store_name(self) -> str:
        """Return the store's name for errors."""
        return f"trainer rank 0 at {join_host_port(self.host, self.port)}"


class RankRendezvous:
    """A store that all ranks have reached. Keep it as long as their group exists.

    Args:
        place: this rank's.
        timeout_s: seconds until all ranks have arrived; also for each later wait of torch.

    Raises:
        ConfigError: rank 0 cannot listen at its address.
        DeadlineError: rank 0 or other ranks did not arrive; names them.
        PeerError: the store refused a request, or its connection was lost.
    """

    def __init__(self, place: RankPlace, timeout_s: float) -> None:
        self._server = RendezvousStore(place.host, place.port) if place.rank == 0 else None
        try:
            if self._server is not None:
                self._server.begin(_EPOCH)
            self.store = _joined(place, timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close rank 0's store; the group must have ended."""
        if self._server is not None:
            self._server.close()


def rank_place(environment: Mapping[str, str]) -> RankPlace:
    """Return the place from torchrun's variables.

    Raises:
        ConfigError: a variable is missing or invalid; names it.
    """
    rank, world_size = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if rank >= world_size:
        raise _no_place(f"RANK = {rank} is not below WORLD_SIZE = {world_size}")
    port = _number(environment, "MASTER_PORT")
    if not 0 < port <= 65535:
        raise _no_place(f"MASTER_PORT = {port} is not in 1..65535")
    host = split_host_port(_given(environment, "MASTER_ADDR"))[0]
    return RankPlace(rank, world_size, host, port)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = _given(environment, name)
    if not (text.isascii() and text.isdigit()):
        raise _no_place(f"{name} = {text!r} is not a number")
    return int(text)


def _given(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise _no_place(f"{name} is not set")
    return environment[name]


def _no_place(why: str) -> ConfigError:
    return ConfigError(
        f"several trainer ranks need torchrun's environment, and {why}; start them with torchrun "
        "or sluice up"
    )


def _joined(place: RankPlace, timeout_s: float) -> EpochStore:
    """Reach the store and wait there for all ranks."""
    spec = TransferGroupSpec(
        epoch=_EPOCH,
        host=place.host,
        port=place.port,
        rank=place.rank,
        world_size=place.world_size,
        backend="",
        bucket_bytes=0,
        timeout_s=timeout_s,
        tensors=(),
        plan_digest="",
    )
    store = _reached(spec, place)
    try:
        gather(store, spec, {rank: f"trainer rank {rank}" for rank in range(place.world_size)})
    except DeadlineError as error:
        raise DeadlineError(error.peer, FORMING, timeout_s, LATE_REMEDY) from error
    except WeightSyncError as error:
        raise PeerError(place.store_name, FORMING, error.detail) from error
    return store


def _reached(spec: TransferGroupSpec, place: RankPlace) -> EpochStore:
    """Ask again until the store answers: rank 0 may start later than the others.

    Torch needs the store before this process has an event loop, so `sluice.rpc.retries` cannot wait
    here.
    """
    ends_s = time.monotonic() + spec.timeout_s
    while True:
        try:
            store = EpochStore(spec, FORMING, "another trainer rank", lambda: None)
            store.present(())
        except (DeadlineError, WeightSyncError) as error:
            if time.monotonic() > ends_s:
                why = f"{error}; {LATE_REMEDY}"
                raise DeadlineError(place.store_name, FORMING, spec.timeout_s, why) from error
        else:
            return store
        time.sleep(_RETRY_S)


class DataParallel:
    """Ranks that train one batch: different rows, or parts of the same ones.

    This base class is a run with one rank, whose collectives do nothing; for FSDP it makes a group
    of one. `TorchDistributed` connects several ranks.

    Every method is collective: all ranks call it in the same order. `phase` names the moment in
    errors.

    Raises (all methods):
        DeadlineError: a rank did not arrive in time.
        PeerError: a rank failed or vanished.
    """

    rank: int = 0
    """This process's number, 0-based."""
    world_size: int = 1
    timeout_s: float = threading.TIMEOUT_MAX
    """Deadline of every collective, seconds."""
    share: SequenceShare | None = None
    """This rank's part of every packed sequence; None: all of it."""
    experts: int = 1
    """Neighboring ranks that divide the experts of each layer among them."""
    _mesh: DeviceMesh | None = None

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type

    @property
    def data_size(self) -> int:
        """Return the number of shares, which train different rows."""
        return self.world_size // (self.share.size if self.share else 1)

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's share: neighboring ranks share a sequence."""
        return self.rank // (self.share.size if self.share else 1)

    def share_sequences(self, size: int) -> None:
        """Make `size` neighboring ranks share every packed sequence from now on.

        Raises:
            ConfigError: the size does not divide the number of ranks.
        """
        ParallelLayout(self.world_size, self.world_size, sequence=size)

    def gather_rows(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """Return the numbers of each share, as `all_gather`; its ranks have the same."""
        return self.all_gather(values, phase)[:: self.share.size if self.share else 1]

    def sum_rows(self, values: Tensor, phase: str) -> None:
        """Sum in place over shares, whose ranks have the same values."""
        if self.share is not None and self.share.rank:
            values.zero_()
        self.all_reduce_sum([values], phase)

    def all_reduce_sum(self, tensors: Sequence[Tensor], phase: str) -> None:
        """Replace each tensor by its sum over ranks, in place; the same bits on every rank."""

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """Return every rank's numbers (as float64), in order of rank; equally many on each."""
        return [list(values)]

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        """Return rank 0's bytes on every rank; the others pass ``None``."""
        assert payload is not None
        return payload

    def shard_mesh(self, size: int) -> DeviceMesh | None:
        """Return groups of `size` neighboring ranks that share one model.

        Args:
            size: a divisor of the number of ranks.

        Returns:
            dimensions ``copy`` (if there are several groups) and ``shard``; ``None`` if these ranks
            cannot share, so that each holds the whole model.
        """
        if self._mesh is None:
            if not dist.is_initialized():
                backend = rank_backends(self.device_type)
                dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            group = dist.group.WORLD
            assert group is not None
            assert group.size() == 1
            self._mesh = DeviceMesh.from_group(group, self.device_type, mesh_dim_names=(SHARD_DIM,))
        return self._mesh

    def expert_mesh(self, size: int) -> DeviceMesh | None:
        """Return how the `size` ranks of a copy divide its experts; ``None``: they do not.

        Returns:
            dimensions ``copy`` (if there are several), ``expert_shard``, over which each expert is
            sharded, and ``expert``, of `experts` neighboring ranks.

        Raises:
            ConfigError: they cannot divide evenly.
        """
        ParallelLayout(self.world_size, size, experts=self.experts)
        return None

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        phase: str,
    ) -> None:
        """Send tensors to ranks and receive some from ranks, in the same order at both ends.

        A rank without any may leave it out, unless it is new to the group (`exchange_places`).

        Args:
            sends: contiguous tensors and the ranks that get them.
            receives: contiguous tensors to fill and the ranks that send them.
            phase: named in errors.
        """
        assert not sends, phase
        assert not receives, phase

    def beside(self) -> DataParallel:
        """Return the same ranks in a group of their own, over Gloo, for a second thread."""
        return self

    def naming_failures(self, phase: str) -> AbstractContextManager[object]:
        """Name failures of collectives that torch itself calls in the block."""
        return nullcontext()

    def close(self) -> None:
        """Leave the group of this rank alone, if `shard_mesh` made one."""
        if self._mesh is not None:
            dist.destroy_process_group()
            self._mesh = None


class TorchDistributed(DataParallel):
    """Ranks that a launcher starts with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    They meet at a store that rank 0 opens at that address (`RankRendezvous`). If torchrun's agent
    already has a store there (TORCHELASTIC_USE_AGENT_STORE), they use that one: torch's ``env://``.

    Args:
        device: holds the gradients; determines the backend.
        timeout_s: deadline of every collective.
        forming_timeout_s: deadline of meeting the other ranks; by default `timeout_s`.

    Raises:
        ConfigError: an environment variable is missing, or rank 0 cannot listen.
        DeadlineError: a rank did not arrive in time.
        PeerError: the group did not form.
    """

    def __init__(
        self, device: Device, timeout_s: float, forming_timeout_s: float | None = None
    ) -> None:
        self.timeout_s = timeout_s
        super().__init__(device.torch_device.type)
        self._meshes: dict[int, DeviceMesh] = {}
        self._expert_meshes: dict[int, DeviceMesh] = {}
        self._group: ProcessGroup | None = None  # all ranks, as torch forms it
        backend = rank_backends(device.torch_device.type)
        device.set_device()  # before the group exists: its backend binds to the current device
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
        self._processes: list[ProcessMark] = []
        self._processes = self._meet()

    def all_reduce_sum(self, tensors: Sequence[Tensor], phase: str) -> None:
        """Sum on the tensors' device, one collective per tensor."""
        for tensor in tensors:
            self._run(partial(dist.all_reduce, tensor, group=self._group, async_op=True), phase)

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """Gather over Gloo as float64."""
        own = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        self._run(partial(dist.all_gather, gathered, own, group=self._group, async_op=True), phase)
        return [part.tolist() for part in gathered]

    def broadcast_bytes(self, payload: bytes | None, phase: str) -> bytes:
        """Broadcast the length, then the content, over Gloo."""
        length = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64)
        self._run(partial(dist.broadcast, length, src=0, group=self._group, async_op=True), phase)
        content = torch.empty(int(length), dtype=torch.uint8)
        if payload is not None:
            content.numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        if content.numel():
            self._run(
                partial(dist.broadcast, content, src=0, group=self._group, async_op=True), phase
            )
        return content.numpy().tobytes()

    def shard_mesh(self, size: int) -> DeviceMesh:
        """Return the mesh of this size, made once; all ranks ask for sizes in the same order."""
        if size not in self._meshes:
            with self.naming_failures(f"forming groups of {size} ranks that share a model"):
                self._meshes[size] = self._make_mesh(size)
        return self._meshes[size]

    def expert_mesh(self, size: int) -> DeviceMesh | None:
        super().expert_mesh(size)
        if self.experts > 1 and size not in self._expert_meshes:
            grid = torch.arange(self.world_size).view(-1, size // self.experts, self.experts)
            names = (COPY_DIM, EXPERT_SHARD_DIM, EXPERT_DIM)
            with self.naming_failures(f"forming groups of {self.experts} ranks with experts"):
                self._expert_meshes[size] = self._grid_mesh(grid, names)
        return self._expert_meshes.get(size)

    def share_sequences(self, size: int) -> None:
        super().share_sequences(size)
        if size == 1:
            return
        with self.naming_failures(f"forming groups of {size} ranks that share sequences"):
            blocks = torch.arange(self.world_size).view(-1, size)
            groups = [self._new_group(block) for block in blocks]
        own = self.rank // size
        self.share = SequenceShare(groups[own], self.rank % size, size)

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        phase: str,
    ) -> None:
        """Exchange on the tensors' devices, at once."""
        operations = [dist.P2POp(dist.isend, one, rank, self._group) for one, rank in sends]
        operations += [dist.P2POp(dist.irecv, one, rank, self._group) for one, rank in receives]
        if not operations:
            return
        with self.naming_failures(phase):
            works = dist.batch_isend_irecv(operations)
        for work in works:
            self._run(partial(_itself, work), phase)

    def beside(self) -> DataParallel:
        other = copy(self)
        with self.naming_failures("forming a second group of all ranks"):
            deadline = timedelta(seconds=self.timeout_s)
            other._group = dist.new_group(backend=_GLOO, timeout=deadline)
        return other

    @contextmanager
    def naming_failures(self, phase: str) -> Iterator[None]:
        """Name a backend's errors, recognized by type or, for Gloo, by text; pass on others."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            if not (isinstance(error, dist.DistError) or _GLOO in text):
                raise
            self._fail(error, phase, is_late=_LATE in text.lower())

    def close(self) -> None:
        dist.destroy_process_group()
        self._leave_rendezvous()

    def _form(self, backend: str, place: RankPlace) -> None:
        form = partial(dist.init_process_group, backend, timeout=timedelta(seconds=self.timeout_s))
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
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            # Gloo's text is the only difference between a deadline and a lost connection, and it
            # is not reliable. The clock is.
            is_late = time.monotonic() - began_s >= 0.9 * self.timeout_s
            self._fail(error, phase, is_late=is_late)

    def _fail(self, error: RuntimeError, phase: str, *, is_late: bool) -> NoReturn:
        ended = self._ended(0.0 if is_late else _ENDING_S) or "a trainer rank"
        peer = f"{ended}, seen from rank {self.rank} of {self.world_size}"
        if is_late:
            raise DeadlineError(peer, phase, self.timeout_s, LATE_REMEDY) from error
        raise PeerError(peer, phase, str(error)) from error

    def _meet(self) -> list[ProcessMark]:
        """Return the ranks' processes; those on other machines are out of sight. Collective."""
        fields = stat_fields(os.getpid())
        started = float(fields[START_FIELD]) if fields else 0.0
        host = socket.gethostname()
        # Containers may have the machine's name, and processes of their own.
        here = f"{host} {_PROCESSES.stat().st_ino if _PROCESSES.exists() else ''}"
        own = [float(os.getpid()), started, float(zlib.crc32(here.encode()))]
        return [
            ProcessMark(
                f"trainer rank {rank}", int(pid), host if place == own[2] else "", int(start)
            )
            for rank, (pid, start, place) in enumerate(self.all_gather(own, FORMING))
        ]

    def _ended(self, wait_s: float) -> str:
        """Name the ranks of this machine that have ended or are stopped.

        A process closes its connections shortly before it is gone.
        """
        ends_s = time.monotonic() + wait_s
        while True:
            states = {mark.name: mark.state() for mark in self._processes}
            found = [f"{name} ({state})" for name, state in states.items() if state in _NOT_ALIVE]
            if found or time.monotonic() > ends_s:
                return ", ".join(found)
            time.sleep(_RETRY_S)

    def _make_mesh(self, size: int) -> DeviceMesh:
        """Make the groups here: those that DeviceMesh makes do not get the deadline."""
        if size == self.world_size:
            world = dist.group.WORLD
            assert world is not None
            return DeviceMesh.from_group(world, self.device_type, mesh_dim_names=(SHARD_DIM,))
        # Neighboring ranks share a copy: they are likely on one machine, with fast links.
        return self._grid_mesh(torch.arange(self.world_size).view(-1, size), (COPY_DIM, SHARD_DIM))

    def _grid_mesh(self, grid: Tensor, names: tuple[str, ...]) -> DeviceMesh:
        """Make a mesh of all ranks, whose first dimension is left out if its size is 1."""
        if grid.shape[0] == 1 and grid.ndim > 1:
            grid, names = grid[0], names[1:]
        own = []
        for dim, size in enumerate(grid.shape):
            for ranks in grid.movedim(dim, -1).reshape(-1, size):
                group = self._new_group(ranks)
                if self.rank in ranks:
                    own.append(group)
        return DeviceMesh.from_group(own, self.device_type, mesh=grid, mesh_dim_names=names)

    def _new_group(self, ranks: Tensor) -> ProcessGroup:
        """Make a group. All ranks make every group; ranks outside it get a placeholder."""
        deadline = timedelta(seconds=self.timeout_s)
        group: ProcessGroup = dist.new_group(ranks.tolist(), timeout=deadline)
        return group


def _itself(work: dist.Work) -> dist.Work:
    return work


def _has_agent_store(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun's agent listens at MASTER_ADDR:MASTER_PORT, so that no rank can."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

"""The trainer's ranks: their groups and collectives, each with a deadline.

Gradients are summed on their device. Commands and metrics always travel between CPUs over Gloo, so
that they never queue behind kernels. A failed collective is never repeated: the group is broken,
and the rank that notices it ends the run with an error that names itself and the phase.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType, HashStore
from torch.distributed.device_mesh import DeviceMesh

from services.trainer.learner.rank_rendezvous import (
    FORMING,
    LATE_REMEDY,
    RankAddress,
    RankRendezvous,
    rank_place,
)
from services.trainer.learner.rank_shares import ImageRanks, SequenceShare, TensorShare
from sluice.concurrency.process import ENDED, START_FIELD, ProcessMark, host_of_pids, stat_fields
from sluice.concurrency.waits import waiting_for
from sluice.config.parallel_layout import ParallelLayout
from sluice.device.host import outlive_collectives
from sluice.device.protocol import Device, rank_backends
from sluice.errors import DeadlineError, PeerError, SluiceError, WeightSyncError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


SHARD_DIM, COPY_DIM, TENSOR_DIM = "shard", "copy", "tensor"
"""Dimensions of the mesh that shards a model, and cuts its layers."""
EXPERT_DIM, EXPERT_SHARD_DIM = "expert", "expert_shard"
"""Dimensions of the mesh that divides its experts, and shards each of them."""

# Texts in errors of torch's backends.
_GLOO = "gloo"
_LATE = "timed out"
_RETRY_S = 0.1
_ENDING_S = 1.0
_NOT_ALIVE = ENDED | {"stopped by a signal"}


@dataclass(frozen=True, slots=True, eq=False)
class StageRanks:
    """The ranks that hold different stages and train the same rows.

    Attributes:
        ranks: their numbers among all ranks, one per stage, in order.
        number: index of this rank's stage, from 0.
    """

    ranks: tuple[int, ...]
    number: int

    @property
    def count(self) -> int:
        """Return the number of stages."""
        return len(self.ranks)

    @property
    def before(self) -> int | None:
        """Return the rank that inputs come from; None: this is the first stage."""
        return self.ranks[self.number - 1] if self.number else None

    @property
    def after(self) -> int | None:
        """Return the rank that outputs go to; None: this is the last stage."""
        return self.ranks[self.number + 1] if self.number + 1 < self.count else None


class ParallelContext:
    """Ranks that train one batch: different rows, or parts of the same rows.

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
    """This rank's part of every packed sequence; None for all of it."""
    tensor: TensorShare | None = None
    """This rank's part of every layer; None for all of it."""
    stages: StageRanks | None = None
    """The stages of the pipeline; None if this rank has all layers."""
    image_ranks: ImageRanks = ImageRanks()
    """The ranks that divide the images of their rows."""
    _layout: ParallelLayout | None = None
    _mesh: DeviceMesh | None = None

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type

    @property
    def layout(self) -> ParallelLayout:
        """Return how these ranks divide their work."""
        return self._layout or ParallelLayout(self.world_size)

    @property
    def stage_size(self) -> int:
        """Return the number of ranks of a stage."""
        return self.world_size // self.layout.pipeline

    @property
    def row_ranks(self) -> int:
        """Return the number of neighboring ranks of a stage that train the same rows."""
        return self.layout.sequence * self.layout.tensor

    @property
    def data_rank(self) -> int:
        """Return the index of this rank's share of the rows, equal for ranks that train the same
        rows."""
        return self.rank % self.stage_size // self.row_ranks

    @property
    def token_multiple(self) -> int:
        """Return the number that the packed tokens of a pass must be a multiple of."""
        return self.row_ranks if self.tensor else 1

    def divide(self, layout: ParallelLayout) -> None:
        """Form the groups of a layout of these ranks, once."""
        self._layout = layout

    def gather_rows(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """Return the numbers of each share, like `all_gather`; with several stages, those of the
        last."""
        return self.all_gather(values, phase)[-self.stage_size :: self.row_ranks]

    def sum_rows(self, values: Tensor, phase: str) -> None:
        """Sum in place over shares, whose ranks have the same values; of several stages the last
        one's count.
        """
        is_last = self.stages is None or self.stages.after is None
        if not is_last or self.rank % self.row_ranks:
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
        """Return groups of `size` ranks that share a model, or this stage's part of it.

        Args:
            size: a divisor of the number of ranks of one stage and tensor index.

        Returns:
            dimensions ``copy`` (if there are several groups), ``shard`` and, where ranks cut
            layers, ``tensor``; ``None`` if these ranks cannot share, so that each holds the whole
            model.
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

    def whole_mesh(self, size: int) -> DeviceMesh | None:
        """Return the ranks of all tensor indices that share a copy of uncut weights.

        Args:
            size: as of `shard_mesh`; a copy has `size` ranks for each tensor index.

        Returns:
            dimensions ``copy`` (if there are several) and ``shard``.
        """
        return self.shard_mesh(size)

    def expert_mesh(self, size: int) -> DeviceMesh | None:
        """Return how the ranks of a copy divide its experts; ``None``: they shard whole layers.

        If ranks cut layers, each sends different tokens to experts. So experts are sharded over all
        ranks of a copy, even if each rank has all of them.

        Args:
            size: as of `shard_mesh`; a copy has `size` ranks for each tensor index.

        Returns:
            dimensions ``copy`` (if there are several), ``expert_shard``, over which each expert is
            sharded, and ``expert``, of neighboring ranks that divide them.

        Raises:
            ConfigError: they cannot divide evenly.
        """
        replace(self.layout, shard=size)
        return None

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        phase: str,
    ) -> None:
        """Send tensors to ranks and receive some from ranks, in the same order at both ends.

        A rank without tensors may skip the call, unless it is new to the group
        (`exchange_layouts`).

        Args:
            sends: contiguous tensors and the ranks that get them.
            receives: contiguous tensors to fill and the ranks that send them.
        """
        assert not sends, phase
        assert not receives, phase

    def in_second_group(self) -> ParallelContext:
        """Return the same ranks in a separate Gloo group, for a second thread."""
        return self

    def naming_failures(self, phase: str) -> AbstractContextManager[object]:
        """Name failures of collectives that torch itself calls in the block."""
        return nullcontext()

    def close(self) -> None:
        """Leave the group of only this rank, if `shard_mesh` made one."""
        if self._mesh is not None:
            dist.destroy_process_group()
            self._mesh = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the group, unless an error ends the block.

        After an error a collective may be running: closing would wait for it until its deadline,
        and so would the other ranks. The end of the process ends it at once.
        """
        if kind is None or not issubclass(kind, Exception):
            self.close()


class TorchDistributed(ParallelContext):
    """Ranks that a launcher starts with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    They meet at a store that rank 0 opens at that address (`RankRendezvous`). If torchrun's agent
    already has a store there (TORCHELASTIC_USE_AGENT_STORE), they use that one: torch's ``env://``.

    Args:
        device: holds the gradients; determines the backend.
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
        self._meshes: dict[tuple[int | str, ...], DeviceMesh] = {}
        self._group: ProcessGroup | None = None  # all ranks, as torch forms it
        self._groups: list[ProcessGroup] = []
        backend = rank_backends(device.torch_device.type)
        if self.device_type == "cuda":
            outlive_collectives()  # so that a rank ends with an error that names the late one
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
        assert dist.group.WORLD is not None
        self._groups.append(dist.group.WORLD)
        self.rank: int = dist.get_rank()
        self.world_size: int = dist.get_world_size()
        self._processes: list[ProcessMark] = []
        self._processes = self._exchange_processes()

    def all_reduce_sum(self, tensors: Sequence[Tensor], phase: str) -> None:
        """Sum on the tensors' device, one collective per tensor."""
        for tensor in tensors:
            self._run(partial(dist.all_reduce, tensor, group=self._group, async_op=True), phase)

    def all_gather(self, values: Sequence[float], phase: str) -> list[list[float]]:
        """Gather over Gloo as float64."""
        local = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(local) for _ in range(self.world_size)]
        gather = partial(dist.all_gather, gathered, local, group=self._group, async_op=True)
        self._run(gather, phase)
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
        # Neighboring ranks share a copy: they are likely on one machine, with fast links.
        grid = self._rank_grid().unflatten(1, (-1, size, self.layout.tensor))
        names: tuple[str, ...] = (COPY_DIM, SHARD_DIM, TENSOR_DIM)
        if self.layout.tensor == 1:
            grid, names = grid.squeeze(-1), names[:2]
        return self._mesh_once(grid, names, f"{size} ranks that share a model")

    def whole_mesh(self, size: int) -> DeviceMesh:
        of_copy = size * self.layout.tensor
        grid = self._rank_grid().unflatten(1, (-1, of_copy))
        return self._mesh_once(grid, (COPY_DIM, SHARD_DIM), f"{of_copy} ranks that share a tower")

    def expert_mesh(self, size: int) -> DeviceMesh | None:
        super().expert_mesh(size)
        experts, tensor = self.layout.experts, self.layout.tensor
        if experts == tensor == 1:
            return None
        grid = self._rank_grid().unflatten(1, (-1, size * tensor // experts, experts))
        names = (COPY_DIM, EXPERT_SHARD_DIM, EXPERT_DIM)
        return self._mesh_once(grid, names, f"{experts} ranks with experts")

    def divide(self, layout: ParallelLayout) -> None:
        super().divide(layout)
        sizes = (layout.pipeline, layout.data_ranks, layout.sequence, layout.tensor)
        grid = torch.arange(self.world_size).view(sizes)
        if layout.pipeline > 1:
            stage, place = divmod(self.rank, self.world_size // layout.pipeline)
            column = grid.flatten(1)[:, place].tolist()
            self.stages = StageRanks(tuple(column), stage)
        with self.naming_failures("forming groups of the ranks that train the same rows"):
            if layout.sequence > 1:
                group, ranks = self._make_groups(grid, 2)
                self.share = SequenceShare(group, ranks.index(self.rank), len(ranks))
            if layout.tensor > 1:
                group, ranks = self._make_groups(grid, 3)
                self.tensor = TensorShare(group, ranks.index(self.rank), len(ranks))
            self.image_ranks = self._image_ranks(grid)

    def _image_ranks(self, grid: Tensor) -> ImageRanks:
        """Return the ranks of all indices of the last two dimensions, sequence and tensor."""
        share, tensor = self.share, self.tensor
        if tensor is not None and share is None:
            share = SequenceShare(tensor.group, tensor.rank, tensor.size)
        elif tensor is not None:
            group, ranks = self._make_groups(grid.flatten(2), 2)
            share = SequenceShare(group, ranks.index(self.rank), len(ranks))
        return ImageRanks(share, encodes=self.stages is None or self.stages.number == 0)

    def exchange(
        self,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
        phase: str,
    ) -> None:
        """Exchange on the tensors' devices, at once."""
        operations = [dist.P2POp(dist.isend, t, rank, self._group) for t, rank in sends]
        operations += [dist.P2POp(dist.irecv, t, rank, self._group) for t, rank in receives]
        if not operations:
            return
        peers = sorted({rank for _, rank in (*sends, *receives)})
        peer = "trainer rank " + ", ".join(map(str, peers))
        with self.naming_failures(phase, peer):
            works = dist.batch_isend_irecv(operations)
        for work in works:
            self._run(partial(_identity, work), phase, peer)

    def in_second_group(self) -> ParallelContext:
        context = copy(self)
        with self.naming_failures("forming a second group of all ranks"):
            deadline = timedelta(seconds=self.timeout_s)
            context._group = dist.new_group(backend=_GLOO, timeout=deadline)
        return context

    @contextmanager
    def naming_failures(self, phase: str, peer: str = "a trainer rank") -> Iterator[None]:
        """Name a backend's errors, recognized by type or, for Gloo, by text; pass on others.

        NCCL's watchdog gives up a late or failed collective and lets its kernels end. Results of
        this rank are invalid from then on, so that is its error, even if another or none appears.
        `peer` is named if no rank has ended.
        """
        try:
            yield
        except SluiceError:
            raise
        except Exception as error:
            given_up, text = self._watchdog_error(), str(error)
            is_backend = isinstance(error, RuntimeError) and (
                isinstance(error, dist.DistError) or _GLOO in text
            )
            if given_up is None and not is_backend:
                raise
            is_late = given_up == ErrorType.TIMEOUT or _LATE in text.lower()
            self._fail(error, phase, peer, is_late=is_late)
        if (given_up := self._watchdog_error()) is not None:
            why = RuntimeError(f"NCCL gave up a collective: {given_up.name}")
            self._fail(why, phase, peer, is_late=given_up == ErrorType.TIMEOUT)

    def close(self) -> None:
        dist.destroy_process_group()
        self._leave_rendezvous()

    def _form(self, backend: str, place: RankAddress) -> None:
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

    def _run(
        self, start: Callable[[], dist.Work | None], phase: str, peer: str = "a trainer rank"
    ) -> None:
        began_s = time.monotonic()
        try:
            work = start()
            assert work is not None
            with waiting_for("trainer ranks", phase):
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            # Only Gloo's text, which is unreliable, separates a deadline from a lost peer. Use
            # the clock.
            is_late = time.monotonic() - began_s >= 0.9 * self.timeout_s
            self._fail(error, phase, peer, is_late=is_late)

    def _watchdog_error(self) -> ErrorType | None:
        """Return why NCCL's watchdog gave up a collective of this rank; ``None`` if it did not."""
        if self.device_type != "cuda":
            return None
        device = torch.device(self.device_type)
        backends = [group._get_backend(device) for group in self._groups]
        errors = [backend.get_error() for backend in backends]
        return next((error for error in errors if error != ErrorType.SUCCESS), None)

    def _fail(self, error: Exception, phase: str, peer: str, *, is_late: bool) -> NoReturn:
        ended = self._name_ended_ranks(0.0 if is_late else _ENDING_S) or peer
        blamed = f"{ended}, seen from rank {self.rank} of {self.world_size}"
        if is_late:
            raise DeadlineError(blamed, phase, self.timeout_s, LATE_REMEDY) from error
        raise PeerError(blamed, phase, str(error)) from error

    def _exchange_processes(self) -> list[ProcessMark]:
        """Return all ranks' processes; those on other machines cannot be observed. Collective."""
        fields = stat_fields(os.getpid())
        started = float(fields[START_FIELD]) if fields else 0.0
        host = host_of_pids()
        local = [float(os.getpid()), started, float(zlib.crc32(host.encode()))]
        return [
            ProcessMark(
                f"trainer rank {rank}", int(pid), host if place == local[2] else "", int(start)
            )
            for rank, (pid, start, place) in enumerate(self.all_gather(local, FORMING))
        ]

    def _name_ended_ranks(self, wait_s: float) -> str:
        """Name the ranks of this machine that have ended or are stopped.

        A process closes its connections shortly before it is gone.
        """
        ends_s = time.monotonic() + wait_s
        while True:
            states = {mark.name: mark.state() for mark in self._processes}
            ended = [f"{name} ({state})" for name, state in states.items() if state in _NOT_ALIVE]
            if ended or time.monotonic() > ends_s:
                return ", ".join(ended)
            time.sleep(_RETRY_S)

    def _rank_grid(self) -> Tensor:
        """Return the numbers of all ranks, [stages, ranks of a stage]."""
        return torch.arange(self.world_size).view(self.layout.pipeline, -1)

    def _mesh_once(self, grid: Tensor, names: tuple[str, ...], sharing: str) -> DeviceMesh:
        """Return the mesh of a grid of all ranks, made once; all ask for grids in the same order.

        The mesh is of this rank's stage, the grid's first dimension; the second is left out if its
        size is 1.
        """
        key = (*grid.shape, *names)
        if key not in self._meshes:
            with self.naming_failures(f"forming groups of {sharing}"):
                self._meshes[key] = self._make_mesh(grid, names)
        return self._meshes[key]

    def _make_mesh(self, grid: Tensor, names: tuple[str, ...]) -> DeviceMesh:
        """Make the groups here, because groups made by DeviceMesh do not get the deadline."""
        if grid.shape[1] == 1:
            grid, names = grid[:, 0], names[1:]
        if grid.shape == (1, self.world_size):
            world = dist.group.WORLD
            assert world is not None
            return DeviceMesh.from_group(world, self.device_type, mesh_dim_names=names)
        groups = [self._make_groups(grid, dim)[0] for dim in range(1, grid.ndim)]
        stage = grid[self.stages.number if self.stages else 0].clone()
        return DeviceMesh.from_group(groups, self.device_type, mesh=stage, mesh_dim_names=names)

    def _make_groups(self, grid: Tensor, dim: int) -> tuple[ProcessGroup, list[int]]:
        """Make the groups along one dimension of all ranks; return this rank's group and its
        ranks."""
        size, own_group = grid.shape[dim], None
        for ranks in grid.movedim(dim, -1).reshape(-1, size).tolist():
            group = self._new_group(ranks)
            if self.rank in ranks:
                self._groups.append(group)
                own_group = group, ranks
        assert own_group is not None
        return own_group

    def _new_group(self, ranks: list[int]) -> ProcessGroup:
        """Make a group. All ranks make every group; ranks outside it get a placeholder."""
        deadline = timedelta(seconds=self.timeout_s)
        group: ProcessGroup = dist.new_group(ranks, timeout=deadline)
        return group


def _identity(work: dist.Work) -> dist.Work:
    return work


def _has_agent_store(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun's agent listens at MASTER_ADDR:MASTER_PORT, so that no rank can."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

"""Process groups of Gloo, NCCL and HCCL that are neither torch's default group nor registered.

A process can hold any number of them, drop one and build the next; `init_process_group` allows
neither.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from sluice.device.ascend_environment import hccl_group_config
from sluice.device.host import outlive_collectives
from sluice.device.npu import hccl_options
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_HCCL_POLL_S = 0.005
_GROUP_POLL_S = 0.0005
_LOOK_AGAIN = timedelta(milliseconds=20)
_NCCL_BLOCKS = 4
"""Thread blocks of a collective: enough for the bandwidth between a host and its GPU."""
_GLOO_LANES = 2
"""Connections and threads that move bytes. Collectives alternate between them; with one lane rank 0
copies everything to every member in one thread."""


class Work(Protocol):
    """A started collective."""

    def is_completed(self) -> bool:
        """Return whether it has ended, successfully or not."""
        ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Raise ``RuntimeError`` if it failed; return at once when it is completed.

        After `timeout` Gloo also raises and leaves the collective running; other backends give it
        up.
        """
        ...


class ProcessGroup(Protocol):
    """The part of torch's backends that a transfer needs."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> Work:
        """Start a broadcast of one tensor on the group's device."""
        ...

    def abort(self) -> None:
        """Free a communicator that hangs (NCCL, HCCL). Gloo ignores it."""
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's place in a group.

    `local_address` is the address of this host that the other members can reach. `timeout_s`
    bounds the formation and is the group's default for operations. `bucket_bytes` is the largest
    collective, for backends that keep buffers; 0 leaves those to the backend.
    """

    store: Store
    rank: int
    world_size: int
    timeout_s: float
    local_address: str
    device: torch.device
    bucket_bytes: int = 0

    @property
    def timeout(self) -> timedelta:
        """Return `timeout_s` in the form that torch takes."""
        return timedelta(seconds=self.timeout_s)


class _HcclBackend(Protocol):
    """The part of torch_npu's ProcessGroupHCCL that is used here."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> Work: ...

    def abort_hccl_comm(self, reason: str) -> None: ...


class HcclGroup:
    """A formed HCCL group: every member has arrived and the communicator exists.

    torch_npu registers its constructor with torch when it is loaded; nothing of it is imported
    here. Unlike in NCCL the first collective makes the communicator, and torch's `abort` does
    nothing: `abort_hccl_comm` does.
    """

    def __init__(self, backend: _HcclBackend) -> None:
        self._backend = backend

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> Work:
        return self._backend.broadcast(tensors, opts)

    def abort(self) -> None:
        self._backend.abort_hccl_comm("the transfer group is given up")


def create_hccl_group(membership: Membership) -> HcclGroup:
    """Construct a group and its communicator; block until all members do the same.

    HCCL gives up only after HCCL_CONNECT_TIMEOUT and 20 s (at least 140 s), whatever the
    membership's timeout. So the caller must be able to abandon the thread of this call.

    Raises:
        ConfigError: torch_npu is not loaded.
        RuntimeError: HCCL failed, or the first collective did not end within the timeout.
    """
    plugin = dist.Backend._plugins.get("HCCL")
    if plugin is None:
        raise ConfigError(
            'collective backend "hccl": not registered with torch; load torch_npu (device "npu") '
            "before forming the group"
        )
    config = hccl_group_config(membership.bucket_bytes, os.environ)
    backend: _HcclBackend = plugin.creator_fn(_options(membership), hccl_options(config))
    group = HcclGroup(backend)
    try:
        _connect(group, membership)
    except BaseException:  # only this function can free the group's communicator
        group.abort()
        raise
    return group


def _options(membership: Membership) -> _DistributedBackendOptions:
    options = _DistributedBackendOptions()
    options.store = membership.store
    options.group_rank = membership.rank
    options.group_size = membership.world_size
    options.timeout = membership.timeout
    options.group_id = "sluice-weights"
    options.global_ranks_in_group = list(range(membership.world_size))
    return options


def _connect(group: HcclGroup, membership: Membership) -> None:
    """Send one byte from rank 0 to all, to reveal faults of HCCL's network during formation."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = membership.timeout
    byte = torch.zeros(1, dtype=torch.uint8, device=membership.device)
    work = group.broadcast([byte], options)
    _wait_for(work, membership.timeout)


def _wait_for(work: Work, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"HCCL's first collective did not end within {timeout.total_seconds():g} s; check "
                "HCCL_IF_IP and HCCL_SOCKET_IFNAME on all hosts, `hccn_tool -i 0 -link -g` and "
                "sluice.weights.timeout_s"
            )
        time.sleep(_HCCL_POLL_S)
    work.wait()


def wait_briefly(work: Work, backend: str) -> None:
    """Wait at most some milliseconds for a collective, without reporting its end or error.

    The call returns at once when a collective of Gloo ends. It only polls collectives of other
    backends, because their wait with a timeout gives the collective up.
    """
    if backend != "gloo":
        time.sleep(_GROUP_POLL_S)
        return
    with contextlib.suppress(RuntimeError):
        work.wait(_LOOK_AGAIN)


def create_process_group(backend: str, membership: Membership) -> ProcessGroup:
    """Construct a group; block until all members do the same or the timeout passes.

    Raises:
        ConfigError: the backend is unknown or not in this build of torch.
        RuntimeError: a member is missing or a connection fails.
    """
    if backend not in _FACTORIES:
        raise ConfigError(
            f'collective backend "{backend}": unknown; use one of {", ".join(sorted(_FACTORIES))}'
        )
    return _FACTORIES[backend](membership)


def _gloo(membership: Membership) -> ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    # Bind to the address that reaches the rendezvous. Gloo would take what the host's name resolves
    # to, which peers of many machines and containers cannot reach.
    options._devices = [
        dist.ProcessGroupGloo.create_device(hostname=membership.local_address)
        for _ in range(_GLOO_LANES)
    ]
    options._timeout = membership.timeout
    options._threads = _GLOO_LANES
    group = dist.ProcessGroupGloo(membership.store, membership.rank, membership.world_size, options)
    return cast("ProcessGroup", group)


def _nccl(membership: Membership) -> ProcessGroup:
    if not dist.is_nccl_available():
        raise ConfigError(
            f'collective backend "nccl": torch {torch.__version__} is built without NCCL; install '
            'a CUDA build, or use the device "cpu" with "gloo"'
        )
    outlive_collectives()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = membership.timeout
    # A member has a group for each trainer rank that sends, all at work at the same time. Their
    # blocks have to fit a GPU: groups that wait for each other's space would never end.
    options.config.max_ctas = _NCCL_BLOCKS
    group = dist.ProcessGroupNCCL(membership.store, membership.rank, membership.world_size, options)
    # Create the communicator now: otherwise a missing member would show in the first collective
    # instead of in the formation.
    group.eager_connect_single_device(membership.device)
    return cast("ProcessGroup", group)


_FACTORIES: dict[str, Callable[[Membership], ProcessGroup]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "hccl": create_hccl_group,
}

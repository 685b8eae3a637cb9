"""A stand-alone group of HCCL, through the constructor that torch_npu registers with torch.

torch_npu makes its backend known to torch when it is loaded, so that nothing of it is imported
here. What its groups do otherwise than NCCL's: the communicator is made by the first collective;
torch's `abort` does nothing, `abort_hccl_comm` does.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from sluice.device.ascend_environment import hccl_group_config
from sluice.device.npu import hccl_options
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from datetime import timedelta

    from sluice.weights.membership import Membership, Work

_POLL_S = 0.005


class _HcclBackend(Protocol):
    """What is used of torch_npu's ProcessGroupHCCL."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> Work: ...

    def abort_hccl_comm(self, reason: str) -> None: ...


class HcclGroup:
    """A formed group: every member was there and the communicator exists."""

    def __init__(self, backend: _HcclBackend) -> None:
        self._backend = backend

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> Work:
        """Start a broadcast of one tensor on the group's device."""
        return self._backend.broadcast(tensors, opts)

    def abort(self) -> None:
        """Free a communicator that hangs."""
        self._backend.abort_hccl_comm("the transfer group is given up")


def create_hccl_group(membership: Membership) -> HcclGroup:
    """Construct a group and its communicator; blocks until all members do the same.

    HCCL itself gives up after HCCL_CONNECT_TIMEOUT and 20 s (at least 140 s), whatever the
    membership's timeout; whoever calls this must be able to leave it behind.

    Raises:
        ConfigError: torch_npu is not loaded.
        RuntimeError: HCCL's, or the first collective did not end within the timeout.
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
    except BaseException:  # nobody else knows of it, to free its communicator
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
    """One byte from rank 0 to all: what is wrong with HCCL's network shows in the formation."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = membership.timeout
    byte = torch.zeros(1, dtype=torch.uint8, device=membership.device)
    work = group.broadcast([byte], options)
    _await(work, membership.timeout)


def _await(work: Work, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"HCCL's first collective did not end within {timeout.total_seconds():g} s; check "
                "HCCL_IF_IP and HCCL_SOCKET_IFNAME on all hosts, `hccn_tool -i 0 -link -g` and "
                "sluice.weights.timeout_s"
            )
        time.sleep(_POLL_S)
    work.wait()

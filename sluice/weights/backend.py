"""Process groups that stand alone: not torch's default group, not registered anywhere.

A process can hold any number of them, drop one and build the next; `init_process_group` allows
neither. Groups of Gloo, NCCL and HCCL are made here and used the same way everywhere else.

By torch's default a timeout of NCCL ends the process, which must outlive its transfer groups. So
``TORCH_NCCL_ASYNC_ERROR_HANDLING=2`` is set before the first, unless the environment says something
else; for HCCL see `sluice.device.ascend_environment`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from sluice.errors import ConfigError
from sluice.weights.hccl_group import create_hccl_group
from sluice.weights.membership import Membership, ProcessGroup, Work

_GLOO_LANES = 2
"""Of connections and threads that move bytes. Collectives take turns on them, and with one lane
rank 0 copies everything to everybody in one thread."""

_LOOK_AGAIN = timedelta(milliseconds=20)
_POLL_S = 0.0005


def wait_a_little(work: Work, backend: str) -> None:
    """Wait for a collective for some milliseconds at most; neither its end nor its error is told.

    It returns at once when a collective of Gloo ends. Those of other backends are only looked at
    now and then, since their wait with a timeout ends the collective.
    """
    if backend != "gloo":
        time.sleep(_POLL_S)
        return
    with contextlib.suppress(RuntimeError):
        work.wait(_LOOK_AGAIN)


def create_process_group(backend: str, membership: Membership) -> ProcessGroup:
    """Construct a group; blocks until all members do the same or the timeout passes.

    Raises:
        ConfigError: the backend is unknown or not in this build of torch.
        RuntimeError: torch's, when a member is missing or a connection fails.
    """
    if backend not in _FACTORIES:
        raise ConfigError(
            f'collective backend "{backend}": unknown; use one of {", ".join(sorted(_FACTORIES))}'
        )
    return _FACTORIES[backend](membership)


def _gloo(membership: Membership) -> ProcessGroup:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in the stubs
    # Bound to the address that reaches the rendezvous: Gloo's own choice is what the host's name
    # resolves to, which on many machines and containers is not reachable or not loopback.
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
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = membership.timeout
    group = dist.ProcessGroupNCCL(membership.store, membership.rank, membership.world_size, options)
    # Otherwise the communicator is only created by the first collective, and a missing member
    # would show there instead of in the formation.
    group.eager_connect_single_device(membership.device)
    return cast("ProcessGroup", group)


_FACTORIES: dict[str, Callable[[Membership], ProcessGroup]] = {
    "gloo": _gloo,
    "nccl": _nccl,
    "hccl": create_hccl_group,
}

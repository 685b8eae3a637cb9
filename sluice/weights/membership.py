"""What forms a process group and what a formed one offers, whatever the backend."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import Store


class Work(Protocol):
    """A collective that was started."""

    def is_completed(self) -> bool:
        """Whether it ended, well or not."""
        ...

    def wait(self, timeout: timedelta = ...) -> bool:
        """Raise ``RuntimeError`` if it failed; returns at once when it is completed.

        Gloo's also raises after `timeout` and leaves the collective as it is; those of other
        backends give the collective up then.
        """
        ...


class ProcessGroup(Protocol):
    """The part of torch's backends that a transfer needs."""

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> Work:
        """Start a broadcast of one tensor on the group's device."""
        ...

    def abort(self) -> None:
        """Free a communicator that hangs (NCCL, HCCL); Gloo ignores it."""
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
        """`timeout_s` as torch wants it."""
        return timedelta(seconds=self.timeout_s)

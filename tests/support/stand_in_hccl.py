"""A backend called ``hccl`` whose groups are Gloo's, registered with torch as torch_npu does it.

What it shares with the real one: the way it is made, broadcasts whose wait has no timeout, an
`abort` that does nothing, and an `abort_hccl_comm`. What it does not share: everything that the
hardware does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from sluice.device.cpu import CpuDevice
from sluice.weights.backend import Membership, Work, create_process_group


class StandInNpu(CpuDevice):
    """The CPU, under the name and with the collectives of an NPU."""

    name = "npu:0"
    collective_backend = "hccl"


class FakeNpus:
    """``torch_npu.npu`` of a host with some NPUs; takes note of what is done."""

    def __init__(self, count: int = 2, *, bfloat16: bool = True) -> None:
        self.count, self.bfloat16 = count, bfloat16
        self.current: int | None = None
        self.device_name = "Ascend910B3"
        self.emptied: list[int | None] = []
        self.streams: list[tuple[int | None, str]] = []
        self.peaks = {index: 20 + index for index in range(count)}

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def set_device(self, device: int) -> None:
        self.current = device

    def Stream(self, device: int, priority: int = 0) -> str:
        return f"stream of {device}, priority {priority}"

    def set_stream(self, stream: str) -> None:
        self.streams.append((self.current, stream))

    def synchronize(self, device: int) -> None:
        assert device == self.current

    def max_memory_allocated(self, device: int) -> int:
        return self.peaks[device]

    def max_memory_reserved(self, device: int) -> int:
        return 2 * self.peaks[device]

    def reset_peak_memory_stats(self, device: int) -> None:
        self.peaks[device] = 1

    def empty_cache(self) -> None:
        self.emptied.append(self.current)

    def is_bf16_supported(self) -> bool:
        return self.bfloat16

    def get_device_name(self, device: int) -> str:
        assert device < self.count
        return self.device_name


@dataclass
class GroupOptions:
    """torch_npu's ProcessGroupHCCL.Options."""

    hccl_config: dict[str, int] = field(default_factory=dict)


def fake_torch_npu(runtime: FakeNpus) -> ModuleType:
    """The package as far as sluice looks into it."""
    package = ModuleType("torch_npu")
    parts: Any = package
    parts.npu = runtime
    parts._C = ModuleType("torch_npu._C")
    parts._C._distributed_c10d = ModuleType("torch_npu._C._distributed_c10d")
    backend = type("ProcessGroupHCCL", (), {"Options": GroupOptions})
    GroupOptions.hccl_config = {}  # pybind's are attributes of the class
    parts._C._distributed_c10d.ProcessGroupHCCL = backend
    return package


class StandInGroup:
    """Gloo's group with HCCL's ways."""

    def __init__(self, options: Any, group_options: GroupOptions | None) -> None:
        self.options, self.group_options = options, group_options
        self.broadcast_bytes: list[int] = []
        self.aborted: list[str] = []
        membership = Membership(
            store=options.store,
            rank=options.group_rank,
            world_size=options.group_size,
            timeout_s=options.timeout.total_seconds(),
            local_address="127.0.0.1",
            device=torch.device("cpu"),
        )
        self._gloo = create_process_group("gloo", membership)

    def broadcast(self, tensors: list[torch.Tensor], opts: dist.BroadcastOptions) -> Work:
        self.broadcast_bytes.append(tensors[0].numel())
        return self._gloo.broadcast(tensors, opts)

    def abort(self) -> None:
        """As torch's base class has it: nothing happens."""

    def abort_hccl_comm(self, reason: str) -> None:
        self.aborted.append(reason)


def register_stand_in() -> list[StandInGroup]:
    """Registers the backend as torch_npu does; the groups made since. Undo: `forget_stand_in`."""
    made: list[StandInGroup] = []

    def create(options: Any, group_options: GroupOptions | None) -> StandInGroup:
        made.append(StandInGroup(options, group_options))
        return made[-1]

    dist.Backend.register_backend("hccl", create, extended_api=True, devices=["npu"])
    return made


def forget_stand_in() -> None:
    """Torch as it was."""
    kinds = dist.Backend
    del kinds._plugins["HCCL"], kinds.backend_type_map["hccl"], kinds.backend_capability["hccl"]
    kinds.default_device_backend_map.pop("npu", None)
    kinds.backend_list.remove("hccl")
    del kinds.HCCL  # type: ignore[attr-defined]  # made by registering

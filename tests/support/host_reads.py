"""Find where the host waits for a device, on the CPU: reads of a tensor's values, and of sizes that
depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_READS = {
    _ATEN._local_scalar_dense,
    _ATEN.nonzero,
    _ATEN.equal,
    _ATEN.masked_select,
    _ATEN._unique2,
    _ATEN.unique_consecutive,
    _ATEN.bincount,
}
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}
_COPIES = {Tensor.cpu, Tensor.numpy, Tensor.tolist}


class HostReads(TorchDispatchMode):
    """The reads while it is entered and `is_watching`, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.is_watching = False
        self._stack = ExitStack()

    def __enter__(self) -> HostReads:
        super().__enter__()
        self._stack.enter_context(_Copies(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        super().__exit__(*error)

    def note(self, name: object) -> None:
        if self.is_watching:
            self.found.append(str(name))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        packet = func.overloadpacket
        by_mask = packet in _INDEXING and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        by_counts = packet is _ATEN.repeat_interleave and "output_size" not in (kwargs or {})
        if packet in _READS or by_mask or by_counts:
            self.note(func)
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    """On the CPU a copy to the host is none, so it is seen only by its name."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _COPIES:
            self._reads.note(func)
        return func(*args, **(kwargs or {}))

"""The memory that tensors take while a block runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MadeBytes(TorchDispatchMode):
    """The largest number of bytes of all tensors made under it that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        # A view of an older tensor is not new.
        older = {t.untyped_storage()._cdata for t in tree_leaves(args) if torch.is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not torch.is_tensor(tensor) or tensor.is_meta:
                continue
            if tensor.untyped_storage()._cdata in older:
                continue
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen.add(storage)
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return result

    def _free(self, size: int) -> None:
        self._now -= size

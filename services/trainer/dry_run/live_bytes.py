"""Count the bytes of live storages and the bytes that collectives move.

It counts real and fake tensors alike, so that a plan can be compared with a real rank.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# Collectives, by the names that reports use.
_COLLECTIVES = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
}


_FUNCTIONAL_SUM = torch.ops._c10d_functional.all_reduce.default


class LiveBytes(TorchDispatchMode):
    """Counts within its block; storages made before it count from their first use.

    Attributes:
        live: bytes alive now.
        peak: most bytes alive at once since `reset`.
        moved: bytes of collectives' results on this rank since `reset`, by kind.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.moved: Counter[str] = Counter()
        self._keys: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._sizes: dict[int, int] = {}
        self._num_storages = 0
        self._resize: Any = None

    def reset(self) -> None:
        """Count the peak and the moved bytes from now on."""
        self.peak = self.live
        self.moved.clear()

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - an operator of torch
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operator returns
        kind = _COLLECTIVES.get(func.overloadpacket.__name__) if func.namespace == "c10d" else None
        if kind is not None:
            return self._move(kind, func, args)
        result = func(*args, **(kwargs or {}))
        if func is _FUNCTIONAL_SUM and not isinstance(result, FakeTensor):  # see `_move`
            result = torch.ops._c10d_functional.wait_tensor(result).clone()
        if func.namespace == "prim":  # half of all calls ask fake tensors for their device
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._track(_unwrap(leaf).untyped_storage())
        return result

    def __enter__(self) -> LiveBytes:
        # FSDP frees gathered weights by setting the size of their storage to 0.
        resize, self._resize = torch.UntypedStorage.resize_, torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> object:  # noqa: ANN401 - storage is C's own type
            result: object = resize(storage, size)
            self._set_size(self._keys.get(storage), size)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _move(self, kind: str, func: Any, args: tuple[Any, ...]) -> Any:  # noqa: ANN401
        """Run a collective, a real one to its end, without counting its internal copies.

        A thread of gloo frees its tensors only some time after the collective has ended, and a wait
        for a sum that ranks divide would count the copy that gloo makes.
        """
        results = [tensor for tensor in tree_leaves(args[0]) if isinstance(tensor, Tensor)]
        self.moved[kind] += sum(tensor.numel() * tensor.element_size() for tensor in results)
        if isinstance(results[0], FakeTensor):
            return func(*args)
        copies = tree_map_only(Tensor, Tensor.clone, args)
        result = func(*copies)
        work = result[-1] if isinstance(result, tuple | list) else result
        dist.Work.unbox(work).wait()
        done = torch._C._distributed_c10d.FakeWork().boxed()
        for original, copied in zip(tree_leaves(args), tree_leaves(copies), strict=True):
            if isinstance(original, Tensor):
                original.copy_(copied)
        return (*result[:-1], done) if isinstance(result, tuple | list) else done

    def _track(self, storage: Any) -> None:  # noqa: ANN401
        if storage not in self._keys:
            self._num_storages += 1
            key = self._keys[storage] = self._num_storages
            self._sizes[key] = 0
            weakref.finalize(storage, self._free, key)
            self._set_size(key, storage.nbytes())

    def _set_size(self, key: int | None, size: int) -> None:
        if key in self._sizes:
            self.live += size - self._sizes[key]
            self._sizes[key] = size
            self.peak = max(self.peak, self.live)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)


def _unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor that a wrapper holds: a wrapper has no storage of its own."""
    while isinstance(tensor, DTensor | AsyncCollectiveTensor):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.elem
    return tensor

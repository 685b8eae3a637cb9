"""A second device on a machine without one, so that tensors of two devices can meet.

Its tensors say that they are on `SECOND`, but hold values in host memory. An operation on them and
on host tensors raises, as it does on a GPU; host tensors of one number may take part in
arithmetic, but not in `stack` or `cat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from sluice.device.cpu import CpuDevice

SECOND = torch.device("meta")  # the only other device that this build's autograd knows
_ATEN = torch.ops.aten
_JOINS = {_ATEN.cat, _ATEN.stack}
_COPIES = {_ATEN._to_copy, _ATEN.copy_}


class SecondDevice(CpuDevice):
    """What trains on it."""

    name = "second"

    @property
    def torch_device(self) -> torch.device:
        return SECOND


class _OnSecond(Tensor):
    """A tensor there."""

    held: Tensor

    @staticmethod
    def __new__(cls: type[_OnSecond], held: Tensor) -> _OnSecond:
        made = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=SECOND,
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"_OnSecond({self.held})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def second_device() -> Iterator[None]:
    """Let tensors be made there while it is entered."""
    with _Factories(), _Calls():
        yield


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """What torch does above its dispatcher: values of a list, which it does not put on SECOND."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist:
            return args[0].cpu().tolist()
        if func is torch.tensor:
            device = kwargs.pop("device", None)
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    there = [one for one in tensors if isinstance(one, _OnSecond)]
    _check(func, tensors, there)
    is_there = bool(there)
    given = kwargs.get("device")
    if given is not None:
        is_there = torch.device(given) == SECOND
        kwargs = {**kwargs, "device": torch.device("cpu")}
    held = tree_map_only(_OnSecond, lambda one: one.held, (args, kwargs))
    found = func(*held[0], **held[1])
    if not is_there or (func.overloadpacket is _ATEN.copy_ and not isinstance(args[0], _OnSecond)):
        return found
    if func.overloadpacket is _ATEN._unsafe_view:  # shares memory, which autograd must not miss
        found = found.clone()
    found = tree_map_only(Tensor, _OnSecond, found)
    return return_and_correct_aliasing(func, args, kwargs, found)


def _check(func: Any, tensors: Sequence[Tensor], there: Sequence[Tensor]) -> None:
    if not there or len(there) == len(tensors) or func.overloadpacket in _COPIES:
        return
    joins = func.overloadpacket in _JOINS
    if any(not isinstance(one, _OnSecond) and (one.ndim or joins) for one in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")

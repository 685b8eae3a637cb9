"""Offload tensors to host memory while nothing computes with them.

A tensor stays the same object: only its storage is emptied and filled again, as FSDP2 does with
gathered weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostMemory:
    """Copies of tensors that are offloaded from their device."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def move_out(self, tensors: Iterable[Tensor], *, wait: bool = True) -> None:
        """Copy tensors to the host and free their device memory; repeating the call is harmless.

        Args:
            tensors: whole or sharded, each with storage of its own.
            wait: wait until the copies are complete. Otherwise they are complete when the device's
                current stream is, and must not be read before.
        """
        for tensor in tensors:
            local = _local(tensor)
            storage = local.untyped_storage()
            # On the CPU it stays, since numpy may refer to it to write a checkpoint.
            if id(tensor) in self._copies or not storage.nbytes() or not storage.resizable():
                continue
            content = _bytes(local)
            # Pinned, for copies at bus speed. Only CUDA keeps dropped pinned memory until its
            # copies are complete: elsewhere copies block.
            pinned = local.device.type == "cuda"
            copy = torch.empty(content.shape, dtype=torch.uint8, pin_memory=pinned)
            copy.copy_(content, non_blocking=not wait and pinned)
            if not wait and local.device.type != "cpu":  # the memory is free after the copy
                local.record_stream(torch.get_device_module(local.device).current_stream())
            self._copies[id(tensor)] = (tensor, copy)  # keeps the tensor's id from being reused
            storage.resize_(0)

    def bring_back(self, tensors: Iterable[Tensor], *, wait: bool = True) -> None:
        """Restore the memory and values of tensors; skip those that are not offloaded.

        Args:
            wait: wait until the values are restored. Otherwise they are when the device's current
                stream reaches this call.
        """
        for tensor in tensors:
            if id(tensor) in self._copies:
                _, copy = self._copies.pop(id(tensor))
                local = _local(tensor)
                local.untyped_storage().resize_(copy.numel())
                _bytes(local).copy_(copy, non_blocking=not wait and copy.is_pinned())

    def read(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor, or its copy if the tensor is offloaded.

        It is valid until the tensor is next moved or changed.
        """
        local = _local(tensor)
        if id(tensor) not in self._copies:
            return local
        _, copy = self._copies[id(tensor)]
        flat = copy.view(local.dtype)
        return flat.as_strided(local.shape, local.stride(), local.storage_offset())

    @contextmanager
    def on_host(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Keep tensors on the host inside the block."""
        self.move_out(tensors)
        try:
            yield
        finally:
            self.bring_back(tensors)

    @contextmanager
    def on_device(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Restore offloaded tensors to their device inside the block."""
        offloaded = [tensor for tensor in tensors if id(tensor) in self._copies]
        self.bring_back(offloaded)
        try:
            yield
        finally:
            self.move_out(offloaded)

    def forget(self) -> None:
        """Drop all copies; their tensors must be out of use."""
        self._copies.clear()


def _local(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def _bytes(tensor: Tensor) -> Tensor:
    """Return a view of all bytes of a tensor's storage."""
    content = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return content.set_(tensor.untyped_storage())

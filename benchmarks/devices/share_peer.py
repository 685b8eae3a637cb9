"""A worker of a vendor's engine, scripted: its model loads as vendors' models do, and computes
nothing. Everything else, from the share that it finds to its last digest, is sluice's own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.peers import serve
from services.rollout.engines.vendor_engines.share_recorder import (
    ShareLoading,
    meta_copy,
    record_share,
)
from services.rollout.engines.weight_inbox import WeightInbox
from sluice.device.cpu import CpuDevice
from sluice.types import TensorSpec, TransferGroupSpec
from sluice.weights.plan import torch_dtype

_ROWS = re.compile(r"embed|head|(q|k|v|gate|up)_proj$")
_COLUMNS = re.compile(r"(o|down)_proj$")
_KIB = 1024


class ScriptedModel(torch.nn.Module):
    """The part of a rank of all tensors, by their names in files."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], rank: int, ranks: int) -> None:
        super().__init__()
        self._rank, self._ranks = rank, ranks
        self._own = torch.nn.ParameterDict()
        for name, tensor in tensors.items():
            part = torch.ones(self._part(name, tensor).shape, dtype=tensor.dtype)
            self._own[name.replace(".", "-")] = torch.nn.Parameter(part, requires_grad=False)

    def _part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        dimension = 0 if _ROWS.search(name) else 1 if _COLUMNS.search(name) else None
        if dimension is None:
            return tensor
        size = tensor.shape[dimension] // self._ranks
        return tensor.narrow(dimension, self._rank * size, size)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Copy the rank's part of each tensor, as it comes."""
        for name, tensor in weights:
            self._own[name.replace(".", "-")].data.copy_(self._part(name, tensor))


def in_files(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors as files have them: one for each expert, gate and up apart."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        block, of_experts, kind = name.partition("experts.")
        if not of_experts:
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor.unbind()):
            halves = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for its_kind, half in zip(kinds, halves, strict=True):
                found[f"{block}experts.{number}.{its_kind}"] = half
    return found


class _Worker:
    async def begin(
        self, tensors: list[dict[str, Any]], rank: int, ranks: int
    ) -> dict[str, object]:
        """Make the model; answer the share that its loader reads."""
        specs = msgspec.convert(tensors, tuple[TensorSpec, ...])
        wholes = {
            spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            for spec in specs
        }
        self._model = ScriptedModel(in_files(wholes), rank, ranks)
        copy: Any = meta_copy(
            self._model,
            lambda module, _: (
                {
                    name: one.to("meta")
                    for name, one in module._parameters.items()
                    if one is not None
                },
                {},
            ),
        )
        share = record_share(copy.load_weights, specs, in_files)
        self._loading = ShareLoading(specs, share, in_files)
        self._inbox = WeightInbox(CpuDevice(), share=share)
        return {"share": msgspec.to_builtins(share)}

    async def rest(self) -> dict[str, int]:
        """Answer the process's memory in bytes, without files that are mapped to it; the peak
        begins here.
        """
        _forget_peak()
        return {"bytes": _status("VmRSS") - _status("RssFile")}

    async def peak(self) -> dict[str, int]:
        """Answer the most memory in bytes since `rest`; pages of code come late and count not."""
        return {"bytes": _status("VmHWM") - _status("RssFile")}

    async def join(self, spec: dict[str, Any]) -> dict[str, str]:
        """Join an epoch."""
        decoded = msgspec.convert(spec, TransferGroupSpec)
        return {"digest": await asyncio.wrap_future(self._inbox.join(decoded))}

    async def stage(self, version: int) -> dict[str, object]:
        """Receive a version."""
        staged = await asyncio.wrap_future(self._inbox.stage(self._inbox.epoch, version))
        return msgspec.to_builtins(staged)  # type: ignore[no-any-return]

    async def commit(self, version: int, digest: str) -> None:
        """Load the staged version into the model."""
        staged = self._inbox.staged_weights(self._inbox.epoch, version, digest)
        self._model.load_weights(self._loading.tensors(staged))
        self._inbox.release(staged)

    async def close(self) -> None:
        """Leave the epoch."""
        self._inbox.close()


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) * _KIB


if __name__ == "__main__":
    asyncio.run(serve(_Worker()))

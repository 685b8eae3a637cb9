"""The weights of a replica of four workers: what each of them receives and holds."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import msgspec

from benchmarks.parts import Part
from benchmarks.peers import PeerProcess
from benchmarks.reporting import print_line
from sluice.device.cpu import CpuDevice
from sluice.types import TensorSpec
from sluice.weight_share import WeightShare
from sluice.weights.digest import combined_digest
from sluice.weights.plan import WeightBuffer, plan_transfer
from sluice.weights.sender import BroadcastReport, WeightSender

_WORKERS, _LAYERS, _HIDDEN, _WIDTH, _VOCABULARY, _EXPERTS = 4, 12, 1024, 4096, 16_000, 8
_BUCKET_BYTES, _TIMEOUT_S, _DTYPE, _ITEM_BYTES = 16 << 20, 120.0, "bfloat16", 2
_NEVER = threading.Event()
_CHANGED = 0.005  # of the weights, between two versions


def _model_specs() -> Iterator[TensorSpec]:
    """Yield the tensors of a decoder; every third layer has experts instead of a wide network."""

    def spec(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, _DTYPE, shape)

    yield spec("embed", _VOCABULARY, _HIDDEN)
    for layer in range(_LAYERS):
        block = f"layers.{layer}."
        yield spec(f"{block}norm", _HIDDEN)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield spec(f"{block}{name}", _HIDDEN, _HIDDEN)
        if layer % 3 == 2:
            part = _WIDTH // _EXPERTS
            yield spec(f"{block}experts.gate_up_proj", _EXPERTS, 2 * part, _HIDDEN)
            yield spec(f"{block}experts.down_proj", _EXPERTS, _HIDDEN, part)
            continue
        yield spec(f"{block}gate_proj", _WIDTH, _HIDDEN)
        yield spec(f"{block}up_proj", _WIDTH, _HIDDEN)
        yield spec(f"{block}down_proj", _HIDDEN, _WIDTH)
    yield spec("norm", _HIDDEN)
    yield spec("head", _VOCABULARY, _HIDDEN)


class _Replica:
    """A sender and the workers of one replica."""

    def __init__(self, workers: Sequence[PeerProcess], specs: tuple[TensorSpec, ...]) -> None:
        self._workers, self._specs = workers, specs
        self._sender = WeightSender(
            device=CpuDevice(), bucket_bytes=_BUCKET_BYTES, timeout_s=_TIMEOUT_S
        )
        self._plan = plan_transfer(specs, 4096)
        self._sent: tuple[BroadcastReport, WeightBuffer] | None = None
        self._version = 0

    def form(self, shares: Sequence[WeightShare]) -> None:
        spec = self._sender.form_group(1, ["replica"], self._specs, {"replica": shares})["replica"]
        for rank, worker in enumerate(self._workers):
            worker.send("join", spec=msgspec.to_builtins(spec.of_worker(rank)))
        self._sender.join(_NEVER)
        for worker in self._workers:
            worker.answer()

    def update(self, *, sparse: bool) -> list[dict[str, Any]]:
        """Send, compare and load the next version; return what the workers said of it."""
        self._version += 1
        weights, update = self._next(), None
        if sparse and self._sent is not None:
            report, old = self._sent
            update = self._sender.encode_update(report.bases, old, weights, _NEVER)
            assert update is not None
        for worker in self._workers:
            worker.send("stage", version=self._version)
        report = self._sender.broadcast(weights, self._version, _NEVER, update)
        staged = [worker.answer() for worker in self._workers]
        parts = {name: bytes.fromhex(one) for each in staged for name, one in each["parts"].items()}
        assert {combined_digest(parts)} == {*report.digests.values()}
        for worker, one in zip(self._workers, staged, strict=True):
            worker.send("commit", version=self._version, digest=one["digest"])
        for worker in self._workers:
            worker.answer()
        self._sent = report, weights
        return staged

    def _next(self) -> WeightBuffer:
        weights = WeightBuffer(self._plan)
        for name, tensor in weights.tensors.items():
            if self._sent is None:
                tensor.normal_(std=0.02)
                continue
            flat = tensor.copy_(self._sent[1].tensors[name]).view(-1)
            flat[:: round(1 / _CHANGED)] *= 1.01
        return weights

    def close(self) -> None:
        self._sender.close()


def measure() -> Mapping[str, Any]:
    """Let a replica of four worker processes take three versions over gloo: all, changes, all."""
    specs = tuple(_model_specs())
    total = _ITEM_BYTES * sum(math.prod(spec.shape) for spec in specs)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(closing(PeerProcess("benchmarks.devices.share_peer")))
            for _ in range(_WORKERS)
        ]
        for rank, worker in enumerate(workers):
            tensors = msgspec.to_builtins(specs)
            worker.send("begin", tensors=tensors, rank=rank, ranks=_WORKERS)
        shares = [msgspec.convert(worker.answer()["share"], WeightShare) for worker in workers]
        replica = stack.enter_context(closing(_Replica(workers, specs)))
        rest = [int(worker.call("rest")["bytes"]) for worker in workers]
        replica.form(shares)
        staged = [replica.update(sparse=sparse) for sparse in (False, True, False)]
        peak = [int(worker.call("peak")["bytes"]) for worker in workers]
    received = [int(one["received_bytes"]) for one in staged[0]]
    shares_bytes = [plan_transfer(specs, 4096, share).total_bytes for share in shares]
    held = [most - before for most, before in zip(peak, rest, strict=True)]
    print_line(
        json.dumps(
            {
                "model_mb": total >> 20,
                "received_mb": [one >> 20 for one in received],
                "changes_mb": [int(one["received_bytes"]) >> 20 for one in staged[1]],
                "held_mb": [one >> 20 for one in held],
            }
        )
    )
    return {
        "bytes_share_ratio": max(received) / (total / _WORKERS),
        "host_share_ratio": max(one / share for one, share in zip(held, shares_bytes, strict=True)),
    }


PART = Part(lambda _: measure(), most={"bytes_share_ratio": 1.1, "host_share_ratio": 1.2})

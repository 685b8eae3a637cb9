"""`make bench-sync`: what bringing new weights to the replicas costs.

Real processes with the torch engine receive a random Llama. Printed last is one JSON object:

bytes_ratio     bytes of an update sent as its changes over bytes of all weights, by learning rate
stall_ratio     seconds in which a generating replica draws no token for a swap, over seconds of a
                transfer of all weights
dense_vs_gloo   seconds of a transfer of all weights over those of one bare broadcast of
                torch.distributed, same bytes and processes
digest_overhead share of a transfer of all weights that goes into proving it
join_s          from a replica with an empty engine to one that serves, its process being up
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import msgspec
import torch
import torch.distributed as dist
from transformers import LlamaConfig

from benchmarks.reporting import ROOT, alternate, print_line
from benchmarks.sync.bytes_ratio import bytes_ratios
from benchmarks.sync.peer import NoDigest
from sluice.config.schema.service import WeightsConfig
from sluice.device.cpu import CpuDevice
from sluice.types import TensorSpec
from sluice.weights import transfer
from sluice.weights.plan import WeightBuffer, plan_transfer
from sluice.weights.sender import WeightSender

RATES = (3e-7, 1e-6, 3e-6, 1e-5)
_NEVER = threading.Event()
_TIMEOUT_S = 60.0


class Replica:
    """A process of `peer`: send a call, then wait for its answer."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sync.peer"],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, op: str, **arguments: object) -> None:
        """Begins an operation."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What came of the oldest operation that was not asked about."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a replica of the benchmark ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def call(self, op: str) -> None:
        """Both."""
        self.send(op)
        self.answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


class Fleet:
    """Rank 0, its replicas and the weights."""

    def __init__(self, sender: WeightSender, replicas: Sequence[Replica], folder: Path) -> None:
        self.sender, self.replicas = sender, replicas
        for replica in replicas:
            replica.send("start", folder=str(folder))
        layouts = [replica.answer()["layout"] for replica in replicas]
        specs = tuple(msgspec.convert(spec, TensorSpec) for spec in layouts[0])
        self._specs = tuple(TensorSpec(s.name, "bfloat16", s.shape) for s in specs)
        self.weights = WeightBuffer(plan_transfer(self._specs, 4096))
        for tensor in self.weights.tensors.values():
            tensor.normal_(std=0.02)
        self._epoch, self._version = 0, 0

    def form(self, replicas: Sequence[Replica]) -> None:
        """Form an epoch of some of the replicas."""
        self._epoch += 1
        self._members = replicas
        names = [f"r{index}" for index in range(len(replicas))]
        specs = self.sender.form_group(self._epoch, names, self._specs)
        for name, replica in zip(names, replicas, strict=True):
            replica.send("join", spec=msgspec.to_builtins(specs[name]))
        self.sender.join(_NEVER)
        for replica in replicas:
            replica.answer()

    def update(self, *, digest: bool = True) -> tuple[float, float]:
        """Seconds until all members have staged all weights; the longest stall of their commit."""
        self._version += 1
        began_s = time.perf_counter()
        for replica in self._members:
            replica.send("stage", epoch=self._epoch, version=self._version, digest=digest)
        report = self.sender.broadcast(self.weights, self._version, _NEVER)
        answers = [replica.answer() for replica in self._members]
        seconds = time.perf_counter() - began_s
        assert all(answer["digest"] == report.digest for answer in answers)
        for replica in self._members:
            replica.send("commit", epoch=self._epoch, version=self._version, digest=report.digest)
        return seconds, max(float(replica.answer()["stall_s"]) for replica in self._members)

    def meet(self) -> None:
        """Make a default process group of torch.distributed with all replicas."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        size, num_bytes = len(self.replicas) + 1, self.weights.plan.total_bytes
        for rank, replica in enumerate(self.replicas, start=1):
            replica.send("meet", port=port, rank=rank, size=size, num_bytes=num_bytes)
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=size)
        for replica in self.replicas:
            replica.answer()
        # Written to: memory that never was is one page of zeros, which stays in the cache.
        self._bare = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)

    def bare_broadcast(self) -> float:
        """Seconds until all replicas have the same bytes from a bare broadcast."""
        began_s = time.perf_counter()
        for replica in self.replicas:
            replica.send("bare")
        dist.broadcast(self._bare, 0)
        for replica in self.replicas:
            replica.answer()
        return time.perf_counter() - began_s


def main(arguments: Sequence[str]) -> int:
    """Measure; return the exit status."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", maxsplit=1)[0],
        epilog="example: python -m benchmarks.sync --replicas 1 --repeats 5",
    )
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16, help="6.5 MB of weights each")
    parser.add_argument("--repeats", type=int, default=25, help="of every timed transfer")
    parser.add_argument("--pretrain", type=int, default=60, help="steps before any measured rate")
    parser.add_argument("--warm-up", type=int, default=30, help="steps at each rate")
    parser.add_argument("--steps", type=int, default=5, help="steps measured at each rate")
    parser.add_argument("--bucket-mb", type=int, default=WeightsConfig().bucket_mb)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ratios = bytes_ratios(
        RATES, pretrain=parsed.pretrain, warm_up=parsed.warm_up, measured=parsed.steps
    )
    print_line(f"bytes of an update over all bytes: {ratios}")
    with _fleet(parsed.replicas, parsed.layers, parsed.bucket_mb) as fleet:
        print_line(f"{fleet.weights.plan.total_bytes / 1e6:.0f} MB to {parsed.replicas} replicas")
        figures = measure(fleet, parsed.repeats)
    sys.stdout.write(json.dumps({"bytes_ratio": ratios, **figures}) + "\n")
    return 0


def measure(fleet: Fleet, repeats: int) -> dict[str, float]:
    """All figures that need replicas."""
    joins = [_join(fleet) for _ in range(3)]
    fleet.meet()
    fleet.form(fleet.replicas)
    for _ in range(3):  # until both ends have all of their memory
        fleet.update()
    kinds: dict[str, Callable[[], float]] = {
        "dense": lambda: fleet.update()[0],
        "bare": fleet.bare_broadcast,
        "no digest": lambda: _without_digest(fleet),
    }
    seconds = alternate(kinds, repeats)
    stalls = _stalls(fleet, repeats)
    print_line(f"seconds: {seconds}, stalls {stalls}, joins {joins}")
    dense = median(seconds["dense"])
    return {
        "stall_ratio": median(stalls) / dense,
        "dense_vs_gloo": dense / median(seconds["bare"]),
        "digest_overhead": 1 - median(seconds["no digest"]) / dense,
        "join_s": median(joins),
    }


def _without_digest(fleet: Fleet) -> float:
    with patch.object(transfer, "StreamDigest", NoDigest):
        return fleet.update(digest=False)[0]


def _stalls(fleet: Fleet, repeats: int) -> list[float]:
    """Stalls of swaps while every replica generates."""
    for replica in fleet.replicas:
        replica.call("generate")
    stalls = [fleet.update()[1] for _ in range(repeats)]
    for replica in fleet.replicas:
        replica.call("quiet")
    return stalls


def _join(fleet: Fleet) -> float:
    began_s = time.perf_counter()
    fleet.form(fleet.replicas[:1])
    fleet.update()
    return time.perf_counter() - began_s


@contextmanager
def _fleet(replicas: int, layers: int, bucket_mb: int) -> Iterator[Fleet]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        LlamaConfig(
            vocab_size=4096,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=2048,
        ).save_pretrained(folder)
        sender = WeightSender(
            device=CpuDevice(), bucket_bytes=bucket_mb << 20, timeout_s=_TIMEOUT_S
        )
        stack.enter_context(closing(sender))
        peers = [stack.enter_context(closing(Replica())) for _ in range(replicas)]
        yield Fleet(sender, peers, folder)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

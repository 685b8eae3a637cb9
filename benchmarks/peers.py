"""Processes that a benchmark steers by JSON lines: one operation a line, one answer a line."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from benchmarks.reporting import ROOT
from sluice.device.cpu import CpuDevice
from sluice.types import TensorSpec
from sluice.weights.plan import WeightBuffer, plan_transfer
from sluice.weights.sender import WeightSender

_NEVER = threading.Event()
_TIMEOUT_S = 120.0
# Of engines, which print otherwise; no download either.
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


class PeerProcess:
    """A peer: send an operation, then wait for its answer.

    Args:
        module: the peer's, with a `main` that calls `serve`.
        python: of an environment that has what the peer needs.
        environment: on top of this process's.
    """

    def __init__(
        self,
        module: str,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [python, "-m", module],
            cwd=ROOT,
            env=os.environ | _QUIET | {"OMP_NUM_THREADS": "1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def send(self, op: str, **arguments: object) -> None:
        """Begin an operation."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the answer of the oldest operation that has none yet."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of {self._module} ended; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def call(self, op: str, **arguments: object) -> dict[str, Any]:
        """Begin an operation and return its answer."""
        self.send(op, **arguments)
        return self.answer()

    def close(self) -> None:
        """End the process; kill it if it does not end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def serve(peer: Any) -> None:  # noqa: ANN401 - its methods are the operations
    """Answer operations until the input ends; then close the peer.

    Standard output is for answers: what engines print goes to the errors.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            answer = await getattr(peer, command.pop("op"))(**command)
            answers.write(json.dumps(answer or {}) + "\n")
            answers.flush()
    finally:
        await peer.close()


class Fleet:
    """Rank 0 of a weight transfer, its replicas, and random weights.

    Args:
        replicas: started peers.
        layout: the tensors that are sent, as an engine answers its own.
        bucket_mb: size of a transfer's buckets.
    """

    def __init__(
        self, replicas: Sequence[PeerProcess], layout: Sequence[Any], bucket_mb: int
    ) -> None:
        self.replicas = replicas
        self._specs = msgspec.convert(layout, tuple[TensorSpec, ...])
        self._sender = WeightSender(
            device=CpuDevice(), bucket_bytes=bucket_mb << 20, timeout_s=_TIMEOUT_S
        )
        self.weights = WeightBuffer(plan_transfer(self._specs, 4096))
        for tensor in self.weights.tensors.values():
            tensor.normal_(std=0.02)
        self._members: Sequence[PeerProcess] = ()
        self._epoch, self._version = 0, 0

    def form(self, replicas: Sequence[PeerProcess]) -> None:
        """Form an epoch of some of the replicas."""
        self._epoch += 1
        self._members = replicas
        names = [f"r{index}" for index in range(len(replicas))]
        specs = self._sender.form_group(self._epoch, names, self._specs)
        for name, replica in zip(names, replicas, strict=True):
            replica.send("join", spec=msgspec.to_builtins(specs[name]))
        self._sender.join(_NEVER)
        for replica in replicas:
            replica.answer()

    def update(self, *, digest: bool = True) -> tuple[float, float]:
        """Send all weights as the next version.

        Returns:
            seconds until all members have staged them, and the longest stall of their commit.
        """
        self._version += 1
        update = {"epoch": self._epoch, "version": self._version}
        began_s = time.perf_counter()
        for replica in self._members:
            replica.send("stage", **update, digest=digest)
        report = self._sender.broadcast(self.weights, self._version, _NEVER)
        answers = [replica.answer() for replica in self._members]
        seconds = time.perf_counter() - began_s
        assert all(answer["digest"] == report.bases[0].digest for answer in answers)
        for replica in self._members:
            replica.send("commit", **update, digest=report.bases[0].digest)
        return seconds, max(float(replica.answer()["stall_s"]) for replica in self._members)

    def close(self) -> None:
        """End the sender."""
        self._sender.close()

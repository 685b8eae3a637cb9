"""A replica's end of the weight wire as a process, steered by JSON lines.

Commands on stdin: ``join`` (spec), ``stage`` (version; optionally signal and bucket: the process
sends itself that signal when it unloads that bucket), ``abort``. On stdout a first line
``{"op": "ready"}``, then one answer for each command when it ended: ``{"op": ..., "ok": true,
...}`` or ``{"op": ..., "ok": false, "error": type, "message": ...}``. End of stdin ends the
process in the ordinary way.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import msgspec
import torch

from sluice.device.cpu import CpuDevice
from sluice.errors import SluiceError
from sluice.types import TransferGroupSpec
from sluice.weights.buffer import WeightBuffer
from sluice.weights.plan import Bucket
from sluice.weights.receiver import WeightReceiver
from sluice.weights.transfer import DirectLane, Lane
from tests.support.weight_digest import plain_digest


class _FatalLane(DirectLane):
    """Receives like any other until a given bucket, then signals its own process."""

    def __init__(self, buffer: WeightBuffer, bucket: int, signal: int) -> None:
        super().__init__(buffer)
        self._bucket, self._signal = bucket, signal

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        if bucket.index == self._bucket:
            os.kill(os.getpid(), self._signal)
        return super().unload(bucket, wire)


class _Peer(WeightReceiver):
    fault: tuple[int, int] | None = None

    def _lane(self, buffer: WeightBuffer) -> Lane:
        if self.fault is None:
            return super()._lane(buffer)
        return _FatalLane(buffer, *self.fault)


def _run(peer: _Peer, command: dict[str, Any]) -> dict[str, Any]:
    if command["op"] == "join":
        spec = msgspec.convert(command["spec"], TransferGroupSpec)
        return {"plan_digest": peer.join(spec)}
    if command["op"] == "stage":
        if "signal" in command:
            peer.fault = (command["bucket"], command["signal"])
        staged = peer.stage(command["version"])
        recomputed = plain_digest(staged.tensors)
        peer.recycle(staged)
        return {"version": staged.version, "digest": staged.digest, "recomputed": recomputed}
    peer.abort(command["reason"])
    return {}


def _answer(peer: _Peer, command: dict[str, Any], lock: threading.Lock) -> None:
    answer: dict[str, Any] = {"op": command["op"]}
    try:
        answer |= {"ok": True, **_run(peer, command)}
    except SluiceError as error:
        answer |= {"ok": False, "error": type(error).__name__, "message": str(error)}
    _write(answer, lock)


def _write(answer: dict[str, Any], lock: threading.Lock) -> None:
    with lock:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Serve commands until stdin ends; each in its own thread, so that ``abort`` gets through."""
    torch.set_num_threads(1)
    peer, lock = _Peer(CpuDevice()), threading.Lock()
    _write({"op": "ready"}, lock)
    for line in sys.stdin:
        threading.Thread(target=_answer, args=(peer, json.loads(line), lock)).start()
    peer.close()


if __name__ == "__main__":
    main()

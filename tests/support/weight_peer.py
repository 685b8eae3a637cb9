"""A replica's end of the weight wire as a process, steered by JSON lines.

Commands on stdin: ``join`` (spec), ``stage`` (version; optionally keep: 1 to hold the version as
one that serves; bucket and signal: the process sends itself that signal when it unloads that
bucket; bucket and flip: a bit of that byte of the bucket is flipped on its way), ``held`` (what is
held as serving), ``abort``. On stdout a first line
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
from sluice.weights.receiver import StagedWeights, WeightReceiver
from sluice.weights.transfer import Lane
from sluice.weights.update_header import UpdateHeader
from tests.support.weight_digest import plain_digest


class _FaultyLane:
    """Receives like any other until a given bucket; there it signals its own process, or damages
    what arrived."""

    def __init__(self, lane: Lane, fault: dict[str, int]) -> None:
        self._lane, self._fault = lane, fault

    def load(self, bucket: Bucket) -> torch.Tensor:
        return self._lane.load(bucket)

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        if bucket.index == self._fault.get("bucket"):
            if "signal" in self._fault:
                os.kill(os.getpid(), self._fault["signal"])
            else:
                wire[self._fault["flip"]] ^= 1
        return self._lane.unload(bucket, wire)


class _Peer(WeightReceiver):
    fault: dict[str, int] = {}  # noqa: RUF012 - replaced, never changed

    @property
    def held(self) -> StagedWeights | None:
        return self._held

    def _lane_for(self, header: UpdateHeader, buffer: WeightBuffer, phase: str) -> Lane:
        return _FaultyLane(super()._lane_for(header, buffer, phase), self.fault)


def _run(peer: _Peer, command: dict[str, Any]) -> dict[str, Any]:
    if command["op"] == "join":
        spec = msgspec.convert(command["spec"], TransferGroupSpec)
        return {"plan_digest": peer.join(spec)}
    if command["op"] == "stage":
        peer.fault = {key: command[key] for key in ("bucket", "signal", "flip") if key in command}
        staged = peer.stage(command["version"])
        recomputed = plain_digest(staged.tensors)
        (peer.keep if command.get("keep") else peer.recycle)(staged)
        return {"version": staged.version, "digest": staged.digest, "recomputed": recomputed}
    if command["op"] == "held":
        held = peer.held
        assert held is not None
        return {"version": held.version, "recomputed": plain_digest(held.tensors)}
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

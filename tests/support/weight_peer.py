"""A replica's end of the weight wire as a process on the device of its argument, steered by JSON
lines.

Commands on stdin:

* ``join``: spec; optionally refuses: why it does not join;
* ``stage``: version; optionally keep: 1 to hold the version as one that serves, and a bucket at
  which it goes wrong: signal: the process sends itself that signal; flip: a bit of that byte of
  the bucket is flipped on its way; cut: the bucket is zeros from that byte on; wait: seconds;
* ``commit``: version, digest: what is staged serves from then on;
* ``held``: what is held as serving;
* ``probe``, ``abort``.

On stdout a first line ``{"op": "ready"}``, then one answer for each command when it ended:
``{"op": ..., "ok": true, ...}`` or ``{"op": ..., "ok": false, "error": type, "message": ...}``,
with the command's number ``call``, if it has one.
End of stdin ends the process in the ordinary way.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from typing import Any

import msgspec
import torch

from sluice.device.select import select_device
from sluice.errors import InvalidRequestError, SluiceError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.plan import Bucket
from sluice.weights.receiver import StagedWeights, WeightReceiver
from sluice.weights.transfer import BucketPort, UpdateHeader
from tests.support.weight_digest import plain_digest

_FAULTS = ("bucket", "signal", "flip", "cut", "wait")


class _FaultyPort:
    """Receives like any other until a given bucket; there it signals its own process, waits, or
    damages what arrived."""

    def __init__(self, bucket_port: BucketPort, fault: dict[str, float]) -> None:
        self._port, self._fault = bucket_port, fault

    def load(self, bucket: Bucket) -> torch.Tensor:
        return self._port.load(bucket)

    def unload(self, bucket: Bucket, wire: torch.Tensor) -> torch.Tensor:
        if bucket.index == self._fault.get("bucket"):
            self._go_wrong(wire)
        return self._port.unload(bucket, wire)

    def _go_wrong(self, wire: torch.Tensor) -> None:
        match self._fault:
            case {"signal": number}:
                # Sent to the process, SIGSTOP reaches another thread, and this one still receives.
                signal.pthread_kill(threading.get_ident(), int(number))
            case {"flip": place}:
                wire[int(place) % wire.numel()] ^= 1
            case {"cut": place}:
                wire[int(place) :] = 0
            case {"wait": seconds}:
                time.sleep(seconds)


class _Peer(WeightReceiver):
    fault: dict[str, float] = {}  # noqa: RUF012 - replaced, never changed
    staged: StagedWeights | None = None

    @property
    def held(self) -> StagedWeights | None:
        return self._held

    def _port_for(self, header: UpdateHeader, *arguments: Any) -> BucketPort:
        return _FaultyPort(super()._port_for(header, *arguments), self.fault)


def _run(peer: _Peer, command: dict[str, Any]) -> dict[str, Any]:
    match command["op"]:
        case "join":
            if "refuses" in command:
                raise InvalidRequestError(command["refuses"])
            spec = msgspec.convert(command["spec"], TransferGroupSpec)
            return {"plan_digest": peer.join(spec)}
        case "stage":
            return _stage(peer, command)
        case "commit":
            return _commit(peer, command)
        case "held":
            held = peer.held
            assert held is not None
            return {"version": held.version, "recomputed": plain_digest(held.tensors)}
        case "abort":
            peer.staged = None
            peer.abort(command["reason"])
    return {}


def _stage(peer: _Peer, command: dict[str, Any]) -> dict[str, Any]:
    peer.fault = {key: command[key] for key in _FAULTS if key in command}
    staged = peer.stage(command["version"])
    recomputed = plain_digest(staged.tensors)
    if "keep" in command:
        (peer.keep if command["keep"] else peer.recycle)(staged)
    peer.staged = staged
    return {"version": staged.version, "digest": staged.digest, "recomputed": recomputed}


def _commit(peer: _Peer, command: dict[str, Any]) -> dict[str, Any]:
    staged = peer.staged
    if staged is None or (staged.version, staged.digest) != (command["version"], command["digest"]):
        raise WeightSyncError("trainer", f"committing version {command['version']}", "not staged")
    peer.keep(staged, lent=True)  # as by a model that computes from it
    return {"version": staged.version, "digest": staged.digest}


def _answer(peer: _Peer, command: dict[str, Any], lock: threading.Lock) -> None:
    answer: dict[str, Any] = {key: command[key] for key in ("op", "call") if key in command}
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
    peer, lock = _Peer(select_device(sys.argv[1])), threading.Lock()
    _write({"op": "ready"}, lock)
    for line in sys.stdin:
        threading.Thread(target=_answer, args=(peer, json.loads(line), lock)).start()
    peer.close()


if __name__ == "__main__":
    main()

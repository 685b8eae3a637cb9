"""Starts, steers and always ends the processes of `tests.support.weight_peer`."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from sluice.types import TransferGroupSpec
from tests.support.steered_process import SteeredProcess

_MODULE = "tests.support.weight_peer"


class PeerProcess(SteeredProcess):
    """One receiver in a process of its own; `name` is the member's."""

    def __init__(self, name: str, *, forked: bool = True, device: str = "cpu") -> None:
        super().__init__(name, _MODULE, [device], {}, forked=forked)

    def join(self, spec: TransferGroupSpec) -> None:
        """Begin to join; the answer comes when the group is formed."""
        self.send("join", spec=msgspec.to_builtins(spec))

    def stage(self, version: int, *, keep: int = 0, **fault: float) -> None:
        """Begin to receive; `fault` is ``bucket`` and what goes wrong there."""
        self.send("stage", version=version, keep=keep, **fault)

    def held(self) -> dict[str, Any]:
        """What it holds as serving; nothing else may be under way."""
        self.send("held")
        return dict(self.answer())

    def abort(self, reason: str) -> None:
        """Leave the epoch."""
        self.send("abort", reason=reason)

    def send(self, op: str, **arguments: Any) -> None:
        """Begin any command of `tests.support.weight_peer`."""
        self.tell(json.dumps({"op": op, **arguments}))

    def signal(self, number: signal.Signals) -> None:
        """Send the process a signal."""
        self.process.send_signal(number)


@contextmanager
def peer_processes(
    names: Sequence[str], *, forked: bool = True, device: str = "cpu"
) -> Iterator[list[PeerProcess]]:
    """Start a process for each name, wait until they listen; all are gone when the block ends."""
    peers: list[PeerProcess] = []
    try:
        peers.extend(PeerProcess(name, forked=forked, device=device) for name in names)
        for peer in peers:
            # Importing torch takes seconds, which no deadline of a group is meant to cover.
            assert peer.answer() == {"op": "ready"}
        yield peers
    finally:
        for peer in peers:
            peer.end()

"""Updates sent as their changes, between real processes: what arrives, and every fault on the way.

Whatever happens, the peer keeps holding the version it served, and all of the next epoch is sent
whole.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest
import torch

from sluice.device.cpu import CpuDevice
from sluice.errors import SluiceError, WeightSyncError
from sluice.types import TensorSpec
from sluice.weights.plan import WeightBuffer, plan_transfer
from sluice.weights.sender import Changes, WeightSender
from sluice.weights.transfer import BaseVersion
from tests.support.patience import LONG_S, in_time
from tests.support.retired_threads import wait_for_retired_threads
from tests.support.weight_digest import plain_digest
from tests.support.weight_fleet import PeerProcess, peer_processes

_NEVER = threading.Event()
_RETIRED_S = 300.0
_MIB = 1 << 20
_SPECS = (
    TensorSpec("embed", "bfloat16", (6 * _MIB,)),
    TensorSpec("norm", "float32", (1000,)),
    TensorSpec("steps", "int64", ()),
)
_HEADER = 16
"""Bytes of a block's header; its gaps follow, then its values."""


def _version(number: int) -> WeightBuffer:
    """Each version differs from the one before in 1 of 100 elements, and in a step counter."""
    buffer = WeightBuffer(plan_transfer(_SPECS, 4096))
    embed = buffer.tensors["embed"].view(torch.int16)
    embed.copy_(torch.arange(embed.numel()) % 30_000)
    for earlier in range(1, number + 1):
        embed[earlier::100] += 1
    buffer.tensors["norm"].fill_(0.5)
    buffer.tensors["steps"].fill_(number)
    return buffer


class _Trainer:
    """The sending end, with what the members of its epoch hold."""

    def __init__(self, sender: WeightSender) -> None:
        self.sender = sender
        self.held: BaseVersion | None = None
        self._epoch = 0

    def form(self, peers: list[PeerProcess]) -> None:
        self._epoch, self.held = self._epoch + 1, None
        specs = self.sender.form_group(self._epoch, [peer.name for peer in peers], _SPECS)
        for peer in peers:
            peer.join(specs[peer.name])
        self.sender.join(_NEVER)
        for peer in peers:
            assert peer.answer()["ok"]

    def send(self, peers: list[PeerProcess], number: int) -> int:
        """Sends a version that every peer then holds; the bytes it took."""
        weights, changes = _version(number), self.changes(number)
        for peer in peers:
            peer.stage(number, keep=1)
        report = self.sender.broadcast(weights, number, _NEVER, changes)
        expected = plain_digest(weights.tensors)
        for peer in peers:
            answer = peer.answer()
            assert answer["digest"] == answer["recomputed"] == expected
        assert report.bases[0].digest == expected
        self.held = BaseVersion(number, expected)
        return report.sent_bytes

    def changes(self, number: int) -> Changes | None:
        if self.held is None:
            return None
        old, new = _version(self.held.version), _version(number)
        update = self.sender.encode_update([self.held], old, new, _NEVER)
        assert update is not None
        return update


@contextmanager
def _trainer(timeout_s: float) -> Iterator[_Trainer]:
    device = CpuDevice()
    with closing(WeightSender(device=device, bucket_bytes=_MIB, timeout_s=timeout_s)) as sender:
        yield _Trainer(sender)


def _assert_still_holds(peer: PeerProcess, number: int) -> None:
    expected = plain_digest(_version(number).tensors)
    held = peer.held()
    assert (held["version"], held["recomputed"]) == (number, expected)


def test_versions_sent_as_changes_equal_versions_sent_whole() -> None:
    with _trainer(120) as trainer, peer_processes(["r0", "r1"]) as peers:
        trainer.form(peers)
        whole = trainer.send(peers, 1)
        for number in (2, 3, 4):
            assert trainer.send(peers, number) < 0.02 * whole
        trainer.form(peers)
        assert trainer.send(peers, 5) == whole
        assert trainer.send(peers, 6) < 0.02 * whole


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_lost_among_changes_leaves_the_survivor_with_the_old_version_or_the_new_one(
    how: signal.Signals,
) -> None:
    def attempt(timeout_s: float) -> None:
        with _trainer(timeout_s) as trainer, peer_processes(["r0", "r1"]) as peers:
            survivor, lost = peers
            trainer.form(peers)
            whole = trainer.send(peers, 1)
            survivor.stage(2)
            lost.stage(2, signal=int(how), bucket=3)
            # Changes are small: all may be in the sockets before the loss shows.
            with suppress(WeightSyncError):
                trainer.sender.broadcast(_version(2), 2, _NEVER, trainer.changes(2))
            survivor.abort("the trainer lost a member")
            answers = {answer["op"]: answer for answer in (survivor.answer(), survivor.answer())}
            if answers["stage"]["ok"]:
                assert answers["stage"]["recomputed"] == plain_digest(_version(2).tensors)
            _assert_still_holds(survivor, 1)

            trainer.form([survivor])
            assert trainer.send([survivor], 2) == whole
        assert wait_for_retired_threads(_RETIRED_S) == 0

    if how is signal.SIGSTOP:
        in_time(attempt)
    else:
        attempt(LONG_S)


# The changes of a bucket of 2^19 elements are two blocks; the first is a header, about 2,600 gaps
# and as many steps.
_DAMAGE = {
    "form": (0, "bucket 4 of 13: "),
    "count": (4, "bucket 4 of 13: the gap code marks"),
    "gap": (_HEADER + 70, "tensor embed differs"),
    "value": (_HEADER + 2622 + 900, "tensor embed differs"),
}


def test_a_flipped_bit_is_noticed_wherever_it_is_and_the_old_version_stays() -> None:
    def attempt(timeout_s: float) -> None:
        with _trainer(timeout_s) as trainer, peer_processes(["r0"]) as peers:
            (peer,) = peers
            for number, (place, said) in enumerate(_DAMAGE.values(), start=1):
                trainer.form(peers)
                trainer.send(peers, number)
                update, weights = trainer.changes(number + 1), _version(number + 1)
                peer.stage(number + 1, keep=1, bucket=3, flip=place)
                with suppress(SluiceError):
                    trainer.sender.broadcast(weights, number + 1, _NEVER, update)
                answer = peer.answer()
                assert answer["error"] == "WeightSyncError"
                assert (
                    f"trainer failed in phase receiving version {number + 1}" in answer["message"]
                )
                assert said in answer["message"]
                _assert_still_holds(peer, number)

    in_time(attempt)


def test_changes_since_a_version_that_is_not_held_are_refused_at_once() -> None:
    version_1 = plain_digest(_version(1).tensors)
    with _trainer(LONG_S) as trainer, peer_processes(["r0"]) as peers:
        (peer,) = peers
        for case, believed in {
            "nothing is held": BaseVersion(1, version_1),
            "another version is": BaseVersion(2, version_1),
            "another digest is": BaseVersion(1, "00" * 16),
        }.items():
            trainer.form(peers)
            if case != "nothing is held":
                trainer.send(peers, 1)
            trainer.held = believed
            peer.stage(3)
            with suppress(WeightSyncError):
                trainer.sender.broadcast(_version(3), 3, _NEVER, trainer.changes(3))
            answer = peer.answer()
            assert answer["error"] == "WeightSyncError"
            assert f"the update builds on version {believed.version}" in answer["message"]
            if case != "nothing is held":
                _assert_still_holds(peer, 1)
        trainer.form(peers)
        trainer.send(peers, 3)

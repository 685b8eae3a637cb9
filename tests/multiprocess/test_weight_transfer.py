"""The weight wire between real processes: what arrives, and what happens when one is gone."""

from __future__ import annotations

import dataclasses
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from sluice.device.cpu import CpuDevice
from sluice.errors import DeadlineError, WeightSyncError
from sluice.types import TransferGroupSpec
from sluice.weights.plan import tensor_specs
from sluice.weights.sender import WeightSender
from tests.support.patience import LONG_S, in_time
from tests.support.retired_threads import wait_for_retired_threads
from tests.support.weight_buffers import buffer_of
from tests.support.weight_digest import plain_digest
from tests.support.weight_fleet import PeerProcess, peer_processes

_NEVER = threading.Event()
_RETIRED_S = 300.0
_MIB = 1024 * 1024


def _small(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(40_000, generator=generator),
        "half": torch.randn(77, 3, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(version),
    }


def _large(version: int) -> dict[str, torch.Tensor]:
    """48 MiB: far more than the sockets between two processes can hold."""
    return {"w": torch.full((12 * _MIB,), float(version))}


@contextmanager
def _sender(timeout_s: float = 120.0, bucket_bytes: int = _MIB) -> Iterator[WeightSender]:
    device = CpuDevice()
    with closing(
        WeightSender(device=device, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    ) as sender:
        yield sender


def _form(
    sender: WeightSender, epoch: int, peers: Sequence[PeerProcess], weights: dict[str, torch.Tensor]
) -> None:
    specs = sender.form_group(epoch, [peer.name for peer in peers], tensor_specs(weights.items()))
    for peer in peers:
        peer.join(specs[peer.name])
    sender.join(_NEVER)
    for peer in peers:
        assert peer.answer() == {
            "op": "join",
            "ok": True,
            "plan_digest": specs[peer.name].plan_digest,
        }


def _transfer(
    sender: WeightSender,
    version: int,
    peers: Sequence[PeerProcess],
    weights: dict[str, torch.Tensor],
) -> None:
    """Broadcast, and hold every receiver to the digest of what was sent."""
    for peer in peers:
        peer.stage(version)
    report = sender.broadcast(buffer_of(weights), version, _NEVER)
    expected = plain_digest(weights)
    assert report.bases[0].digest == expected
    for peer in peers:
        assert peer.answer() == {
            "op": "stage",
            "ok": True,
            "version": version,
            "digest": expected,
            "recomputed": expected,
        }


def test_three_ranks_hold_equal_digests_version_after_version_in_one_epoch() -> None:
    with _sender() as sender, peer_processes(["r0", "r1"]) as peers:
        _form(sender, 1, peers, _small(0))
        for version in (1, 2, 3):
            _transfer(sender, version, peers, _small(version))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_peer_ends_the_broadcast_by_name_and_the_survivor_gets_the_next_epoch(
    how: signal.Signals,
) -> None:
    def attempt(timeout_s: float) -> None:
        with _sender(timeout_s) as sender, peer_processes(["r0", "r1"]) as peers:
            _form(sender, 1, peers, _large(1))
            survivor, lost = peers
            survivor.stage(1)
            lost.stage(1, signal=int(how), bucket=3)
            with pytest.raises(
                WeightSyncError,
                match=r"r0, r1 failed in phase broadcasting version 1 in epoch 1: "
                r".*(the header|bucket \d+ of 48)",
            ):
                sender.broadcast(buffer_of(_large(1)), 1, _NEVER)
            survivor.abort("the trainer lost a member")
            answers = {answer["op"]: answer for answer in (survivor.answer(), survivor.answer())}
            assert answers["abort"]["ok"]
            assert answers["stage"]["error"] == "WeightSyncError"

            _form(sender, 2, [survivor], _large(1))
            _transfer(sender, 1, [survivor], _large(1))
        assert wait_for_retired_threads(_RETIRED_S) == 0

    if how is signal.SIGSTOP:
        in_time(attempt)
    else:
        attempt(LONG_S)


@pytest.mark.timeout(500)  # below the collective's own timeout
def test_a_control_channel_that_fails_ends_the_broadcast_long_before_its_timeout() -> None:
    with _sender(timeout_s=600) as sender, peer_processes(["r0"]) as peers:
        _form(sender, 1, peers, _large(1))
        weights = buffer_of(_large(1))
        peers[0].stage(1, signal=int(signal.SIGSTOP), bucket=3)
        channel_failed = threading.Event()
        failing = threading.Thread(target=_fail_when_stopped, args=(peers[0], channel_failed))
        failing.start()
        with pytest.raises(WeightSyncError, match=r"stopped by the caller, at bucket \d+"):
            sender.broadcast(weights, 1, channel_failed)
        failing.join()
    # The pending operation ended with its peer, which the block above killed.
    assert wait_for_retired_threads(_RETIRED_S) == 0


def _fail_when_stopped(peer: PeerProcess, failed: threading.Event) -> None:
    """Set `failed` once the peer has stopped itself, and so waits at a bucket."""
    while Path(f"/proc/{peer.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)
    failed.set()


def test_a_peer_that_never_joins_is_named_and_the_others_form_the_next_epoch() -> None:
    def attempt(timeout_s: float) -> None:
        with _sender(timeout_s) as sender, peer_processes(["r0"]) as peers:
            specs = sender.form_group(1, ["r0", "never"], tensor_specs(_small(1).items()))
            peers[0].join(dataclasses.replace(specs["r0"], timeout_s=300))
            with pytest.raises(
                DeadlineError,
                match=rf"^never: no answer within {timeout_s:g} s while forming .* epoch 1",
            ):
                sender.join(_NEVER)
            peers[0].abort("the epoch did not form")
            answers = {answer["op"]: answer for answer in (peers[0].answer(), peers[0].answer())}
            assert "rank 2" in answers["join"]["message"]
            _form(sender, 2, peers, _small(1))
            _transfer(sender, 1, peers, _small(1))

    in_time(attempt)


def test_a_peer_with_another_plan_refuses_and_the_sender_is_stopped_by_its_answer() -> None:
    with _sender() as sender, peer_processes(["r0"]) as peers:
        spec = sender.form_group(1, ["r0"], tensor_specs(_small(1).items()))["r0"]
        peers[0].join(_with_another_plan(spec))
        refusal = peers[0].answer()
        assert refusal["error"] == "InvalidRequestError"
        assert "plan digest" in refusal["message"]
        stop = threading.Event()
        stop.set()
        with pytest.raises(WeightSyncError, match=r"with r0 .*before joining"):
            sender.join(stop)


def test_a_newcomer_joins_in_a_new_epoch_and_gets_the_version_the_others_have() -> None:
    with _sender() as sender, peer_processes(["r0", "r1"]) as (first, newcomer):
        _form(sender, 1, [first], _small(1))
        _transfer(sender, 1, [first], _small(1))
        _form(sender, 2, [first, newcomer], _small(1))
        _transfer(sender, 1, [first, newcomer], _small(1))
        _transfer(sender, 2, [first, newcomer], _small(2))


def test_a_process_that_abandoned_a_pending_collective_exits_cleanly() -> None:
    exits: list[tuple[int, str]] = []

    def attempt(timeout_s: float) -> None:
        with _sender(timeout_s) as sender, peer_processes(["r0"], forked=False) as peers:
            _form(sender, 1, peers, _small(1))
            peers[0].stage(1)
            peers[0].abort("leaving in the middle")
            answers = {answer["op"]: answer for answer in (peers[0].answer(), peers[0].answer())}
            assert "leaving in the middle" in answers["stage"]["message"]
            exits.append(peers[0].leave())  # it waits for the collective, which ends by its timeout

    in_time(attempt)
    _assert_clean_exit(*exits[-1])


def _with_another_plan(spec: TransferGroupSpec) -> TransferGroupSpec:
    first, *others = spec.tensors
    renamed = dataclasses.replace(first, name="another.name")
    return dataclasses.replace(spec, tensors=(renamed, *others))


def _assert_clean_exit(code: int, errors: str) -> None:
    assert code == 0, errors
    assert "terminate called" not in errors
    assert "Traceback" not in errors

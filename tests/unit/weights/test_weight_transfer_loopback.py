"""Sender and receivers with real Gloo groups over loopback, as threads of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from sluice.device.cpu import CpuDevice
from sluice.errors import (
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    NotReadyError,
    WeightSyncError,
)
from sluice.weights import group
from sluice.weights import rank_sender as sender_module
from sluice.weights.plan import tensor_specs
from sluice.weights.receiver import StagedWeights, WeightReceiver
from sluice.weights.rendezvous import RendezvousStore
from sluice.weights.sender import WeightSender
from sluice.weights.snapshot import SnapshotBuffers
from sluice.weights.transfer import UpdateTrailer
from tests.support.retired_threads import wait_for_retired_threads
from tests.support.weight_buffers import buffer_of
from tests.support.weight_digest import plain_digest
from tests.support.weight_rendezvous import give_calls_time

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sluice.types import TransferGroupSpec

_NEVER = threading.Event()


def _weights(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(5000, generator=generator),
        "half": torch.randn(9, 3, generator=generator).to(torch.bfloat16),
        "steps": torch.tensor(seed),
        "none": torch.zeros(0, 2),
    }


_TENSORS = tensor_specs(_weights().items())


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def sender() -> Iterator[WeightSender]:
    device = CpuDevice()
    with closing(WeightSender(device=device, bucket_bytes=4096, timeout_s=60.0)) as made:
        yield made
    assert wait_for_retired_threads(60) == 0


@pytest.fixture
def receiver() -> Iterator[WeightReceiver]:
    with closing(WeightReceiver(CpuDevice())) as made:
        yield made


def _form(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor, epoch: int = 1
) -> TransferGroupSpec:
    spec = sender.form_group(epoch, ["rollout-0"], _TENSORS)["rollout-0"]
    joined = pool.submit(receiver.join, spec)
    sender.join(_NEVER)
    assert joined.result(60) == spec.plan_digest
    return spec


def _equal(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def test_a_staged_version_equals_what_was_sent_and_carries_its_digest(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor
) -> None:
    _form(sender, receiver, pool)
    staging = pool.submit(receiver.stage, 7)
    report = sender.broadcast(buffer_of(_weights()), 7, _NEVER)
    staged = staging.result(60)
    assert _equal(staged.tensors, _weights())
    assert staged.version == report.version == 7
    assert staged.digest == report.bases[0].digest == plain_digest(_weights())
    assert staged.received_bytes == report.sent_bytes


def test_a_snapshot_travels_like_the_weights_it_holds(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor
) -> None:
    _form(sender, receiver, pool)
    buffers = SnapshotBuffers(_TENSORS)
    buffers.write(_weights(2).items(), version=2, timeout_s=0.0)
    staging = pool.submit(receiver.stage, 2)
    with buffers.read() as snapshot:
        sender.broadcast(snapshot.weights, snapshot.version, _NEVER)
    assert _equal(staging.result(60).tensors, _weights(2))


def test_staging_memory_is_reused_only_after_it_was_given_back(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor
) -> None:
    _form(sender, receiver, pool)

    def transfer(version: int) -> StagedWeights:
        staging = pool.submit(receiver.stage, version)
        sender.broadcast(buffer_of(_weights(version)), version, _NEVER)
        return staging.result(60)

    first, second = transfer(1), transfer(2)
    second_address = second.tensors["large"].data_ptr()
    receiver.recycle(second)
    third, fourth = transfer(3), transfer(4)
    assert third.tensors["large"].data_ptr() == second_address
    for version, kept in ((1, first), (3, third), (4, fourth)):
        assert _equal(kept.tensors, _weights(version))


def test_a_receiver_that_asked_for_another_version_refuses_it(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor
) -> None:
    _form(sender, receiver, pool)
    staging = pool.submit(receiver.stage, 8)
    # The receiver leaves at once, and how far the sender comes is chance.
    with contextlib.suppress(WeightSyncError):
        sender.broadcast(buffer_of(_weights()), 9, _NEVER)
    with pytest.raises(
        WeightSyncError, match=r"trainer failed in phase receiving version 8 .*sent version 9"
    ):
        staging.result(60)
    with pytest.raises(NotReadyError, match="abandoned"):
        receiver.stage(1)


def test_bytes_that_do_not_give_the_senders_digest_are_refused(
    sender: WeightSender,
    receiver: WeightReceiver,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other_digest(version: int, total_bytes: int, digests: tuple[bytes, ...]) -> UpdateTrailer:
        return UpdateTrailer(version, total_bytes, (*digests[:-1], bytes(16)))

    monkeypatch.setattr(sender_module, "UpdateTrailer", other_digest)
    _form(sender, receiver, pool)
    staging = pool.submit(receiver.stage, 1)
    sender.broadcast(buffer_of(_weights()), 1, _NEVER)
    with pytest.raises(WeightSyncError, match=f"tensor {_TENSORS[-1].name} differs .*; 1 of"):
        staging.result(60)


def test_another_plan_digest_is_refused_before_the_store_is_contacted(
    receiver: WeightReceiver, sender: WeightSender
) -> None:
    spec = sender.form_group(1, ["rollout-0"], _TENSORS)["rollout-0"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        wrong = dataclasses.replace(spec, port=port, plan_digest="00" * 16)
        with pytest.raises(InvalidRequestError, match=r"plan digest is 0000.*computed here"):
            receiver.join(wrong)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    ("change", "named"),
    [({"rank": 0}, "rank 0 of 2"), ({"rank": 2}, "rank 2 of 2"), ({"backend": "nccl"}, "nccl")],
)
def test_a_spec_that_cannot_be_joined_is_refused(
    sender: WeightSender, receiver: WeightReceiver, change: dict[str, object], named: str
) -> None:
    spec = sender.form_group(1, ["rollout-0"], _TENSORS)["rollout-0"]
    with pytest.raises(InvalidRequestError, match=named):
        receiver.join(dataclasses.replace(spec, **change))  # type: ignore[arg-type]


def test_an_abort_ends_a_reception_in_progress(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor
) -> None:
    _form(sender, receiver, pool)
    staging: Future[object] = pool.submit(receiver.stage, 1)
    receiver.abort("the trainer said so")
    with pytest.raises((WeightSyncError, NotReadyError), match="the trainer said so"):
        staging.result(60)
    with pytest.raises(NotReadyError, match="abandoned"):
        receiver.stage(1)


def test_an_abort_ends_a_join_in_progress(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor
) -> None:
    spec = sender.form_group(1, ["rollout-0"], _TENSORS)["rollout-0"]
    started = threading.Event()

    def join() -> str:
        started.set()
        return receiver.join(dataclasses.replace(spec, timeout_s=120.0))

    joining = pool.submit(join)
    assert started.wait(60)
    deadline = time.monotonic() + 60
    while not receiver._streams and time.monotonic() < deadline:
        time.sleep(0.001)
    receiver.abort("a new epoch is coming")
    with pytest.raises((WeightSyncError, NotReadyError), match="a new epoch is coming"):
        joining.result(60)


def test_a_stop_event_ends_a_formation_that_waits_for_a_member(
    sender: WeightSender, pool: ThreadPoolExecutor
) -> None:
    stop = threading.Event()
    sender.form_group(1, ["rollout-0", "rollout-1"], _TENSORS)
    joining = pool.submit(sender.join, stop)
    stop.set()
    with pytest.raises(WeightSyncError, match=r"rollout-0, rollout-1.*stopped by the caller"):
        joining.result(60)


def test_a_formation_ends_by_its_own_deadline_and_names_who_did_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_calls_time(monkeypatch)
    with closing(WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=0.2)) as sender:
        sender.form_group(4, ["rollout-0"], _TENSORS)
        with pytest.raises(DeadlineError, match=r"rollout-0: no answer within 0.2 s.*epoch 4"):
            sender.join(_NEVER)


def test_what_nccl_found_wrong_is_in_the_error_of_the_formation(
    sender: WeightSender,
    receiver: WeightReceiver,
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch has it in the last line of its message."""
    mismatch = "Mismatched NCCL version detected : rank 1 version 23007 rank 0 version 22907"

    def fail(*_: object) -> None:
        raise torch.distributed.DistBackendError(
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage "
            "(run with NCCL_DEBUG=WARN for details), NCCL version 2.29.7\nncclInvalidUsage: This "
            f"usually reflects invalid usage of NCCL library.\nLast error:\n{mismatch}\n"
        )

    monkeypatch.setattr(group, "create_process_group", fail)
    spec = sender.form_group(1, ["rollout-0"], _TENSORS)["rollout-0"]
    joining = pool.submit(receiver.join, spec)
    for end in (lambda: sender.join(_NEVER), lambda: joining.result(60)):
        with pytest.raises(WeightSyncError, match=f"version 2.29.7: {mismatch}$"):
            end()


def test_an_epoch_that_failed_is_not_used_again(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor
) -> None:
    _form(sender, receiver, pool)
    sender.abandon("a probe failed")
    with pytest.raises(NotReadyError, match=r"epoch 1 was abandoned .a probe failed."):
        sender.broadcast(buffer_of(_weights()), 1, _NEVER)
    receiver.abort("a probe failed")
    _form(sender, receiver, pool, epoch=2)
    staging = pool.submit(receiver.stage, 1)
    report = sender.broadcast(buffer_of(_weights()), 1, _NEVER)
    assert {staging.result(60).digest} == {*report.digests.values()}


def test_epochs_rise_and_members_are_named_once(sender: WeightSender) -> None:
    sender.form_group(3, ["a"], _TENSORS)
    with pytest.raises(InvalidRequestError, match="epoch 3: must be larger than 3"):
        sender.form_group(3, ["a"], _TENSORS)
    for members in ([], ["a", "a"]):
        with pytest.raises(InvalidRequestError, match="at least one receiver"):
            sender.form_group(4, members, _TENSORS)


def test_weights_that_are_not_the_epochs_are_refused_before_anything_is_sent(
    sender: WeightSender, receiver: WeightReceiver, pool: ThreadPoolExecutor
) -> None:
    _form(sender, receiver, pool)
    weights = _weights()
    others = (
        {name: tensor for name, tensor in weights.items() if name != "half"},
        weights | {"half": weights["half"].float()},
    )
    for other in others:
        with pytest.raises(InvalidRequestError, match="name='half'"):
            sender.broadcast(buffer_of(other), 1, _NEVER)
    in_another_order = dict(reversed(weights.items()))
    with pytest.raises(InvalidRequestError, match="the order differs"):
        sender.broadcast(buffer_of(in_another_order), 1, _NEVER)
    staging = pool.submit(receiver.stage, 1)
    sender.broadcast(buffer_of(weights), 1, _NEVER)
    assert _equal(staging.result(60).tensors, weights)


def test_nothing_is_staged_without_a_formed_group(receiver: WeightReceiver) -> None:
    with pytest.raises(NotReadyError, match="no epoch was joined"):
        receiver.stage(1)


def _port(sender: WeightSender) -> int:
    return sender.form_group(1, ["rollout-0"], _TENSORS)["rollout-0"].port


def test_the_store_listens_on_the_given_address_only(sender: WeightSender) -> None:
    port = _port(sender)
    with socket.create_connection(("127.0.0.1", port), timeout=60):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=60)


def test_a_port_in_use_is_named_with_the_remedy(sender: WeightSender) -> None:
    port = _port(sender)
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*free port"):
        RendezvousStore("127.0.0.1", port)

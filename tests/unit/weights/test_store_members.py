"""Nobody without the epoch's key is answered by the store or disturbs those who have it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import grpc
import pytest
import torch

from sluice.device.cpu import CpuDevice
from sluice.errors import WeightSyncError
from sluice.rpc.credentials import Credentials
from sluice.weights import rendezvous
from sluice.weights.plan import tensor_specs
from sluice.weights.receiver import WeightReceiver
from sluice.weights.rendezvous import EpochStore, RendezvousStore
from sluice.weights.sender import WeightSender
from tests.support.certified import mutual, service_key
from tests.support.weight_buffers import buffer_of
from tests.support.weight_rendezvous import KEY, link_to, make_spec

_WEIGHTS = {"w": torch.arange(9.0)}
_TENSORS = tensor_specs(_WEIGHTS.items())
_NEVER = threading.Event()
_WAIT_S = 60.0


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with closing(RendezvousStore("127.0.0.1")) as store:
        store.begin(1, KEY)
        yield store


@pytest.mark.parametrize(
    ("epoch", "store_key"),
    [(1, b""), (1, b"w" * 32), (1, KEY[:-1]), (2, KEY), (0, KEY)],
    ids=["no key", "wrong key", "short key", "next epoch", "epoch before"],
)
def test_a_stranger_is_refused_and_logged_and_changes_nothing(
    store: RendezvousStore, caplog: pytest.LogCaptureFixture, epoch: int, store_key: bytes
) -> None:
    stranger = link_to(store, epoch=epoch, store_key=store_key)
    for ask in (
        lambda: stranger.set("joined/1", b"1"),
        lambda: stranger.existing(["n"]),
        lambda: stranger.add("n", 1),
        lambda: stranger.delete_key("n"),
    ):
        with pytest.raises(WeightSyncError, match="is over or has not begun, or this is not"):
            ask()
        refused = [record.getMessage() for record in caplog.records]
        assert len([line for line in refused if "refuses a call of ipv4:127.0.0.1:" in line]) == 1
        caplog.clear()
    assert link_to(store).existing(["joined/1", "n"]) == {}


def test_an_epoch_forgets_the_keys_of_the_one_before_and_refuses_its_members(
    store: RendezvousStore,
) -> None:
    former = link_to(store)
    former.set("a", b"old")
    store.begin(2, b"n" * 32)
    with pytest.raises(WeightSyncError, match="the epoch is over"):
        former.set("a", b"late")
    assert link_to(store, epoch=2, store_key=b"n" * 32).existing(["a"]) == {}


def test_nobody_is_answered_before_the_first_epoch_begins() -> None:
    with closing(RendezvousStore("127.0.0.1")) as store:
        for key in (b"", KEY):
            with pytest.raises(WeightSyncError, match="has not begun"):
                link_to(store, epoch=0, store_key=key).existing([])


def test_each_epoch_has_a_key_of_its_own_which_no_log_line_shows() -> None:
    with closing(WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=1.0)) as sender:
        specs = [sender.form_group(epoch, ["r0"], _TENSORS)["r0"] for epoch in (1, 2)]
    assert len({spec.store_key for spec in specs}) == 2
    assert {len(spec.store_key) for spec in specs} == {32}
    assert "store_key" not in repr(specs)


def test_connections_that_send_nothing_or_garbage_keep_no_member_waiting(
    store: RendezvousStore,
) -> None:
    silent = [socket.create_connection(("127.0.0.1", store.port)) for _ in range(50)]
    try:
        for each in silent[:25]:
            each.sendall(b"\xa5" * 100)
        assert link_to(store, timeout_s=_WAIT_S).add("n", 1) == 1
    finally:
        for each in silent:
            each.close()


def test_strangers_that_open_calls_and_send_no_message_keep_no_member_waiting(
    store: RendezvousStore,
) -> None:
    def nothing() -> Iterator[bytes]:
        _NEVER.wait(10.0)
        yield from ()

    address = f"127.0.0.1:{store.port}"
    with grpc.insecure_channel(address) as channel:
        method = "/sluice.api.weights.v1.RendezvousService/AddToKey"
        silent = [channel.stream_unary(method).future(nothing()) for _ in range(16)]
        assert link_to(store, timeout_s=_WAIT_S).add("n", 1) == 1
        assert {call.code() for call in silent} == {grpc.StatusCode.PERMISSION_DENIED}


def test_a_sum_beyond_64_bits_is_refused_and_changes_nothing(store: RendezvousStore) -> None:
    member = link_to(store)
    member.add("n", 2**63 - 1)
    with pytest.raises(WeightSyncError, match="does not fit into 64 bits"):
        member.add("n", 1)
    assert member.add("n", 0) == 2**63 - 1


def test_a_full_store_refuses_more_keys_and_still_takes_known_ones(
    store: RendezvousStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "MAX_KEYS", 2)
    monkeypatch.setattr(rendezvous, "MAX_TABLE_BYTES", 10)
    link = link_to(store)
    link.set("a", b"1")
    link.set("b", b"1")
    with pytest.raises(WeightSyncError, match="the store is full: 3 keys"):
        link.set("c", b"1")
    with pytest.raises(WeightSyncError, match="the store is full: 3 keys"):
        link.add("c", 1)
    with pytest.raises(WeightSyncError, match="11 bytes with this one"):
        link.set("a", b"x" * 8)
    link.set("a", b"x" * 7)
    assert link.delete_key("b")
    link.set("c", b"1")
    assert link.existing(["a", "b", "c"]) == {"a": b"x" * 7, "c": b"1"}


def test_a_text_cannot_be_added_to(store: RendezvousStore) -> None:
    link = link_to(store)
    link.set("a", b"text")
    with pytest.raises(WeightSyncError, match=r"b'text' is not a number"):
        link.add("a", 1)


def test_a_group_forms_over_tls() -> None:
    certificates = mutual(service_key()).for_transfers()
    sender = WeightSender(
        device=CpuDevice(), bucket_bytes=4096, timeout_s=_WAIT_S, certificates=certificates
    )
    with (
        closing(sender),
        closing(WeightReceiver(CpuDevice())) as receiver,
        ThreadPoolExecutor(1) as pool,
    ):
        spec = sender.form_group(1, ["r0"], _TENSORS)["r0"]
        assert spec.certificates is None  # each process has its own
        joined = pool.submit(receiver.join, replace(spec, certificates=certificates))
        sender.join(_NEVER)
        assert joined.result(_WAIT_S) == spec.plan_digest
        staged = pool.submit(receiver.stage, 1)
        assert (
            sender.broadcast(buffer_of(_WEIGHTS), 1, _NEVER).bases[0].digest
            == staged.result(_WAIT_S).digest
        )


@pytest.mark.parametrize(
    "credentials",
    [None, mutual(), mutual(service_key("theirs")), mutual(service_key(), trusts="theirs")],
    ids=["no tls", "no certificate", "certificate of others", "unknown authority"],
)
def test_a_store_with_tls_refuses_members_without_the_right_certificates(
    credentials: Credentials | None,
) -> None:
    certificates = mutual(service_key()).for_transfers()
    with closing(RendezvousStore("127.0.0.1", certificates=certificates)) as store:
        store.begin(1, KEY)
        own = credentials.for_transfers() if credentials else None
        spec = replace(make_spec(store.port), certificates=own)
        with pytest.raises(WeightSyncError, match="cannot connect"):
            EpochStore(spec, "joining", "trainer", lambda: None).existing([])

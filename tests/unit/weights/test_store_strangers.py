"""Nobody without the epoch's key is answered or disturbs those who have it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch

from sluice.device.cpu import CpuDevice
from sluice.errors import WeightSyncError
from sluice.weights import rendezvous
from sluice.weights.plan import tensor_specs
from sluice.weights.receiver import WeightReceiver
from sluice.weights.rendezvous import RendezvousStore, StoreLink
from sluice.weights.sender import WeightSender
from sluice.weights.store import FRAME_HEADER, Add, Read, StoreQuestion, Write, from_body, to_body
from tests.support.raw_member import KEY, NONCE, WAIT_S, RawMember
from tests.support.store_relay import StoreRelay
from tests.support.weight_rendezvous import link_to, make_spec

_WEIGHTS = {"w": torch.arange(9.0)}
_TENSORS = tensor_specs(_WEIGHTS.items())
_NEVER = threading.Event()
# What would do most harm if it were read: it makes a member seem to be there.
_FORGERY = to_body(StoreQuestion(1, Write("joined/1", b"1" * 64)))
_WRONG_KEY = b"w" * 32


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def _no_key(port: int, _: bytes) -> RawMember:
    stranger = RawMember(port)
    stranger.link.sendall(FRAME_HEADER.pack(len(_FORGERY)) + _FORGERY)
    return stranger


def _empty_key(port: int, _: bytes) -> RawMember:
    return RawMember(port, b"").greet()


def _wrong_key(port: int, _: bytes) -> RawMember:
    stranger = RawMember(port, _WRONG_KEY)
    stranger.link.sendall(stranger.hello + stranger.signed_frame(_FORGERY))
    return stranger


def _wrong_key_after_a_true_proof(port: int, key: bytes) -> RawMember:
    stranger = RawMember(port, key).greet()
    stranger.key = _WRONG_KEY
    stranger.link.sendall(stranger.signed_frame(_FORGERY))
    return stranger


def _repeated_frame(port: int, key: bytes) -> RawMember:
    stranger = RawMember(port, key).greet()
    frame = stranger.signed_frame(to_body(StoreQuestion(1, Read(()))))
    stranger.link.sendall(frame)
    stranger.open(stranger.read_frame())
    stranger.link.sendall(frame)
    return stranger


def _tampered_frame(port: int, key: bytes) -> RawMember:
    stranger = RawMember(port, key).greet()
    stranger.link.sendall(_flipped(stranger.signed_frame(_FORGERY)))
    return stranger


def _truncated_proof(port: int, key: bytes) -> RawMember:
    stranger = RawMember(port, key)
    stranger.link.sendall(stranger.hello[:-1])
    stranger.link.shutdown(socket.SHUT_WR)
    return stranger


def _truncated_mac(port: int, key: bytes) -> RawMember:
    stranger = RawMember(port, key).greet()
    signed_frame = stranger.signed_frame(_FORGERY)[FRAME_HEADER.size + 1 :]
    stranger.link.sendall(FRAME_HEADER.pack(len(signed_frame)) + signed_frame)
    return stranger


def _garbage_before_the_challenge(port: int, _: bytes) -> RawMember:
    return RawMember(port, early=b"\xa5" * 100)


def _proof_before_the_challenge(port: int, key: bytes) -> RawMember:
    with RawMember(port, key) as recorded:
        return RawMember(port, key, early=recorded.hello)


Stranger = Callable[[int, bytes], RawMember]
_STRANGERS: list[Stranger] = [
    _no_key,
    _empty_key,
    _wrong_key,
    _wrong_key_after_a_true_proof,
    _repeated_frame,
    _tampered_frame,
    _truncated_proof,
    _truncated_mac,
    _garbage_before_the_challenge,
    _proof_before_the_challenge,
]


@pytest.fixture
def store() -> Iterator[RendezvousStore]:
    with closing(RendezvousStore("127.0.0.1")) as store:
        store.begin(1, KEY)
        yield store


@pytest.fixture
def bodies_read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every question's body that the store parses."""
    bodies: list[bytes] = []

    def spied(body: bytes, kind: type[StoreQuestion]) -> StoreQuestion:
        bodies.append(body)
        return from_body(body, kind)

    monkeypatch.setattr(rendezvous, "from_body", spied)
    return bodies


def _refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    return [message for message in found if "ends the connection of 127.0.0.1:" in message]


@pytest.mark.parametrize("stranger", _STRANGERS, ids=lambda s: s.__name__.strip("_"))
def test_a_stranger_is_cut_off_and_logged_once_and_the_epoch_goes_on(
    caplog: pytest.LogCaptureFixture, stranger: Stranger, bodies_read: list[bytes]
) -> None:
    caplog.set_level(logging.WARNING)
    receiver = WeightReceiver(CpuDevice())
    with (
        closing(WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=WAIT_S)) as sender,
        ThreadPoolExecutor(1) as pool,
        closing(receiver),
    ):
        spec = sender.form_group(1, ["r0"], _TENSORS)["r0"]
        assert len(spec.store_key) == 32
        for _ in ("before the group is formed", "after that"):
            with stranger(sender.port, spec.store_key) as link:
                assert link.is_ended()
            assert len(_refusals(caplog)) == 1, caplog.text
            assert _FORGERY not in bodies_read
            caplog.clear()
            if receiver.epoch is None:
                joined = pool.submit(receiver.join, spec)
                sender.join(_NEVER)
                assert joined.result(WAIT_S) == spec.plan_digest
        staged = pool.submit(receiver.stage, 1)
        report = sender.broadcast(_WEIGHTS, 1, _NEVER)
        assert staged.result(WAIT_S).digest == report.digest
    assert bodies_read


def test_a_recorded_connection_is_worth_nothing_in_another_one(
    store: RendezvousStore, caplog: pytest.LogCaptureFixture
) -> None:
    with StoreRelay(store.port) as relay:
        spec = make_spec(relay.port)
        assert StoreLink(spec, "joining", lambda: None).ask(Add("n", 1)) == (b"1",)
    with RawMember(store.port) as thief:
        thief.link.sendall(relay.said)
        assert thief.is_ended()
    assert len(_refusals(caplog)) == 1
    assert link_to(store).ask(Read(("n",))) == (b"1",)


def test_a_recorded_answer_is_refused_by_the_member(store: RendezvousStore) -> None:
    with StoreRelay(store.port) as relay:
        StoreLink(make_spec(relay.port), "joining", lambda: None).ask(Read(("n",)))
    store.close()
    with socket.create_server(("127.0.0.1", 0)) as false_store, ThreadPoolExecutor(1) as pool:
        link = StoreLink(make_spec(false_store.getsockname()[1]), "joining", lambda: None)
        false_store.accept()[0].close()
        asked = pool.submit(link.ask, Read(("n",)))
        connection, _ = false_store.accept()
        with connection:
            connection.sendall(relay.answered)
            with pytest.raises(WeightSyncError, match=r"store 127.*answer 0 is forged"):
                asked.result(WAIT_S)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"change_question": _flipped}, "epoch 1 is over and so is its key"),
        ({"change_answer": _flipped}, "answer 0 is forged, damaged or a repetition"),
    ],
    ids=["question", "answer"],
)
def test_who_changes_a_message_on_its_way_is_found_out(
    store: RendezvousStore, changes: dict[str, Callable[[bytes], bytes]], error: str
) -> None:
    with StoreRelay(store.port, **changes) as relay:
        link = StoreLink(make_spec(relay.port), "joining", lambda: None)
        with pytest.raises(WeightSyncError, match=error):
            link.ask(Write("a", b"1"))


def test_a_connection_does_not_outlive_the_key_of_its_epoch(
    store: RendezvousStore, caplog: pytest.LogCaptureFixture
) -> None:
    with RawMember(store.port).greet() as former:
        former.ask(to_body(StoreQuestion(1, Read(()))))
        store.begin(2, _WRONG_KEY)
        former.link.sendall(former.signed_frame(to_body(StoreQuestion(2, Write("a", b"1")))))
        assert former.is_ended()
    assert len(_refusals(caplog)) == 1
    assert link_to(store, epoch=2, store_key=_WRONG_KEY).ask(Read(("a",))) == (None,)


def test_nobody_is_answered_before_the_first_epoch_begins() -> None:
    with closing(RendezvousStore("127.0.0.1")) as store:
        for key in (b"", KEY):
            with RawMember(store.port, key).greet() as early:
                assert early.is_ended()


def test_each_epoch_has_a_key_of_its_own_which_no_log_line_shows() -> None:
    with closing(WeightSender(device=CpuDevice(), bucket_bytes=4096, timeout_s=1.0)) as sender:
        specs = [sender.form_group(epoch, ["r0"], _TENSORS)["r0"] for epoch in (1, 2)]
    assert len({spec.store_key for spec in specs}) == 2
    assert "store_key" not in repr(specs)


def test_a_challenge_is_drawn_for_each_connection(store: RendezvousStore) -> None:
    with RawMember(store.port) as first, RawMember(store.port) as second:
        assert first.hello[: len(NONCE)] == second.hello[: len(NONCE)]
        assert first.hello != second.hello

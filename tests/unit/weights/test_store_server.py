"""The server's thread: whatever one client does, the others are answered."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from sluice.weights import store
from sluice.weights.store import FRAME_HEADER, MAC_BYTES, MAX_FRAME_BYTES, StoreServer
from tests.support.raw_member import KEY, WAIT_S, RawMember


def _echo(body: bytes) -> bytes:
    if body == b"unanswerable":
        raise ValueError(body)
    return body


def _serving(listener: socket.socket) -> closing[StoreServer]:
    server = StoreServer(listener)
    server.serve(KEY, _echo)
    return closing(server)


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.getsockname()[1]
    with _serving(listener):
        yield number


def _member(port: int) -> RawMember:
    return RawMember(port).greet()


def test_questions_of_one_connection_are_answered_in_order(port: int) -> None:
    with _member(port) as member:
        for body in (b"first", b"", b"x" * MAX_FRAME_BYTES):
            assert member.ask(body) == body


def test_a_key_and_a_question_in_one_write_are_answered(port: int) -> None:
    with RawMember(port) as member:
        member.link.sendall(member.hello + member.signed_frame(b"at once"))
        assert member.open(member.read_frame()) == b"at once"


@pytest.mark.parametrize("case", ["too long", "too short", "no frame", "unanswerable", "two"])
def test_a_client_that_breaks_the_protocol_is_cut_off_and_others_are_not(
    port: int, case: str
) -> None:
    with _member(port) as good, _member(port) as bad:
        sent = {
            "too long": FRAME_HEADER.pack(MAC_BYTES + MAX_FRAME_BYTES + 1),
            "too short": FRAME_HEADER.pack(MAC_BYTES - 1),
            "no frame": b"GET / HTTP/1.1\r\n\r\n",
            "unanswerable": bad.signed_frame(b"unanswerable"),
            "two": 2 * bad.signed_frame(b"a"),
        }[case]
        assert good.ask(b"before") == b"before"
        bad.link.sendall(sent)
        assert bad.is_ended()
        assert good.ask(b"after") == b"after"


def test_a_question_in_pieces_is_answered_and_keeps_nobody_waiting(port: int) -> None:
    with RawMember(port) as slow, _member(port) as other:
        sent = slow.hello + slow.signed_frame(b"abc")
        for start in range(0, len(sent), 10):
            slow.link.sendall(sent[start : start + 10])
            assert other.ask(b"quick") == b"quick"
        assert slow.open(slow.read_frame()) == b"abc"


def test_a_client_that_does_not_read_its_answer_keeps_nobody_waiting() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    # Inherited by accepted sockets: an answer does not fit into what the system buffers.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    port, body = listener.getsockname()[1], bytes(MAX_FRAME_BYTES)
    with _serving(listener), _member(port) as deaf, _member(port) as other:
        deaf.link.sendall(deaf.signed_frame(body))
        for _ in range(3):
            assert other.ask(b"quick") == b"quick"
        assert deaf.open(deaf.read_frame()) == body


def test_connections_are_bounded_in_number_and_a_place_becomes_free_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CONNECTIONS", 1)
    with _member(port) as first:
        assert first.ask(b"a") == b"a"
        with (
            socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as second,
            suppress(ConnectionError),
        ):
            assert second.recv(1) == b""  # not even a challenge
        assert first.ask(b"b") == b"b"
    with _member(port) as third:
        assert third.ask(b"c") == b"c"


def test_strangers_that_take_all_places_make_room_for_members(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CONNECTIONS", 2)
    with RawMember(port) as first, RawMember(port) as second, _member(port) as member:
        assert first.is_ended()
        assert member.ask(b"a") == b"a"
        with _member(port) as another:
            assert second.is_ended()
            assert another.ask(b"b") == b"b"
            assert member.ask(b"c") == b"c"


@pytest.mark.parametrize("is_member", [False, True])
def test_a_connection_that_asks_nothing_is_ended(
    monkeypatch: pytest.MonkeyPatch, is_member: bool
) -> None:
    monkeypatch.setattr(store, "_SILENT_S", 0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    with _serving(listener), RawMember(listener.getsockname()[1]) as member:
        # The beginning of a proof or of a question counts for nothing.
        member.link.sendall(member.hello + b"\x01" if is_member else b"\x01")
        assert member.is_ended()


def test_closing_ends_all_connections_and_frees_the_port() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with _serving(listener) as server, _member(port) as member:
        assert member.ask(b"a") == b"a"
        server.close()
        server.close()
        assert member.is_ended()
        with pytest.raises(ConnectionRefusedError):
            RawMember(port)

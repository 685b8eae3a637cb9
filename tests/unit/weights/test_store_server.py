"""The server's thread: whatever one client does, the others are answered."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from sluice.weights import store_server
from sluice.weights.store_messages import FRAME_HEADER, MAX_FRAME_BYTES
from sluice.weights.store_server import StoreServer

_WAIT_S = 5.0


def _echo(body: bytes) -> bytes:
    if body == b"unanswerable":
        raise ValueError(body)
    return FRAME_HEADER.pack(len(body)) + body


@pytest.fixture
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    number = listener.getsockname()[1]
    with closing(StoreServer(listener, _echo)):
        yield number


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)


def _ask(link: socket.socket, body: bytes) -> bytes:
    link.sendall(FRAME_HEADER.pack(len(body)) + body)
    return _read(link, FRAME_HEADER.size + len(body))[FRAME_HEADER.size :]


def _read(link: socket.socket, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes and (chunk := link.recv(num_bytes - len(received))):
        received += chunk
    return received


def _is_ended(link: socket.socket) -> bool:
    """Whether the server closes it; fails by a timeout if it does not."""
    try:
        return link.recv(1) == b""
    except ConnectionError:
        return True


def test_questions_of_one_connection_are_answered_in_order(port: int) -> None:
    with _connect(port) as link:
        for body in (b"first", b"", b"x" * MAX_FRAME_BYTES):
            assert _ask(link, body) == body


@pytest.mark.parametrize(
    "sent",
    [
        FRAME_HEADER.pack(MAX_FRAME_BYTES + 1),
        b"GET / HTTP/1.1\r\n\r\n",
        FRAME_HEADER.pack(12) + b"unanswerable",
        2 * (FRAME_HEADER.pack(1) + b"a"),
    ],
    ids=["too long", "no frame", "unanswerable", "two at once"],
)
def test_a_client_that_breaks_the_protocol_is_cut_off_and_others_are_not(
    port: int, sent: bytes
) -> None:
    with _connect(port) as good, _connect(port) as bad:
        assert _ask(good, b"before") == b"before"
        bad.sendall(sent)
        assert _is_ended(bad)
        assert _ask(good, b"after") == b"after"


def test_a_question_in_pieces_is_answered_and_keeps_nobody_waiting(port: int) -> None:
    with _connect(port) as slow, _connect(port) as other:
        for piece in (b"\x03\x00", b"\x00\x00a", b"b"):
            slow.sendall(piece)
            assert _ask(other, b"quick") == b"quick"
        slow.sendall(b"c")
        assert _read(slow, 7) == FRAME_HEADER.pack(3) + b"abc"


def test_a_client_that_does_not_read_its_answer_keeps_nobody_waiting() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    # Inherited by accepted sockets: an answer does not fit into what the system buffers.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    port = listener.getsockname()[1]
    frame = FRAME_HEADER.pack(MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES)
    with closing(StoreServer(listener, _echo)), _connect(port) as deaf, _connect(port) as other:
        deaf.sendall(frame)
        for _ in range(3):
            assert _ask(other, b"quick") == b"quick"
        assert _read(deaf, len(frame)) == frame


def test_connections_are_bounded_in_number_and_a_place_becomes_free_again(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "MAX_CONNECTIONS", 1)
    with _connect(port) as first:
        assert _ask(first, b"a") == b"a"
        with _connect(port) as second:
            assert _is_ended(second)
    with _connect(port) as third:
        assert _ask(third, b"c") == b"c"


def test_a_connection_that_asks_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_server, "_SILENT_S", 0.1)
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(StoreServer(listener, _echo)), _connect(listener.getsockname()[1]) as link:
        link.sendall(b"\x01")  # the beginning of a question counts for nothing
        assert _is_ended(link)


def test_closing_ends_all_connections_and_frees_the_port(port: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    own_port = listener.getsockname()[1]
    server = StoreServer(listener, _echo)
    with _connect(own_port) as link:
        assert _ask(link, b"a") == b"a"
        server.close()
        server.close()
        assert _is_ended(link)
    with pytest.raises(ConnectionRefusedError):
        _connect(own_port)

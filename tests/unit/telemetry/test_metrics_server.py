"""The page over HTTP: what is answered, and what is not."""

from __future__ import annotations

import socket
import socketserver
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPException

import pytest

from sluice.telemetry import metrics
from sluice.telemetry.metric_names import Instrument
from sluice.telemetry.metrics import InstrumentReading, MetricsPage
from tests.support.loopback import needs_ipv6
from tests.support.scraped import fetch, parsed, value

LEVEL = Instrument(name="sluice_level", unit="metres", meaning="Of the water.")


@contextmanager
def served(
    read: Callable[[], Iterable[InstrumentReading]] = lambda: [InstrumentReading(LEVEL, 1.0)],
    host: str = "127.0.0.1",
) -> Iterator[str]:
    with closing(MetricsPage(read, host, 0)) as page:
        yield f"[{host}]:{page.port}" if ":" in host else f"{host}:{page.port}"


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_the_page_is_answered_and_nothing_else_is_there(host: str) -> None:
    with served(host=host) as address:
        assert value(parsed(fetch(address)), "sluice_level") == 1.0
        assert value(parsed(fetch(address, "/metrics?name=x")), "sluice_level") == 1.0
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(address, "/")


def test_a_page_that_fails_is_an_error_and_the_next_one_is_answered() -> None:
    answers = iter([ValueError("broken"), InstrumentReading(LEVEL, 2.0)])

    def read() -> Iterable[InstrumentReading]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    with served(read) as address:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            fetch(address)
        assert value(parsed(fetch(address)), "sluice_level") == 2.0


def test_a_client_that_sends_nothing_is_disconnected_and_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_TIMEOUT_S", 0.1)
    with served() as address, socket.create_connection(split(address), 20) as silent:
        silent.sendall(b"GET /met")
        assert value(parsed(fetch(address)), "sluice_level") == 1.0
        assert silent.recv(10) == b""


def test_a_ninth_connection_is_closed_at_once_and_a_free_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_TIMEOUT_S", 60.0)
    with served() as address, ExitStack() as silent:
        first, *_ = [
            silent.enter_context(socket.create_connection(split(address), 20)) for _ in range(8)
        ]
        ninth = silent.enter_context(socket.create_connection(split(address), 20))
        assert ninth.recv(10) == b""
        first.shutdown(socket.SHUT_WR)
        assert first.recv(10) == b""
        # The server closes a connection a moment before it counts it as free.
        for _ in range(600):
            with suppress(OSError, HTTPException):
                assert value(parsed(fetch(address)), "sluice_level") == 1.0
                break
            time.sleep(0.1)
        else:
            pytest.fail("no connection became free")


def test_connections_that_get_no_thread_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with served() as address:
        with monkeypatch.context() as patched:
            patched.setattr(socketserver.ThreadingMixIn, "process_request", without_thread)
            for _ in range(9):
                with socket.create_connection(split(address), 20) as closed:
                    assert closed.recv(10) == b""
        assert value(parsed(fetch(address)), "sluice_level") == 1.0


def test_after_the_end_nobody_listens() -> None:
    with served() as address:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split(address), 20)


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)

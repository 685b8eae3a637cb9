"""The page over HTTP: what is answered, what is not, and that nobody can keep it busy."""

from __future__ import annotations

import socket
import threading
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from sluice.telemetry import metrics_page
from sluice.telemetry.metrics_page import MetricsServer
from tests.support.scraped import fetch


@contextmanager
def served(page: Callable[[], bytes]) -> Iterator[str]:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = MetricsServer(page, "text/plain; version=0.0.4", listening)
    server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.stop()


def test_the_page_is_answered_and_nothing_else_is_there() -> None:
    with served(lambda: b"told 1\n") as address:
        assert fetch(address) == "told 1\n"
        assert fetch(address, "/metrics?name=x") == "told 1\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(address, "/")


def test_another_method_is_refused() -> None:
    with served(lambda: b"") as address, socket.create_connection(split(address), 10) as caller:
        caller.sendall(b"POST /metrics HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc")
        assert b" 501 " in caller.recv(4096)


def test_a_page_that_fails_is_told_as_such_and_the_next_one_is_answered() -> None:
    answers = iter([ValueError("broken"), b"fine\n"])

    def page() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with served(page) as address:
        with pytest.raises(urllib.error.HTTPError, match="500"):
            fetch(address)
        assert fetch(address) == "fine\n"


def test_callers_beyond_the_limit_find_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "_MOST_AT_ONCE", 2)
    inside, go_on = threading.Semaphore(0), threading.Event()

    def page() -> bytes:
        inside.release()
        go_on.wait(20)
        return b"late\n"

    found: list[str] = []
    with served(page) as address:
        callers = [threading.Thread(target=lambda: found.append(fetch(address))) for _ in range(2)]
        for caller in callers:
            caller.start()
        assert inside.acquire(timeout=20)
        assert inside.acquire(timeout=20)
        with socket.create_connection(split(address), 20) as third:
            assert third.recv(10) == b""
        go_on.set()
        for caller in callers:
            caller.join(20)
    assert found == ["late\n", "late\n"]


def test_a_caller_that_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    assert metrics_page._MetricsRequest.timeout == metrics_page._REQUEST_TIMEOUT_S
    monkeypatch.setattr(metrics_page._MetricsRequest, "timeout", 0.1)
    with served(lambda: b"") as address, socket.create_connection(split(address), 20) as silent:
        silent.sendall(b"GET /met")
        assert silent.recv(10) == b""


def test_a_caller_that_sends_a_byte_now_and_then_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_page._MetricsRequest, "timeout", 0.5)
    with served(lambda: b"") as address, socket.create_connection(split(address), 20) as slow:
        slow.settimeout(0.05)
        with suppress(ConnectionError):  # closed with some of its bytes unread
            for _ in range(400):  # many times the deadline
                slow.sendall(b"G")
                with suppress(TimeoutError):
                    assert slow.recv(10) == b""
                    return
            raise AssertionError("it held its place")


def test_a_thread_that_cannot_be_started_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_page, "_MOST_AT_ONCE", 1)
    start, failures = threading.Thread.start, [True, True]

    def limited(thread: threading.Thread) -> None:
        if "process_request" in thread.name and failures:
            failures.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    with served(lambda: b"fine\n") as address:
        monkeypatch.setattr(threading.Thread, "start", limited)
        for _ in range(2):
            with socket.create_connection(split(address), 20) as refused:
                assert refused.recv(10) == b""
        assert not failures
        assert fetch(address) == "fine\n"


def test_after_the_end_nobody_listens() -> None:
    with served(lambda: b"") as address:
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(split(address), 20)


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)

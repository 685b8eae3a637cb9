"""Programs on a server of SandboxFusion: what is sent, and what its answers mean."""

from __future__ import annotations

import base64
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sluice.errors import ConfigError, SandboxUnavailableError
from sluice.sandbox import sandbox_fusion
from sluice.sandbox.run_result import MIB, PYTHON, Limits, Result, SandboxEnd
from sluice.sandbox.sandbox_fusion import SandboxFusionSandbox

LIMITS = Limits(wall_s=60.0, memory_bytes=512 * MIB, output_bytes=1000)


@contextmanager
def served(*answers: object) -> Iterator[tuple[SandboxFusionSandbox, list[Any]]]:
    """A server with one answer after the other (an integer is a status), and its requests."""
    left, requests = list(answers), list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(json.loads(body))
            answer = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(b"" if isinstance(answer, int) else json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/run_code"
        yield SandboxFusionSandbox(url, LIMITS), requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_result(status: str = "Finished", code: int | None = 0, out: str = "") -> dict[str, object]:
    return {"status": status, "return_code": code, "stdout": out, "stderr": "e"}


def answered(status: str, run: dict[str, object] | None, **more: object) -> Result:
    with served({"status": status, "run_result": run, "execution_time": 1, **more}) as (box, _):
        return box.run([PYTHON, "a.py"], {"a.py": "x"})


def test_a_program_goes_there_as_verl_sends_it() -> None:
    answer = {"status": "Success", "run_result": run_result(out="4\n")}
    with served(answer) as (sandbox, requests):
        result = sandbox.run([PYTHON, "a.py"], {"a.py": "print(4)", "b": "é"}, "ü".encode())
    assert result == Result(SandboxEnd.FINISHED, 0, b"4\n", b"e")
    (request,) = requests
    assert request["code"] == "print(4)"
    assert request["language"] == "python"
    assert request["stdin"] == "ü"
    assert (request["run_timeout"], request["memory_limit_MB"]) == (pytest.approx(57.0), 512)
    assert base64.b64decode(request["files"]["b"]).decode() == "é"


def test_another_command_line_goes_there_as_a_script() -> None:
    with served({"status": "Success", "run_result": run_result()}) as (sandbox, requests):
        sandbox.run(["ls", "-l", "a b"])
    assert (requests[0]["language"], requests[0]["code"]) == ("bash", "ls -l 'a b'")


def test_ends_on_the_server_are_distinguished() -> None:
    assert answered("Failed", run_result(code=1)).exit_code == 1
    late = answered("Failed", run_result("TimeLimitExceeded", None))
    assert late.end is SandboxEnd.TIMED_OUT
    long = answered("Success", run_result(out="x" * 2000))
    assert (long.end, len(long.stdout)) == (SandboxEnd.OUTPUT_TOO_LARGE, 1000)


@pytest.mark.parametrize(
    ("status", "run"),
    [
        ("SandboxError", None),
        ("Failed", None),
        ("Odd", run_result()),
        ("Failed", run_result("Error")),
    ],
)
def test_a_failure_of_the_server_is_none_of_the_program(
    status: str, run: dict[str, object] | None
) -> None:
    with pytest.raises(SandboxUnavailableError):
        answered(status, run, message="it broke")


def test_a_busy_server_is_asked_again_and_another_status_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox_fusion, "_FIRST_PAUSE_S", 0.0)
    answer = {"status": "Success", "run_result": run_result()}
    with served(504, 504, answer) as (sandbox, requests):
        assert sandbox.run([PYTHON, "a.py"], {"a.py": "x"}).exit_code == 0
        assert len(requests) == 3
    for status, asked in ((504, 3), (404, 1)):
        with served(status) as (sandbox, requests):
            with pytest.raises(SandboxUnavailableError, match=str(status)):
                sandbox.run([PYTHON, "a.py"], {"a.py": "x"})
            assert len(requests) == asked


def test_a_server_that_hangs_ends_with_the_time_of_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sandbox = SandboxFusionSandbox(f"http://127.0.0.1:{silent.getsockname()[1]}/", LIMITS)
        with pytest.raises(SandboxUnavailableError, match="no whole answer in time"):
            sandbox.run([PYTHON, "a.py"], {"a.py": "x"}, limits=replace(LIMITS, wall_s=0.5))
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # a second try would have more time
            silent.accept()


def test_an_address_that_is_none_is_an_error_with_the_key() -> None:
    with pytest.raises(ConfigError, match=r"reward\.sandbox_fusion\.url = 'box:80'"):
        SandboxFusionSandbox("box:80", LIMITS)

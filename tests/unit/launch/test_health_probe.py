"""The probe of containers' health checks against real servers."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from sluice.launch import health_probe
from sluice.launch.health_probe import health_problem, main
from sluice.launch.network_layout import ServicePorts
from sluice.rpc.server import RpcServer
from tests.support.source_tree import ROOT

ANSWERS_WITHIN_S = 10.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def serve(*, serving: bool) -> tuple[RpcServer, int]:
    port = free_port()
    server = RpcServer(
        [], ("test",), host="127.0.0.1", port=0, max_message_bytes=1 << 20, health_port=port
    )
    await server.start(serving=serving)
    return server, port


async def problem_of(port: int) -> str | None:
    return await asyncio.to_thread(health_problem, f"127.0.0.1:{port}", ANSWERS_WITHIN_S)


async def test_a_server_is_healthy_while_it_serves_and_not_before() -> None:
    server, port = await serve(serving=False)
    try:
        assert await problem_of(port) == f"127.0.0.1:{port}: answers, and is not serving"
        await server.set_serving(serving=True)
        assert await problem_of(port) is None
        assert await problem_of(server.port) is None
    finally:
        await server.stop(0)


def test_where_nobody_listens_the_reason_is_said() -> None:
    problem = health_problem(f"127.0.0.1:{free_port()}", ANSWERS_WITHIN_S)
    assert problem is not None
    assert "UNAVAILABLE" in problem


async def test_the_exit_code_tells_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server, port = await serve(serving=True)
    monkeypatch.setitem(health_probe.SERVICE_PORTS, "reward", ServicePorts(1, port))
    try:
        assert await asyncio.to_thread(main, ["reward"]) == 0
    finally:
        await server.stop(0)
    assert await asyncio.to_thread(main, ["reward"]) == 1
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["reward", "trainer"]])
def test_no_service_or_an_unknown_one_is_exit_code_2_with_an_example(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "example: python -m sluice.launch.health_probe trainer" in capsys.readouterr().err


def test_a_probe_loads_grpc_and_nothing_heavy() -> None:
    code = (
        "import sys, sluice.launch.health_probe; "
        "heavy = {'numpy', 'pyarrow', 'msgspec', 'yaml', 'google.protobuf', 'torch'}; "
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr

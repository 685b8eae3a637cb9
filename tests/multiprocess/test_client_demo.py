"""A small `make demo-clients`: many clients on a run in training, and some of them vanish."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import grpc
import pytest

from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from sluice.client import run_monitor
from tests.support.threaded_launch import threaded_launch
from tools import launched_run
from tools.client_demo import __main__ as client_demo
from tools.client_demo.__main__ import _COMMANDS, NODE, NODE_PACKAGES, PYTHON

HAS_NODE = shutil.which("node") is not None and (NODE_PACKAGES / "@grpc").is_dir()
PROMPTS = 60
LANGUAGES = (PYTHON, NODE) if HAS_NODE else (PYTHON,)


@pytest.mark.timeout(900)
def test_every_prompt_is_answered_once_though_queues_are_full_and_clients_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launched_run, "launched_run", threaded_launch)
    # A busy machine may keep the holder of a pause from renewing it for some seconds.
    monkeypatch.setattr(run_monitor, "_LEASE_S", 120.0)
    (tmp_path / "slow").touch()  # the run's scorer leaves the clients a core
    code = client_demo.main(
        [
            *("--folder", str(tmp_path), "--run", "tiny", "--calm", "2"),
            *("--prompts", str(PROMPTS), "--clients", "3", "--vanish", "1"),
            *("--slots", "3", "--max-queued", "1", "--max-tokens", "24"),
            *("--concurrency", "12", "--languages", *LANGUAGES),
        ]
    )
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert code == 0, (report, printed.err[-3000:])
    assert (report["answered"], report["lost"], report["failed"]) == (PROMPTS, 0, 0)
    assert report["answered_twice"] == 0
    assert report["vanished"] == 1
    assert report["vanished_mid_stream"] == 1
    assert report["tried_again"] > 0  # 36 prompts at once for 8 places that training shares
    assert report["slots_left"] == 0
    assert min(report["training_steps_per_minute"].values()) > 0
    assert report["clients"] == 3


class SilentOnce(trainer_pb2_grpc.TrainerServiceServicer):
    """Knows no replica, and leaves the second question without an answer."""

    def __init__(self) -> None:
        self.questions = 0
        self.asked_again = asyncio.Event()

    async def GetStatus(
        self, request: trainer_pb2.GetStatusRequest, context: object
    ) -> trainer_pb2.GetStatusResponse:
        self.questions += 1
        if self.questions == 2:
            await asyncio.Event().wait()
        if self.questions > 2:
            self.asked_again.set()
        return trainer_pb2.GetStatusResponse()


@pytest.mark.skipif(not HAS_NODE, reason="`make demo-clients` installs Node's packages")
async def test_a_client_in_node_asks_again_when_its_question_for_replicas_gets_no_answer() -> None:
    server, trainer = grpc.aio.server(), SilentOnce()
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = await asyncio.create_subprocess_exec(
        *_COMMANDS[NODE], stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdin is not None
    assert client.stdout is not None
    task = {
        "name": "node-0",
        "trainer": f"127.0.0.1:{port}",
        "prompts": [[0, [{"role": "user", "content": "1 + 1"}]]],
        "concurrency": 1,
        "max_tokens": 1,
        "deadline_s": 300,
        "vanish_at": None,
    }
    try:
        client.stdin.write(json.dumps(task).encode() + b"\ngo\n")
        assert json.loads(await client.stdout.readline()) == {"ready": True}
        async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
            failure = tasks.create_task(client.stdout.readline())
            asked_again = tasks.create_task(trainer.asked_again.wait())
            await asyncio.wait((failure, asked_again), return_when=asyncio.FIRST_COMPLETED)
            assert asked_again.done(), await failure
            failure.cancel()
    finally:
        client.kill()
        await client.wait()
        await server.stop(None)

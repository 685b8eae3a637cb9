"""A small `make demo-clients`: many clients on a run in training, and some of them vanish."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from sluice.api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tests.support.source_tree import ROOT
from tools.client_demo.__main__ import _COMMANDS, NODE, NODE_PACKAGES, PYTHON

HAS_NODE = shutil.which("node") is not None and (NODE_PACKAGES / "@grpc").is_dir()
LANGUAGES = (PYTHON, NODE) if HAS_NODE else (PYTHON,)


@pytest.mark.timeout(900)
def test_every_prompt_is_answered_once_though_queues_are_full_and_clients_vanish(
    tmp_path: Path,
) -> None:
    (tmp_path / "slow").touch()  # the run's scorer leaves the clients a core
    finished = subprocess.run(
        [
            *(sys.executable, "-m", "tools.client_demo", "--folder", str(tmp_path)),
            *("--prompts", "150", "--clients", "5", "--vanish", "2", "--run", "tiny"),
            *("--slots", "4", "--max-queued", "2", "--max-tokens", "24", "--calm", "2"),
            *("--concurrency", "12"),
            *("--languages", *LANGUAGES),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert finished.stdout, finished.stderr[-3000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert finished.returncode == 0, (report, finished.stderr[-3000:])
    assert (report["answered"], report["lost"], report["failed"]) == (150, 0, 0)
    assert report["answered_twice"] == 0
    assert 1 <= report["vanished"] <= 2  # one may have ended before the signal came
    assert report["vanished_mid_stream"] > 0
    assert report["tried_again"] > 0  # 60 prompts at once for 12 places that training shares
    assert report["slots_left"] == 0
    assert min(report["training_steps_per_minute"].values()) > 0
    assert report["clients"] == 5


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
    }
    try:
        client.stdin.write(json.dumps(task).encode() + b"\ngo\n")
        assert json.loads(await client.stdout.readline()) == {"ready": True}
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            failure = tasks.create_task(client.stdout.readline())
            asked_again = tasks.create_task(trainer.asked_again.wait())
            await asyncio.wait((failure, asked_again), return_when=asyncio.FIRST_COMPLETED)
            assert asked_again.done(), await failure
            failure.cancel()
    finally:
        client.kill()
        await client.wait()
        await server.stop(None)

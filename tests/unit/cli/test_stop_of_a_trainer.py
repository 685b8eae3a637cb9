"""`sluice stop` beside a scripted trainer."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.cli.run import control as command
from sluice.cli.run import up
from sluice.client.run_address import locate_run
from sluice.errors import NotReadyError
from sluice.launch.servicer import LauncherAddress, write_launcher
from sluice.rpc.policy import CALL_POLICIES, CallPolicy
from tests.support.dashboard_run import make_run
from tests.support.rpc_server import serving
from tests.support.scripted_trainer import ScriptedTrainer, monitored

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")


class DyingTrainer(ScriptedTrainer):
    """After the call another one is in its place, which knows nothing of it."""

    starts = 1

    async def GetStatus(self, request: Any, context: Any) -> Any:
        status = await super().GetStatus(request, context)
        status.instance_id = f"trainer-{self.starts}"
        return status

    async def Stop(self, request: Any, context: Any) -> Any:
        self.starts += 1
        return trainer_pb2.StopResponse(step=self.step)


class LostAnswer(DyingTrainer):
    """Answers are lost on the way while the trainer saves; later it dies."""

    num_asked = 0

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.num_asked += 1
        if self.num_asked in range(3, 7):  # more than one question is repeated
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        self.starts += self.num_asked == 9
        return await super().GetStatus(request, context)

    async def Stop(self, request: Any, context: Any) -> Any:
        return trainer_pb2.StopResponse(step=self.step)


async def test_a_trainer_that_is_out_of_reach_for_a_moment_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_POLL_S", 0.0)
    async with serving(trainer=LostAnswer()) as server:
        run = make_run(tmp_path, f"sluice.trainer.endpoint.port={server.port}")
        with pytest.raises(NotReadyError, match="was started again; repeat the command"):
            await command._save_and_end(locate_run(run), 60.0)


class AbsentAtFirst(ScriptedTrainer):
    """Begins to listen after more tries than one call makes."""

    num_asked = 0

    async def Stop(self, request: Any, context: Any) -> Any:
        self.num_asked += 1
        if self.num_asked < 5:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused")
        return trainer_pb2.StopResponse(step=self.step)


async def test_an_interrupted_run_whose_trainer_begins_to_listen_just_now_is_saved() -> None:
    trainer = AbsentAtFirst()
    async with monitored(trainer) as monitor:
        assert await up._save_and_end(monitor)
    assert trainer.num_asked == 5


async def test_a_launcher_that_never_answers_is_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CALL_POLICIES, "LaunchService/GetServices", CallPolicy(deadline_s=0.5))
    run = locate_run(make_run(tmp_path))
    stranger = subprocess.Popen(["sleep", "60"])  # has the process id of the former launcher
    try:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            address = f"127.0.0.1:{mute.getsockname()[1]}"
            write_launcher(run.run_dir, LauncherAddress(address, "s" * 32, stranger.pid))
            with pytest.raises(NotReadyError, match=r"launcher of .* does not answer; repeat"):
                await command._end_now(run, 5.0)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_trainer_that_was_started_again_before_it_saved_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(trainer=DyingTrainer()) as server:
        run = make_run(tmp_path, f"sluice.trainer.endpoint.port={server.port}")
        with pytest.raises(NotReadyError, match="was started again; repeat the command"):
            await command._save_and_end(locate_run(run), 60.0)
    assert capsys.readouterr().err == "ending after the present step, and saving\n"

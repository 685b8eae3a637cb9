"""`sluice stop` beside a scripted trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.api.trainer.v1 import trainer_pb2
from sluice.cli.run import stop as command
from sluice.client.run_address import locate_run
from sluice.errors import NotReadyError
from tests.support.dashboard_run import make_run
from tests.support.rpc_server import serving
from tests.support.scripted_trainer import ScriptedTrainer


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


async def test_a_trainer_that_was_started_again_before_it_saved_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(trainer=DyingTrainer()) as server:
        run = make_run(tmp_path, f"sluice.trainer.endpoint.port={server.port}")
        with pytest.raises(NotReadyError, match="was started again; repeat the command"):
            await command._save_and_end(locate_run(run), 60.0)
    assert capsys.readouterr().err == "ending after the present step, and saving\n"

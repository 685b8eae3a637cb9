"""`sluice eval` and the run it holds meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.policy import evaluate as evaluation
from sluice.concurrency.process import until_signal
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.errors import NotReadyError
from sluice.launch.processes.supervisor import ServiceState
from sluice.launch.service_spec import ServiceSpec
from sluice.launch.servicer import ReplicaScale, launch_service
from tests.support.scripted_children import end_self
from tests.support.scripted_trainer import ScriptedTrainer, monitored

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

NOWHERE = ("sluice.trainer.endpoint.port=1", "sluice.reward.endpoint.port=1")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_run_continues_after_a_signal_ends_an_evaluation(number: int) -> None:
    trainer = ScriptedTrainer(step=1)
    async with monitored(trainer) as monitor:

        async def evaluate() -> None:
            async with monitor.held(20):
                end_self(number)()
                await asyncio.Event().wait()

        assert await until_signal(evaluate()) is None
    assert trainer.controls == ["pause", "resume"]


async def test_without_a_signal_its_result_or_error_comes_out() -> None:
    async def works() -> int:
        return 7

    async def fails() -> int:
        raise NotReadyError("no policy yet")

    assert await until_signal(works()) == 7
    with pytest.raises(NotReadyError):
        await until_signal(fails())


def test_the_result_is_one_json_object_for_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def evaluated(run: Path, *_settings: Any) -> tuple[int, dict[str, float]]:
        assert run == Path("runs/a")
        return 3, {"val-core/x/acc/mean@1": 0.5}

    monkeypatch.setattr(evaluation, "_evaluate", evaluated)
    shown = CliRunner().invoke(commands, ["eval", "--run", "runs/a", "--json"])
    assert json.loads(shown.stdout) == {"step": 3, "metrics": {"val-core/x/acc/mean@1": 0.5}}


def test_a_run_that_has_ended_is_evaluated_by_its_checkpoints(tmp_path: Path) -> None:
    write_config(load_config(None, NOWHERE), tmp_path / "config.yaml")
    refused = CliRunner().invoke(commands, ["eval", "--run", str(tmp_path)]).exception
    assert isinstance(refused, NotReadyError)
    assert "is not active" in str(refused)
    assert str(refused).endswith("sluice eval --model CHECKPOINT --benchmark FILE")


async def test_a_run_that_is_starting_is_to_be_asked_again_and_not_its_checkpoints(
    tmp_path: Path,
) -> None:
    write_config(load_config(None, NOWHERE), tmp_path / "config.yaml")
    async with launch_service(tmp_path, ReplicaScale(NoProcesses(), no_replica)):
        with pytest.raises(NotReadyError, match="does not answer yet") as refused:
            await evaluation._evaluate(tmp_path, None, None, 0.0)
    assert "--model" not in str(refused.value)


class NoProcesses:
    """A launcher that has started nothing yet."""

    def services(self) -> tuple[ServiceState, ...]:
        return ()

    def add(self, spec: ServiceSpec) -> None: ...

    def dismiss(self, name: str) -> None: ...


def no_replica(number: int) -> ServiceSpec:
    raise AssertionError(f"nobody asked for replica {number}")

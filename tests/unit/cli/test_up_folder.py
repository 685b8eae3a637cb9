"""`sluice up` in the folder of a finished or active run."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.reward.ledger.ledger import PromptLedger
from sluice.cli.main import commands
from sluice.cli.run import up
from sluice.cli.run.checked import refuse_other_ledger
from sluice.cli.run.quickstart import MARKER
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.doctor import files
from sluice.errors import ConfigError
from sluice.launch.cluster.ray_run import RayOptions
from sluice.launch.plan import LaunchPlan
from sluice.launch.processes.child import ThisMachine
from sluice.launch.processes.supervisor import RunEnd, ServiceState
from sluice.launch.service_spec import ServiceSpec, replica_name
from sluice.launch.servicer import ReplicaScale, launch_service
from sluice.report.run_record import ACCOUNTS_NAME, METRICS_NAME
from sluice.report.summary import read_summary, write_summary
from sluice.service_contract import CONFIG_NAME, LEDGER_FORMAT, LEDGER_NAME
from sluice.telemetry.metrics import FOLDER


class Processes:
    """A run of one process."""

    def services(self) -> tuple[ServiceState, ...]:
        return (ServiceState("trainer", None, 0, is_draining=False),)

    def add(self, spec: ServiceSpec) -> None: ...

    def dismiss(self, name: str) -> None: ...


def replica(number: int) -> ServiceSpec:
    return ServiceSpec(replica_name(number), (sys.executable, "-c", "pass"))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rollout-0.json").touch()
    (tmp_path / ACCOUNTS_NAME).touch()
    return load_config(None, [f"sluice.run_dir={tmp_path}"])


async def start(config: RunConfig, folder: Path) -> int:
    display = up.Display(Console(file=StringIO()))
    end, _ = await up.start_processes(config, folder / CONFIG_NAME, display)
    return end.exit_code


def left(folder: Path) -> list[str]:
    return [file.name for file in (folder / FOLDER).iterdir()]


async def test_the_folder_of_an_active_run_is_refused_and_stays_as_it_is(
    tmp_path: Path, config: RunConfig
) -> None:
    processes = Processes()
    async with launch_service(tmp_path, ReplicaScale(processes, replica)):
        with pytest.raises(ConfigError, match="another run is active in this folder"):
            await start(config, tmp_path)
    assert left(tmp_path) == ["rollout-0.json"]
    assert (tmp_path / ACCOUNTS_NAME).exists()
    assert not (tmp_path / CONFIG_NAME).exists()


async def test_the_folder_of_a_ledger_of_another_format_is_refused_and_stays_as_it_is(
    tmp_path: Path, config: RunConfig
) -> None:
    ledger = tmp_path / LEDGER_NAME
    PromptLedger(ledger).close()
    refuse_other_ledger(config)
    with closing(sqlite3.connect(ledger)) as database:
        database.execute("PRAGMA user_version = 3")
    with pytest.raises(ConfigError, match=f"format 3, and .* reads {LEDGER_FORMAT}; use the"):
        await start(config, tmp_path)
    assert left(tmp_path) == ["rollout-0.json"]
    assert (tmp_path / ACCOUNTS_NAME).exists()
    assert not (tmp_path / CONFIG_NAME).exists()


async def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(ConfigError) as refused:
        await start(config, tmp_path)
    assert str(refused.value) == (
        f"sluice.run_dir = {tmp_path}: cannot be written by this user; give the right to "
        f"{tmp_path}, or give another folder"
    )
    assert (tmp_path / ACCOUNTS_NAME).exists()


async def test_a_checkpoint_folder_that_cannot_be_written_is_refused_at_the_start(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = tmp_path / "saves"
    saves.mkdir()
    monkeypatch.setattr(files.os, "access", lambda folder, _: folder != saves)
    keys = (f"trainer.default_local_dir={saves}/run", "trainer.save_freq=5")
    config = load_config(None, [f"sluice.run_dir={config.sluice.run_dir}", *keys])
    with pytest.raises(
        ConfigError, match=r"^trainer\.default_local_dir = .* the right to .*saves,"
    ):
        await start(config, tmp_path)


async def test_a_quickstart_replaces_no_result_of_an_active_run(tmp_path: Path) -> None:
    files = {tmp_path / name for name in (MARKER, METRICS_NAME)}
    for file in files:
        file.touch()
    async with launch_service(tmp_path, ReplicaScale(Processes(), replica)):
        arguments = ["quickstart", "--run", str(tmp_path)]
        done = await asyncio.to_thread(CliRunner().invoke, commands, arguments)
    assert "another run is active in this folder" in str(done.exception)
    assert files == {file for file in tmp_path.iterdir() if file.is_file()}


async def test_a_second_start_says_that_the_run_is_active_before_it_looks_at_ports(
    tmp_path: Path,
) -> None:
    async with launch_service(tmp_path, ReplicaScale(Processes(), replica)):
        arguments = ["up", f"sluice.run_dir={tmp_path}", "sluice.trainer.endpoint.port=1"]
        done = await asyncio.to_thread(CliRunner().invoke, commands, arguments)
    assert str(done.exception) == (
        f"sluice.run_dir = {tmp_path}: another run is active in this folder; end it first, or "
        "give another folder"
    )


async def test_a_start_removes_what_only_the_end_of_the_run_before_it_knew(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_summary(tmp_path, {"outcome": "interrupted", "seconds_total": 99.5})
    assert read_summary(tmp_path)

    async def supervised(*_: object) -> tuple[RunEnd, None]:
        assert read_summary(tmp_path) == {}
        assert not (tmp_path / ACCOUNTS_NAME).exists()
        return RunEnd(0, ()), None

    monkeypatch.setattr(up, "_supervise", supervised)
    assert await start(config, tmp_path) == 0


def test_a_run_that_finds_no_resources_leaves_targets_of_another_alone(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_capacity(*_: object) -> None:
        raise ConfigError("no resources")

    monkeypatch.setattr(up, "ray_plan", no_capacity)
    with pytest.raises(ConfigError, match="no resources"):
        up.start_run(config, up.Display(Console(file=StringIO())), ray=RayOptions())
    assert left(tmp_path) == ["rollout-0.json"]


async def test_a_run_that_begins_forgets_targets_of_one_whose_launcher_was_killed(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(config: RunConfig, _: Path) -> LaunchPlan:
        trainer = ServiceSpec("trainer", (sys.executable, "-c", "pass"), ends_run=True)
        return LaunchPlan(config, (trainer,), replica, ThisMachine())

    monkeypatch.setattr(up, "local_plan", plan)
    processes = Processes()
    async with launch_service(tmp_path, ReplicaScale(processes, replica)) as killed:
        pass
    up_file = tmp_path / "launcher.json"
    up_file.write_text(f'{{"address": "{killed.address}", "secret": "s"}}', encoding="utf-8")
    assert await start(config, tmp_path) == 0
    assert left(tmp_path) == []

"""The launcher of one service among containers, with scripted processes in the services' place."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.launch import container
from sluice.launch.container import EXIT_UNFORESEEN, main, services_of
from sluice.launch.network_layout import KINDS, Kind, network_settings
from sluice.launch.processes.supervisor import EXIT_FAILED
from sluice.launch.service_spec import ServiceSpec
from sluice.launch.shared_run import RunEnding, SharedRun
from sluice.service_contract import CONFIG_NAME, MARK_VARIABLE
from tests.support.scripted_children import STUBBORN, WAIT_S, polite, spec

FAILS = "print('port 7 is in use'); raise SystemExit(1)"


class Folder:
    """A run's folder, and launchers in it."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._monkeypatch = path, monkeypatch
        self.run = SharedRun(path)
        self.run.begin(path / "checkpoints")
        self.file = path / CONFIG_NAME
        self.config = load_config(None, [*network_settings(), f"sluice.run_dir={path}"])
        write_config(self.config, self.file)

    def keep(self, kind: Kind, process: ServiceSpec) -> int:
        """Runs the launcher of `kind` over one process; its exit code."""

        def services(*_: object) -> tuple[ServiceSpec, ...]:
            return (replace(process, ends_run=True),)

        self._monkeypatch.setattr(container, "services_of", services)
        return main([kind, "--config", str(self.file)])

    def log(self, name: str) -> str:
        file = self.path / "logs" / f"{name}.log"
        return file.read_text(encoding="utf-8") if file.is_file() else ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    return Folder(tmp_path, monkeypatch)


def when(holds: Callable[[], bool], act: Callable[[], object]) -> threading.Thread:
    """Does `act` from another thread once `holds`."""
    gone = threading.Event()

    def watch() -> None:
        for _ in range(int(WAIT_S / 0.02)):
            if holds():
                act()
                return
            gone.wait(0.02)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_the_trainer_that_reaches_its_last_step_ends_the_run_for_all(folder: Folder) -> None:
    assert folder.keep("trainer", spec("trainer", "print('done')", is_needed=True)) == 0
    assert folder.run.ending() == RunEnding("trainer", ())


def test_a_volume_that_fails_for_a_moment_ends_no_service(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failed = Path.read_text, threading.Event()

    def read_text(file: Path, *arguments: Any, **named: Any) -> str:
        if file.name == "ended.json" and file.is_file() and not failed.is_set():
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, *arguments, **named)

    monkeypatch.setattr(Path, "read_text", read_text)
    ends = when(
        lambda: "ready" in folder.log("rollout"), lambda: folder.run.end(RunEnding("trainer", ()))
    )
    assert folder.keep("rollout", polite("rollout")) == 0
    ends.join()
    assert failed.is_set()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk without Linux")
def test_an_output_that_cannot_be_written_ends_no_service(folder: Folder) -> None:
    program = f"""
import runpy, sys
from sluice.launch import service_spec
process = service_spec.ServiceSpec("trainer", (sys.executable, "-c", "print('done')"))
service_spec.trainer_services = lambda *_: (process,)
sys.argv[1:] = ["trainer", "--config", {str(folder.file)!r}]
runpy.run_module("sluice.launch.container", run_name="__main__")
"""
    with Path("/dev/full").open("w") as full:
        kept = subprocess.run([sys.executable, "-c", program], stdout=full, check=False)
    assert kept.returncode == 0
    assert folder.run.ending() == RunEnding("trainer", ())


def test_an_error_of_the_launcher_itself_is_distinguished_from_a_failure_of_the_run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: object) -> int:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(container, "_supervise", broken)
    assert folder.keep("trainer", spec("trainer", FAILS)) == EXIT_UNFORESEEN != EXIT_FAILED
    assert "ZeroDivisionError: division by zero" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["reward", "rollout"])
def test_a_service_ends_in_order_with_its_run(
    folder: Folder, kind: Kind, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = when(
        lambda: "ready" in folder.log(kind), lambda: folder.run.end(RunEnding("trainer", ()))
    )
    assert folder.keep(kind, polite(kind)) == 0
    ends.join()
    assert "bye" in folder.log(kind)
    assert "ready" in capfd.readouterr().out


def test_a_needed_service_that_fails_permanently_ends_the_run_with_its_last_lines(
    folder: Folder, capfd: pytest.CaptureFixture[str]
) -> None:
    process = spec("reward", FAILS, is_needed=True)
    assert folder.keep("reward", process) == 1
    ending = folder.run.ending()
    assert ending is not None
    assert ending.service == "reward"
    assert "port 7 is in use" in ending.failures[0]
    assert "port 7 is in use" in capfd.readouterr().err


def test_a_needed_service_that_leaves_in_order_in_the_middle_of_the_run_ends_it(
    folder: Folder,
) -> None:
    assert folder.keep("reward", spec("reward", "print('bye')", is_needed=True)) == 1
    ending = folder.run.ending()
    assert ending is not None
    assert ending.failures == ("reward ended with code 0 in the middle of the run",)


def test_a_replica_that_leaves_in_order_leaves_alone(folder: Folder) -> None:
    assert folder.keep("rollout", spec("rollout-1", "print('bye')")) == 0
    assert folder.run.ending() is None


def test_a_replica_that_fails_permanently_ends_alone(folder: Folder) -> None:
    assert folder.keep("rollout", spec("rollout-1", FAILS)) == 1
    assert folder.run.ending() is None


def test_a_launcher_that_is_started_after_the_end_starts_nothing(folder: Folder) -> None:
    folder.run.end(RunEnding("trainer", ()))
    assert [folder.keep(kind, spec(kind, FAILS)) for kind in KINDS] == [0, 0, 0]
    assert not (folder.path / "logs").exists()


def test_after_a_failure_the_service_that_failed_and_the_trainer_say_so(
    folder: Folder, capfd: pytest.CaptureFixture[str]
) -> None:
    folder.run.end(RunEnding("reward", ("reward ended with code 1",)))
    codes = {kind: folder.keep(kind, spec(kind, FAILS)) for kind in KINDS}
    assert codes == {"trainer": 1, "reward": 1, "rollout": 0}
    assert capfd.readouterr().err.count("reward ended with code 1") == len(KINDS)


@pytest.mark.parametrize(("kind", "code"), [("rollout", 0), ("reward", 0), ("trainer", 130)])
def test_being_asked_to_stop_ends_the_service_and_not_the_run(
    folder: Folder, kind: Kind, code: int
) -> None:
    stops = when(lambda: "ready" in folder.log(kind), lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert folder.keep(kind, polite(kind)) == code
    stops.join()
    assert "bye" in folder.log(kind)
    assert folder.run.ending() is None


def test_a_trainer_that_must_be_killed_when_asked_to_stop_does_not_end_the_run(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "launcher_grace_s", lambda _: 0.5)
    stops = when(
        lambda: "ready" in folder.log("trainer"), lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert folder.keep("trainer", spec("trainer", STUBBORN, is_needed=True)) == 130
    stops.join()
    assert folder.run.is_active


def test_a_service_whose_launcher_died_knows_how_often_it_was_started(folder: Folder) -> None:
    def trainer() -> ServiceSpec:
        return services_of("trainer", folder.config, folder.file, folder.run)[0]

    first, second = trainer(), trainer()
    assert (first.starts_before, second.starts_before) == (0, 1)
    mark = folder.run.checkpoints_before()
    assert first.environment[MARK_VARIABLE] == second.environment[MARK_VARIABLE] == mark
    assert first.is_needed


def test_each_service_has_the_command_that_the_local_launcher_gives_it(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "own_address", lambda *_: "10.0.0.9")
    monkeypatch.setattr(container.socket, "gethostname", lambda: "abc")
    commands = {
        kind: services_of(kind, folder.config, folder.file, folder.run)[0].command[1:]
        for kind in KINDS
    }
    file = str(folder.file)
    assert commands == {
        "trainer": ("-m", "services.trainer", "--config", file),
        "reward": ("-m", "services.reward", "--config", file),
        "rollout": (
            *("-m", "services.rollout", "--config", file, "--name", "rollout-abc"),
            "sluice.rollout.endpoint.advertise=10.0.0.9",
        ),
    }

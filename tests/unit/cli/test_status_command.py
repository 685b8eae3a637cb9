"""`sluice status` and other commands on a run that is not active."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.running_run import ask_run
from sluice.concurrency.process import mark_process
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.errors import ConfigError, NotReadyError
from sluice.launch.processes.supervisor import ServiceState
from sluice.launch.service_spec import ServiceSpec
from sluice.launch.servicer import ReplicaScale, launch_service
from tests.support.run_folder import ACCOUNTS, STEPS, VALIDATIONS, run_folder

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

# Ports on which nothing of ours can listen.
NOWHERE = ("sluice.trainer.endpoint.port=1", "sluice.reward.endpoint.port=1")


def past(folder: Path, *, ended: bool, empty: bool = False, validations: int = 2) -> Path:
    write_config(load_config(None, NOWHERE), folder / "config.yaml")
    run_folder(
        folder,
        steps=() if empty else STEPS,
        validations=() if empty else VALIDATIONS[:validations],
        accounts=ACCOUNTS if ended else None,
    )
    return folder


def status(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, ["status", *arguments])
    return result.exit_code, result.output


def test_a_finished_run_says_so(tmp_path: Path) -> None:
    code, text = status(str(past(tmp_path, ended=True)))
    assert code == 0
    assert text == f"{tmp_path}: finished after 2 steps; held-out accuracy 0.250 -> 0.750\n"


def test_a_finished_run_says_so_to_machines(tmp_path: Path) -> None:
    code, text = status(str(past(tmp_path, ended=True)), "--json")
    assert code == 0
    assert json.loads(text) == {
        "phase": "finished",
        "step": 2,
        "accuracies": [0.25, 0.75],
        "processes": [],
        "is_data_exhausted": False,
        "total_steps": None,
    }


def test_a_run_that_was_stopped_before_its_last_step_is_not_called_finished(tmp_path: Path) -> None:
    past(tmp_path, ended=True)
    settings = [*NOWHERE, "trainer.total_training_steps=9"]
    write_config(load_config(None, settings), tmp_path / "config.yaml")
    _, text = status(str(tmp_path))
    assert text.startswith(
        f"{tmp_path}: stopped after step 2 of 9; held-out accuracy 0.250 -> 0.750\n"
    )
    assert f"`sluice up {tmp_path / 'config.yaml'}` starts it again" in text


class Restarting:
    """A launcher whose trainer waits for its restart."""

    def services(self) -> tuple[ServiceState, ...]:
        reward = ServiceState("reward", 7, 0, is_draining=False, max_restarts=5)
        trainer = ServiceState("trainer", None, 1, is_draining=False, max_restarts=5)
        return reward, trainer

    def add(self, spec: ServiceSpec) -> None: ...

    def dismiss(self, name: str) -> None: ...


async def test_a_run_whose_trainer_is_being_restarted_says_so_and_which_try_it_is(
    tmp_path: Path,
) -> None:
    run = past(tmp_path, ended=False)
    async with launch_service(tmp_path, ReplicaScale(Restarting(), no_replica)):
        code, text = await asyncio.to_thread(status, str(run))
        _, for_machines = await asyncio.to_thread(status, str(run), "--json")
    assert code == 0
    assert "starting; 2 steps finished" in text
    assert "trainer is being restarted (try 1 of 5)" in text
    assert "sluice up" not in text, "it runs: nobody has to start it"
    assert json.loads(for_machines)["processes"][1] == {
        "name": "trainer",
        "pid": 0,
        "restarts": 1,
        "is_draining": False,
        "max_restarts": 5,
    }


def no_replica(number: int) -> ServiceSpec:
    raise AssertionError(f"nobody asked for replica {number}")


def secured(folder: Path, *, ended: bool) -> Path:
    """A run whose certificates are gone."""
    run = past(folder, ended=ended)
    gone = [f"sluice.security.{name}_file=/gone" for name in ("ca", "cert", "key")]
    write_config(
        load_config(None, [*NOWHERE, "sluice.security.tls=mtls", *gone]), run / "config.yaml"
    )
    return run


@pytest.mark.parametrize("why", [(), ("--why",)])
def test_a_finished_run_is_shown_without_its_certificates(
    tmp_path: Path, why: tuple[str, ...]
) -> None:
    result = CliRunner().invoke(commands, ["status", *why, str(secured(tmp_path, ended=True))])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{tmp_path}: finished after 2 steps; held-out accuracy")
    assert "note: its services could not be asked" in result.stderr
    assert "sluice.security.ca_file = /gone is no file" in result.stderr


def test_a_run_that_may_be_active_is_never_reported_without_asking_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sluice\.security\.ca_file = /gone is no file"):
        CliRunner().invoke(
            commands, ["status", str(secured(tmp_path, ended=False))], catch_exceptions=False
        )


def test_an_interrupted_run_shows_how_far_it_came_and_how_to_continue(tmp_path: Path) -> None:
    _, text = status(str(past(tmp_path, ended=False)))
    assert f"{tmp_path}: not running; 2 steps finished" in text
    assert f"`sluice up {tmp_path / 'config.yaml'}` starts it again" in text


def test_one_validation_is_one_accuracy(tmp_path: Path) -> None:
    _, text = status(str(past(tmp_path, ended=True, validations=1)))
    assert text == f"{tmp_path}: finished after 2 steps; held-out accuracy 0.250\n"


def test_a_run_without_a_single_step_has_no_accuracy(tmp_path: Path) -> None:
    _, text = status(str(past(tmp_path, ended=False, empty=True)))
    assert f"{tmp_path}: not running; 0 steps finished\n" in text


async def test_commands_that_need_it_running_refuse_with_the_same_words(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"the run is not active\.\n.*finished after 2 steps"):
        await ask_run(past(tmp_path, ended=True))


def why(run_dir: Path, *arguments: str) -> str:
    result = CliRunner().invoke(commands, ["status", "--why", str(run_dir), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_of_a_run_without_processes_it_says_how_far_it_came(tmp_path: Path) -> None:
    write_config(load_config(None, NOWHERE), tmp_path / "config.yaml")
    assert f"{tmp_path}: not running; 0 steps finished" in why(tmp_path)


def test_a_process_that_lives_and_does_not_answer_is_no_past_run(tmp_path: Path) -> None:
    write_config(load_config(None, NOWHERE), tmp_path / "config.yaml")
    with mark_process(tmp_path, "trainer", "127.0.0.1:1"):
        found = json.loads(why(tmp_path, "--json"))
        shown = why(tmp_path)
    assert found["root"] == "trainer"
    assert found["services"][0]["process"] == "alive"
    assert shown.startswith("trainer does not answer (its process")

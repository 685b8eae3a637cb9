"""What containers are given from outside: how long they may stop."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError
from sluice.launch.container_settings import STOP_GRACE_VARIABLE, check_stop_grace, duration_s
from sluice.launch.network_layout import engine_grace_s
from sluice.service_contract import CONFIG_NAME
from tests.unit.cli.test_prepare_command import model_and_data

pytestmark = pytest.mark.usefixtures("tried_scorers")

LONG = "sluice.shutdown_grace_s=60"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("1m30s", 90.0), ("1.5h", 5400.0), ("500ms", 0.5), ("2m500ms", 120.5)],
)
def test_a_duration_is_read_as_compose_reads_it(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "90", "s", "30s1m", "-5s", "soon"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="give one such as 90s"):
        duration_s(text)


def test_a_run_is_refused_whose_services_would_be_killed_while_they_stop() -> None:
    config = load_config(None, [LONG])
    needed = f"{engine_grace_s(60.0)}s"
    check_stop_grace(config, needed)
    with pytest.raises(ConfigError, match=f"{STOP_GRACE_VARIABLE}={needed}"):
        check_stop_grace(config, "30s")


def prepare(*arguments: str, stop_grace: str) -> tuple[int, str]:
    environment = {STOP_GRACE_VARIABLE: stop_grace}
    result = CliRunner().invoke(commands, ["prepare", *arguments], env=environment)
    return result.exit_code, result.output + str(result.exception)


def test_prepare_writes_no_run_that_its_containers_cannot_stop_in_order(tmp_path: Path) -> None:
    arguments = ["--run-dir", str(tmp_path / "run"), *model_and_data(tmp_path / "job"), LONG]
    code, said = prepare(*arguments, stop_grace="30s")
    assert code != 0
    assert "sluice.shutdown_grace_s = 60" in said
    assert not (tmp_path / "run" / CONFIG_NAME).exists()
    assert prepare(*arguments, stop_grace="75s")[0] == 0


def test_a_run_that_continues_is_held_against_the_configuration_it_began_with(
    tmp_path: Path,
) -> None:
    arguments = ["--run-dir", str(tmp_path / "run"), *model_and_data(tmp_path / "job")]
    assert prepare(*arguments, LONG, stop_grace="75s")[0] == 0
    code, said = prepare(*arguments, stop_grace="30s")
    assert code != 0
    assert "sluice.shutdown_grace_s = 60" in said
    assert prepare("--restart", *arguments, stop_grace="30s")[0] == 0

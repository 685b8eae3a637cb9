"""What the command says of itself."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sluice.cli.main import app, commands

NAMES = (
    "quickstart",
    "up",
    "train",
    "doctor",
    "status",
    "dashboard",
    "compare",
    "scale",
    "prepare",
    "generate",
    "submit",
    "score",
    "serve-openai",
    "eval",
    "merge",
    "simulate",
    "certs",
)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, arguments, terminal_width=80)
    return result.exit_code, result.output


def test_the_command_lists_all_it_can_do() -> None:
    code, text = invoke("--help")
    assert code == 0
    assert {command.name for command in commands.registered_commands} == set(NAMES)
    assert all(f"\n  {name} " in text for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_commands_help_shows_an_example_on_a_line_of_its_own(name: str) -> None:
    code, text = invoke(name, "--help")
    assert code == 0
    assert "\n  Example" in text
    assert f"\n    sluice {name}" in text


@pytest.mark.parametrize("name", NAMES)
def test_every_option_and_argument_says_what_it_does(name: str) -> None:
    group = typer.main.get_command(commands)
    command = group.commands[name]  # type: ignore[attr-defined]
    assert all(getattr(parameter, "help", None) for parameter in command.params)


def test_the_version_is_the_packages() -> None:
    assert invoke("--version") == (0, f"sluice {version('sluice')}\n")


@pytest.mark.parametrize("name", ["status", "generate", "eval"])
def test_a_run_that_was_never_started_is_one_line_and_exit_code_1(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["hello", "--run", str(tmp_path)] if name == "generate" else [str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["sluice", name, *arguments])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"sluice: ERROR run: {tmp_path} holds no config.yaml; give the folder of a started run "
        "(its sluice.run_dir), for example runs/quickstart\n"
    )


def test_an_unknown_option_is_exit_code_2_with_its_name() -> None:
    code, text = invoke("status", "--jason")
    assert code == 2
    assert "--jason" in text


@pytest.mark.parametrize(
    ("name", "old", "parameter", "value"),
    [
        ("up", ("--room-timeout", "5"), "old_capacity_timeout", 5.0),
        ("prepare", ("--anew",), "old_restart", True),
    ],
)
def test_old_names_of_options_are_accepted_and_not_shown(
    name: str, old: tuple[str, ...], parameter: str, value: object
) -> None:
    command = typer.main.get_command(commands).commands[name]  # type: ignore[attr-defined]
    assert command.make_context(name, list(old)).params[parameter] == value
    assert old[0] not in invoke(name, "--help")[1]

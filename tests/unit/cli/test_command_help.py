"""What the command says of itself."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from sluice import __main__ as entry
from sluice.cli import main
from sluice.cli.main import app, commands


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, arguments, terminal_width=80)
    return result.exit_code, result.output


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Each command by its words, those of groups and those below `eval` too."""
    for name, one in getattr(command, "commands", {}).items():
        yield from leaves(one, (*words, name))
    if not isinstance(command, TyperGroup):
        yield " ".join(words), command


COMMANDS = dict(leaves(get_command(commands)))
NAMES = sorted(name for name in COMMANDS if " " not in name)


def test_the_command_lists_all_it_can_do() -> None:
    code, text = invoke("--help")
    assert code == 0
    assert all(f"\n  {name} " in text for name in (*NAMES, "config", "data", "reward"))
    assert "..." not in text.partition("\nStart:")[2]
    assert max(map(len, text.splitlines())) <= 80


def test_every_command_is_listed_under_its_purpose() -> None:
    _, text = invoke("--help")
    headings = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings[1:] == [
        "Start:",
        "Check before the start:",
        "Watch:",
        "Change a run:",
        "Use the policy:",
        "Deploy:",
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example_and_explains_all_it_takes(name: str) -> None:
    code, text = invoke(*name.split(), "--help")
    assert code == 0
    assert f"\n    sluice {name}" in text.partition("\n  Example")[2]
    assert all(getattr(parameter, "help", None) for parameter in COMMANDS[name].params)


@pytest.mark.parametrize("group", ["config", "data", "reward", "env", "recipe", "agents"])
def test_the_help_of_a_group_lists_its_commands_and_an_example(group: str) -> None:
    code, text = invoke(group, "--help")
    assert code == 0
    below = [name.split()[1] for name in COMMANDS if name.startswith(f"{group} ")]
    assert below
    assert all(f"\n  {name} " in text for name in below)
    assert f"\n    sluice {group} " in text
    assert "..." not in text.partition("\nCommands:")[2]


def test_the_version_is_the_packages() -> None:
    assert invoke("--version") == (0, f"sluice {version('sluice')}\n")


def test_the_long_version_names_python_and_packages() -> None:
    code, text = invoke("--version", "-v")
    assert code == 0
    assert f"\npython {platform.python_version()} " in text
    assert f"\ngrpcio {version('grpcio')}\n" in text


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"sluice {version('sluice')}\n")


def completions(*words: str) -> set[str]:
    """What bash would offer for the last word."""
    environment = {
        "_SLUICE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["sluice", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = CliRunner().invoke(commands, [], prog_name="sluice", env=environment)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("config", "explain", "data.train_b"), "data.train_batch_size"),
        (("config", "check", "run.yaml", "data.train_b"), "data.train_batch_size="),
        (("up", "run.yaml", "+data.train_b"), "+data.train_batch_size="),
        (("train", "data.train_b"), "data.train_batch_size="),
    ],
)
def test_the_shell_completes_configuration_keys(words: tuple[str, ...], offered: str) -> None:
    assert offered in completions(*words)


# They follow a run.
WITHOUT_JSON = {"quickstart", "up", "train"}


@pytest.mark.parametrize("name", sorted(set(NAMES) - WITHOUT_JSON))
def test_every_command_that_answers_something_answers_in_json_too(name: str) -> None:
    assert "--json" in invoke(name, "--help")[1]


@pytest.mark.parametrize(
    "name",
    [
        *("status", "logs", "open", "dashboard", "report", "scale", "submit", "stop"),
        *("generate", "score", "eval", "serve-openai"),
    ],
)
def test_every_command_on_a_run_takes_it_as_an_argument_and_as_an_option(name: str) -> None:
    _, text = invoke(name, "--help")
    assert "[RUN]" in text
    assert "--run RUN" in text


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
        "(its sluice.run_dir); one whose model or data are still being made has none yet\n"
    )


def test_an_unknown_option_is_exit_code_2_with_its_name() -> None:
    code, text = invoke("status", "--jason")
    assert code == 2
    assert "--jason" in text


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.save_freq=5"],
        ["--trainer.save_freq", "5"],
        ["--trainer.x=5"],
        ["--custom_reward_function.path=5"],
    ],
)
def test_a_key_that_is_written_as_an_option_is_refused_with_its_spelling(words: list[str]) -> None:
    code, text = invoke("up", "run.yaml", *words)
    assert code == 2
    key = words[0].removeprefix("--").removesuffix("=5")
    assert f"{words[0]} is no option; give {key}=5" in " ".join(text.split())


def test_a_file_that_cannot_be_written_is_one_line_with_its_path_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nowhere" / "run.yaml"
    launch = tmp_path / "launch.overrides"
    launch.touch()
    monkeypatch.setattr(sys, "argv", ["sluice", "init", str(file), "--from", str(launch)])
    with pytest.raises(SystemExit) as ended:
        app()
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        f"sluice: ERROR {file}: No such file or directory; correct the path, its permissions or "
        "the space on its disk\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk without Linux")
def test_an_output_on_a_full_disk_is_one_line_and_exit_code_1() -> None:
    command = [sys.executable, "-m", "sluice", "config", "explain", "data.truncation"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "sluice: ERROR a file or the output cannot be written: No space left on device; "
        "free some space\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk without Linux")
@pytest.mark.parametrize("is_pipe", [True, False])
def test_a_run_ends_with_its_own_exit_code_though_its_output_cannot_be_written(
    *, is_pipe: bool
) -> None:
    program = (
        "from sluice.cli import main; from sluice.cli.terminal import RunConsole, print_line; "
        "main.commands = lambda: [print_line(RunConsole(), 'a step') for _ in range(3)]; "
        "main.app()"
    )
    if is_pipe:
        reader, output = os.pipe()
        os.close(reader)
    else:
        output = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-c", program]
    with os.fdopen(output, "wb") as stdout:
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_ctrl_c_before_a_command_has_begun_is_exit_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    monkeypatch.setattr(sys, "argv", ["sluice", "status"])
    with pytest.raises(SystemExit) as ended:
        entry.app()
    assert ended.value.code == 130


def test_an_output_whose_encoding_lacks_a_character_escapes_it() -> None:
    imports = "import sys; from sluice import __main__ as entry; from sluice.cli import main"
    code = f"{imports}; main.app = lambda: print('a \\xf7 b')"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; entry.app()"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "a \\xf7 b\n"

"""docs/environments.md against reality: its files load, its command prints what it shows."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.reward.episodes.drivers import EpisodeFailedError
from sluice.cli.main import commands
from sluice.environment.verl_stand_in import FUNCTION_TOOL_REGISTRY
from sluice.types import Answer, FinishReason
from tests.support.documents import blocks
from tests.support.environments import author_file, calls, episode, row, served
from tests.support.source_tree import ROOT

PAGE = ROOT / "docs" / "environments.md"
STOP = FinishReason.STOP


DOCKER = """#!/bin/sh
cd "$(dirname "$0")"
echo "$@" >> said
case $1 in
run) [ -e refused ] && { echo "no such image" >&2; exit 125; }
    echo id ;;
exec) [ -e down ] && { echo "Cannot connect to the Docker daemon" >&2; exit 1; }
    shift 2; exec "$@" ;;
rm) touch removed ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for docker, which runs commands on this machine; its folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "docker").write_text(DOCKER)
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


FILES = ("calculator.py", "game.py", "loop.py", "shell.py", "tools.py")
"""Of the page's Python, in its order."""
COMMANDS = [one for one in blocks(PAGE, "console") if one.startswith("$ sluice env check")]


def test_each_file_of_the_page_has_a_command() -> None:
    named = [shlex.split(one.partition("\n")[0])[4] for one in COMMANDS]
    assert named == list(FILES)


@pytest.mark.parametrize("shown", COMMANDS, ids=FILES)
def test_a_command_of_the_page_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, docker: Path, shown: str
) -> None:
    for name, text in zip(FILES, blocks(PAGE, "python"), strict=True):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    FUNCTION_TOOL_REGISTRY.clear()  # a process loads one file; other tests have loaded theirs
    command, _, expected = shown.partition("\n")
    result = CliRunner().invoke(commands, shlex.split(command)[2:])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == expected.strip()


async def test_the_game_of_the_page_ends_with_the_number(tmp_path: Path) -> None:
    async with served(author_file(tmp_path, blocks(PAGE, "python")[1]), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        low, high, turn = 1, 100, 0
        while True:
            guess = (low + high) // 2
            seen = await played.step(turn, Answer(f"I guess {guess}"), STOP)
            turn += 1
            if seen.done:
                break
            low, high = (guess + 1, high) if "Higher" in seen.messages[0].content else (low, guess)
        scored = await played.close()
        assert seen.reward == 1.0
        assert scored is not None
        assert scored.score == 1.0


async def test_the_loop_of_the_page_asks_twice(tmp_path: Path) -> None:
    async with served(author_file(tmp_path, blocks(PAGE, "python")[2]), tmp_path) as servers:
        played = episode(servers, row("6"))
        await played.open()
        seen = await played.step(0, Answer("5"), STOP)
        assert [one.content for one in seen.messages][1:2] == ["5"]
        assert (await played.step(1, Answer("It is 6."), STOP)).done
        scored = await played.close()
        assert scored is not None
        assert scored.score == 1.0


async def test_the_container_of_the_page_runs_commands_and_is_removed(
    tmp_path: Path, docker: Path
) -> None:
    async with served(author_file(tmp_path, blocks(PAGE, "python")[3]), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        seen = await played.step(0, calls(("shell", {"command": "echo 5; exit 3"})), STOP)
        assert [one.content for one in seen.messages] == ["5\nexit code 3\n"]
        await played.close()
        assert (docker / "removed").exists()


async def test_a_docker_that_is_down_is_no_observation(tmp_path: Path, docker: Path) -> None:
    async with served(author_file(tmp_path, blocks(PAGE, "python")[3]), tmp_path) as servers:
        played = episode(servers)
        await played.open()
        (docker / "down").touch()
        with pytest.raises(EpisodeFailedError, match="Cannot connect to the Docker"):
            await played.step(0, calls(("shell", {"command": "true"})), STOP)


async def test_an_image_that_is_not_there_is_no_observation(
    tmp_path: Path, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a call may take: there is one try.
    monkeypatch.setattr("services.reward.episodes.client._FIRST_BACKOFF_S", 600.0)
    (docker / "refused").touch()
    source = author_file(tmp_path, blocks(PAGE, "python")[3])
    async with served(source, tmp_path) as servers:
        with pytest.raises(EpisodeFailedError, match="no such image"):
            await episode(servers).open()

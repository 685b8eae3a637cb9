"""The environment of the TRL baseline: pinned, and made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import trl_environment
from benchmarks.trl_environment import REQUIREMENTS, STAMP, interpreter_of, make_environment


class FakeCommands:
    """Stands for venv and pip: records commands and answers with set statuses."""

    def __init__(self, *statuses: int) -> None:
        self.commands: list[list[str]] = []
        self._statuses = list(statuses)

    def __call__(self, command: list[str]) -> int:
        self.commands.append(list(command))
        if "venv" in command:
            python = interpreter_of(Path(command[-1]))
            python.parent.mkdir(parents=True)
            python.touch()
        return self._statuses.pop(0) if self._statuses else 0


def commands(monkeypatch: pytest.MonkeyPatch, *statuses: int) -> FakeCommands:
    fake = FakeCommands(*statuses)
    monkeypatch.setattr(trl_environment, "_run", fake)
    return fake


@pytest.fixture
def requirements(tmp_path: Path) -> Path:
    file = tmp_path / "requirements.txt"
    file.write_text("trl==1\n")
    return file


def test_a_complete_environment_is_left_as_it_is(
    tmp_path: Path, requirements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = commands(monkeypatch)
    make_environment(tmp_path / "venv", requirements)
    assert len(fake.commands) == 2
    make_environment(tmp_path / "venv", requirements)
    assert len(fake.commands) == 2


def test_changed_requirements_are_installed_into_the_same_environment(
    tmp_path: Path, requirements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_environment_with = commands(monkeypatch)
    make_environment(tmp_path / "venv", requirements)
    requirements.write_text("trl==2\n")
    make_environment(tmp_path / "venv", requirements)
    kinds = [
        next(word for word in c if word in {"venv", "pip"}) for c in make_environment_with.commands
    ]
    assert kinds == ["venv", "pip", "pip"]


def test_an_interrupted_installation_is_not_taken_for_complete(
    tmp_path: Path, requirements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(monkeypatch, 0, 1)
    with pytest.raises(trl_environment.EnvironmentFailedError, match="pip could not install"):
        make_environment(tmp_path / "venv", requirements)
    assert not (tmp_path / "venv" / STAMP).exists()


def test_packages_come_from_pips_configured_sources_and_the_wheelhouse_alone(
    tmp_path: Path, requirements: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = commands(monkeypatch)
    monkeypatch.setattr(trl_environment, "WHEELHOUSE", tmp_path)
    make_environment(tmp_path / "venv", requirements)
    _, install = fake.commands
    assert install[install.index("--find-links") + 1] == str(tmp_path)
    assert not [word for word in install if "index-url" in word or "://" in word]


def test_every_requirement_is_exact_and_none_is_a_cuda_package() -> None:
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in line for line in lines)
    assert "torch==2.13.0" in lines
    assert not [line for line in lines if line.startswith(("nvidia", "triton", "cuda"))]

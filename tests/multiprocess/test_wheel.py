"""The wheel holds commands, services, the page, data files, recipes and the protos."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

WAIT_S = 600.0


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel; the dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True, timeout=WAIT_S)
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)]
    subprocess.run(build, check=True, timeout=WAIT_S, cwd=folder)
    (wheel,) = folder.glob("sluice-*.whl")
    target = folder / "site"
    install = [*pip, "install", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, timeout=WAIT_S, cwd=folder)
    return target


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python outside of the checkout, with the wheel before it."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=installed.parent,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def test_modules_come_from_the_wheel(installed: Path) -> None:
    found = run(
        installed, "-c", "import sluice, services; print(sluice.__file__, services.__file__)"
    )
    assert found.stdout.split() == [
        str(installed / f"{n}/__init__.py") for n in ("sluice", "services")
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-m", "sluice.cli.main", "recipe", "show", "dapo-qwen3-32b-npu", "--tiny"),
        ("-m", "services.reward", "--help"),
        # In one process: each would import torch.
        ("-c", "import services.evaluation.__main__, services.rollout.__main__"),
        ("-m", "services.trainer", "--help"),
    ],
)
def test_commands_and_services_start_outside_of_the_checkout(
    installed: Path, arguments: tuple[str, ...]
) -> None:
    ended = run(installed, *arguments)
    assert ended.returncode == 0, ended.stderr


def test_every_file_of_data_is_in_the_wheel(installed: Path) -> None:
    suffixes = {".toml", ".yaml", ".js", ".css", ".html", ".svg", ".txt"}
    wanted = {
        file.relative_to(ROOT)
        for package in ("sluice", "services")
        for file in (ROOT / package).rglob("*")
        if file.suffix in suffixes and "__pycache__" not in file.parts
    }
    assert [file for file in sorted(wanted) if not (installed / file).is_file()] == []


def test_clients_in_other_languages_find_the_protos(installed: Path) -> None:
    protos = installed / "share" / "sluice" / "proto"
    services = {"common", "environment", "reward", "rollout", "trainer"}
    assert {file.stem for file in protos.rglob("*.proto")} == services

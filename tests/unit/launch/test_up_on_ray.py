"""`sluice up --on ray` where there is no Ray, or the words are wrong."""

from __future__ import annotations

import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.run import up
from sluice.config.loading.loader import load_config
from sluice.errors import ConfigError
from sluice.launch.cluster.ray_cluster import ray_cluster


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'sluice\[ray\]'"), ray_cluster("auto"):
        pass


def test_a_trainer_on_several_machines_is_pointed_to_ray(tmp_path: Path) -> None:
    config = load_config(None, ["trainer.nnodes=2", f"sluice.run_dir={tmp_path}"])
    with pytest.raises(ConfigError, match="start it with --on ray on a Ray cluster"):
        up.start_run(config, up.Display(Console(file=StringIO())))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["up", "train"])
@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--on", "ray", "--resources", "NPU:8"), "write SERVICE=RESOURCE:AMOUNT"),
        (("--resources", "rollout=NPU:8"), "only a Ray cluster hands them out"),
    ],
)
def test_wrong_resources_are_refused_before_anything_is_read(
    words: tuple[str, ...], reported: str, command: str
) -> None:
    result = CliRunner().invoke(commands, [command, "no-such-file.yaml", *words])
    assert isinstance(result.exception, ConfigError)
    assert reported in str(result.exception)


def test_only_two_places_are_known() -> None:
    result = CliRunner().invoke(commands, ["up", "--on", "slurm"])
    assert result.exit_code == 2

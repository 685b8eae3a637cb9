"""What `sluice prepare` says of a run that has nothing left to train."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.run.prepare import spent_notice
from sluice.config.derived import checkpoint_folder
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.launch.network_layout import CONFIG_NAME
from sluice.launch.shared_run import Ending, SharedRun
from sluice.service_contract import TRACKER_NAME
from tests.unit.cli.test_prepare_command import model_and_data, prepare

AUTO = "trainer.resume_mode=auto"


def run_at(folder: Path, newest: str, *settings: str) -> RunConfig:
    config = load_config(None, [f"sluice.run_dir={folder}", *settings])
    checkpoints = Path(checkpoint_folder(config))
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / TRACKER_NAME).write_text(newest, encoding="utf-8")
    return config


@pytest.mark.parametrize("newest", ["20", "25\n"])
def test_a_run_that_would_resume_at_its_last_step_is_told_with_the_remedy(
    tmp_path: Path, newest: str
) -> None:
    said = spent_notice(run_at(tmp_path, newest, AUTO, "trainer.total_training_steps=20"))
    assert said is not None
    for part in (newest.strip(), "trainer.total_training_steps = 20", "docker compose down -v"):
        assert part in said


@pytest.mark.parametrize(
    ("newest", "settings"),
    [
        ("19", (AUTO, "trainer.total_training_steps=20")),
        ("20", (AUTO,)),
        ("20", ("trainer.resume_mode=disable", "trainer.total_training_steps=20")),
        ("no number", (AUTO, "trainer.total_training_steps=20")),
    ],
)
def test_nothing_is_said_of_a_run_with_steps_left_or_of_an_unknown_number(
    tmp_path: Path, newest: str, settings: tuple[str, ...]
) -> None:
    assert spent_notice(run_at(tmp_path, newest, *settings)) is None


def test_prepare_says_it_when_a_run_begins_and_not_while_one_goes_on(tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", "trainer.total_training_steps=3"
    job = [*model_and_data(tmp_path / "job"), AUTO, steps, "data.train_batch_size=8"]
    assert "without a step" not in prepare("--run-dir", run_dir, *job)
    run_at(run_dir, "3", AUTO, steps)
    assert locate(run_dir).trainer.total_training_steps == 3
    assert "without a step" not in prepare("--run-dir", run_dir, *job)
    SharedRun(run_dir).end(Ending("trainer", ()))
    assert "without a step" in prepare("--run-dir", run_dir, *job)


def locate(run_dir: Path) -> RunConfig:
    return load_config(run_dir / CONFIG_NAME, [])

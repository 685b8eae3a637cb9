"""A service that is started by hand refuses what `sluice up` would, and says the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def started(service: str, tmp_path: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and all output of a service that is given a configuration of defaults."""
    config = tmp_path / "run.yaml"
    config.write_text(f"sluice: {{run_dir: {tmp_path / 'run'}}}\n", encoding="utf-8")
    command = [sys.executable, "-m", service, "--config", str(config), *overrides]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def test_staleness_that_nothing_corrects_for_is_refused_by_a_lone_trainer(tmp_path: Path) -> None:
    stale = "sluice.asynchrony.max_staleness=4"
    without = "algorithm.rollout_correction.rollout_is=null"
    code, output = started("services.trainer", tmp_path, stale, without)
    assert code == 1
    assert "nothing corrects for samples of an older policy" in output
    assert "algorithm.rollout_correction.rollout_is=token" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("service", ["services.trainer", "services.reward"])
def test_waves_that_would_overlap_with_training_are_refused_by_a_lone_service(
    service: str, tmp_path: Path
) -> None:
    code, output = started(
        service,
        tmp_path,
        "sluice.asynchrony.max_staleness=1",
        "sluice.sampling.strategy=rounds",
        "algorithm.filter_groups.enable=true",
        "algorithm.rollout_correction.rollout_is=token",
    )
    assert code == 1
    assert "sluice.sampling.strategy = rounds" in output
    assert "Traceback" not in output


def test_a_trainer_refuses_replicas_that_serve_the_models_files(tmp_path: Path) -> None:
    key = "sluice.rollout.serves_model_files"
    batches = "actor_rollout_ref.actor.use_dynamic_bsz=true"
    code, output = started("services.trainer", tmp_path, batches, f"{key}=true")
    assert code == 1
    assert f"{key} = true: replicas that read their weights from files" in output
    assert f"set {key}=false" in output
    assert "Traceback" not in output

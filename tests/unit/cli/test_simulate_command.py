"""`sluice simulate` prints tables for people and one object for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.errors import ConfigError
from sluice.simulate.result import simulate
from tests.unit.simulate.simulations import FLEET, TRAINER, RecordedRun, SmallWorkload, small

SMALL = [
    *("--replicas", "2", "--slots", "16", "--steps", "6", "--batch-size", "4", "--group-size", "4"),
    *("--trainer-s", "10"),
]
CONFIG = """
data: {train_files: [train.parquet], train_batch_size: 6}
actor_rollout_ref:
  model: {path: model}
  rollout: {n: 4, max_num_seqs: 16}
sluice:
  asynchrony: {max_staleness: 1}
"""


def run(*words: str) -> str:
    result = CliRunner().invoke(commands, ["simulate", *SMALL, *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_one_simulation_is_printed_with_its_accounts() -> None:
    text = run("--mixture", "early", "--max-staleness", "1")
    assert "generated / trained tokens" in text
    assert "filtered_all_wrong" in text


def test_one_object_has_the_figures() -> None:
    figures = json.loads(run("--strategy", "rounds", "--json"))
    assert figures["strategy"] == "rounds"
    assert figures["staleness_max"] == 0
    assert figures["gen_per_trained"] > 1.0


def test_a_comparison_names_all_strategies() -> None:
    figures = json.loads(run("--compare", "--json"))
    assert set(figures) == {"rounds", "stream", "staged", "memory", "staged_memory"}
    assert figures["rounds"]["fill_speedup"] == 1.0
    assert "staged_memory" in run("--compare")


def test_a_sweep_recommends(tmp_path: Path) -> None:
    assert "<- recommended" in run("--sweep", "--on-stale", "drop", "--plot", str(tmp_path))
    assert (tmp_path / "sweep.png").is_file()
    assert "recommended" in json.loads(run("--sweep", "--json"))


def test_two_modes_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        run("--sweep", "--compare")


def test_a_run_is_set_beside_its_simulation(tmp_path: Path) -> None:
    settings, recorded = small(max_staleness=1, num_steps=20), RecordedRun()
    simulate(settings, SmallWorkload(), recorded.recorder)
    recorded.write(tmp_path, FLEET.num_replicas, TRAINER.stall_s)
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    found = json.loads(run("--run", str(tmp_path), "--json"))
    assert set(found["twin_error"]) == {"step_time", "trainer_idle", "fleet_idle", "waste"}
    assert all(abs(error) < 0.1 for error in found["twin_error"].values())
    assert "error" in run("--run", str(tmp_path))
    assert "memory" in json.loads(run("--run", str(tmp_path), "--compare", "--json"))

"""A simulation that is fitted to a run filters what the run filtered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.simulator.__main__ import main
from benchmarks.simulator.fit import fitted_simulation
from benchmarks.simulator.twin import twin
from sluice.errors import ConfigError, DataError
from sluice.simulate.result import simulate
from tests.unit.simulate.simulations import FLEET, TRAINER, RecordedRun, SmallWorkload, small

CONFIG = """
data: {train_files: [train.parquet], train_batch_size: 6}
actor_rollout_ref:
  model: {path: model}
  rollout: {n: 4, max_num_seqs: 16}
sluice:
  asynchrony: {max_staleness: 1}
"""
FILTER = "algorithm: {filter_groups: {enable: true, min_yield: 0.05, min_yield_groups: 30}}\n"


def recorded(folder: Path, *, has_filter: bool) -> None:
    settings, run = small(max_staleness=1, num_steps=20), RecordedRun()
    simulate(replace(settings, filters_groups=has_filter), SmallWorkload(), run.recorder)
    run.write(folder, FLEET.num_replicas, TRAINER.stall_s)
    config = CONFIG + FILTER if has_filter else CONFIG
    (folder / "config.yaml").write_text(config, encoding="utf-8")


def test_a_run_is_set_beside_its_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path, has_filter=True)
    assert main([str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["twin_error"]) == {"step_time", "trainer_idle", "fleet_idle", "waste"}
    assert all(abs(error) < 0.1 for error in found["twin_error"].values())


def test_the_twin_of_a_run_without_a_filter_throws_no_group_away(tmp_path: Path) -> None:
    recorded(tmp_path, has_filter=False)
    found = twin(*fitted_simulation(tmp_path))
    assert abs(found["waste"].error) < 0.05
    assert abs(found["step_time"].error) < 0.05


def test_a_record_with_filtered_groups_is_no_run_without_a_filter(tmp_path: Path) -> None:
    recorded(tmp_path, has_filter=True)
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"enable = false, but groups\.jsonl .*filtered_all_"):
        fitted_simulation(tmp_path)


def test_a_run_that_left_samples_out_answers_nothing(tmp_path: Path) -> None:
    recorded(tmp_path, has_filter=True)
    file = tmp_path / "groups.jsonl"
    text = file.read_text(encoding="utf-8").replace('"probes": 0', '"probes": 2')
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"probes: 2.* stream or rounds"):
        fitted_simulation(tmp_path)


def test_the_twin_gives_up_where_the_run_would_have(tmp_path: Path) -> None:
    recorded(tmp_path, has_filter=True)
    floor = fitted_simulation(tmp_path)[1].yield_floor
    assert (floor.min_yield, floor.num_groups) == (0.05, 30)

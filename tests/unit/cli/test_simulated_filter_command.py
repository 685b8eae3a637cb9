"""`sluice simulate --run` filters what the run filtered."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.simulate.fitted import fitted_simulation
from sluice.errors import ConfigError
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


def simulated(folder: Path, *words: str) -> str:
    command = ["simulate", "--run", str(folder), *words]
    result = CliRunner().invoke(commands, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_twin_of_a_run_without_a_filter_throws_no_group_away(tmp_path: Path) -> None:
    recorded(tmp_path, has_filter=False)
    found = json.loads(simulated(tmp_path, "--json"))
    accounts = found["simulated"]["accounts"]
    assert accounts["filtered_all_right"] == accounts["filtered_all_wrong"] == 0.0
    assert abs(found["twin_error"]["waste"]) < 0.05
    assert abs(found["twin_error"]["step_time"]) < 0.05
    assert "recommended" in simulated(tmp_path, "--sweep", "--steps", "4")


def test_a_run_without_a_filter_does_not_say_what_choosing_strategies_would_do(
    tmp_path: Path,
) -> None:
    recorded(tmp_path, has_filter=False)
    for words in (["--compare"], ["--strategy", "staged", "--sweep"]):
        with pytest.raises(
            ConfigError, match=r"filter_groups\.enable = false.*leave --compare out"
        ):
            simulated(tmp_path, *words)


def test_a_record_with_filtered_groups_is_no_run_without_a_filter(tmp_path: Path) -> None:
    recorded(tmp_path, has_filter=True)
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"enable = false, but groups\.jsonl .*filtered_all_"):
        simulated(tmp_path)


def test_a_run_with_partial_credit_keeps_what_it_kept_and_answers_nothing_about_probes(
    tmp_path: Path,
) -> None:
    recorded(tmp_path, has_filter=True)
    file = tmp_path / "groups.jsonl"
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line["right"] = 0  # every answer is right in part
        line["end"] = line["end"].replace("all_right", "uniform").replace("all_wrong", "uniform")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = json.loads(simulated(tmp_path, "--json"))
    assert abs(found["twin_error"]["waste"]) < 0.1
    with pytest.raises(ConfigError, match=r"staged decides.*filter_groups.metric"):
        simulated(tmp_path, "--strategy", "staged", "--sweep")


def test_the_twin_gives_up_where_the_run_would_have(tmp_path: Path) -> None:
    recorded(tmp_path, has_filter=True)
    floor = fitted_simulation(tmp_path, None, 0).settings.yield_floor
    assert (floor.min_yield, floor.num_groups) == (0.05, 30)

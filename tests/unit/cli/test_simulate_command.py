"""`sluice simulate` prints tables for people and one object for machines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.simulate.options import Model
from sluice.cli.simulate.subject import of_model
from sluice.errors import ConfigError, DataError
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
algorithm: {filter_groups: {enable: true}}
sluice:
  asynchrony: {max_staleness: 1, ahead_share: 0.75}
"""


def simulated(*words: str) -> str:
    result = CliRunner().invoke(commands, ["simulate", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run(*words: str) -> str:
    return simulated(*SMALL, *words)


@pytest.fixture
def recorded_run(tmp_path: Path) -> Path:
    settings, recorded = small(max_staleness=1, num_steps=20), RecordedRun()
    settings = replace(settings, rules=replace(settings.rules, ahead_share=0.75))
    simulate(settings, SmallWorkload(), recorded.recorder)
    recorded.write(tmp_path, FLEET.num_replicas, TRAINER.stall_s)
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def test_one_simulation_is_printed_with_its_accounts() -> None:
    text = run("--mixture", "early", "--max-staleness", "1")
    assert "generated / trained tokens" in text
    assert "filtered_all_wrong" in text


def test_one_object_has_the_figures() -> None:
    figures = json.loads(run("--strategy", "rounds", "--json"))
    assert figures["strategy"] == "rounds"
    assert figures["staleness_max"] == 0
    assert figures["gen_per_trained"] > 1.0


def test_one_simulation_and_a_comparison_have_the_same_times_to_fill_and_of_a_step() -> None:
    one = json.loads(run("--strategy", "stream", "--trainer-s", "1000", "--json"))
    compared = json.loads(run("--compare", "--trainer-s", "1000", "--json"))["stream"]
    names = ("fill_s_mean", "fill_s_p50", "fill_s_p99", "step_s", "step_s_p50", "step_s_p99")
    assert [one[name] for name in names] == [compared[name] for name in names]
    assert one["step_s"] > 1000.0 > one["fill_s_mean"]
    text = run("--strategy", "stream", "--trainer-s", "1000")
    for title, name in (("seconds to fill a batch", "fill_s_mean"), ("seconds a step", "step_s")):
        line = next(line for line in text.splitlines() if line.startswith(title))
        assert float(line.split()[-1]) == pytest.approx(one[name], rel=0.01)


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


def test_without_a_run_the_defaults_are_those_that_the_help_names() -> None:
    settings = of_model(Model(), None, 0)
    rules, fleet = settings.rules, settings.fleet
    assert (fleet.num_replicas, fleet.slots, settings.trainer.train_s) == (8, 128, 60.0)
    assert (rules.train_batch_size, rules.gen_batch_size, rules.samples_per_group) == (64, 64, 16)
    assert (rules.max_staleness, rules.probe_samples, settings.num_steps) == (4, 4, 240)


def test_a_trainer_that_takes_no_time_may_be_given() -> None:
    assert of_model(Model(trainer_s=0.0), None, 0).trainer.train_s == 0.0


def test_a_run_is_set_beside_its_simulation(recorded_run: Path) -> None:
    folder = str(recorded_run)
    found = json.loads(simulated("--run", folder, "--json"))
    assert set(found["twin_error"]) == {"step_time", "trainer_idle", "fleet_idle", "waste"}
    assert all(abs(error) < 0.1 for error in found["twin_error"].values())
    assert "error" in simulated("--run", folder, "--strategy", "stream", "--steps", "6")
    assert "error" in simulated("--run", folder, "--ahead-share", "0.75", "--steps", "6")
    words = ("--compare", "--strategy", "memory", "--steps", "6", "--json")
    assert "memory" in json.loads(simulated("--run", folder, *words))


@pytest.mark.parametrize(
    ("option", "other"),
    [
        ("--strategy", "memory"),
        ("--max-staleness", "3"),
        ("--ahead-share", "1.0"),
        ("--on-policy-fill", "exact"),
        ("--on-stale", "drop"),
    ],
)
def test_a_run_is_not_set_beside_a_simulation_by_other_rules(
    recorded_run: Path, option: str, other: str
) -> None:
    words = ("--run", str(recorded_run), "--steps", "6", option, other)
    with pytest.raises(ConfigError, match=f"^{option}: {other}, but the run had .*--compare"):
        simulated(*words)
    assert "recommended" in simulated(*words, "--sweep")


@pytest.mark.parametrize("mode", [(), ("--compare",), ("--sweep",)])
def test_a_run_that_left_samples_out_answers_nothing(
    recorded_run: Path, mode: tuple[str, ...]
) -> None:
    file = recorded_run / "groups.jsonl"
    text = file.read_text(encoding="utf-8").replace('"probes": 0', '"probes": 2')
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"probes: 2.* stream or rounds"):
        simulated("--run", str(recorded_run), *mode)

"""What a simulation is given: a workload's file, a replica's speed, another fleet for a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.simulate.options import Model
from sluice.cli.simulate.subject import changed, of_model
from sluice.errors import ConfigError
from sluice.simulate.result import simulate
from sluice.simulate.settings import TrainerSettings
from tests.unit.simulate.simulations import FLEET, TRAINER, RecordedRun, SmallWorkload, small

SMALL = [
    *("--replicas", "2", "--slots", "16", "--steps", "6", "--batch-size", "4", "--group-size", "4"),
    *("--trainer-s", "10", "--json"),
]
CONFIG = """
data: {train_files: [train.parquet], train_batch_size: 6}
actor_rollout_ref:
  model: {path: model}
  rollout: {n: 4, max_num_seqs: 16}
algorithm: {filter_groups: {enable: true}}
sluice:
  asynchrony: {max_staleness: 1}
"""
OF_RECORD = {
    "--mixture": ("late", "the run's own groups are the workload"),
    "--workload": ("workload.yaml", "the run's own groups are the workload"),
    "--group-size": ("16", "its groups are recorded with the samples that they had"),
    "--batch-size": ("64", "is recorded of batches of its own size"),
}
WHAT_IF = {
    "--replicas": "4",
    "--slots": "32",
    "--step-ms": "3.0",
    "--sequence-ms": "0.2",
    "--gen-batch-size": "12",
    "--trainer-s": "30.0",
}


def simulated(*words: str) -> str:
    result = CliRunner().invoke(commands, ["simulate", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def recorded_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, recorded = tmp_path_factory.mktemp("run"), RecordedRun()
    simulate(small(max_staleness=1, num_steps=20), SmallWorkload(), recorded.recorder)
    recorded.write(folder, FLEET.num_replicas, TRAINER.stall_s)
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return folder


def test_a_workloads_file_takes_the_mixtures_place(tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    of_mid = [(0.25, 5, 0.32), (1.2, 1.2, 0.40), (6, 0.25, 0.28)]
    kinds = [dict(zip(("alpha", "beta", "weight"), kind, strict=True)) for kind in of_mid]
    file.write_text(json.dumps({"pass_rates": kinds}), encoding="utf-8")
    words = (*SMALL, "--workload", str(file))
    assert simulated(*words) == simulated(*SMALL, "--mixture", "mid")
    file.write_text(json.dumps({"pass_rates": kinds, "lengths": {"max_tokens": 4000}}))
    assert simulated(*words) != simulated(*SMALL, "--mixture", "mid")
    assert str(file) in simulated(*SMALL[:-1], "--compare", "--workload", str(file))


def test_a_file_and_a_mixture_are_one_workload_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--workload: .* and --mixture mid both.*leave one out"):
        simulated("--workload", str(tmp_path / "w.yaml"), "--mixture", "mid")


def test_a_workloads_wrong_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--workload .*w\.yaml: there is no such file"):
        simulated("--workload", str(tmp_path / "w.yaml"))


def test_each_option_of_the_model_is_its_own_setting() -> None:
    model = Model(
        replicas=3,
        slots=5,
        step_ms=12.0,
        sequence_ms=0.5,
        group_size=6,
        batch_size=7,
        gen_batch_size=9,
        trainer_s=11.0,
    )
    settings = of_model(model, 20, 2)
    rules, fleet = settings.rules, settings.fleet
    assert (fleet.num_replicas, fleet.slots) == (3, 5)
    assert (fleet.base_step_s, fleet.per_sequence_s) == pytest.approx((0.012, 0.0005))
    assert (rules.samples_per_group, rules.train_batch_size, rules.gen_batch_size) == (6, 7, 9)
    assert (settings.trainer.train_s, settings.num_steps, settings.seed) == (11.0, 20, 2)


def test_replicas_whose_steps_take_half_the_time_fill_a_batch_in_half_the_time() -> None:
    words = ("--strategy", "rounds", *SMALL)
    slow = json.loads(simulated(*words, "--step-ms", "20", "--sequence-ms", "1"))
    fast = json.loads(simulated(*words, "--step-ms", "10", "--sequence-ms", "0.5"))
    assert fast["fill_s_mean"] == pytest.approx(slow["fill_s_mean"] / 2)


@pytest.mark.parametrize("option", ["--step-ms", "--sequence-ms", "--trainer-s"])
def test_a_time_without_end_is_refused_by_its_options_name(option: str) -> None:
    result = CliRunner().invoke(commands, ["simulate", option, "inf"])
    assert result.exit_code != 0
    assert f"{option}: inf is no time; give a finite number" in str(result.exception)


def test_a_decoding_step_takes_time() -> None:
    with pytest.raises(ConfigError, match=r"--step-ms: 0, and --sequence-ms: 0: .*above 0"):
        simulated("--step-ms", "0", "--sequence-ms", "0")


def test_a_comparison_says_what_the_run_would_do_with_another_fleet_or_trainer(
    recorded_run: Path,
) -> None:
    words = ("--run", str(recorded_run), "--compare", "--steps", "12", "--json")
    as_it_was = json.loads(simulated(*words))["stream"]
    fewer = json.loads(simulated(*words, "--replicas", "1"))["stream"]
    assert fewer["fill_s_mean"] > 1.3 * as_it_was["fill_s_mean"]
    slower = json.loads(simulated(*words, "--trainer-s", "500"))["stream"]
    assert slower["step_s"] > 500.0 > as_it_was["step_s"]
    words = ("--run", str(recorded_run), "--sweep", "--steps", "3", "--json")
    swept = json.loads(simulated(*words, "--replicas", "8"))
    assert max(point["replicas"] for point in swept["points"]) == 32


@pytest.mark.parametrize("mode", ["--compare", "--sweep"])
@pytest.mark.parametrize("option", WHAT_IF)
def test_a_runs_fleet_trainer_and_waves_may_be_others_with_compare_or_sweep(
    recorded_run: Path, option: str, mode: str
) -> None:
    words = ("--run", str(recorded_run), mode, "--steps", "3", option, WHAT_IF[option], "--json")
    assert json.loads(simulated(*words))


@pytest.mark.parametrize("option", WHAT_IF)
def test_a_run_is_not_set_beside_the_simulation_of_another_fleet_or_trainer(
    tmp_path: Path, option: str
) -> None:
    why = f"^{option}: {WHAT_IF[option]} beside --run: .*its own simulation.*--compare or --sweep"
    with pytest.raises(ConfigError, match=why):
        simulated("--run", str(tmp_path), option, WHAT_IF[option])


@pytest.mark.parametrize("option", OF_RECORD)
@pytest.mark.parametrize("mode", [(), ("--compare",), ("--sweep",)])
def test_what_a_record_cannot_answer_otherwise_is_refused_beside_it_with_the_reason(
    tmp_path: Path, option: str, mode: tuple[str, ...]
) -> None:
    value, why = OF_RECORD[option]
    with pytest.raises(ConfigError, match=f"^{option}: {value} beside --run: .*{why}; leave out"):
        simulated("--run", str(tmp_path), option, value, *mode)


def test_another_trainers_steps_differ_in_proportion() -> None:
    settings = small(trainer=TrainerSettings(train_s=10.0, spread_s=2.0))
    trainer = changed(settings, Model(trainer_s=5.0)).trainer
    assert (trainer.train_s, trainer.spread_s) == (5.0, 1.0)
    idle = small(trainer=TrainerSettings(train_s=0.0))
    assert changed(idle, Model(trainer_s=5.0)).trainer.train_s == 5.0

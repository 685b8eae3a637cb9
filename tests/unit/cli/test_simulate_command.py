"""`sluice simulate` prints tables for people and one object for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli import simulate as module
from sluice.cli.main import commands
from sluice.errors import ConfigError
from sluice.simulate.settings import SimulationSettings

SMALL = [
    *("--replicas", "2", "--slots", "16", "--steps", "6", "--batch-size", "4", "--group-size", "4"),
    *("--trainer-s", "10"),
]


def simulated(*words: str) -> str:
    result = CliRunner().invoke(commands, ["simulate", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def run(*words: str) -> str:
    return simulated(*SMALL, *words)


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


def settings_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> SimulationSettings:
    """What the options describe; nothing is simulated."""
    seen: list[SimulationSettings] = []
    monkeypatch.setattr(module, "_simulate_one", lambda settings, *_, **__: seen.append(settings))
    simulated(*words)
    return seen[0]


def test_the_defaults_are_those_of_the_simulators_page(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(monkeypatch)
    rules, fleet = settings.rules, settings.fleet
    assert (fleet.num_replicas, fleet.slots, settings.trainer.train_s) == (8, 128, 60.0)
    assert (fleet.base_step_s, fleet.per_sequence_s) == (0.02, 0.0001)
    assert (rules.train_batch_size, rules.gen_batch_size, rules.samples_per_group) == (64, 64, 16)
    assert (rules.max_staleness, rules.probe_samples, settings.num_steps) == (4, 4, 240)


def test_a_workloads_file_takes_the_mixtures_place(tmp_path: Path) -> None:
    file = tmp_path / "workload.yaml"
    of_mid = [(0.25, 5, 0.32), (1.2, 1.2, 0.40), (6, 0.25, 0.28)]
    kinds = [dict(zip(("alpha", "beta", "weight"), kind, strict=True)) for kind in of_mid]
    file.write_text(json.dumps({"pass_rates": kinds}), encoding="utf-8")
    words = (*SMALL, "--json", "--workload", str(file))
    assert simulated(*words) == simulated(*SMALL, "--json", "--mixture", "mid")
    file.write_text(json.dumps({"pass_rates": kinds, "lengths": {"max_tokens": 4000}}))
    assert simulated(*words) != simulated(*SMALL, "--json", "--mixture", "mid")
    assert str(file) in simulated(*SMALL, "--compare", "--workload", str(file))


def test_a_file_and_a_mixture_are_one_workload_too_many(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--workload: .* and --mixture mid both.*leave one out"):
        simulated("--workload", str(tmp_path / "w.yaml"), "--mixture", "mid")


def test_a_workloads_wrong_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--workload .*w\.yaml cannot be read.*a YAML file"):
        simulated("--workload", str(tmp_path / "w.yaml"))


def test_each_option_of_the_model_is_its_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--replicas 3 --slots 5 --step-ms 12 --sequence-ms 0.5 --group-size 6 --batch-size 7"
    more = "--gen-batch-size 9 --trainer-s 0 --steps 20 --seed 2"
    settings = settings_of(monkeypatch, *words.split(), *more.split())
    rules, fleet = settings.rules, settings.fleet
    assert (fleet.num_replicas, fleet.slots) == (3, 5)
    assert (fleet.base_step_s, fleet.per_sequence_s) == pytest.approx((0.012, 0.0005))
    assert (rules.samples_per_group, rules.train_batch_size, rules.gen_batch_size) == (6, 7, 9)
    assert (settings.trainer.train_s, settings.num_steps, settings.seed) == (0.0, 20, 2)


def test_replicas_whose_steps_take_half_the_time_fill_a_batch_in_half_the_time() -> None:
    words = ("--strategy", "rounds", *SMALL, "--json")
    slow = json.loads(simulated(*words, "--step-ms", "20", "--sequence-ms", "1"))
    fast = json.loads(simulated(*words, "--step-ms", "10", "--sequence-ms", "0.5"))
    assert fast["fill_s_mean"] == pytest.approx(slow["fill_s_mean"] / 2)


@pytest.mark.parametrize("option", ["--step-ms", "--sequence-ms", "--trainer-s"])
def test_a_time_without_end_is_refused_by_its_options_name(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"inf.*give finite times \(.*{option}"):
        simulated(option, "inf")


def test_a_decoding_step_takes_time() -> None:
    with pytest.raises(ConfigError, match=r"0 s and 0 s for each.*--step-ms.*step above 0"):
        simulated("--step-ms", "0", "--sequence-ms", "0")

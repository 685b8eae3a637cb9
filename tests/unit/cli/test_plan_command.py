"""`sluice plan` prints one object for programs, and exits with 1 if a launch does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.plan.dry_run import PassBytes
from tests.support.counted_launch import NOTHING, answer_dry_runs
from tests.support.source_tree import ROOT

LAUNCH = Path(__file__).resolve().parents[2] / "data" / "launches" / "grpo-8xa100.overrides"
GIB = 1 << 30


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The backward pass's peak of all dry runs, GiB."""
    peak = [1]

    def counted(*_: object) -> PassBytes:
        return replace(NOTHING, backward=peak[0] * GIB, moved={"all_gather": GIB})

    answer_dry_runs(monkeypatch, counted)
    return peak


def planned(*arguments: str) -> tuple[int, str]:
    given = ["plan", str(LAUNCH), "--device", "80GB", *arguments]
    result = CliRunner().invoke(commands, given)
    return result.exit_code, result.output


def test_programs_get_one_object(dry_run: list[int]) -> None:
    code, output = planned("--model", "Qwen2.5-7B", "--json")
    found = json.loads(output.splitlines()[-1])
    assert code == 0
    assert (found["fits"], found["fits_with"]) == (True, [])
    assert found["peaks"]["trainer"]["backward"] == GIB
    assert found["stages"] == {"1": GIB}
    assert set(found["peaks"]["rollout"]) == {"start", "generating", "update"}
    assert found["split"]["trainer"] + found["split"]["rollout"] == 8
    assert found["lacks"] == {}
    assert found["engine"]["holds_weights"] is True
    assert found["engine"]["longest_rows"] > 0


def test_a_launch_that_does_not_fit_is_an_exit_code_of_1(dry_run: list[int]) -> None:
    dry_run[0] = 100
    code, output = planned("--model", "Qwen2.5-7B")
    assert code == 1
    assert "It does not fit" in output
    assert "a trainer's device: backward takes 100.00 GiB of the 72.0" in " ".join(output.split())


def test_the_peaks_of_stages_are_printed_and_the_phases_of_the_largest(dry_run: list[int]) -> None:
    launch = LAUNCH.with_name("grpo-qwen2.5-7b-megatron-kl.overrides")
    given = ["plan", str(launch), "--device", "80GB", "--model", "Qwen2.5-7B"]
    output = CliRunner().invoke(commands, given).output
    assert "GiB on a trainer's device of stage 1 of 2, peak by phase" in output
    assert "peaks of stages, GiB: 1: 1.00, 2: 1.00" in output


def test_a_launch_without_a_model_needs_one(dry_run: list[int]) -> None:
    result = CliRunner().invoke(commands, ["plan", str(LAUNCH), "--device", "80GB"])
    assert result.exit_code == 1
    assert "give --model" in str(result.exception)


def test_compose_gets_replicas_and_settings_of_the_split(dry_run: list[int]) -> None:
    code, output = planned("--model", "Qwen2.5-7B", "--values", "compose")
    assert code == 0
    assert output.splitlines() == [
        "# 7 train, 1 generates in 1 replica",
        "SLUICE_REPLICAS=1",
        'SLUICE_SETTINGS="trainer.nnodes=1 trainer.n_gpus_per_node=7"',
    ]
    compose = (ROOT / "compose.gpu.yaml").read_text(encoding="utf-8")
    assert "scale: ${SLUICE_REPLICAS:-1}\n" in compose
    assert "SLUICE_SETTINGS" in (ROOT / "compose.yaml").read_text(encoding="utf-8")


def test_helm_gets_values_that_the_chart_knows(dry_run: list[int]) -> None:
    code, output = planned("--model", "Qwen2.5-7B", "--values", "helm")
    found = yaml.safe_load(output)
    assert code == 0
    known = yaml.safe_load((ROOT / "deploy/helm/sluice/values.yaml").read_text(encoding="utf-8"))
    for section, values in found.items():
        assert set(values) <= set(known[section]), section
    assert found["trainer"]["ranks"] + found["rollout"]["replicas"] == 8


def test_a_launch_that_fits_with_no_change_has_no_values(dry_run: list[int]) -> None:
    dry_run[0] = 100
    given = ["plan", str(LAUNCH), "--device", "80GB", "--model", "Qwen2.5-7B", "--values", "helm"]
    result = CliRunner().invoke(commands, given)
    assert result.exit_code == 1
    assert "no change was found" in str(result.exception)


def test_a_trainer_on_several_machines_has_values_for_neither(dry_run: list[int]) -> None:
    launch = LAUNCH.with_name("dapo-qwen3-32b-fsdp2-npu.overrides")
    given = ["plan", str(launch), "--device", "64GB", "--model", "Qwen3-32B", "--values", "compose"]
    result = CliRunner().invoke(commands, given)
    assert "the trainer takes 2 machines, and compose starts it on one" in str(result.exception)

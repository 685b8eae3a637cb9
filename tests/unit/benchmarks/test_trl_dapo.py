"""Command line and result of the TRL baseline; TRL itself is not in this environment."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.training_record import AccuracyCurve, Bounds
from benchmarks.trl_dapo import REQUIRED_ASSETS, make_result, parse_arguments, tuning_of
from benchmarks.trl_settings import DapoJob, TrlTuning


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    for name in REQUIRED_ASSETS:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    return tmp_path


def outcome(accuracies: dict[int, float]) -> Any:
    curve = AccuracyCurve()
    for batch, accuracy in accuracies.items():
        curve.add(batch, batch * 2.0, accuracy)
    return SimpleNamespace(
        curve=curve,
        stopped_by="target",
        batches=10,
        generated_tokens=40_000,
        training_seconds=20.0,
        cpu_seconds=19.0,
        evaluation_seconds=3.0,
        setup_seconds=1.0,
    )


def result_of(accuracies: dict[int, float]) -> dict[str, Any]:
    bounds = Bounds(target=0.85, max_batches=60, max_seconds=900.0)
    result = make_result(outcome(accuracies), seed=3, bounds=bounds, settings={"threads": 2})
    read: dict[str, Any] = json.loads(json.dumps(result))
    return read


def test_every_tuning_setting_has_a_flag_and_its_default(assets: Path) -> None:
    assert tuning_of(parse_arguments(["--assets", str(assets)])) == TrlTuning()
    flags = ["--threads", "1", "--micro-batch", "64", "--bf16", "--cache", "static"]
    tuning = tuning_of(parse_arguments(["--assets", str(assets), *flags]))
    assert tuning == TrlTuning(threads=1, micro_batch=64, bf16=True, cache="static")


def test_missing_assets_are_named(assets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (assets / "data" / "test.parquet").unlink()
    with pytest.raises(SystemExit):
        parse_arguments(["--assets", str(assets)])
    assert "data/test.parquet is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--micro-batch", "100", "does not divide 256"),
        ("--evaluate-every", "0", "at least 1"),
        ("--threads", "0", "at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    assets: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--assets", str(assets), flag, value])
    assert message in capsys.readouterr().err


def test_the_result_names_the_seconds_at_the_first_accuracy_that_suffices() -> None:
    result = result_of({0: 0.25, 5: 0.6, 10: 0.87})
    assert result["seconds_to_target"] == 20.0
    assert result["batches_to_target"] == 10
    assert result["accuracy_before"] == 0.25
    assert result["accuracy_after"] == 0.87
    assert result["curve"] == [[0, 0.0, 0.25], [5, 10.0, 0.6], [10, 20.0, 0.87]]


def test_a_target_not_reached_is_null() -> None:
    result = result_of({0: 0.25, 5: 0.6})
    assert result["seconds_to_target"] is None
    assert result["batches_to_target"] is None


def test_rates_are_over_training_time_alone() -> None:
    result = result_of({0: 0.25})
    assert result["seconds_per_batch"] == 2.0
    assert result["tokens_per_second"] == 2000


def test_the_job_is_the_quickstarts() -> None:
    job = DapoJob()
    assert (job.batch_completions, job.step_completions) == (512, 256)

"""Runs beside each other: at equal steps, tokens and time, with their configurations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sluice.dashboard.run_data import compare_folders
from sluice.dashboard.side_by_side import settings_object
from tests.support.dashboard_run import add_lines, make_run, step_row

ACCURACY = "val-core/sums/acc/mean@2"
REWARD = "critic/rewards/mean"
WALL = "accounts/trainer_wall_s"


def a_run(folder: Path, seconds: list[float], tokens: float, *overrides: str) -> Path:
    """A run with one step for each of `seconds` (of the trainer's clock), and rising rewards."""
    rows: list[dict[str, float | None]] = [{"step": 0, ACCURACY: 0.25}]
    for step, second in enumerate(seconds, 1):
        numbers = {REWARD: float(step), "train/generated_tokens": tokens, WALL: second}
        rows.append(step_row(step, **numbers))
        rows.append({"step": step, ACCURACY: 0.25 + 0.1 * step})
    folder.mkdir(parents=True)
    add_lines(make_run(folder, *overrides) / "metrics.jsonl", rows)
    return folder


def figure(found: dict[str, Any], name: str) -> list[float | None]:
    return next(row["values"] for row in found["figures"] if row["name"] == name)


def at_the_common_end(found: dict[str, Any], by: str) -> dict[str, Any]:
    return [row for row in found["progress"] if row["by"] == by][-1]


def test_runs_are_compared_at_the_end_of_the_shorter_by_each_measure(tmp_path: Path) -> None:
    slow = a_run(tmp_path / "slow", [10.0, 20.0, 30.0, 40.0], 100.0)
    fast = a_run(tmp_path / "fast", [5.0, 10.0], 300.0)
    found = compare_folders([slow, fast], 10)
    assert [run["name"] for run in found["runs"]] == ["slow", "fast"]
    by_step = at_the_common_end(found, "step")
    assert (by_step["at"], by_step["accuracy"]) == (2, [0.45, 0.45])
    by_tokens = at_the_common_end(found, "tokens")
    assert (by_tokens["at"], by_tokens["accuracy"]) == (400, [0.65, 0.35])
    by_seconds = at_the_common_end(found, "seconds")
    assert (by_seconds["at"], by_seconds["accuracy"]) == (10, [0.35, 0.45])
    assert by_seconds["reward"] == [1.0, 1.5]


def test_wall_clock_time_continues_over_a_restart_of_the_trainer(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [10.0, 20.0, 3.0, 9.0], 1.0)
    (own,) = compare_folders([run], 10)["runs"]
    assert own["axes"]["seconds"] == [10.0, 20.0, 23.0, 29.0]


def test_a_record_without_the_trainers_clock_sums_its_steps(tmp_path: Path) -> None:
    rows = [step_row(step, **{"timing_s/step": 2.0}) for step in (1, 2, 3)]
    add_lines(tmp_path / "metrics.jsonl", rows)
    (own,) = compare_folders([tmp_path], 10)["runs"]
    assert own["axes"]["seconds"] == [2.0, 4.0, 6.0]


def test_figures_are_means_of_the_last_ten_steps_and_what_no_run_has_is_left_out(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "run", [float(step) for step in range(1, 21)], 1.0)
    found = compare_folders([run], 10)
    assert figure(found, "Reward") == [15.5]
    assert figure(found, "Held-out accuracy, best") == [2.25]
    assert "Entropy" not in {row["name"] for row in found["figures"]}


def test_only_settings_that_mean_something_differ(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    runs = [
        a_run(
            folder,
            [1.0],
            1.0,
            f"data.train_files={folder.absolute()}/train.parquet",
            f"actor_rollout_ref.actor.optim.lr={lr}",
            f"sluice.rollout.endpoint.port={port}",
        )
        for folder, lr, port in zip(folders, ("1e-6", "2e-6"), (7001, 7002), strict=True)
    ]
    found = compare_folders(runs, 10)
    assert found["differences"] == [
        {"key": "actor_rollout_ref.actor.optim.lr", "values": ["1e-06", "2e-06"]}
    ]


def test_a_copied_run_differs_in_no_path(tmp_path: Path) -> None:
    first = tmp_path / "first"
    run = a_run(first, [1.0], 1.0, f"data.train_files=[{first}/one.parquet,data/two.parquet]")
    shutil.copytree(run, tmp_path / "copy")
    assert compare_folders([run, tmp_path / "copy"], 10)["differences"] == []
    settings = {row["key"]: row["value"] for row in settings_object(tmp_path / "copy")["settings"]}
    assert settings["data.train_files"] == "[RUN/one.parquet, data/two.parquet]"


def test_runs_of_one_name_are_shown_with_their_paths(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / parent / "run", [1.0], 1.0) for parent in ("a", "b")]
    names = [run["name"] for run in compare_folders(runs, 10)["runs"]]
    assert names == [str(run) for run in runs]


def test_a_run_without_steps_has_no_figures_and_no_error(tmp_path: Path) -> None:
    found = compare_folders([tmp_path, a_run(tmp_path / "b", [1.0], 1.0)], 10)
    assert found["progress"] == []
    assert figure(found, "Steps") == [None, 1.0]


def test_the_configuration_says_what_was_changed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "data.train_batch_size=7")
    rows = {row["key"]: row for row in settings_object(run)["settings"]}
    assert {key for key, row in rows.items() if row["is_changed"]} == {"data.train_batch_size"}
    assert rows["data.train_batch_size"]["default"] == "1024"


def test_a_configuration_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("[1", encoding="utf-8")
    assert settings_object(tmp_path) == {"settings": []}


@pytest.mark.parametrize(
    "name",
    [
        *("api_key", "OPENAI_KEY", "private_key", "aws_secret_access_key", "client_secret"),
        *("token", "github_token", "password", "api-key", "hf-token", "passwd", "MYSQL_PWD"),
    ],
)
def test_secrets_of_a_configuration_are_not_shown(tmp_path: Path, name: str) -> None:
    shown_too = "max_token: 5, pad_token: <pad>, think_end_token: x, label_key: answer"
    (tmp_path / "config.yaml").write_text(
        f"reward:\n  custom_reward_function:\n    reward_kwargs: {{{name}: sk-1, {shown_too}}}\n"
    )
    shown = str(settings_object(tmp_path))
    assert "sk-1" not in shown
    assert all(f"'{value}'" in shown for value in ("5", "<pad>", "answer"))

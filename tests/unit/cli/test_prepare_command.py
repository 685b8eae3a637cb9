"""`sluice prepare`: the files that it writes, and its notices."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice.cli.main import commands
from sluice.cli.run import prepare as prepare_module
from sluice.cli.run.prepare import spent_notice
from sluice.client.run_address import locate_run
from sluice.concurrency.process import (
    ProcessMark,
    host_of_pids,
    mark_file,
    mark_process,
    process_marks,
)
from sluice.config.derived import checkpoint_folder
from sluice.config.loading.loader import load_config
from sluice.config.run import RunConfig
from sluice.errors import ConfigError
from sluice.launch.network_layout import KINDS, SERVICE_PORTS
from sluice.launch.shared_run import RunEnding, SharedRun
from sluice.quickstart.arithmetic import TASKS
from sluice.quickstart.prepare import QuickstartAssets
from sluice.report.run_record import ACCOUNTS_NAME
from sluice.report.summary import SUMMARY_NAME, remove_end_files
from sluice.service_contract import CONFIG_NAME, LEDGER_NAME, TRACKER_NAME
from tests.support.doctor_findings import write_model
from tests.support.prompt_parquet import prompt_rows, write_prompts

pytestmark = pytest.mark.usefixtures("tried_scorers")


def model_and_data(folder: Path) -> list[str]:
    """Files that pass the checks before the start, and nothing more."""
    model, data = folder / "model", folder / "train.parquet"
    folder.mkdir(parents=True)
    write_model(model)
    write_prompts(data, prompt_rows(["1 + 1"]))
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]


def prepare(*arguments: str | Path) -> str:
    result = CliRunner().invoke(commands, ["prepare", *map(str, arguments)], terminal_width=400)
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.output


def test_commands_find_the_run_by_the_file_that_is_written(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    prepare("--run-dir", run_dir, *model_and_data(tmp_path / "job"), "data.train_batch_size=8")
    location = locate_run(run_dir)
    assert location.trainer == f"trainer:{SERVICE_PORTS['trainer'].port}"
    assert location.reward == f"reward:{SERVICE_PORTS['reward'].port}"
    assert location.config.data.train_batch_size == 8
    assert location.config.sluice.run_dir == str(run_dir)


@pytest.mark.parametrize("is_active", [False, True])
def test_a_folder_with_a_ledger_of_another_format_stays_as_it_is(
    is_active: bool, tmp_path: Path
) -> None:
    job, run_dir = model_and_data(tmp_path / "job"), tmp_path / "run"
    if is_active:
        prepare("--run-dir", run_dir, *job)
    (run_dir / LEDGER_NAME).parent.mkdir(parents=True)
    with closing(sqlite3.connect(run_dir / LEDGER_NAME)) as database:
        database.execute("PRAGMA user_version = 3")
    refused = CliRunner().invoke(commands, ["prepare", "--run-dir", str(run_dir), *job])
    assert isinstance(refused.exception, ConfigError)
    assert "format 3, and this version of sluice reads" in str(refused.exception)
    assert (run_dir / CONFIG_NAME).exists() is is_active


def test_a_scorer_that_cannot_be_loaded_is_refused_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried_scorers: list[RunConfig]
) -> None:
    job, run_dir = model_and_data(tmp_path / "job"), tmp_path / "run"
    prepare("--run-dir", run_dir, *job)
    assert [config.sluice.run_dir for config in tried_scorers] == [str(run_dir)]

    def refuse(*_: object) -> None:
        raise ConfigError("mine.py has no compute_score")

    monkeypatch.setattr(prepare_module, "try_responses", refuse)
    words = ["prepare", "--run-dir", str(tmp_path / "other"), *job]
    refused = CliRunner().invoke(commands, words)
    assert refused.exit_code != 0
    assert "mine.py has no compute_score" in refused.output + str(refused.exception)
    assert not (tmp_path / "other" / CONFIG_NAME).exists()


def test_preparing_again_leaves_an_active_run_alone_and_begins_one_after_it_ended(
    tmp_path: Path,
) -> None:
    job = model_and_data(tmp_path / "job")
    assert "the run begins" in prepare("--run-dir", tmp_path / "run", *job)
    assert "the run continues" in prepare("--run-dir", tmp_path / "run", *job)
    SharedRun(tmp_path / "run").end(RunEnding("trainer", ()))
    assert "the run begins" in prepare("--run-dir", tmp_path / "run", *job)


def test_a_beginning_forgets_that_the_run_before_it_ended(tmp_path: Path) -> None:
    job, run_dir = model_and_data(tmp_path / "job"), tmp_path / "run"
    prepare("--run-dir", run_dir, *job)
    ends = [run_dir / ACCOUNTS_NAME, run_dir / SUMMARY_NAME]
    (run_dir / "processes").mkdir()
    killed = ProcessMark("rollout/1", os.getpid(), host_of_pids(), started=1)
    mark_file(run_dir, "rollout/1").write_text(json.dumps(asdict(killed)), encoding="utf-8")
    for file in ends:
        file.write_text("{}", encoding="utf-8")
    prepare("--run-dir", run_dir, *job)
    assert all(file.is_file() for file in ends), "the run is active, and its files stay"
    SharedRun(run_dir).end(RunEnding("trainer", ()))
    prepare("--run-dir", run_dir, *job)
    assert not any(file.exists() for file in ends)
    assert not (run_dir / "processes").exists(), "its processes may note themselves elsewhere"


def test_a_process_that_lives_keeps_its_mark_where_another_run_begins(tmp_path: Path) -> None:
    with mark_process(tmp_path, "reward"):
        remove_end_files(tmp_path)
        assert mark_file(tmp_path, "reward").is_file()


def test_the_marks_of_other_machines_are_those_of_the_last_start(tmp_path: Path) -> None:
    before = ProcessMark("rollout-1", 7, f"not {host_of_pids()}", started=1)
    mark_file(tmp_path, "rollout-1").parent.mkdir()
    mark_file(tmp_path, "rollout-1").write_text(json.dumps(asdict(before)), encoding="utf-8")
    remove_end_files(tmp_path)
    assert not process_marks(tmp_path)


def test_an_active_run_keeps_its_configuration_and_restart_begins_another(
    tmp_path: Path,
) -> None:
    job, run_dir = model_and_data(tmp_path / "job"), tmp_path / "run"
    prepare("--run-dir", run_dir, *job, "data.train_batch_size=8")
    assert "stays" not in prepare("--run-dir", run_dir, *job, "data.train_batch_size=8")
    reported = prepare("--run-dir", run_dir, *job, "data.train_batch_size=16")
    assert "stays as it is" in reported
    assert "--restart" in reported
    assert locate_run(run_dir).config.data.train_batch_size == 8
    again = prepare("--restart", "--run-dir", run_dir, *job, "data.train_batch_size=16")
    assert "the run begins" in again
    assert locate_run(run_dir).config.data.train_batch_size == 16


def test_a_file_of_settings_is_read_and_a_wrong_one_writes_nothing(tmp_path: Path) -> None:
    job, run_dir = tmp_path / "job.yaml", tmp_path / "run"
    job.write_text("data: {train_batch_size: 4}\n", encoding="utf-8")
    files = model_and_data(tmp_path / "job")
    prepare(job, *files, "--run-dir", run_dir)
    assert locate_run(run_dir).config.data.train_batch_size == 4
    wrong = ["prepare", str(job), "--run-dir", str(tmp_path / "other")]
    assert CliRunner().invoke(commands, wrong).exit_code != 0
    assert not (tmp_path / "other" / CONFIG_NAME).exists()


def test_with_secure_everything_asks_for_certificates_and_tokens_made_once(tmp_path: Path) -> None:
    job, run_dir = model_and_data(tmp_path / "job"), tmp_path / "run"
    prepare("--secure", "--run-dir", run_dir, *job)
    security = load_config(run_dir / CONFIG_NAME, []).sluice.security
    assert (security.tls, security.server_name) == ("mtls", "sluice")
    assert security.token_file is not None
    before = Path(security.token_file).read_bytes()
    prepare("--secure", "--run-dir", run_dir, *job)
    assert Path(security.token_file).read_bytes() == before


@pytest.mark.parametrize("name", ["run", r"a\,b"])
def test_the_quickstarts_job_is_taken_with_what_was_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    task = TASKS["quickstart"]

    def make(directory: Path, **_: object) -> QuickstartAssets:
        model_and_data(directory)
        data = directory / "train.parquet"
        return QuickstartAssets(task, directory / "model", data, data)

    monkeypatch.setattr("sluice.cli.run.quickstart.asset_maker", lambda: make)
    run_dir = tmp_path / name
    prepare("--quickstart", "trainer.save_freq=3", "--secure", "--run-dir", run_dir)
    config = locate_run(run_dir).config
    assert config.sluice.run_dir == str(run_dir)
    assert config.actor_rollout_ref.model.path == str(run_dir / "assets" / "model")
    assert config.sluice.security.ca_file == str(run_dir / "certs" / "ca.pem")
    assert config.data.max_response_length == task.max_response_tokens
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (20, 3)
    assert all(getattr(config.sluice, kind).endpoint.port for kind in KINDS)


AUTO = "trainer.resume_mode=auto"


def run_at(folder: Path, newest: str, *settings: str) -> RunConfig:
    config = load_config(None, [f"sluice.run_dir={folder}", *settings])
    checkpoints = Path(checkpoint_folder(config))
    checkpoints.mkdir(parents=True, exist_ok=True)
    (checkpoints / TRACKER_NAME).write_text(newest, encoding="utf-8")
    return config


@pytest.mark.parametrize("newest", ["20", "25\n"])
def test_a_run_that_would_resume_at_its_last_step_gets_a_notice_with_the_remedy(
    tmp_path: Path, newest: str
) -> None:
    said = spent_notice(run_at(tmp_path, newest, AUTO, "trainer.total_training_steps=20"))
    assert said is not None
    for part in (newest.strip(), "trainer.total_training_steps = 20", "docker compose down -v"):
        assert part in said


@pytest.mark.parametrize(
    ("newest", "settings"),
    [
        ("19", (AUTO, "trainer.total_training_steps=20")),
        ("20", (AUTO,)),
        ("20", ("trainer.resume_mode=disable", "trainer.total_training_steps=20")),
        ("no number", (AUTO, "trainer.total_training_steps=20")),
    ],
)
def test_there_is_no_notice_for_a_run_with_steps_left_or_of_an_unknown_number(
    tmp_path: Path, newest: str, settings: tuple[str, ...]
) -> None:
    assert spent_notice(run_at(tmp_path, newest, *settings)) is None


def test_the_notice_comes_when_a_run_begins_and_not_while_one_is_active(tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", "trainer.total_training_steps=3"
    job = [*model_and_data(tmp_path / "job"), AUTO, steps, "data.train_batch_size=8"]
    assert "without a step" not in prepare("--run-dir", run_dir, *job)
    run_at(run_dir, "3", AUTO, steps)
    assert locate(run_dir).trainer.total_training_steps == 3
    assert "without a step" not in prepare("--run-dir", run_dir, *job)
    SharedRun(run_dir).end(RunEnding("trainer", ()))
    assert "without a step" in prepare("--run-dir", run_dir, *job)


def locate(run_dir: Path) -> RunConfig:
    return load_config(run_dir / CONFIG_NAME, [])

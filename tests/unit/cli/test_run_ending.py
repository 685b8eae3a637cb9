"""The last lines of a run: how it ended, where its files are, and the command that continues it."""

from __future__ import annotations

import errno
import io
import json
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sluice.cli.run import up as up_module
from sluice.cli.run.ending import end_run
from sluice.cli.run.up import Display, display_from_options, start_processes
from sluice.cli.running_run import PastRun
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.config.run import RunConfig
from sluice.launch.cluster.ray_run import RayOptions
from sluice.launch.processes.supervisor import RunEnd
from tests.support.run_folder import ACCOUNTS, STEPS, VALIDATIONS, run_folder


def run_at(folder: Path, *, saved: int | None = None, has_steps: bool = True) -> RunConfig:
    ports = ("sluice.trainer.endpoint.port=1", "sluice.reward.endpoint.port=1")
    config = load_config(None, [f"sluice.run_dir={folder}", *ports])
    write_config(config, folder / "config.yaml")
    run_folder(
        folder,
        steps=STEPS if has_steps else (),
        validations=VALIDATIONS if has_steps else (),
        accounts=ACCOUNTS if has_steps else None,
    )
    if saved is not None:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(saved))
    return config


def ended(
    config: RunConfig, end: RunEnd, total_steps: int | None = 2, shown: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    screen = io.StringIO()
    end_run(
        config,
        end,
        Console(file=screen, width=80),
        total_steps=total_steps,
        seconds_total=130.0,
        seconds_services=100.0,
        shown_lines=shown,
    )
    summary = Path(config.sluice.run_dir) / "summary.json"
    return screen.getvalue(), json.loads(summary.read_text())


def test_a_finished_run_names_its_validation_its_files_and_how_to_train_on(tmp_path: Path) -> None:
    text, summary = ended(run_at(tmp_path, saved=2), RunEnd(0, ()))
    assert "finished after step 2 of 2, 2 min\n" in text
    assert "0 lost" in text
    assert f"checkpoint  {tmp_path}/checkpoints/global_step_2\n" in text
    assert f"report      {tmp_path}/report.html\n" in text
    assert f"metrics     {tmp_path}/metrics.jsonl\n" in text
    assert f"sluice up {tmp_path}/config.yaml trainer.total_training_steps=4\n" in text
    assert (tmp_path / "report.html").is_file()
    assert (summary["outcome"], summary["step"], summary["prompts_lost"]) == ("finished", 2, 0)
    assert summary["seconds_total"] == 130.0
    assert summary["checkpoint"] == f"{tmp_path}/checkpoints/global_step_2"


@pytest.mark.parametrize(("saved", "start"), [(1, "from step 1"), (None, "from the beginning")])
def test_an_interrupted_run_names_the_command_that_resumes_it_and_from_where(
    tmp_path: Path, saved: int | None, start: str
) -> None:
    text, summary = ended(run_at(tmp_path, saved=saved), RunEnd(130, ()), total_steps=9)
    assert "interrupted after step 2 of 9" in text
    assert f"resume      sluice up {tmp_path}/config.yaml  # {start}\n" in text
    assert (summary["outcome"], summary["checkpoint_step"]) == ("interrupted", saved)


def test_a_run_that_ended_before_its_first_step_names_no_file_that_is_not_there(
    tmp_path: Path,
) -> None:
    folder = run_at(tmp_path, saved=None)
    (tmp_path / "metrics.jsonl").unlink()
    text, _ = ended(folder, RunEnd(130, ()), total_steps=9)
    named = [Path(line.split()[1]) for line in text.splitlines() if line.startswith(("rep", "met"))]
    assert named == []


async def test_the_command_that_resumes_a_run_starts_it_where_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def placed(*_: object) -> AsyncIterator[None]:
        yield

    async def supervised(*_: object) -> None: ...

    monkeypatch.setattr(up_module, "ray_plan", placed)
    monkeypatch.setattr(up_module, "_supervise", supervised)
    config, display = run_at(tmp_path, saved=1), Display(Console(file=io.StringIO()))
    for ray, where in ((RayOptions(), " --on ray"), (None, "")):
        await start_processes(config, tmp_path / "config.yaml", display, ray)
        text, _ = ended(config, RunEnd(130, ()), total_steps=9)
        again = f"sluice up {tmp_path}/config.yaml{where}"
        assert f"resume      {again}  # from step 1\n" in text
        assert f"`{again}` starts it again" in PastRun("not running", 2, ()).as_text(tmp_path)


def test_the_command_that_resumes_a_run_is_quoted_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my run; $(x)"
    folder.mkdir()
    text, _ = ended(run_at(folder, saved=1), RunEnd(130, ()), total_steps=9)
    line = next(line for line in text.splitlines() if line.startswith("resume"))
    command, _, _ = line.removeprefix("resume").partition("#")
    assert shlex.split(command) == ["sluice", "up", f"{folder}/config.yaml"]
    again = PastRun("not running", 2, ()).as_text(folder)
    assert f"`sluice up '{folder}/config.yaml'` starts it again" in again


def test_a_failed_run_names_the_reason_first_and_for_machines(tmp_path: Path) -> None:
    failure = "reward ended with code 3:\n  seen\n  port 7 is in use"
    end = RunEnd(1, (failure,))
    text, summary = ended(run_at(tmp_path, saved=1), end, total_steps=9, shown=("seen",))
    assert text.startswith("failed: reward ended with code 3:\n  port 7 is in use\n")
    reason = "reward ended with code 3: port 7 is in use"
    assert f"failed after step 2 of 9, 2 min: {reason}\n" in text
    assert (summary["outcome"], summary["reason"]) == ("failed", reason)


def test_a_run_that_somebody_stopped_before_its_last_step_is_not_called_finished(
    tmp_path: Path,
) -> None:
    text, summary = ended(run_at(tmp_path), RunEnd(0, ()), total_steps=9)
    assert "stopped after step 2 of 9" in text
    assert summary["outcome"] == "stopped"


def test_a_run_whose_data_set_ended_is_finished_and_trains_on_with_more_epochs(
    tmp_path: Path,
) -> None:
    config = run_at(tmp_path, saved=2)
    accounts = json.dumps({**ACCOUNTS, "data_exhausted": 1.0})
    (tmp_path / "accounts.json").write_text(accounts)
    text, summary = ended(config, RunEnd(0, ()), total_steps=9)
    assert "finished after step 2 of 9, 2 min: data exhausted\n" in text
    assert f"train on    sluice up {tmp_path}/config.yaml trainer.total_epochs=60\n" in text
    assert (summary["outcome"], summary["reason"]) == ("finished", "data exhausted")


def test_a_run_without_a_step_still_says_where_its_logs_are(tmp_path: Path) -> None:
    text, summary = ended(run_at(tmp_path, has_steps=False), RunEnd(130, ()), total_steps=None)
    assert "interrupted after step 0, 2 min\n" in text
    assert f"logs        {tmp_path}/logs\n" in text
    assert summary["outcome"] == "interrupted"


def test_a_run_whose_output_cannot_be_written_has_its_summary_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", FullDisk())
    end_run(
        run_at(tmp_path, saved=2),
        RunEnd(1, ("reward ended with code 3",)),
        display_from_options(logs=False, quiet=False, as_json=False).console,
        total_steps=2,
        seconds_total=1.0,
        seconds_services=1.0,
    )
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"
    assert (tmp_path / "report.html").is_file()


def test_the_summary_names_the_versions_that_ran(tmp_path: Path) -> None:
    _, summary = ended(run_at(tmp_path, saved=2), RunEnd(0, ()))
    assert {"sluice", "python", "torch"} <= summary["versions"].keys()
    assert (summary["accuracy_best"], summary["accuracy_best_step"]) == (0.75, 2)


def test_the_last_line_of_standard_output_may_be_the_summary_for_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_at(tmp_path, saved=2)
    end_run(
        config,
        RunEnd(0, ()),
        Console(stderr=True),
        total_steps=2,
        seconds_total=1.0,
        seconds_services=1.0,
        as_json=True,
    )
    assert json.loads(capsys.readouterr().out)["outcome"] == "finished"

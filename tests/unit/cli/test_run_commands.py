"""How a run is named, and the commands that list, show, report and begin runs."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack
from io import StringIO
from pathlib import Path
from shutil import copytree
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from sluice.cli.arguments import RUN_VARIABLE, named_run
from sluice.cli.main import commands
from sluice.cli.run.checked import check_run, read_to_start
from sluice.cli.running_run import PastRun, past_run
from sluice.cli.terminal import RunConsole
from sluice.cli.watch import dashboard
from sluice.cli.watch import status as status_module
from sluice.concurrency.process import host_of_pids, mark_process
from sluice.config.loading.loader import load_config
from sluice.config.loading.yaml_text import write_config
from sluice.errors import ConfigError, NotReadyError
from sluice.launch.servicer import LauncherAddress, write_launcher
from sluice.service_contract import TRACKER_NAME
from tests.support.run_folder import run_folder

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

NOWHERE = ["sluice.trainer.endpoint.port=1", "sluice.reward.endpoint.port=1"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_VARIABLE, raising=False)


def sluice(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments)


def past(name: str, age_s: float = 0.0, *, ended: bool = True, steps: int = 2) -> Path:
    """A run that started `age_s` seconds ago and has ended."""
    run = Path("runs") / name
    run.mkdir(parents=True)
    if ended:
        run_folder(run)
    else:
        run_folder(run, accounts=None)
    settings = [*NOWHERE, f"sluice.run_dir={run}", f"trainer.total_training_steps={steps}"]
    write_config(load_config(None, settings), run / "config.yaml")
    then = run.stat().st_mtime - age_s
    os.utime(run / "config.yaml", (then, then))
    return run


def listed() -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(sluice("runs", "--json").stdout)["runs"]
    return found


def test_a_command_without_a_run_means_the_newest_one_and_says_so() -> None:
    past("old", 60.0)
    past("new")
    past("older", 600.0)
    shown = sluice("status")
    assert shown.stdout.startswith("runs/new: finished")
    assert shown.stderr == "run: runs/new (newest)\n"


def test_the_variable_comes_before_the_newest_and_a_name_before_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("a", "b", "c"):
        past(name)
    monkeypatch.setenv(RUN_VARIABLE, "runs/b")
    shown = sluice("status")
    assert shown.stdout.startswith("runs/b: finished")
    assert shown.stderr == "run: runs/b (SLUICE_RUN)\n"
    assert sluice("status", "runs/a").stdout.startswith("runs/a: finished")
    assert sluice("status", "--run", "runs/a").stdout.startswith("runs/a: finished")


def test_two_different_runs_and_no_run_at_all_are_refused() -> None:
    assert named_run(Path("a"), Path("a")) == Path("a")
    with pytest.raises(ConfigError, match="named twice, a and --run b"):
        named_run(Path("a"), Path("b"))
    with pytest.raises(ConfigError, match="none named, and none was started in"):
        named_run(None)


def test_a_configuration_of_the_users_means_the_run_that_it_has_started() -> None:
    past("a", 60.0)
    past("b")
    Path("run.yaml").write_text("sluice: {run_dir: runs/a}\n")
    Path("later.yaml").write_text("sluice: {run_dir: runs/later}\n")
    assert sluice("status", "run.yaml").stdout.startswith("runs/a: finished")
    assert named_run(Path("runs/a/config.yaml")) == Path("runs/a/config.yaml")
    refused = str(sluice("status", "later.yaml").exception)
    assert "sluice.run_dir = runs/later holds no started run" in refused
    assert "`sluice up later.yaml`" in refused


def test_a_run_that_does_not_exist_is_refused_with_the_nearest_that_does() -> None:
    past("first")
    past("other")
    assert str(sluice("status", "runs/frst").exception) == (
        "run: runs/frst does not exist; did you mean runs/first?"
    )
    assert "give a run's sluice.run_dir" in str(sluice("status", "nowhere").exception)


def test_runs_are_listed_with_state_step_accuracy_and_age_newest_first() -> None:
    past("done", 7200.0)
    past("early", 60.0, steps=9)
    past("killed", 30.0, ended=False)
    lines = sluice("runs").stdout.splitlines()
    assert [line.split()[:4] for line in lines if line.startswith("runs/")] == [
        ["runs/killed", "stopped", "2/2", "0.750"],
        ["runs/early", "stopped", "2/9", "0.750"],
        ["runs/done", "finished", "2/2", "0.750"],
    ]
    assert "2 h 00 min ago" in lines[-2] or "2 h 00 min ago" in lines[-1]
    found = listed()
    assert [one["run"] for one in found] == ["runs/killed", "runs/early", "runs/done"]
    assert found[2]["total_steps"] == 2


def test_a_run_that_cannot_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    past("mine", 60.0)
    (past("damaged", 30.0) / "accounts.json").write_bytes(b"\xff\n")
    others = past("others")

    async def read(folder: Path) -> PastRun:
        if folder == others:
            raise PermissionError(13, "Permission denied", "metrics.jsonl")
        return await past_run(folder)

    monkeypatch.setattr(status_module, "past_run", read)
    assert [one["state"] for one in listed()] == ["unreadable", "unreadable", "finished"]


def test_a_run_that_failed_is_listed_as_failed() -> None:
    (past("broken", ended=False) / "summary.json").write_text('{"outcome": "failed"}')
    assert [one["state"] for one in listed()] == ["failed"]


def test_a_run_whose_data_set_ended_before_its_last_step_is_listed_as_finished() -> None:
    run = past("short", steps=9)
    (run / "accounts.json").write_text('{"data_exhausted": 1.0}')
    assert [one["state"] for one in listed()] == ["finished"]
    assert sluice("status").stdout.startswith("runs/short: finished after 2 steps (data exhausted)")


def test_a_folder_without_runs_is_no_error() -> None:
    assert sluice("runs").stdout.startswith("no runs in ")
    assert json.loads(sluice("runs", "--json").stdout) == {"runs": []}


def test_a_folder_that_does_not_exist_has_no_list_of_runs() -> None:
    refused = str(sluice("runs", "nowhere").exception)
    assert refused == "runs: nowhere is no folder; give the folder that holds the runs"


def logged() -> Path:
    run = past("a")
    (run / "logs").mkdir()
    (run / "logs" / "trainer.log").write_text("one\ntwo\x1b[2J\nthree\n")
    (run / "logs" / "reward.log").write_text("four\n")
    return run


def test_logs_are_shown_of_all_services_or_of_one_with_escapes_made_visible() -> None:
    run = str(logged())
    everything = ["reward | four", "trainer | one", "trainer | two\\x1b[2J", "trainer | three"]
    assert sluice("logs", run).stdout.splitlines() == everything
    assert sluice("logs", f"{run}/config.yaml").stdout.splitlines() == everything
    assert sluice("logs", run, "trainer", "-n", "1").stdout == "three\n"
    assert sluice("logs", "reward").stdout == "four\n"
    assert sluice("logs", "reward", run).stdout == "four\n"
    shown = sluice("logs", "reward", "--json").stdout
    assert json.loads(shown) == {"service": "reward", "line": "four"}


def test_a_service_without_a_log_is_refused_with_those_that_have_one() -> None:
    logged()
    refused = sluice("logs", "rollout-9")
    assert "has no log of 'rollout-9'; it has reward, trainer" in str(refused.exception)
    refused = sluice("logs", "reward", "runs/other")
    assert str(refused.exception).startswith("run: runs/other does not exist; give a run's")
    (Path("runs") / "other").mkdir()
    refused = sluice("logs", "reward", "runs/other")
    assert str(refused.exception).startswith("run: runs/other/logs holds no logs")


def test_of_two_names_that_are_no_run_logs_takes_neither_for_a_folder() -> None:
    logged()
    for words in (("trainer", "other"), ("other", "trainer")):
        refused = str(sluice("logs", *words).exception)
        assert refused.startswith(f"run: there is no folder {words[0]}, and none {words[1]}; give")


def test_a_report_can_be_written_of_a_run_that_did_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run = past("a", ended=False)
    shown = sluice("report", str(run))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("not finished: the numbers so far\nheld-out accuracy 0.250 ->")
    assert (run / "report.html").is_file()
    assert json.loads((run / "summary.json").read_text())["steps"] == 2
    assert json.loads(sluice("report", str(run), "--json").stdout)["is_finished"] is False


def test_the_numbers_of_a_run_are_shown_where_no_report_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = past("a")
    monkeypatch.setattr(dashboard, "write_summary", Mock(side_effect=PermissionError))
    refused = sluice("report", str(run))
    assert isinstance(refused.exception, PermissionError)
    assert "held-out accuracy 0.250 ->" in refused.stdout
    assert "report.html" not in refused.stdout


def test_a_report_keeps_what_only_the_end_of_the_run_knew() -> None:
    run = past("a")
    (run / "summary.json").write_text('{"seconds_total": 99.5, "outcome": "finished", "steps": 0}')
    assert " 100 s in all)" in sluice("report", str(run)).stdout
    found = json.loads(sluice("report", str(run), "--json").stdout)
    assert (found["seconds_total"], found["outcome"], found["steps"]) == (99.5, "finished", 2)


@pytest.mark.parametrize("now", [(), ("--now",)])
def test_a_run_that_is_not_active_cannot_be_stopped(now: tuple[str, ...]) -> None:
    refused = sluice("stop", str(past("a")), *now)
    assert isinstance(refused.exception, NotReadyError)


@pytest.mark.parametrize("variable", ["", "runs/a"])
def test_of_several_active_runs_none_is_stopped_that_was_not_named(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, variable)
    active = [past("a").absolute(), past("b").absolute()]
    past("c")
    with ExitStack() as marks:
        for run in active:
            marks.enter_context(mark_process(run, "trainer"))
        refused = sluice("stop")
        assert isinstance(refused.exception, ConfigError)
        named = f"name the one to stop: {active[0]}, {active[1]}"
        assert str(refused.exception) == f"run: 2 are active; {named}"
        assert isinstance(sluice("stop", "runs/a").exception, NotReadyError)
    assert isinstance(sluice("stop").exception, NotReadyError)


def test_a_run_whose_processes_live_on_another_machine_is_never_called_inactive() -> None:
    run = past("a", ended=False)
    (run / "processes").mkdir()
    mark = {"name": "trainer", "pid": 7, "host": "node7 pid:[1]", "started": 1}
    (run / "processes" / "trainer.json").write_text(json.dumps(mark))
    write_launcher(run, LauncherAddress("127.0.0.1:1", "a-secret-of-a-launcher", 7))
    there = (
        f"the processes of {run} were last seen on node7; use the command there, or, if nothing "
        f"runs there any more, `sluice up {run}/config.yaml` starts it again"
    )
    assert sluice("status", str(run)).stdout.splitlines()[1:] == [there]
    for command in (("stop",), ("stop", "--now"), ("scale", "rollout", "2")):
        refused = sluice(*command, "--run", str(run))
        assert isinstance(refused.exception, NotReadyError)
        assert str(refused.exception) == f"run: {there}"
    assert [one["state"] for one in listed()] == ["out of sight"]
    screen = StringIO()
    with pytest.raises(ConfigError):
        check_run(None, [f"sluice.run_dir={run.absolute()}", "gone"], RunConsole(file=screen))
    assert "notice: the processes of " in screen.getvalue(), "a second start is seen"
    assert "node7; if they still run there, end this start" in screen.getvalue()
    own = {**mark, "name": "reward", "host": host_of_pids()}
    (run / "processes" / "reward.json").write_text(json.dumps(own))
    assert "starts it again" in sluice("status", str(run)).stdout, "part of it was here"
    (run / "processes" / "reward.json").unlink()
    (run / "summary.json").write_text('{"seconds_total": 99.5, "outcome": "failed"}')
    assert "starts it again" in sluice("status", str(run)).stdout, "its end was noted"


@pytest.mark.parametrize("mode", ["auto", "disable", "resume_path"])
def test_a_runs_own_file_resumes_from_its_newest_checkpoint_however_the_run_began(
    mode: str,
) -> None:
    run = past("a").absolute()
    file, path = run / "config.yaml", "elsewhere" if mode == "resume_path" else "null"
    began = [f"trainer.resume_mode={mode}", f"trainer.resume_from_path={path}"]
    write_config(load_config(None, [f"sluice.run_dir={run}", *began]), file)
    assert read_to_start(file, []).config.trainer.resume_mode == mode, "it has no checkpoint yet"
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / TRACKER_NAME).write_text("2")
    again = read_to_start(file, ["trainer.test_freq=3"]).config.trainer
    assert (again.resume_mode, again.resume_from_path, again.test_freq) == ("auto", None, 3)
    chosen = read_to_start(file, ["trainer.resume_mode=disable"]).config.trainer
    assert chosen.resume_mode == "disable", "the user's words win"


def test_a_run_that_went_back_and_has_saved_nothing_since_begins_again_where_it_began() -> None:
    run = past("a").absolute()  # two steps since it went back
    began = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=elsewhere"]
    write_config(load_config(None, [f"sluice.run_dir={run}", *began]), run / "config.yaml")
    (run / "checkpoints").mkdir()
    for newest, mode in (("4", "resume_path"), ("3", "auto")):
        (run / "checkpoints" / TRACKER_NAME).write_text(newest)
        assert read_to_start(run / "config.yaml", []).config.trainer.resume_mode == mode


def test_notes_on_keys_come_for_those_that_a_user_has_set() -> None:
    file, chosen = past("a") / "config.yaml", "critic.optim.betas=[0.9,0.99]"
    for own, settings, noted in (
        (True, ["sluice.run_dir=other"], False),
        (True, ["sluice.run_dir=other", chosen], True),
        (False, [f"sluice.run_dir={Path('other').absolute()}", chosen], True),
    ):
        screen = StringIO()
        with pytest.raises(ConfigError, match="gone"):
            check_run(file if own else None, [*settings, "gone"], RunConsole(file=screen))
        assert ("has no effect" in screen.getvalue()) is noted
        assert "rollout.gpu_memory_utilization" not in screen.getvalue()


def test_the_file_of_a_copied_run_starts_the_other_one_no_more() -> None:
    run, copy = past("a").absolute(), Path("runs/copied").absolute()
    settings = [*NOWHERE, f"sluice.run_dir={run}", "trainer.total_training_steps=9"]
    write_config(load_config(None, settings), run / "config.yaml")
    copytree(run, copy)
    with pytest.raises(ConfigError, match="copied or moved; add") as refused:
        read_to_start(copy / "config.yaml", [])
    assert f"add sluice.run_dir={copy} to continue" in str(refused.value)
    here = read_to_start(copy / "config.yaml", [f"sluice.run_dir={copy}"])
    assert here.config.sluice.run_dir == str(copy)
    again = f"`sluice up runs/copied/config.yaml sluice.run_dir={copy}` starts it again"
    assert again in sluice("status", "runs/copied").output
    assert f"`sluice up {run}/config.yaml` starts it again" in sluice("status", str(run)).output


def test_init_writes_a_launch_with_comments_and_replaces_no_file() -> None:
    Path("launch.overrides").write_text("data.max_prompt_length=1024\n", encoding="utf-8")
    words = ["init", "--from", "launch.overrides"]
    assert sluice(*words).exit_code == 0
    text = Path("run.yaml").read_text(encoding="utf-8")
    assert re.search(r"\n  # .+\n  max_prompt_length: 1024\n", text)
    with pytest.raises(ConfigError, match=r"run\.yaml: exists"):
        CliRunner().invoke(commands, words, catch_exceptions=False)
    assert sluice(*words, "--force").exit_code == 0


def test_one_nearest_key_is_explained_and_several_are_named() -> None:
    shown = sluice("config", "explain", "lr")
    assert shown.stdout.startswith("actor_rollout_ref.actor.optim.lr\n")
    assert "lr: the nearest key is actor_rollout_ref.actor.optim.lr" in shown.stderr
    assert "did you mean" in str(sluice("config", "explain", "enable").exception)

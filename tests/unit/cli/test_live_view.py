"""The view of a running run: a table on a terminal, lines in a pipe."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sluice.api.trainer.v1 import trainer_pb2
from sluice.cli.terminal import ConsoleHandler, RunConsole
from sluice.cli.watch import live_view
from sluice.cli.watch.live_view import Detail, LiveView, run_accuracies, run_table
from sluice.client.run_monitor import (
    ReplicaSnapshot,
    RunMonitor,
    RunSnapshot,
    WatchedRule,
)
from sluice.concurrency.waits import Waiting
from sluice.config.loading.loader import load_config
from sluice.dashboard.step_history import StepHistory
from sluice.errors import SluiceError
from sluice.report.run_record import METRICS_NAME
from sluice.telemetry.metric_names import STEP
from tests.support.rpc_server import rpc_server
from tests.support.run_folder import ACCOUNTING, ACCOUNTS, ACCURACY, STEPS, run_folder
from tests.support.scripted_trainer import ScriptedReward, ScriptedTrainer, monitored

pytestmark = pytest.mark.usefixtures("tries_follow_at_once")

REPLICA = ReplicaSnapshot("rollout-0", "127.0.0.1:7", "serving", 3, 256, 120, 6412.2, 0.3)


def snapshot(
    metrics: Mapping[str, float], *, version: int | None = 3, awaited: tuple[Waiting, ...] = ()
) -> RunSnapshot:
    replicas = (REPLICA,) if version is not None else ()
    return RunSnapshot("waiting for batch", 7.2, 3, 60, version, replicas, metrics, {}, awaited)


def rendered(
    shown: RunSnapshot, accuracies: list[tuple[int, float]] | None = None, width: int = 80
) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(run_table(shown, accuracies or []))
    return captured.get()


def test_a_hold_and_a_guard_without_a_signal_are_shown_with_their_reasons() -> None:
    watched = (
        WatchedRule("hold when x", "no signal", "no row has x"),
        WatchedRule("hold when y", "watching", "y = 1"),
    )
    shown = replace(snapshot({}), hold_reason="accuracy fell", guards=watched)
    words = " ".join(rendered(shown).split())
    assert "held by a guard: accuracy fell; `sluice resume` ends the hold" in words
    assert "no signal for the guard 'hold when x': no row has x" in words
    assert "hold when y" not in words


METRICS = {name: value for name, value in STEPS[0].items() if value is not None}


@pytest.fixture
def _lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_view, "REFRESH_S", 0.01)
    monkeypatch.setattr(live_view, "LINE_EVERY_S", 0.02)


def test_the_table_shows_all_that_the_run_is_watched_for_within_80_columns() -> None:
    text = rendered(snapshot(METRICS), [(0, 0.25), (2, 0.625)])
    words = " ".join(text.split())
    for part in (
        "step 3/60",
        "waiting for batch (7 s)",
        "policy version 3",
        "reward -0.50",
        "held-out accuracy 0.625",
        "kept/right/wrong 4/1/2",
        "generated÷trained 1.67",
        "staleness 0",
        "tokens/s 12,346",
        "trainer idle 40%",
        "rollout idle 10%",
        "s/step 2.25",
        "rollout-0 serving 3 120/256 6,412 30%",
    ):
        assert part in words
    assert "…" not in text


@pytest.mark.parametrize("width", [40, 60])
def test_no_name_of_a_number_is_cut_in_a_narrow_terminal(width: int) -> None:
    text = rendered(snapshot(METRICS), [(0, 0.25), (2, 0.625)], width)
    for part in ("held-out accuracy", "kept/right/wrong", "generated÷trained", "tokens/s"):
        assert part in text
    assert "12,346" in text
    assert "…" not in text


def test_the_accounting_stands_below_within_80_columns() -> None:
    accounting = {**ACCOUNTS, **ACCOUNTING}
    words = " ".join(rendered(replace(snapshot(METRICS), accounts=accounting)).split())
    assert "tokens 3,000 trained 60.0%, filtered all right 25.0%, pending 15.0%" in words
    assert "trainer 4 s training 50.0%, waiting for batch 37.5%; unaccounted 12.5%" in words
    assert "rollout 10 s generating 90.0%, idle 10.0%; unaccounted 0.0%" in words
    assert "residual" not in rendered(snapshot(METRICS))


def test_before_the_first_step_there_are_dashes_and_no_replicas() -> None:
    text = rendered(snapshot({}, version=None))
    assert "policy version none" in text
    assert "replica" not in text
    assert " ".join(text.split()).count(" -") >= 8


def test_only_long_waits_are_shown() -> None:
    awaited = (Waiting("replica a", "generating", 11.0), Waiting("scorers", "grading", 0.5))
    text = rendered(snapshot(METRICS, awaited=awaited))
    assert "waiting for replica a: generating (11 s)" in text
    assert "scorers" not in text


class Screen(io.StringIO):
    """What was shown, and a way to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)

    async def until(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in self.getvalue():
                self.written.clear()
                await self.written.wait()


def view_on(
    screen: Screen, run_dir: Path, *, terminal: bool = False, detail: Detail = "steps"
) -> LiveView:
    console = RunConsole(file=screen, force_terminal=terminal, width=80, color_system=None)
    config = load_config(None, [f"sluice.run_dir={run_dir}"])
    return LiveView(console, config, ("reward", "rollout-0", "trainer"), detail=detail)


async def test_without_a_terminal_every_step_and_accuracy_is_a_plain_line(tmp_path: Path) -> None:
    screen = Screen()
    view = view_on(screen, tmp_path)
    run_folder(tmp_path)
    async with monitored(ScriptedTrainer()) as monitor:
        await view.follow(monitor)
    text = screen.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == f"starting 3 processes; logs: {tmp_path / 'logs'}"
    assert lines[1].startswith("step 1/2  reward -0.500  kept 4/7")
    assert lines[2] == "validation after step 2: accuracy 0.750"
    assert lines[3].startswith("step 2/2  ")
    assert len(lines) == 4


async def test_a_resumed_run_prints_its_own_validations_alone(tmp_path: Path) -> None:
    screen = Screen()
    view = view_on(screen, run_folder(tmp_path))
    async with monitored(ScriptedTrainer()) as monitor:
        await view.follow(monitor)
        assert "validation" not in screen.getvalue()
        with (tmp_path / METRICS_NAME).open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps({"step": 2, ACCURACY: 0.75}) + "\n")
        view.print_missed_steps()
    assert screen.getvalue().endswith("validation after step 2: accuracy 0.750\n")


class Refusing:
    """A monitor of a run that starts: nothing answers."""

    def __getattr__(self, name: str) -> object:
        raise SluiceError("not yet")


@pytest.mark.usefixtures("_lines_at_once")
async def test_a_log_of_a_run_that_starts_is_never_silent(tmp_path: Path) -> None:
    screen = Screen()
    view = view_on(screen, run_folder(tmp_path))
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(view.follow(Refusing()))  # type: ignore[arg-type]
        await screen.until("0 of 3 up; reward; rollout-0; trainer\n")
        view.log_line("reward", "12:00:01 INFO    reward sluice.rpc.server: listening on [::]:1")
        view.log_line("trainer", "12:00:01 INFO    trainer a.b: loading the model")
        await screen.until("1 of 3 up; rollout-0; trainer: loading the model\n")
        following.cancel()


@pytest.mark.usefixtures("_lines_at_once")
async def test_a_log_of_a_long_step_shows_what_it_waits_for(tmp_path: Path) -> None:
    screen = Screen()
    view = view_on(screen, run_folder(tmp_path))
    trainer = ScriptedTrainer(step=0, total_steps=9, never_ends=True)
    async with monitored(trainer) as monitor, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(view.follow(monitor))
        await screen.until("step 1/9: batch 0 of")
        trainer.phase = trainer_pb2.RUN_PHASE_TRAINING
        await screen.until("step 1/9: training (")
        following.cancel()
    assert view.total_steps == 9


@pytest.mark.usefixtures("_lines_at_once")
async def test_a_log_of_a_run_that_a_guard_holds_says_why_and_what_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "_LINE_EVERY_S_IN_STEPS", 9999.0)
    screen = Screen()
    view = view_on(screen, run_folder(tmp_path))
    trainer = ScriptedTrainer(total_steps=9, never_ends=True)
    async with monitored(trainer) as monitor, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(view.follow(monitor))
        await screen.until("step 2/9")
        trainer.phase, trainer.hold_reason = trainer_pb2.RUN_PHASE_PAUSED, "accuracy fell"
        await screen.until("s); held by a guard: accuracy fell; `sluice resume` ends the hold\n")
        trainer.hold_reason = "reward fell"
        await screen.until("s); held by a guard: reward fell; `sluice resume` ends the hold\n")
        following.cancel()


class Watched:
    """A monitor that notes when a call of it has failed."""

    def __init__(self, monitor: RunMonitor) -> None:
        self.monitor, self.has_failed = monitor, asyncio.Event()

    async def snapshot(self) -> RunSnapshot:
        try:
            return await self.monitor.snapshot()
        except SluiceError:
            self.has_failed.set()
            raise


@pytest.mark.usefixtures("_lines_at_once")
async def test_a_terminal_gets_one_table_that_stays_when_the_services_leave(tmp_path: Path) -> None:
    screen = Screen()
    view = view_on(screen, run_folder(tmp_path), terminal=True)
    server = rpc_server(trainer=ScriptedTrainer(), reward=ScriptedReward())
    await server.start()
    async with RunMonitor(server.address, server.address) as monitor, asyncio.timeout(30):
        watched = Watched(monitor)
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(view.follow(watched))  # type: ignore[arg-type]
            await screen.until("step 2/2")
            await server.stop(0)
            await watched.has_failed.wait()
            following.cancel()
    last_frame = screen.getvalue().rpartition("\x1b[2K")[2]
    assert "step 2/2" in last_frame
    assert "0.750" in last_frame


@pytest.mark.usefixtures("_lines_at_once")
async def test_services_that_are_not_up_yet_are_waited_for(tmp_path: Path) -> None:
    screen = Screen()
    trainer = ScriptedTrainer()
    view = view_on(screen, run_folder(tmp_path))

    class Late:
        """A monitor that fails once."""

        def __init__(self, monitor: object) -> None:
            self.monitor, self.failed = monitor, False

        def __getattr__(self, name: str) -> object:
            if not self.failed:
                self.failed = True
                raise SluiceError("not yet")
            return getattr(self.monitor, name)

    async with monitored(trainer) as monitor:
        await view.follow(Late(monitor))  # type: ignore[arg-type]
    assert "step 2/2" in screen.getvalue()


def test_warnings_and_errors_of_services_are_shown_and_other_lines_only_when_asked(
    tmp_path: Path,
) -> None:
    lines = ["12:00:01 INFO    x: calm", "12:00:02 WARNING x: [b]careful[/b] [/x]"]
    shown = {}
    details: tuple[Detail, ...] = ("quiet", "steps", "logs")
    for detail in details:
        screen = Screen()
        view = view_on(screen, tmp_path, detail=detail)
        for line in lines:
            view.log_line("reward", line)
        shown[detail] = screen.getvalue()
    assert shown["quiet"] == shown["steps"] == f"reward    | {lines[1]}\n"
    assert shown["logs"] == "".join(f"reward    | {line}\n" for line in lines)


def test_accuracies_follow_a_growing_file_and_leave_out_what_cannot_be_read(
    tmp_path: Path,
) -> None:
    file, history = tmp_path / METRICS_NAME, StepHistory(tmp_path)
    assert run_accuracies(history) == []
    line = json.dumps({"step": 10, ACCURACY: 0.5})
    file.write_text(json.dumps({"step": 1}) + "\n" + line[:20])
    assert run_accuracies(history) == []
    file.write_text(line[:-3] + "\n" + line + "\n")  # a full disk cut the first one off
    assert run_accuracies(history) == [(10, 0.5)]
    file.unlink()
    file.mkdir()  # a file system that fails for a moment
    assert run_accuracies(history) == [(10, 0.5)]


def test_the_first_validation_of_a_resumed_run_is_shown_below_a_later_one_of_before(
    tmp_path: Path,
) -> None:
    file = tmp_path / METRICS_NAME
    file.write_text(json.dumps({"step": 12, ACCURACY: 0.3}) + "\n", encoding="utf-8")
    view = view_on(screen := Screen(), tmp_path)
    with file.open("a", encoding="utf-8") as metrics:
        metrics.write(json.dumps({"step": 10, ACCURACY: 0.81}) + "\n")
    view.print_missed_steps()
    assert screen.getvalue().endswith("validation after step 10: accuracy 0.810\n")


def test_a_validation_of_steps_that_are_trained_again_is_not_shown(tmp_path: Path) -> None:
    def write(*rows: Mapping[str, float]) -> None:
        with (tmp_path / METRICS_NAME).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    write({"step": 0, ACCURACY: 0.1}, {"step": 7, STEP: 7.0}, {"step": 7, ACCURACY: 0.8})
    assert run_accuracies(StepHistory(tmp_path)) == [(0, 0.1), (7, 0.8)]
    view = view_on(screen := Screen(), tmp_path)
    write({"step": 6, STEP: 6.0})
    assert run_accuracies(StepHistory(tmp_path)) == [(0, 0.1)]
    view.print_missed_steps()
    write({"step": 7, STEP: 7.0}, {"step": 7, ACCURACY: 0.8})
    view.print_missed_steps()
    lines = [line for line in screen.getvalue().splitlines() if "validation" in line]
    assert lines == ["validation after step 7: accuracy 0.800"]


@pytest.mark.parametrize("terminal", [False, True])
async def test_an_output_that_cannot_be_written_ends_no_run(
    tmp_path: Path, *, terminal: bool
) -> None:
    class FullDisk(Screen):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    view = view_on(screen := FullDisk(), run_folder(tmp_path), terminal=terminal)
    view.log_line("reward", "12:00:00 ERROR reward | something")
    async with monitored(ScriptedTrainer()) as monitor, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(view.follow(monitor))
        await screen.until("step 2")
        following.cancel()
    log = logging.LogRecord("sluice.launch", logging.WARNING, "", 1, "again", None, None)
    ConsoleHandler(RunConsole(file=screen)).emit(log)


def test_lines_for_a_full_disk_are_lost_and_fill_no_memory(tmp_path: Path) -> None:
    class FullDisk(Screen):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    view = view_on(screen := FullDisk(), run_folder(tmp_path))
    view.log_line("reward", "12:00:00 ERROR reward | first")
    screen.is_full = False
    view.log_line("reward", "12:00:01 ERROR reward | second")
    assert "second" in screen.getvalue()
    assert "first" not in screen.getvalue()


@pytest.mark.usefixtures("_lines_at_once")
async def test_a_quiet_view_still_learns_the_steps_of_the_run(tmp_path: Path) -> None:
    view = view_on(Screen(), run_folder(tmp_path), detail="quiet")
    async with monitored(ScriptedTrainer(step=1, total_steps=9)) as monitor, asyncio.timeout(60):
        await view.follow(monitor)
    assert view.total_steps == 9, "an end before the last step must not be called finished"


def test_steps_of_a_run_that_was_over_before_it_could_be_asked_are_printed_at_its_end(
    tmp_path: Path,
) -> None:
    screen = Screen()
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 5, STEP: 5}) + "\n")
    view = view_on(screen, tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as more:
        for step in (6, 7):
            more.write(json.dumps({"step": step, STEP: step, "actor/entropy": 0.5}) + "\n")
    view.print_missed_steps()
    assert screen.getvalue() == "".join(f"step {n}/{n}  entropy 0.500\n" for n in (6, 7))

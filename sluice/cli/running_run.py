"""Find a run by its folder, and connect to it while it runs."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sluice.algorithm.accounting import DATA_EXHAUSTED
from sluice.client.async_client import AsyncClient
from sluice.client.launcher import LaunchedProcess
from sluice.client.run_address import RunLocation, locate_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.concurrency.process import host_of_pids, process_marks
from sluice.config.derived import checkpoint_folder
from sluice.config.loading.loader import load_config
from sluice.config.loading.override_values import format_override_value
from sluice.config.run import RunConfig
from sluice.errors import DeadlineError, HandshakeError, NotReadyError, PeerError
from sluice.launch.servicer import have_all_left, launched_processes
from sluice.report.run_record import read_progress
from sluice.report.summary import read_summary
from sluice.service_contract import CONFIG_NAME, ON_RAY_NAME, TRACKER_NAME


@dataclass(frozen=True, slots=True)
class PastRun:
    """The state of a run whose trainer does not answer, from its folder and its launcher.

    Attributes:
        phase: "finished" if it reached its end; "starting" if its launcher answers; "out of sight"
            if it may run on another machine; otherwise "not running": it was interrupted or has
            failed.
        step: the number of finished steps.
        accuracies: of the first and of the last validation; fewer if there are fewer.
        processes: what the launcher runs.
        is_data_exhausted: whether it ended because its data set had no more prompts.
        total_steps: its configured steps; None if the data determine them.
    """

    phase: Literal["finished", "starting", "out of sight", "not running"]
    step: int
    accuracies: tuple[float, ...]
    processes: tuple[LaunchedProcess, ...] = ()
    is_data_exhausted: bool = False
    total_steps: int | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether it ended in order, before its last step."""
        has_more = self.step < (self.total_steps or 0) and not self.is_data_exhausted
        return self.phase == "finished" and has_more

    def as_text(self, run_dir: Path) -> str:
        """Return a line or two for the console."""
        steps = f"{self.step} step{'' if self.step == 1 else 's'}"
        values = " -> ".join(f"{value:.3f}" for value in self.accuracies)
        accuracy = f"; held-out accuracy {values}" if values else ""
        if self.is_stopped:
            return (
                f"{run_dir}: stopped after step {self.step} of {self.total_steps}{accuracy}\n"
                f"`{resume_command(run_dir)}` starts it again"
            )
        if self.phase == "finished":
            why = " (data exhausted)" if self.is_data_exhausted else ""
            return f"{run_dir}: finished after {steps}{why}{accuracy}"
        if self.phase == "starting":
            restarts = [text for process in self.processes if (text := process.restart_text)]
            return (
                f"{run_dir}: starting; {steps} finished{accuracy}\n"
                f"{', '.join(restarts) or f'{len(self.processes)} processes are starting'}; "
                f"logs: {run_dir / 'logs'}"
            )
        if self.phase == "out of sight":
            return f"{run_dir}: {steps} finished{accuracy}\n{elsewhere_notice(run_dir)}"
        return (
            f"{run_dir}: not running; {steps} finished{accuracy}\n"
            f"logs: {run_dir / 'logs'}; `{resume_command(run_dir)}` starts it again"
        )


def resume_command(run_dir: Path) -> str:
    """Return the command that resumes a run, for a shell; a copied folder's resumes the copy."""
    options = ("--on", "ray") if (run_dir / ON_RAY_NAME).is_file() else ()
    file = run_dir / CONFIG_NAME
    is_copy = file.is_file() and is_copied(run_dir, load_config(file, ()))
    folder_override = (folder_setting(run_dir.absolute()),) if is_copy else ()
    return shlex.join(["sluice", "up", str(file), *folder_override, *options])


def is_copied(run_dir: Path, config: RunConfig) -> bool:
    """Return whether a run's folder was copied or moved since its file was written."""
    named_folder = Path(config.sluice.run_dir)
    is_there = named_folder.is_dir() and named_folder.samefile(run_dir)
    return named_folder.is_absolute() and named_folder != run_dir.absolute() and not is_there


def folder_setting(run_dir: Path) -> str:
    """Return the override for the run's folder; 2026 is a name there."""
    return f"sluice.run_dir={format_override_value(str(run_dir))}"


def newest_step(config: RunConfig) -> int | None:
    """Return the step of the checkpoint from which a run resumes; None without a readable one."""
    try:
        text = (Path(checkpoint_folder(config)) / TRACKER_NAME).read_text(encoding="utf-8")
        return int(text)
    except (OSError, ValueError):
        return None


async def past_run(run_dir: Path) -> PastRun:
    """Read the state of a run whose trainer does not answer."""
    record, processes = read_progress(run_dir), await launched_processes(run_dir)
    values = [point.accuracy for point in record.accuracies()]
    state: Literal["finished", "out of sight", "not running"]
    state = "out of sight" if elsewhere_notice(run_dir) else "not running"
    state = "finished" if record.accounts else state
    is_here = (run_dir / CONFIG_NAME).is_file()
    return PastRun(
        state if processes is None else "starting",
        record.last_step,
        (values[0], values[-1]) if len(values) > 1 else tuple(values),
        processes or (),
        bool(record.accounts.get(DATA_EXHAUSTED)),
        locate_run(run_dir).config.trainer.total_training_steps if is_here else None,
    )


async def is_active(run_dir: Path) -> bool:
    """Return whether a launcher or a service of the run lives, as far as this machine can see."""
    marks = process_marks(run_dir)
    if any(mark.state() in {"alive", "stopped by a signal"} for mark in marks):
        return True
    return await launched_processes(run_dir) is not None


def elsewhere_notice(run_dir: Path) -> str:
    """Return on which other machines a run may be active, and what to do; may be empty."""
    notice = last_seen_notice(run_dir)
    return notice and (
        f"{notice}; use the command there, or, if nothing runs there any more, "
        f"`{resume_command(run_dir)}` starts it again"
    )


def last_seen_notice(run_dir: Path) -> str:
    """Return the other hosts on which a run without a recorded end was seen; may be empty.

    A run that had processes here, too, is ours, such as one on Ray whose launcher has died.
    """
    hosts = {mark.host for mark in process_marks(run_dir)}
    if not hosts or host_of_pids() in hosts or read_summary(run_dir):
        return ""
    names = ", ".join(sorted({host.partition(" ")[0] for host in hosts}))
    return f"the processes of {run_dir} were last seen on {names}"


async def ask_run(run: Path) -> tuple[RunLocation, RunSnapshot]:
    """Return addresses and present state of a running run.

    Args:
        run: the run's folder, or its configuration file.

    Raises:
        ConfigError: no run was started there.
        NotReadyError: its trainer does not answer; the message has the state of the run.
        HandshakeError, AccessDeniedError: the run's services do not accept our credentials.
    """
    location = locate_run(run)
    failure: PeerError | DeadlineError | None = None
    if not await have_all_left(location.run_dir):
        async with RunMonitor.of(location) as monitor:
            try:
                return location, await monitor.snapshot()
            except HandshakeError:
                raise
            except (PeerError, DeadlineError) as error:
                failure = error
    past = await past_run(location.run_dir)
    states = {"starting": "does not answer yet", "out of sight": "does not answer here"}
    state = states.get(past.phase, "is not active")
    raise NotReadyError(f"the run {state}.\n{past.as_text(location.run_dir)}") from failure


@asynccontextmanager
async def connect_client(run: Path, *, name: str = "") -> AsyncIterator[AsyncClient]:
    """Connect a client, under a name, to a running run; raises what `ask_run` raises."""
    await ask_run(run)
    async with AsyncClient.connect(run, name=name) as client:
        yield client

"""Find a run by its folder, and connect to it while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sluice.client.async_client import AsyncClient
from sluice.client.launcher import Launcher
from sluice.client.run_address import RunLocation, locate_run
from sluice.client.run_monitor import RunMonitor, RunSnapshot
from sluice.concurrency.process import process_marks
from sluice.config.derived import checkpoint_folder
from sluice.config.run import RunConfig
from sluice.errors import DeadlineError, HandshakeError, NotReadyError, PeerError
from sluice.launch.servicer import launcher_of
from sluice.report.run_record import read_progress
from sluice.service_contract import TRACKER_NAME


@dataclass(frozen=True, slots=True)
class PastRun:
    """The state of a run whose services do not answer, from its folder.

    Attributes:
        phase: "finished" if it reached its end, otherwise "not running": it was interrupted, has
            failed, or is still starting.
        step: the number of finished steps.
        accuracies: of the first and of the last validation; fewer if there are fewer.
    """

    phase: Literal["finished", "not running"]
    step: int
    accuracies: tuple[float, ...]

    def as_text(self, run_dir: Path) -> str:
        """Return a line or two for the console."""
        steps = f"{self.step} step{'' if self.step == 1 else 's'}"
        values = " -> ".join(f"{value:.3f}" for value in self.accuracies)
        accuracy = f"; held-out accuracy {values}" if values else ""
        if self.phase == "finished":
            return f"{run_dir}: finished after {steps}{accuracy}"
        return (
            f"{run_dir}: not running; {steps} finished{accuracy}\n"
            f"logs: {run_dir / 'logs'}; `sluice up {run_dir / 'config.yaml'}` starts it again"
        )


def newest_checkpoint(config: RunConfig) -> int | None:
    """Return the step of the checkpoint from which a run resumes; None without a readable one."""
    try:
        text = (Path(checkpoint_folder(config)) / TRACKER_NAME).read_text(encoding="utf-8")
        return int(text)
    except (OSError, ValueError):
        return None


def past_run(run_dir: Path) -> PastRun:
    """Read the state of a run from its folder."""
    record = read_progress(run_dir)
    values = [point.accuracy for point in record.accuracies()]
    return PastRun(
        "finished" if record.accounts else "not running",
        int(record.steps[-1]["step"] or 0) if record.steps else 0,
        (values[0], values[-1]) if len(values) > 1 else tuple(values),
    )


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
    monitor = RunMonitor(location.trainer, location.reward, credentials=location.credentials)
    async with monitor:
        try:
            return location, await monitor.snapshot()
        except HandshakeError:
            raise
        except (PeerError, DeadlineError) as error:
            text = past_run(location.run_dir).as_text(location.run_dir)
            raise NotReadyError(f"the run is not active.\n{text}") from error


async def launcher_answers(run_dir: Path) -> bool:
    """Return whether the run's launcher on this machine answers, or is too busy to."""
    try:
        found = launcher_of(run_dir)
        async with Launcher(found.address, found.credentials) as launcher:
            await launcher.services()
    except DeadlineError:
        return True
    except (NotReadyError, PeerError):
        return False
    return True


async def is_active(run_dir: Path) -> bool:
    """Return whether a launcher or a service of the run lives, as far as this machine can see."""
    marks = process_marks(run_dir)
    if any(mark.state() in {"alive", "stopped by a signal"} for mark in marks):
        return True
    return await launcher_answers(run_dir)


@asynccontextmanager
async def connected(run: Path, *, name: str = "") -> AsyncIterator[AsyncClient]:
    """Connect a client, under a name, to a running run; raises what `ask_run` raises."""
    await ask_run(run)
    async with AsyncClient.connect(run, name=name) as client:
        yield client

"""`sluice stop` and `sluice resume`: end a running run with a checkpoint; end its hold."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run, started_runs
from sluice.cli.running_run import ask_run, elsewhere, is_active, newest_step, resume_command
from sluice.cli.terminal import print_json
from sluice.client.run_address import RunLocation, locate_run
from sluice.client.run_monitor import RunMonitor
from sluice.concurrency.waits import deadline
from sluice.errors import ConfigError, DeadlineError, NotReadyError, PeerError
from sluice.launch.servicer import all_left, launched_processes, launcher_of

_POLL_S = 0.2
# About 5 s, since each look tries three times. A trainer that is out of reach for less may be in
# its place, or be started again there.
_ABSENT_POLLS = 6


def stop(
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not save; lose the steps since the last checkpoint.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for the step, the checkpoint, the end.")
    ] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Stop a running run: finish the step, save a checkpoint, end all services.

    --now works on the machine of the run's sluice up; without it the trainer is called, wherever
    it runs. Resume the run with sluice up on its config.yaml. Name the run if several are active.

    \b
    Examples:
      sluice stop runs/quickstart
      sluice stop --now
    """
    location = locate_run(named_run(run, run_option))
    if run is None and run_option is None:
        asyncio.run(_refuse_several(location.run_dir))
    asyncio.run(_end_now(location, timeout) if now else _save_and_end(location, timeout))
    step, resume = newest_step(location.config), resume_command(location.run_dir)
    if as_json:
        print_json({"run": str(location.run_dir), "step": step, "resume": resume})
        return
    where = "its start: no checkpoint was saved" if step is None else f"step {step}"
    typer.echo(f"{location.run_dir}: stopped\nresume from {where}: {resume}")


async def _refuse_several(run_dir: Path) -> None:
    """Raise ConfigError if other runs than that of the folder are active; no argument named it."""
    known = {run_dir, *started_runs(), *started_runs(run_dir.parent)}
    active = [run for run in sorted({run.absolute() for run in known}) if await is_active(run)]
    if len(active) > 1:
        raise ConfigError(
            f"run: {len(active)} are active; name the one to stop: {', '.join(map(str, active))}"
        )


async def _save_and_end(location: RunLocation, timeout_s: float) -> None:
    if await all_left(location.run_dir):
        raise NotReadyError(await _not_answering(location.run_dir))
    async with RunMonitor(
        location.trainer, location.reward, credentials=location.credentials
    ) as monitor:
        try:
            trainer = (await monitor.snapshot()).instance_id
        except (PeerError, DeadlineError) as error:
            raise NotReadyError(await _not_answering(location.run_dir)) from error
        typer.echo("ending after the present step, and saving", err=True)
        async with _until(timeout_s, location.run_dir):
            await monitor.stop("sluice stop", skip_validation=True, save=True)
            await _until_ended(location.run_dir, monitor, trainer)


async def _not_answering(run_dir: Path) -> str:
    if await launched_processes(run_dir) is not None:
        again = shlex.join(["sluice", "stop", str(run_dir), "--now"])
        return (
            f"run: the trainer of {run_dir} does not answer, so nothing can be saved; it may still "
            f"be starting: try again, or end the run with `{again}`"
        )
    return _not_active(run_dir)


def _not_active(run_dir: Path) -> str:
    nowhere = f"{run_dir} is not active; there is nothing to stop"
    return f"run: {elsewhere(run_dir) or nowhere}"


async def _end_now(location: RunLocation, timeout_s: float) -> None:
    """End the launcher of the run, as SIGTERM does: it ends all services in order."""
    run_dir = location.run_dir
    launcher = launcher_of(run_dir)
    processes = await launched_processes(run_dir)
    if processes is None or not launcher.pid:
        raise NotReadyError(_not_active(run_dir))
    # What answers with the secret of the file is the launcher, so its process id is not another's.
    if not processes:
        raise NotReadyError(f"run: the launcher of {run_dir} does not answer; repeat the command")
    os.kill(launcher.pid, signal.SIGTERM)
    async with _until(timeout_s, run_dir):
        await _until_ended(run_dir)


def _until(timeout_s: float, run_dir: Path) -> AbstractAsyncContextManager[None]:
    return deadline(
        timeout_s,
        peer="run",
        phase="waiting for its end",
        remedy=f"it is still ending; see {run_dir / 'logs'}, or repeat with --now",
    )


async def _until_ended(run_dir: Path, monitor: RunMonitor | None = None, trainer: str = "") -> None:
    """Wait until neither the launcher nor the trainer of that instance id, if any, answers.

    Where no launcher can be asked, the trainer is away for `_ABSENT_POLLS` looks in a row.

    Raises:
        NotReadyError: another trainer has taken its place, and knows of no stop.
    """
    num_absent, enough = 0, _ABSENT_POLLS if monitor else 1
    while True:
        is_launched = await launched_processes(run_dir) is not None
        enough = 1 if is_launched else enough
        found = await _answering(monitor, trainer) if monitor else None
        if found not in (None, trainer):
            raise NotReadyError(
                f"run: the trainer of {run_dir} died before it had ended, and was started again; "
                "repeat the command"
            )
        num_absent = 0 if is_launched or found else num_absent + 1
        if num_absent == enough:
            return
        await asyncio.sleep(_POLL_S)


async def _answering(monitor: RunMonitor, trainer: str) -> str | None:
    """Return the instance id of the trainer that answers, if any; a busy one is `trainer`."""
    try:
        return (await monitor.snapshot()).instance_id
    except DeadlineError:
        return trainer
    except PeerError:
        return None


def resume(
    run: RunArgument = None, *, run_option: RunOption = None, as_json: AsJson = False
) -> None:
    """Continue a run that a guard holds (sluice.guards), or its operator.

    sluice status shows why it is held. What the guards saw so far breaks no rule again.

    \b
    Examples:
      sluice resume runs/quickstart
    """
    folder, reason, step = asyncio.run(_resume(named_run(run, run_option)))
    if as_json:
        print_json({"run": str(folder), "step": step, "reason": reason})
        return
    was = f"it was held: {reason}" if reason else "no guard held it"
    typer.echo(f"{folder}: continues after step {step}; {was}")


async def _resume(run: Path) -> tuple[Path, str, int]:
    location, snapshot = await ask_run(run)
    async with RunMonitor(
        location.trainer, location.reward, credentials=location.credentials
    ) as monitor:
        return location.run_dir, snapshot.hold_reason, await monitor.resume()

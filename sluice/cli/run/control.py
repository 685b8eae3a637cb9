"""`sluice stop`, `sluice resume` and `sluice scale`: control a running run."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run, started_runs
from sluice.cli.running_run import ask_run, elsewhere_notice, is_active, newest_step, resume_command
from sluice.cli.terminal import print_json
from sluice.client.launcher import Launcher, Scaling
from sluice.client.run_address import RunLocation, locate_run
from sluice.client.run_monitor import RunMonitor
from sluice.concurrency.waits import deadline
from sluice.errors import ConfigError, DeadlineError, NotReadyError, PeerError
from sluice.launch.service_spec import replica_number
from sluice.launch.servicer import check_number, have_all_left, launched_processes, launcher_of

_POLL_S = 0.2
# About 5 s, since each look tries three times. A trainer that is out of reach for less may be in
# its place, or be started again there.
_ABSENT_POLLS = 6
_LOOK_S = 0.5


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
    start = "its start: no checkpoint was saved" if step is None else f"step {step}"
    typer.echo(f"{location.run_dir}: stopped\nresume from {start}: {resume}")


async def _refuse_several(run_dir: Path) -> None:
    """Raise ConfigError if other runs than that of the folder are active; no argument named it."""
    candidates = {run_dir, *started_runs(), *started_runs(run_dir.parent)}
    active = [run for run in sorted({run.absolute() for run in candidates}) if await is_active(run)]
    if len(active) > 1:
        raise ConfigError(
            f"run: {len(active)} are active; name the one to stop: {', '.join(map(str, active))}"
        )


async def _save_and_end(location: RunLocation, timeout_s: float) -> None:
    if await have_all_left(location.run_dir):
        raise NotReadyError(await _not_answering_text(location.run_dir))
    async with RunMonitor.of(location) as monitor:
        try:
            trainer = (await monitor.snapshot()).instance_id
        except (PeerError, DeadlineError) as error:
            raise NotReadyError(await _not_answering_text(location.run_dir)) from error
        typer.echo("ending after the present step, and saving", err=True)
        async with _ending_deadline(timeout_s, location.run_dir):
            await monitor.stop("sluice stop", skip_validation=True, save=True)
            await _wait_until_ended(location.run_dir, monitor, trainer)


async def _not_answering_text(run_dir: Path) -> str:
    if await launched_processes(run_dir) is not None:
        again = shlex.join(["sluice", "stop", str(run_dir), "--now"])
        return (
            f"run: the trainer of {run_dir} does not answer, so nothing can be saved; it may still "
            f"be starting: try again, or end the run with `{again}`"
        )
    return _not_active_text(run_dir)


def _not_active_text(run_dir: Path) -> str:
    nowhere = f"{run_dir} is not active; there is nothing to stop"
    return f"run: {elsewhere_notice(run_dir) or nowhere}"


async def _end_now(location: RunLocation, timeout_s: float) -> None:
    """End the launcher of the run, as SIGTERM does: it ends all services in order."""
    run_dir = location.run_dir
    launcher = launcher_of(run_dir)
    processes = await launched_processes(run_dir)
    if processes is None or not launcher.pid:
        raise NotReadyError(_not_active_text(run_dir))
    # What answers with the secret of the file is the launcher, so its process id is not another's.
    if not processes:
        raise NotReadyError(f"run: the launcher of {run_dir} does not answer; repeat the command")
    os.kill(launcher.pid, signal.SIGTERM)
    async with _ending_deadline(timeout_s, run_dir):
        await _wait_until_ended(run_dir)


def _ending_deadline(timeout_s: float, run_dir: Path) -> AbstractAsyncContextManager[None]:
    return deadline(
        timeout_s,
        peer="run",
        phase="waiting for its end",
        remedy=f"it is still ending; see {run_dir / 'logs'}, or repeat with --now",
    )


async def _wait_until_ended(
    run_dir: Path, monitor: RunMonitor | None = None, trainer: str = ""
) -> None:
    """Wait until neither the launcher nor the trainer of that instance id, if any, answers.

    Where no launcher can be asked, the trainer is away for `_ABSENT_POLLS` looks in a row.

    Raises:
        NotReadyError: another trainer has taken its place, and knows of no stop.
    """
    num_absent, enough = 0, _ABSENT_POLLS if monitor else 1
    while True:
        is_launched = await launched_processes(run_dir) is not None
        enough = 1 if is_launched else enough
        answering = await _answering_instance(monitor, trainer) if monitor else None
        if answering not in (None, trainer):
            raise NotReadyError(
                f"run: the trainer of {run_dir} died before it had ended, and was started again; "
                "repeat the command"
            )
        num_absent = 0 if is_launched or answering else num_absent + 1
        if num_absent == enough:
            return
        await asyncio.sleep(_POLL_S)


async def _answering_instance(monitor: RunMonitor, trainer: str) -> str | None:
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
    async with RunMonitor.of(location) as monitor:
        return location.run_dir, snapshot.hold_reason, await monitor.resume()


def scale(
    service: Annotated[Literal["rollout"], typer.Argument(help="What to scale.")],
    count: Annotated[int, typer.Argument(help="The new number of replicas, 1 or more.")],
    run: RunArgument = None,
    *,
    run_option: RunOption = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait until it is done.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Start or drain replicas of a run of `sluice up`, and wait until it is done.

    New replicas serve as soon as they hold the current weights. The highest numbers leave first;
    other replicas continue their samples. 0 is refused: nothing would sample.

    \b
    Example:
      sluice scale rollout 4 runs/quickstart
    """
    check_number(count)
    console = Console(highlight=False, quiet=as_json)
    location = locate_run(named_run(run, run_option))
    change = asyncio.run(scale_rollout(count, location, timeout, console))
    if as_json:
        print_json({"replicas": count, "started": change.started, "drained": change.drained})


async def scale_rollout(
    count: int, location: RunLocation, timeout_s: float, console: Console
) -> Scaling:
    """Set the number of replicas of a run's launcher, wait until they serve, return the change.

    Raises:
        NotReadyError: no launcher answers.
        DeadlineError: it takes longer than `timeout_s` seconds.
    """
    run_dir = location.run_dir
    launcher_address = launcher_of(run_dir)
    async with (
        Launcher(launcher_address.address, launcher_address.credentials) as launcher,
        RunMonitor.of(location) as monitor,
    ):
        try:
            change = await launcher.set_replicas(count)
            if change.started or change.drained:
                console.print(_change_text(change))
            elif not await _unfinished_changes(launcher, monitor):
                console.print(f"{count} replicas already; nothing to do")
                return change
            with console.status("waiting") as status:
                async with deadline(
                    timeout_s,
                    peer="rollout fleet",
                    phase=f"scaling to {count} replicas",
                    remedy=f"see the logs in {run_dir / 'logs'}; the change continues",
                ):
                    while unfinished := await _unfinished_changes(launcher, monitor):
                        status.update(f"waiting for {', '.join(unfinished)}")
                        await asyncio.sleep(_LOOK_S)
        except PeerError as error:
            no_answer = f"the launcher of {run_dir} does not answer; it has ended"
            raise NotReadyError(f"run: {elsewhere_notice(run_dir) or no_answer}") from error
        console.print(f"done: {count} replicas")
    return change


def _change_text(change: Scaling) -> str:
    parts = [("starting", change.started), ("draining", change.drained)]
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in parts if names)


async def _unfinished_changes(launcher: Launcher, monitor: RunMonitor) -> list[str]:
    """Return the unfinished changes, also those of other commands.

    That is draining replicas that have not left, and other replicas that do not serve yet.
    """
    try:
        processes = await launcher.services()
    except DeadlineError:  # a launcher on a busy machine may answer late
        return ["the launcher to answer"]
    replicas = [process for process in processes if replica_number(process.name) is not None]
    serving = await _serving_names(monitor)
    late = [f"{process.name} to leave" for process in replicas if process.is_draining]
    return late + [
        f"{process.name} to serve"
        for process in replicas
        if not process.is_draining and process.name not in serving
    ]


async def _serving_names(monitor: RunMonitor) -> set[str]:
    """Return the names of replicas that serve; none while the trainer does not answer."""
    try:
        replicas = (await monitor.snapshot()).replicas
    except (PeerError, DeadlineError):
        return set()
    return {replica.name for replica in replicas if replica.state in ("serving", "held")}

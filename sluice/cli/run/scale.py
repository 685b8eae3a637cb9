"""`sluice scale`: change the number of replicas of a running run."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import typer
from rich.console import Console

from sluice.cli.arguments import AsJson, RunArgument, RunOption, named_run
from sluice.cli.running_run import elsewhere
from sluice.cli.terminal import print_json
from sluice.client.launcher import Launcher, Scaling
from sluice.client.run_address import RunLocation, locate_run
from sluice.client.run_monitor import RunMonitor
from sluice.concurrency.waits import deadline
from sluice.errors import DeadlineError, NotReadyError, PeerError
from sluice.launch.replica_scale import check_number
from sluice.launch.service_spec import replica_number
from sluice.launch.servicer import launcher_of

_POLL_S = 0.5


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
    found = launcher_of(run_dir)
    async with (
        Launcher(found.address, found.credentials) as launcher,
        RunMonitor(location.trainer, location.reward, credentials=location.credentials) as monitor,
    ):
        try:
            change = await launcher.set_replicas(count)
            if change.started or change.drained:
                console.print(_as_text(change))
            elif not await _outstanding(launcher, monitor):
                console.print(f"{count} replicas already; nothing to do")
                return change
            with console.status("waiting") as status:
                async with deadline(
                    timeout_s,
                    peer="rollout fleet",
                    phase=f"scaling to {count} replicas",
                    remedy=f"see the logs in {run_dir / 'logs'}; the change continues",
                ):
                    while left := await _outstanding(launcher, monitor):
                        status.update(f"waiting for {', '.join(left)}")
                        await asyncio.sleep(_POLL_S)
        except PeerError as error:
            ended = f"the launcher of {run_dir} does not answer; it has ended"
            raise NotReadyError(f"run: {elsewhere(run_dir) or ended}") from error
        console.print(f"done: {count} replicas")
    return change


def _as_text(change: Scaling) -> str:
    parts = [("starting", change.started), ("draining", change.drained)]
    return "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)


async def _outstanding(launcher: Launcher, monitor: RunMonitor) -> list[str]:
    """Return the unfinished changes, also those of other commands.

    That is draining replicas that have not left, and other replicas that do not serve yet.
    """
    try:
        processes = await launcher.services()
    except DeadlineError:  # a launcher on a busy machine may answer late
        return ["the launcher to answer"]
    replicas = [each for each in processes if replica_number(each.name) is not None]
    serving = await _serving(monitor)
    late = [f"{each.name} to leave" for each in replicas if each.is_draining]
    return late + [
        f"{each.name} to serve"
        for each in replicas
        if not each.is_draining and each.name not in serving
    ]


async def _serving(monitor: RunMonitor) -> set[str]:
    """Return the names of replicas that serve; none while the trainer does not answer."""
    try:
        replicas = (await monitor.snapshot()).replicas
    except (PeerError, DeadlineError):
        return set()
    return {replica.name for replica in replicas if replica.state in ("serving", "held")}

"""`sluice up`: a whole run, on this machine or on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from sluice.cli.arguments import ConfigArguments, split_arguments
from sluice.cli.terminal import print_line, printable
from sluice.cli.watch.live_view import LiveView
from sluice.client.launcher import Launcher
from sluice.client.run_address import CONFIG_NAME
from sluice.client.run_monitor import RunMonitor
from sluice.config.addresses import peer_address
from sluice.config.check import launch_notes
from sluice.config.loading.loader import load_config, read_settings
from sluice.config.loading.yaml_text import write_config
from sluice.config.rules.checks import check_config, fixed_ports
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, SluiceError
from sluice.launch.cluster.placement import parse_demands
from sluice.launch.cluster.ray_run import RayOptions, ray_plan
from sluice.launch.network_layout import launcher_grace_s
from sluice.launch.plan import LaunchPlan, check_reward_function, local_plan, with_absolute_paths
from sluice.launch.processes.supervisor import EXIT_INTERRUPTED, RunEnd, Supervisor
from sluice.launch.replica_scale import ReplicaScale
from sluice.launch.service_spec import with_ports
from sluice.launch.servicer import launch_service, launcher_of
from sluice.report.run_record import ACCOUNTS_NAME
from sluice.rpc.credentials import service_credentials
from sluice.rpc.status import expect_no_tls
from sluice.telemetry.metrics_page import forget_target, forget_targets

logger = logging.getLogger(__name__)

# A launcher that was killed may have left its address, where nothing answers.
_LAUNCHER_ANSWERS_S = 3.0


ShowLogs = Annotated[bool, typer.Option("--logs", help="Show all log lines of the services.")]
On = Annotated[
    Literal["local", "ray"],
    typer.Option("--on", help="Start processes here, or on a Ray cluster."),
]
RayAddress = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT", help="Head of the Ray cluster; auto: the one of this machine."
    ),
]
Demanded = Annotated[
    list[str] | None,
    typer.Option(
        "--resources",
        metavar="SERVICE=NAME:AMOUNT",
        help="Resources of Ray that each process of a service needs besides threads and devices; "
        "repeatable.",
        show_default=False,
    ),
]
CapacityTimeout = Annotated[
    float, typer.Option(min=1.0, help="Seconds to wait until the Ray cluster has the resources.")
]
OldCapacityTimeout = Annotated[
    float | None,
    typer.Option("--room-timeout", min=1.0, hidden=True, help="Old name of --capacity-timeout."),
]


def up(
    arguments: ConfigArguments = None,
    *,
    logs: ShowLogs = False,
    on: On = "local",
    ray_address: RayAddress = "auto",
    resources: Demanded = None,
    capacity_timeout: CapacityTimeout = 300.0,
    old_capacity_timeout: OldCapacityTimeout = None,
) -> None:
    """Start all services of a run, here or on the nodes of a Ray cluster, and follow it to its end.

    Ctrl-C ends everything in order. Exit codes: 0 the run reached its end, 1 something
    failed, 130 interrupted.

    \b
    Examples:
      sluice up run.yaml
      sluice up run.yaml data.train_batch_size=32 --logs
      sluice up run.yaml --on ray --resources rollout=NPU:8
    """
    patience_s = old_capacity_timeout or capacity_timeout
    ray = RayOptions(ray_address, parse_demands(resources or ()), patience_s)
    if on != "ray" and resources:
        raise ConfigError(
            "--resources: only a Ray cluster hands them out; add --on ray, or leave --resources out"
        )
    _run(arguments, logs=logs, ray=ray if on == "ray" else None)


def train(arguments: ConfigArguments = None, *, logs: ShowLogs = False) -> None:
    """Train on this machine: another name of `sluice up`.

    \b
    Example:
      sluice train run.yaml trainer.total_training_steps=100
    """
    _run(arguments, logs=logs)


def _run(arguments: list[str] | None, *, logs: bool, ray: RayOptions | None = None) -> None:
    file, overrides = split_arguments(arguments)
    console, config = Console(), load_config(file, overrides)
    for note in launch_notes(config, read_settings(file, overrides)):
        print_line(console, f"notice: {note.text}")
    end = start_run(config, console, logs=logs, ray=ray)
    raise typer.Exit(end.exit_code)


def start_run(
    config: RunConfig, console: Console, *, logs: bool, ray: RayOptions | None = None
) -> RunEnd:
    """Check, start and follow a run; every process has ended when this returns.

    Args:
        config: the run's configuration.
        console: where to show the run.
        logs: show every log line, not only warnings and errors.
        ray: the cluster to start it on; ``None``: this machine.

    Raises:
        ConfigError: the configuration contradicts itself or the cluster, or another run uses the
            folder; nothing was started.
    """
    check_config(config)
    if config.trainer.nnodes > 1 and ray is None:
        raise ConfigError(
            f"trainer.nnodes = {config.trainer.nnodes}: `sluice up` starts a run on one machine; "
            "set it to 1, start it with --on ray on a Ray cluster, or start "
            "`python -m services.trainer` with torchrun on each machine"
        )
    check_reward_function(config.reward)
    run_dir = Path(config.sluice.run_dir).absolute()
    _show_launcher_messages(console)
    end = asyncio.run(_start(config, run_dir / CONFIG_NAME, console, logs=logs, ray=ray))
    for failure in end.failures:
        console.print(Text("failed: ", style="red") + Text(printable(failure)), soft_wrap=True)
    if end.failures:
        console.print(f"all log lines: {run_dir / 'logs'}", soft_wrap=True)
    if end.exit_code == EXIT_INTERRUPTED:
        console.print("interrupted; everything has ended")
    return end


async def _start(
    config: RunConfig,
    config_file: Path,
    console: Console,
    *,
    logs: bool,
    ray: RayOptions | None,
) -> RunEnd:
    await _refuse_beside_another(config_file.parent)
    # A run with this file has reached its end.
    (config_file.parent / ACCOUNTS_NAME).unlink(missing_ok=True)
    config = with_absolute_paths(config)
    if ray is None:
        config = with_ports(config)
        write_config(config, config_file)
        return await _supervise(local_plan(config, config_file), console, logs=logs)
    console.print("placing the run on the Ray cluster")
    async with ray_plan(config, config_file, ray) as plan:
        return await _supervise(plan, console, logs=logs)


async def _refuse_beside_another(run_dir: Path) -> None:
    """Raise ConfigError if a launcher on this machine already runs in the folder."""
    try:
        found = launcher_of(run_dir)
        async with (
            asyncio.timeout(_LAUNCHER_ANSWERS_S),
            Launcher(found.address, found.credentials) as launcher,
        ):
            await launcher.services()
    except (SluiceError, TimeoutError):
        return
    raise ConfigError(
        f"sluice.run_dir = {run_dir}: another run is active in this folder; end it first, or "
        "give another folder"
    )


async def _save_and_end(monitor: RunMonitor) -> bool:
    """Ask the trainer to save and to end; return false if it does not answer."""
    try:
        await monitor.stop("interrupted", skip_validation=True)
    except SluiceError as error:
        logger.warning("nothing is saved: %s", error)
        return False
    return True


def _show_launcher_messages(console: Console) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False)
    logger = logging.getLogger("sluice.launch")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)


async def _supervise(plan: LaunchPlan, console: Console, *, logs: bool) -> RunEnd:
    service = plan.config.sluice
    run_dir = Path(service.run_dir)
    view = LiveView(console, run_dir, tuple(spec.name for spec in plan.specs), show_logs=logs)
    supervisor = Supervisor(
        plan.specs,
        run_dir / "logs",
        view.log_line,
        launcher_grace_s(service.shutdown_grace_s),
        plan.host,
        on_left=lambda name: forget_target(run_dir, name),
        save=(lambda: _save_and_end(monitor)) if plan.config.trainer.save_freq > 0 else None,
    )
    trainer = peer_address(service.trainer.endpoint, "sluice.trainer.endpoint")
    reward = peer_address(service.reward.endpoint, "sluice.reward.endpoint")
    credentials = service_credentials(service.security, service.trainer.endpoint)
    if not credentials.is_encrypted:
        expect_no_tls()
    monitor = RunMonitor(trainer, reward, credentials=credentials)
    scale = ReplicaScale(
        supervisor, plan.make_replica, has_fixed_port=bool(fixed_ports(service.rollout))
    )
    control = launch_service(run_dir, scale)
    forget_targets(run_dir)
    async with monitor, control, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(view.follow(monitor), name="live-view")
        end = await supervisor.run()
        following.cancel()
    return end

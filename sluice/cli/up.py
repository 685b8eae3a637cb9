"""`sluice up`: a whole run on this machine."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from sluice.cli.live_view import LiveView
from sluice.cli.run_location import CONFIG_NAME
from sluice.cli.terminal_text import printable
from sluice.client.run_monitor import RunMonitor
from sluice.config.checks import check_config, fixed_ports
from sluice.config.dump import write_config
from sluice.config.endpoints import peer_address
from sluice.config.explain import launch_notices
from sluice.config.loader import load_config
from sluice.config.remarks import remarks
from sluice.config.run import RunConfig
from sluice.config.security import with_absolute_files
from sluice.errors import ConfigError
from sluice.launch.replica_scale import ReplicaScale
from sluice.launch.reward_function_check import check_reward_function
from sluice.launch.service_spec import local_services, rollout_service, with_ports
from sluice.launch.servicer import launch_service
from sluice.launch.supervisor import EXIT_INTERRUPTED, RunEnd, Supervisor
from sluice.report.run_record import ACCOUNTS_NAME
from sluice.rpc.credentials import service_credentials
from sluice.rpc.handshake_remedy import expect_no_tls

# A service spends its own grace period draining; what it needs to leave comes on top.
_EXIT_MARGIN_S = 5.0

ConfigAndOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE]...",
        help="A YAML file, and keys to override in verl's spelling.",
        show_default=False,
    ),
]
ShowLogs = Annotated[bool, typer.Option("--logs", help="Show all log lines of the services.")]


def up(arguments: ConfigAndOverrides = None, *, logs: ShowLogs = False) -> None:
    """Start all services of a run as local processes, and follow it to its end.

    Ctrl-C once ends everything in order. Exit codes: 0 the run reached its end, 1 something
    failed, 130 interrupted.

    \b
    Examples:
      sluice up run.yaml
      sluice up run.yaml data.train_batch_size=32 --logs
    """
    _run(arguments, logs=logs)


def train(arguments: ConfigAndOverrides = None, *, logs: ShowLogs = False) -> None:
    """Train: the same as `sluice up`, for those who look for this name.

    \b
    Example:
      sluice train run.yaml trainer.total_training_steps=100
    """
    _run(arguments, logs=logs)


def _run(arguments: list[str] | None, *, logs: bool) -> None:
    file, overrides = split_arguments(arguments or [])
    console, config = Console(), load_config(file, overrides)
    for line in (*(one.text for one in launch_notices(file, overrides)), *remarks(config)):
        console.print(f"notice: {line}", soft_wrap=True, markup=False, highlight=False)
    end = start_run(config, console, logs=logs)
    raise typer.Exit(end.exit_code)


def split_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The configuration file, if the first argument is one, and the overrides."""
    if not arguments:
        return None, []
    first = Path(arguments[0])
    if first.is_file() or not ("=" in arguments[0] or arguments[0].startswith(("+", "~"))):
        return first, arguments[1:]
    return None, arguments


def start_run(config: RunConfig, console: Console, *, logs: bool) -> RunEnd:
    """Checks, starts and follows a run; every process has ended when this returns.

    Raises:
        ConfigError: the configuration does not hold together; nothing was started.
    """
    check_config(config)
    if config.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes = {config.trainer.nnodes}: `sluice up` starts a run on one machine; "
            "set it to 1, or start `python -m services.trainer` with torchrun on each machine"
        )
    check_reward_function(config.reward)
    config = with_ports(_with_absolute_paths(config))
    config_file = Path(config.sluice.run_dir) / CONFIG_NAME
    write_config(config, config_file)
    # It says that the run has ended, which from now on is not so.
    config_file.with_name(ACCOUNTS_NAME).unlink(missing_ok=True)
    _show_launcher_messages(console)
    end = asyncio.run(_supervise(config, config_file, console, logs=logs))
    for failure in end.failures:
        console.print(Text("failed: ", style="red") + Text(printable(failure)), soft_wrap=True)
    if end.failures:
        console.print(f"all log lines: {config_file.parent / 'logs'}", soft_wrap=True)
    if end.exit_code == EXIT_INTERRUPTED:
        console.print("interrupted; everything has ended")
    return end


def _show_launcher_messages(console: Console) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False)
    logger = logging.getLogger("sluice.launch")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)


async def _supervise(
    config: RunConfig, config_file: Path, console: Console, *, logs: bool
) -> RunEnd:
    specs = local_services(config, config_file)
    run_dir = config_file.parent
    view = LiveView(console, run_dir, tuple(spec.name for spec in specs), show_logs=logs)
    supervisor = Supervisor(
        specs, run_dir / "logs", view.log_line, config.sluice.shutdown_grace_s + _EXIT_MARGIN_S
    )
    trainer = peer_address(config.sluice.trainer.endpoint, "sluice.trainer.endpoint")
    reward = peer_address(config.sluice.reward.endpoint, "sluice.reward.endpoint")
    credentials = service_credentials(config.sluice.security, config.sluice.trainer.endpoint)
    if not credentials.is_encrypted:
        expect_no_tls()
    monitor = RunMonitor(trainer, reward, credentials=credentials)
    scale = ReplicaScale(
        supervisor,
        lambda number: rollout_service(config, config_file, number),
        has_fixed_port=bool(fixed_ports(config.sluice.rollout)),
    )
    control = launch_service(run_dir, supervisor, scale)
    async with monitor, control, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(view.follow(monitor), name="live-view")
        end = await supervisor.run()
        following.cancel()
    return end


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """The run folder and credentials, absolute, since commands may run in another directory."""
    run_dir = str(Path(config.sluice.run_dir).absolute())
    security = with_absolute_files(config.sluice.security)
    return msgspec.structs.replace(
        config, sluice=msgspec.structs.replace(config.sluice, run_dir=run_dir, security=security)
    )

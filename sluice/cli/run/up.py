"""`sluice up`: a whole run, on this machine or on the nodes of a Ray cluster."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console

from sluice.cli.arguments import (
    AsJson,
    ConfigArguments,
    TrustScript,
    script_settings,
    split_arguments,
)
from sluice.cli.run.checked import (
    check_run,
    refuse_beside_another,
    refuse_other_ledger,
    refuse_unwritable,
)
from sluice.cli.run.ending import end_run
from sluice.cli.terminal import ConsoleHandler, RunConsole, print_line
from sluice.cli.watch.live_view import Detail, LiveView
from sluice.client.run_monitor import RunMonitor
from sluice.config.addresses import peer_address
from sluice.config.loading.yaml_text import write_config
from sluice.config.rules.checks import fixed_ports
from sluice.config.run import RunConfig
from sluice.errors import ConfigError, SluiceError
from sluice.launch.cluster.placement import parse_demands
from sluice.launch.cluster.ray_run import RayOptions, ray_plan
from sluice.launch.network_layout import launcher_grace_s
from sluice.launch.plan import LaunchPlan, local_plan, with_absolute_paths
from sluice.launch.processes.child import ThisMachine
from sluice.launch.processes.supervisor import RunEnd, Supervisor
from sluice.launch.service_spec import with_ports
from sluice.launch.servicer import ReplicaScale, launch_service
from sluice.report.summary import remove_end_files
from sluice.rpc.credentials import service_credentials
from sluice.rpc.retries import Retries, RetryPolicy, is_absence
from sluice.rpc.status import expect_no_tls
from sluice.service_contract import CONFIG_NAME, ON_RAY_NAME
from sluice.telemetry.metrics import forget_target, forget_targets

logger = logging.getLogger(__name__)

# A trainer may begin to listen just now, or be busy.
_SAVE = RetryPolicy(patience_s=5.0, max_s=0.5)

ENDPOINTS_NAME = "endpoints.json"
"""In the run's folder while it is active: where clients in any language reach its services."""

ShowLogs = Annotated[
    bool, typer.Option("--logs", "--verbose", "-v", help="Show all log lines of the services.")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show warnings, errors and the end of the run only.")
]
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


def up(  # noqa: PLR0913 - options of the command
    arguments: ConfigArguments = None,
    *,
    logs: ShowLogs = False,
    quiet: Quiet = False,
    on: On = "local",
    ray_address: RayAddress = "auto",
    resources: Demanded = None,
    capacity_timeout: CapacityTimeout = 300.0,
    trust_script: TrustScript = False,
    as_json: AsJson = False,
) -> None:
    """Start all services of a run, here or on the nodes of a Ray cluster, and follow it to its end.

    Ctrl-C, or the end of the terminal, ends the run after its step, with a checkpoint if
    trainer.save_freq > 0; a second Ctrl-C ends it at once. Exit codes: 0 the run
    reached its end, 1 something failed, 130 interrupted.

    \b
    Examples:
      sluice up run.yaml
      sluice up run.yaml data.train_batch_size=32 --logs
      sluice up run.yaml --on ray --resources rollout=NPU:8
    """
    ray = ray_options(on, ray_address, resources, capacity_timeout)
    display = display_from_options(logs=logs, quiet=quiet, as_json=as_json)
    configured = split_arguments(arguments, trust_script=trust_script)
    run_configured(configured, display, ray)


def ray_options(
    on: str, address: str, resources: list[str] | None, patience_s: float
) -> RayOptions | None:
    """Return how a run uses a Ray cluster; ``None``: it starts on this machine."""
    extra = parse_demands(resources or ())
    if on == "ray":
        return RayOptions(address, extra, patience_s)
    if resources:
        raise ConfigError(
            "--resources: only a Ray cluster hands them out; add --on ray, or leave --resources out"
        )
    return None


def train(  # noqa: PLR0913 - options of the command
    arguments: ConfigArguments = None,
    *,
    script: Annotated[
        Path | None,
        typer.Option(
            help="A launch script of verl. It runs under bash, with python, ray and all other "
            "programs recorded; the arguments of its launch configure the run.",
        ),
    ] = None,
    logs: ShowLogs = False,
    quiet: Quiet = False,
    on: On = "local",
    ray_address: RayAddress = "auto",
    resources: Demanded = None,
    capacity_timeout: CapacityTimeout = 300.0,
    trust_script: TrustScript = False,
    as_json: AsJson = False,
) -> None:
    """Train here or on a Ray cluster, as sluice up; also from a launch script of verl.

    \b
    Examples:
      sluice train run.yaml trainer.total_training_steps=100
      sluice train --script run_qwen2-7b.sh actor_rollout_ref.rollout.name=torch
      sluice train --script run_qwen3-32b.sh --on ray
    """
    ray = ray_options(on, ray_address, resources, capacity_timeout)
    if script is None:
        configured = split_arguments(arguments, trust_script=trust_script)
    else:
        configured = script_settings(script, arguments or [], trusted=trust_script)
    display = display_from_options(logs=logs, quiet=quiet, as_json=as_json)
    run_configured(configured, display, ray)


@dataclass(frozen=True, slots=True)
class Display:
    """Where and how to show a run; `as_json` prints its summary to standard output at the end."""

    console: Console
    detail: Detail = "steps"
    as_json: bool = False


def display_from_options(*, logs: bool, quiet: bool, as_json: bool) -> Display:
    """Return how to show a run, from the options; JSON moves all else to standard error.

    Raises:
        ConfigError: they contradict each other.
    """
    if logs and quiet:
        raise ConfigError("--verbose and --quiet contradict each other; leave one of them out")
    detail: Detail = "logs" if logs else "quiet" if quiet else "steps"
    return Display(RunConsole(stderr=as_json), detail, as_json)


def run_configured(
    configured: tuple[Path | None, list[str]],
    display: Display,
    ray: RayOptions | None = None,
) -> NoReturn:
    """Check a run, start it and follow it to its end; exit with its code.

    Args:
        configured: YAML file, or a file of overrides, and overrides.
        display: where and how to show it.
        ray: the cluster to start it on; ``None``: this machine.

    Raises:
        ConfigError: of `check_run` and `start_run`.
    """
    file, overrides = configured
    run = check_run(file, overrides, display.console, is_local=ray is None)
    if ray is not None:  # the devices are known once the cluster is
        ray = replace(ray, keys=run.settings)
    end = start_run(run.config, display, ray=ray)
    raise typer.Exit(end.exit_code)


def start_run(
    config: RunConfig,
    display: Display,
    *,
    ray: RayOptions | None = None,
    began_s: float | None = None,
) -> RunEnd:
    """Start and follow a run that was checked; every process has ended when this returns.

    Args:
        config: of `check_run`.
        display: where and how to show it.
        ray: the cluster to start it on; ``None``: this machine.
        began_s: start of the whole command, on the monotonic clock; ``None``: now.

    Raises:
        ConfigError: the configuration contradicts itself or the cluster, or another run uses the
            folder; nothing was started.
    """
    if config.trainer.nnodes > 1 and ray is None:
        raise ConfigError(
            f"trainer.nnodes = {config.trainer.nnodes}: `sluice up` starts a run on one machine; "
            "set it to 1, start it with --on ray on a Ray cluster, or start "
            "`python -m services.trainer` with torchrun on each machine"
        )
    run_dir = Path(config.sluice.run_dir).absolute()
    show_launcher_messages(display.console)
    started_s = time.monotonic()
    end, view = asyncio.run(start_processes(config, run_dir / CONFIG_NAME, display, ray))
    ended_s = time.monotonic()
    end_run(
        config,
        end,
        display.console,
        total_steps=view.total_steps,
        seconds_total=ended_s - (began_s or started_s),
        seconds_services=ended_s - started_s,
        shown_lines=view.shown,
        as_json=display.as_json,
    )
    return end


async def start_processes(
    config: RunConfig,
    config_file: Path,
    display: Display,
    ray: RayOptions | None = None,
    view: type[LiveView] = LiveView,
) -> tuple[RunEnd, LiveView]:
    """Start and follow the processes of a configuration until all have ended.

    Args:
        config: of the run.
        config_file: where to write it, in the run's folder.
        display: where and how to show the run.
        ray: the cluster to start it on; ``None``: this machine.
        view: what shows it.

    Returns:
        how the processes ended, and the view that showed them.

    Raises:
        ConfigError: see `start_run`.
    """
    await refuse_beside_another(config_file.parent)
    refuse_unwritable(config)
    refuse_other_ledger(config)
    remove_end_files(config_file.parent)
    config = with_absolute_paths(config)
    if ray is None:
        config = with_ports(config)
        write_config(config, config_file)
        config_file.with_name(ON_RAY_NAME).unlink(missing_ok=True)
        return await _supervise(local_plan(config, config_file), display, view)
    print_line(display.console, "placing the run on the Ray cluster")
    async with ray_plan(config, config_file, ray) as plan:
        config_file.with_name(ON_RAY_NAME).touch()
        return await _supervise(plan, display, view)


async def _save_and_end(monitor: RunMonitor) -> bool:
    """Ask the trainer to save and to end; return false if it does not answer."""
    ask = partial(monitor.stop, "interrupted", skip_validation=True, save=True)
    try:
        await Retries(_SAVE, retries_on=is_absence).call(ask)
    except SluiceError as error:
        logger.warning("nothing is saved: %s", error)
        return False
    return True


def show_launcher_messages(console: Console) -> None:
    """Print what the launcher logs."""
    handler = ConsoleHandler(console)
    for shown_logger in (logging.getLogger("sluice.launch"), logger):
        shown_logger.handlers[:] = [handler]
        shown_logger.setLevel(logging.INFO)


async def _supervise(
    plan: LaunchPlan, display: Display, shown_by: type[LiveView]
) -> tuple[RunEnd, LiveView]:
    service = plan.config.sluice
    run_dir = Path(service.run_dir)
    names = tuple(spec.name for spec in plan.specs)
    view = shown_by(display.console, plan.config, names, detail=display.detail)
    supervisor = Supervisor(
        plan.specs,
        run_dir / "logs",
        view.log_line,
        launcher_grace_s(service.shutdown_grace_s),
        plan.host,
        on_dismissed=lambda name: forget_target(run_dir, name),
        save=(lambda: _save_and_end(monitor)) if plan.config.trainer.save_freq > 0 else None,
    )
    trainer = peer_address(service.trainer.endpoint, "sluice.trainer.endpoint")
    reward = peer_address(service.reward.endpoint, "sluice.reward.endpoint")
    credentials = service_credentials(service.security, service.trainer.endpoint)
    if not credentials.is_encrypted:
        expect_no_tls()
    monitor = RunMonitor(trainer, reward, credentials=credentials)
    scale = ReplicaScale(
        supervisor,
        plan.make_replica,
        has_fixed_port=bool(fixed_ports(service.rollout)),
        is_local=isinstance(plan.host, ThisMachine),
    )
    control = launch_service(run_dir, scale)
    forget_targets(run_dir)
    endpoints = {"trainer": trainer, "reward": reward, "tls": service.security.tls}
    async with monitor, control, asyncio.TaskGroup() as tasks:
        (run_dir / ENDPOINTS_NAME).write_text(json.dumps(endpoints) + "\n", encoding="utf-8")
        following = tasks.create_task(view.follow(monitor), name="live-view")
        end = await supervisor.run()
        following.cancel()
    view.print_missed_steps()
    (run_dir / ENDPOINTS_NAME).unlink(missing_ok=True)
    return end, view

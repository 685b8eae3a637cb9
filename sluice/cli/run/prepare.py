"""`sluice prepare`: make the folder of a run whose services have separate hosts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sluice.cli.arguments import AsJson, ConfigArguments, TrustScript, split_arguments
from sluice.cli.run.certificates import CERTIFICATES, ensure_certificates, security_settings
from sluice.cli.run.checked import check_before_start, refuse_other_ledger
from sluice.cli.run.quickstart import make_asset_settings
from sluice.cli.running_run import folder_setting, newest_step
from sluice.cli.terminal import print_json, print_line
from sluice.config.check import launch_notes
from sluice.config.derived import checkpoint_folder
from sluice.config.loading.loader import read_run, read_settings
from sluice.config.loading.yaml_text import dump_config, write_config
from sluice.config.run import RunConfig
from sluice.doctor.reward import ENOUGH_S, try_responses
from sluice.launch.network_layout import (
    DASHBOARD_VARIABLE,
    DEVICE_VARIABLE,
    OBSERVED_VARIABLE,
    dashboard_settings,
    device_settings,
    network_settings,
    observed_settings,
)
from sluice.launch.shared_run import SharedRun
from sluice.report.summary import remove_end_files
from sluice.service_contract import CONFIG_NAME
from sluice.telemetry.metrics import forget_targets

_SEED = 0  # of the quickstart's files

_KEPT = (
    "stays as it is, and other settings are ignored: the run has not ended, and its services read "
    "that file; stop them, then give --restart to begin a new run"
)

_Quickstart = Annotated[
    bool, typer.Option("--quickstart", help="Make the quickstart's model and data first.")
]
_Secure = Annotated[
    bool, typer.Option("--secure", help="Make certificates and tokens, and require them.")
]
# Compose's files set these by an environment variable.
_Observed = Annotated[
    bool,
    typer.Option("--observed", help="Serve metrics, and send traces.", envvar=OBSERVED_VARIABLE),
]
_Dashboard = Annotated[
    bool,
    typer.Option(
        "--dashboard",
        help="Serve the dashboard to other hosts too; needs --secure.",
        envvar=DASHBOARD_VARIABLE,
    ),
]
_Device = Annotated[
    str | None,
    typer.Option(help="Device of trainer and replicas: cpu, cuda or npu.", envvar=DEVICE_VARIABLE),
]
_Restart = Annotated[
    bool, typer.Option("--restart", help="Begin a new run even if the last has not ended.")
]
_RunFolder = Annotated[
    Path, typer.Option("--run", "--run-dir", help="Folder that all services of the run see.")
]


def prepare(  # noqa: PLR0913 - one parameter an option
    arguments: ConfigArguments = None,
    *,
    run_dir: _RunFolder = Path("runs/run"),
    quickstart: _Quickstart = False,
    secure: _Secure = False,
    observed: _Observed = False,
    dashboard: _Dashboard = False,
    device: _Device = None,
    restart: _Restart = False,
    trust_script: TrustScript = False,
    as_json: AsJson = False,
) -> None:
    """Write the configuration of a run whose services have separate hosts, such as containers.

    The address of a service is its kind (trainer, reward, rollout) at a fixed port. A run in the
    folder that has not ended continues with its own configuration.

    \b
    Examples:
      sluice prepare run.yaml --run-dir /runs/run trainer.save_freq=20
      sluice prepare --quickstart --secure --run-dir /runs/run
    """
    console = Console(stderr=as_json)
    report = partial(print_line, console)
    run, config_file = SharedRun(run_dir), run_dir / CONFIG_NAME
    is_active = run.is_active and config_file.is_file() and not restart
    certificates = run_dir.absolute() / CERTIFICATES
    file, overrides = split_arguments(arguments, trust_script=trust_script)
    settings: list[str] = []
    settings += make_asset_settings(run_dir, "quickstart", _SEED, console) if quickstart else ()
    if secure:
        ensure_certificates(certificates, report, run_is_active=is_active)
        settings += security_settings(certificates)
    settings += observed_settings() if observed else ()
    settings += dashboard_settings() if dashboard else ()
    settings += device_settings(device) if device is not None else ()
    settings += [*network_settings(), folder_setting(run_dir.absolute())]
    with as_file(files("sluice.quickstart") / "quickstart.yaml") as job:
        base = job if quickstart else file
        run_as_read = read_run(base, [*settings, *overrides])
        refuse_other_ledger(run_as_read.config)
        notes = launch_notes(run_as_read.config, read_settings(base, overrides))
    config = check_before_start(run_as_read, console, notes, is_local=False, grades=False).config
    try_responses(config, (), ENOUGH_S)  # what grades can be loaded
    if not is_active:
        _write_run(run, config, config_file, report)
    elif config_file.read_text(encoding="utf-8") != dump_config(config):
        report(f"notice: {config_file} {_KEPT}")
    _print_written(config_file, is_active=is_active, as_json=as_json)


def _print_written(config_file: Path, *, is_active: bool, as_json: bool) -> None:
    if as_json:
        print_json({"config": str(config_file), "continues": is_active})
    else:
        state = "continues" if is_active else "begins"
        print_line(Console(), f"{config_file.parent}: the run {state}")


def _write_run(
    run: SharedRun, config: RunConfig, config_file: Path, report: Callable[[str], None]
) -> None:
    """Write the files of a new run."""
    if (notice := spent_notice(config)) is not None:
        report(f"notice: {notice}")
    write_config(config, config_file)
    remove_end_files(config_file.parent)
    forget_targets(config_file.parent)
    run.begin(Path(checkpoint_folder(config)))


def spent_notice(config: RunConfig) -> str | None:
    """Return a notice if the run would resume from a checkpoint of its last step.

    There is none if only the data determine the number of steps
    (``trainer.total_training_steps`` is null).
    """
    num_planned, num_done = config.trainer.total_training_steps, newest_step(config)
    if (
        config.trainer.resume_mode != "auto"
        or num_planned is None
        or num_done is None
        or num_done < num_planned
    ):
        return None
    return (
        f"the newest checkpoint in {checkpoint_folder(config)} is of step {num_done}, and "
        f"trainer.total_training_steps = {num_planned}: the run ends without a step; raise it, or "
        "begin in a folder without checkpoints (in Compose after docker compose down -v, in Helm "
        "with another run.name)"
    )

"""The program of a container: keep one service of a run.

Started as `python -m sluice.launch.container KIND --config FILE`; FILE is in the folder of the run,
which all containers see. Restart policies of Compose and Kubernetes start a container again. They
know neither when a run is over, nor that all ranks of a trainer start together, nor the address of
a replica: this launcher adds that.

Exit codes: 0, the service ended with its run, or on request; 1, it failed, with a diagnosis, and
would fail again; 70, an unforeseen error of the launcher itself, with its traceback; 130, a trainer
ended on request before its last step.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from sluice.concurrency.process import exit_status, run_and_exit
from sluice.config.addresses import peer_address, split_host_port
from sluice.config.loading.loader import load_config, read_run
from sluice.config.run import RunConfig, changed
from sluice.device.ascend_environment import VISIBLE_VARIABLE
from sluice.device.host import CUDA_VISIBLE_VARIABLE, launch_environment
from sluice.errors import ConfigError
from sluice.launch.device_plan import device_share, gpu_share, local_devices, replica_environment
from sluice.launch.network_layout import KINDS, Kind, launcher_grace_s
from sluice.launch.processes.supervisor import EXIT_FAILED, EXIT_INTERRUPTED, RunEnd, Supervisor
from sluice.launch.service_spec import (
    TRAINER,
    ServiceSpec,
    own_address,
    replica_in_container,
    reward_service,
    trainer_services,
)
from sluice.launch.shared_run import RunEnding, SharedRun
from sluice.telemetry.logs import configure_logging

logger = logging.getLogger(__name__)

SHARED_DEVICES_VARIABLE = "SLUICE_SHARED_DEVICES"
"""Devices of this machine that the containers of a run divide, as `compose.gpu.yaml` gives them to
trainer and replicas: numbers, or ``all``. Without it a container has all that it sees to itself."""
# EX_SOFTWARE of sysexits.h: the container may be started again, which EXIT_FAILED forbids in a Job.
EXIT_UNFORESEEN = 70
_WATCH_INTERVAL_S = 0.5
# The trainer's name is unknown while its container starts, or starts again.
_TRAINER_NAMED_WITHIN_S = 60.0


def main(arguments: Sequence[str]) -> int:
    """Run until the service or the run ends; return the exit code."""
    options = _parse(arguments)
    kind: Kind = options.kind
    codes: list[int] = []
    try:
        status = exit_status(kind, lambda: codes.append(_run_service(kind, options.config)))
    except Exception:
        logger.exception("%s: its launcher ends with an unforeseen error", kind)
        return EXIT_UNFORESEEN
    return codes[0] if codes else status


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m sluice.launch.container",
        description="Keeps one service of a run running.",
        epilog="example: python -m sluice.launch.container trainer --config /runs/run/config.yaml",
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--config", type=Path, required=True, help="in the run's folder")
    return parser.parse_args(arguments)


def _run_service(kind: Kind, config_file: Path) -> int:
    config = load_config(config_file, ())
    configure_logging(f"{kind} launcher", config.sluice.log_level)
    run = SharedRun(Path(config.sluice.run_dir))
    over = run.ending()
    if over is not None:
        return _exit_code_after(over, kind)
    try:
        specs = services_of(kind, config, config_file, run)
        return asyncio.run(_supervise(kind, specs, config, run))
    finally:
        run.release()


def services_of(
    kind: Kind, config: RunConfig, config_file: Path, run: SharedRun
) -> tuple[ServiceSpec, ...]:
    """Return the processes of one service; the first one's orderly end ends the launcher."""
    service_device = config.sluice.rollout.device if kind == "rollout" else config.trainer.device
    environment = _shared_environment(os.environ, service_device)
    if environment is not None:
        # Containers count the replicas: with a number of their own, no GPU might be divided.
        config = changed(config, ("sluice.rollout.replicas=0",))
    if kind == "rollout":
        host = socket.gethostname()
        trainer = peer_address(config.sluice.trainer.endpoint, "sluice.trainer.endpoint")
        address = own_address(split_host_port(trainer)[0], _TRAINER_NAMED_WITHIN_S)
        devices = _replica_devices(config, run, environment)
        specs: tuple[ServiceSpec, ...] = (
            replica_in_container(config, config_file, f"rollout-{host}", address, devices),
        )
    elif kind == "reward":
        specs = (reward_service(config, config_file),)
    else:
        if environment is not None:
            _refuse_too_few(config_file, environment)
        mark = run.checkpoints_before()
        specs = trainer_services(config, config_file, mark, environment or os.environ)
    before = run.count_start(specs[0].name)
    if before:
        logger.warning("%s: its launcher was started %d times before", specs[0].name, before)
    return tuple(replace(spec, ends_run=spec is specs[0], starts_before=before) for spec in specs)


def _shared_environment(
    environment: Mapping[str, str], device: str | None
) -> dict[str, str] | None:
    """Return variables with the devices that containers divide; ``None``: they divide none."""
    shared = environment.get(SHARED_DEVICES_VARIABLE)
    if not shared:
        return None
    variable = VISIBLE_VARIABLE if (device or "").startswith("npu") else CUDA_VISIBLE_VARIABLE
    return {**environment, **({} if shared == "all" else {variable: shared})}


def _refuse_too_few(config_file: Path, environment: Mapping[str, str]) -> None:
    """Refuse devices that do not suffice for the trainer and a replica, with those that would."""
    run = read_run(config_file, ["sluice.rollout.replicas=1"])  # containers count the replicas
    shortage = local_devices(run.config, run.keys, environment).shortage
    if shortage:
        raise ConfigError(
            f"{SHARED_DEVICES_VARIABLE}={environment[SHARED_DEVICES_VARIABLE]}: {shortage}"
        )


def _replica_devices(
    config: RunConfig, run: SharedRun, shared: Mapping[str, str] | None
) -> Mapping[str, str]:
    """Return the variables of a replica's devices: all that it sees, or its share of them."""
    service = config.sluice.rollout
    all_that_it_sees = launch_environment(config, service.device, service.endpoint, os.environ)
    if shared is None:
        return all_that_it_sees
    share = device_share if (service.device or "").startswith("npu") else gpu_share
    visible = share(config, shared)
    max_replicas = visible.beside_trainer()
    is_by_hand = config.sluice.weights.backend == "gloo" and not max_replicas
    if is_by_hand:  # one replica shares devices with the trainer
        if not (visible.numbers and visible.devices_per_replica):
            return all_that_it_sees
        max_replicas = 1
    number = run.claim_replica(max_replicas)
    if number is None:
        remedy = (
            ", which have claimed them; start fewer "
            f"(docker compose up --scale rollout={max_replicas})"
            if max_replicas
            else "; give the containers more devices, or lower trainer.n_gpus_per_node"
        )
        raise ConfigError(
            f"{SHARED_DEVICES_VARIABLE}={shared[SHARED_DEVICES_VARIABLE]}: beside "
            f"{visible.trainer_ranks} trainer rank(s) {len(visible.numbers)} device(s) have place "
            f"for {max_replicas} replica(s) of {visible.devices_per_replica}{remedy}"
        )
    if is_by_hand:
        return all_that_it_sees | dict(shared.items() - os.environ.items())
    return replica_environment(config, number, shared)


async def _supervise(
    kind: Kind, specs: tuple[ServiceSpec, ...], config: RunConfig, run: SharedRun
) -> int:
    grace_s = launcher_grace_s(config.sluice.shutdown_grace_s)
    supervisor = Supervisor(specs, Path(config.sluice.run_dir) / "logs", _print_line, grace_s)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_end_when_run_ends(run, supervisor), name="end of the run")
        end = await supervisor.run()
        watching.cancel()
    return _record_outcome(kind, specs, end, run)


async def _end_when_run_ends(run: SharedRun, supervisor: Supervisor) -> None:
    while True:  # nothing reports a change of a file on a volume
        with suppress(OSError):  # a network file system may fail for a moment (EIO, ESTALE)
            if run.ending() is not None:
                supervisor.end()
                return
        await asyncio.sleep(_WATCH_INTERVAL_S)


def _record_outcome(kind: Kind, specs: Sequence[ServiceSpec], end: RunEnd, run: SharedRun) -> int:
    """Record the end of the run if this service ends it, and return the exit code."""
    for failure in end.failures:
        logger.error("%s", failure)
    over = run.ending()
    if over is not None:
        return EXIT_FAILED if end.failures else _exit_code_after(over, kind)
    if end.failures:
        if any(spec.is_needed for spec in specs):
            run.end(RunEnding(kind, end.failures))
        return EXIT_FAILED
    if end.exit_code == EXIT_INTERRUPTED:
        return EXIT_INTERRUPTED if kind == TRAINER else 0
    if kind != TRAINER and any(spec.is_needed for spec in specs):
        run.end(RunEnding(kind, (f"{kind} ended with code 0 in the middle of the run",)))
        return EXIT_FAILED
    if kind == TRAINER:
        run.end(RunEnding(kind, ()))
    return 0


def _exit_code_after(over: RunEnding, kind: Kind) -> int:
    """Return the exit code of a service whose run is over; the service that failed exits with 1."""
    if over.is_complete:
        logger.info("the run has reached its end")
        return 0
    logger.error("the run has failed: %s", "\n".join(over.failures))
    return EXIT_FAILED if kind in {over.service, TRAINER} else 0


def _print_line(_: str, line: str) -> None:
    with suppress(OSError):  # a disk that is full, or a reader that has left, loses lines
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    run_and_exit(partial(main, sys.argv[1:]))

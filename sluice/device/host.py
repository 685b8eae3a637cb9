"""Accelerators of this host, and the start of a process that computes on one. Loads no torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import subprocess
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from itertools import takewhile
from pathlib import Path

from sluice import installed_version
from sluice.config.problems import Problem, errors
from sluice.config.run import RunConfig
from sluice.config.schema.service import EndpointConfig
from sluice.device.ascend_checks import (
    AscendDemand,
    AscendHost,
    ascend_findings,
    visible_devices,
    vllm_findings,
)
from sluice.device.ascend_environment import (
    hccl_environment,
    import_environment,
    queue_environment,
)
from sluice.errors import ConfigError

CUDA_VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
NCCL_ERRORS_VARIABLE = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NCCL_DUMP_VARIABLE = "TORCH_NCCL_DUMP_ON_TIMEOUT"
NCCL_DUMP_WAIT_VARIABLE = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
CONNECTIONS_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_log = logging.getLogger(__name__)
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_RECLAIMABLE = re.compile(r"^inactive_file (\d+)$", re.MULTILINE)
_DEVICE_FOLDER = Path("/dev")
_GPU_FILE = re.compile(r"nvidia\d+")
_NPU_FILE = re.compile(r"v?davinci(\d+)")  # a share of one begins with "v"
_DISTRIBUTIONS = ("torch-npu", "torch_npu")


def has_torch_npu() -> bool:
    """Return whether the package is installed, whatever the hardware. Imports nothing."""
    return importlib.util.find_spec("torch_npu") is not None


def device_numbers(
    environment: Mapping[str, str], devices: Path = _DEVICE_FOLDER
) -> tuple[str, ...]:
    """Return the NPUs that a process started from here may use, by the host's numbers.

    Args:
        devices: where the driver puts one file for each.
    """
    visible = visible_devices(environment)
    return _npu_numbers(devices) if visible is None else visible


def wants_npu(
    name: str | None, environment: Mapping[str, str], devices: Path = _DEVICE_FOLDER
) -> bool:
    """Return whether a process with this ``device`` key will compute on an NPU.

    Args:
        name: as configured; ``None``: detected, an NPU first.
    """
    if name is not None and name != "auto":
        return name.partition(":")[0] == "npu"
    return has_torch_npu() and bool(device_numbers(environment, devices))


def ascend_host(environment: Mapping[str, str], devices: Path = _DEVICE_FOLDER) -> AscendHost:
    """Return the facts about this host."""
    return AscendHost(
        environment=dict(environment),
        torch_version=_version("torch") or "",
        torch_npu_version=next(filter(None, map(_version, _DISTRIBUTIONS)), None),
        num_devices=len(_npu_numbers(devices)),
        interfaces=frozenset(name for _, name in socket.if_nameindex()),
        vllm_version=_version("vllm"),
        vllm_ascend_version=_version("vllm-ascend"),
    )


def launch_environment(
    config: RunConfig,
    device: str | None,
    endpoint: EndpointConfig,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the variables that a launcher adds to `environment` for a process."""
    if wants_npu(device, environment):
        return hccl_environment(config, endpoint, environment)
    return import_environment(has_torch_npu=has_torch_npu(), environment=environment)


def nccl_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to `environment` before a process forms its first group of NCCL.

    When a collective fails or is late, torch's watchdog waits a minute for a record of collectives
    to be written. The first group of the process then waits eight more, and ends the process,
    which outlives its transfer groups. Who sets the first variable wants that record.
    """
    if NCCL_DUMP_VARIABLE in environment:
        return {}
    return {NCCL_DUMP_VARIABLE: "0", NCCL_DUMP_WAIT_VARIABLE: "0"}


def outlive_collectives(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch's watchdog give up NCCL's late collectives, of groups formed from now on.

    By default it ends the process then, and torchrun asks for the same.
    """
    environment.update(nccl_environment(environment))
    environment[NCCL_ERRORS_VARIABLE] = "2"


def prepare_process(
    config: RunConfig,
    device: str | None,
    endpoint: EndpointConfig,
    *,
    collectives_on_device: bool,
    runs_vllm: bool = False,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Set what CANN, CUDA or NCCL will read here; check the host if an NPU is configured.

    With ``auto`` nothing is fatal: detection may skip the NPU and logs why; findings about vLLM are
    logged too.

    Raises:
        ConfigError: everything that is wrong, each with its remedy.
    """
    if not wants_npu(device, environment):
        if collectives_on_device and device != "cpu":
            # By default 8 queues of the driver serve all streams. Collectives of several groups
            # that are in one queue on two GPUs, in another order on each, would wait for each
            # other.
            environment.setdefault(CONNECTIONS_VARIABLE, "32")
            environment.update(nccl_environment(environment))
        return
    environment.update(hccl_environment(config, endpoint, environment))
    captures_graphs = runs_vllm and not config.actor_rollout_ref.rollout.enforce_eager
    environment.update(queue_environment(captures_graphs=captures_graphs, environment=environment))
    if device is not None and device != "auto":
        demand = AscendDemand(1, collectives_on_device, runs_vllm, captures_graphs)
        findings = ascend_findings(ascend_host(environment), demand)
        fatal = errors(findings)
        _warn(finding for finding in findings if finding not in fatal)
        if fatal:
            raise ConfigError('device "npu": ' + "; ".join(finding.text for finding in fatal))
    elif runs_vllm:
        _warn(vllm_findings(ascend_host(environment)))


def _warn(findings: Iterable[Problem]) -> None:
    for finding in findings:
        _log.warning("NPU: %s", finding.text)


def _npu_numbers(devices: Path) -> tuple[str, ...]:
    matches = (_NPU_FILE.fullmatch(file.name) for file in devices.glob("*davinci*"))
    return tuple(str(number) for number in sorted(int(match[1]) for match in matches if match))


def _version(distribution: str) -> str | None:
    version = installed_version(distribution)
    return version and version.partition("+")[0]


def gpu_numbers(environment: Mapping[str, str], devices: Path = _DEVICE_FOLDER) -> tuple[str, ...]:
    """Return the GPUs that a process started from here may use, by CUDA's numbers or by name.

    CUDA ends its list at the first negative number. It numbers visible GPUs from 0, whatever the
    driver calls the files: a container with the host's third GPU alone has a file nvidia2 and a
    GPU 0.

    Args:
        devices: where the driver puts one file for each.
    """
    visible = environment.get(CUDA_VISIBLE_VARIABLE)
    if visible is not None:
        names = (entry.strip() for entry in visible.split(","))
        listed = takewhile(lambda entry: not entry.startswith("-"), names)
        return tuple(entry for entry in listed if entry)
    files = [file for file in devices.glob("nvidia*") if _GPU_FILE.fullmatch(file.name)]
    return tuple(str(number) for number in range(len(files)))


def is_cpu_torch() -> bool:
    """Return whether torch is built for CPUs alone. Imports nothing."""
    return (installed_version("torch") or "").endswith("+cpu")


@cache
def gpu_gib() -> float | None:
    """Return the memory of the smallest GPU of the host, GiB; ``None``: no driver reports it."""
    command = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
        return min(float(size) for size in ended.stdout.split()) / 1024
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def wants_gpu(
    name: str | None, environment: Mapping[str, str], devices: Path = _DEVICE_FOLDER
) -> bool:
    """Return whether a process with this ``device`` key will compute on any GPU of the host.

    Args:
        name: as configured; ``None``: detected. ``cuda:N`` names one already.
    """
    if name is None or name == "auto":
        has_gpu = bool(gpu_numbers(environment, devices))
        return has_gpu and not wants_npu(name, environment, devices)
    return name == "cuda"


def available_memory(root: Path = Path("/")) -> int | None:
    """Return Linux's estimate of what can be allocated without swapping, bytes; elsewhere ``None``.

    Args:
        root: of the file system with ``proc``.
    """
    try:
        match = _AVAILABLE.search((root / "proc/meminfo").read_text(encoding="ascii"))
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that new processes may take: the kernel's estimate, or a container's limit.

    Args:
        root: of the file system with ``proc`` and ``sys``.
    """
    limits = [available_memory(root)]
    group = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):  # "max": no limit
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        match = _RECLAIMABLE.search((group / "memory.stat").read_text(encoding="ascii"))
        limits.append(max(0, limit - used + (int(match[1]) if match else 0)))
    return min((limit for limit in limits if limit is not None), default=None)

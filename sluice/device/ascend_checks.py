"""Faults of a host's set-up for NPUs, each with its remedy. Pure; loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

from sluice.config.problems import Problem, Severity
from sluice.device import ascend_environment as variables

_LARGEST = (1 << 31) - 1
_RANGES = (
    (variables.CONNECT_VARIABLE, "s", variables.CONNECT_RANGE_S),
    (variables.EXEC_VARIABLE, "s", (0, _LARGEST)),  # wider than what every product takes
    (variables.BUFFER_VARIABLE, "MB", (1, _LARGEST)),
)


@dataclass(frozen=True, slots=True)
class AscendHost:
    """Facts about the host; `sluice.device.host` gathers them.

    Attributes:
        torch_version: without its build, such as ``2.13.0``.
        torch_npu_version: the same of torch_npu; ``None`` if it is not installed.
        num_devices: NPUs whose device file is there.
        vllm_version: of vLLM; ``None`` if it is not installed.
        vllm_ascend_version: of vLLM's plugin for NPUs; ``None`` if it is not installed.
    """

    environment: Mapping[str, str]
    torch_version: str
    torch_npu_version: str | None
    num_devices: int
    interfaces: frozenset[str] = field(default_factory=frozenset)
    vllm_version: str | None = None
    vllm_ascend_version: str | None = None


@dataclass(frozen=True, slots=True)
class AscendDemand:
    """What a process or a launcher needs of the host.

    Attributes:
        collectives_on_device: whether weights or gradients travel by HCCL.
        runs_vllm: whether a replica uses one with vLLM.
        captures_graphs: whether that vLLM captures graphs.
    """

    num_devices: int
    collectives_on_device: bool
    runs_vllm: bool = False
    captures_graphs: bool = False


def ascend_findings(host: AscendHost, demand: AscendDemand) -> tuple[Problem, ...]:
    """Return all faults, the fatal ones first."""
    problems = [*_package(host), *_cann(host.environment), *_devices(host, demand)]
    problems += _ranges(host.environment)
    if demand.runs_vllm:
        problems += vllm_findings(host)
    if demand.captures_graphs:
        problems += _queue(host.environment)
    if demand.collectives_on_device:
        problems += [*_network(host), *_watchdog(host.environment)]
    return tuple(sorted(problems, key=lambda problem: problem.severity is not Severity.ERROR))


def vllm_findings(host: AscendHost) -> Iterator[Problem]:
    """Yield what keeps vLLM from using this host's NPUs."""
    version = host.vllm_version
    if host.vllm_ascend_version is None:
        yield _fault(
            "vllm_ascend is not installed, and vLLM alone knows no NPU",
            f"install the vllm-ascend wheel made for vllm {version or 'of this host'}, use an "
            "image that has it, or set actor_rollout_ref.rollout.name=torch",
        )
    elif version is not None and _minor(version) != _minor(host.vllm_ascend_version):
        yield _fault(
            f"vllm_ascend {host.vllm_ascend_version} is made for vllm "
            f"{_minor(host.vllm_ascend_version)}, and vllm is {version}",
            f"install vllm-ascend {_minor(version)}, or the vllm it is made for",
            is_fatal=False,
        )


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the entries of ASCEND_RT_VISIBLE_DEVICES; ``None`` if it is not set."""
    value = environment.get(variables.VISIBLE_VARIABLE)
    if value is None:
        return None
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _package(host: AscendHost) -> Iterator[Problem]:
    if host.torch_npu_version is None:
        yield _fault(
            "torch_npu is not installed",
            f"install the torch-npu wheel made for torch {host.torch_version}, or use an image "
            "that has it",
        )
    elif _minor(host.torch_npu_version) != _minor(host.torch_version):
        yield _fault(
            f"torch_npu {host.torch_npu_version} is made for torch "
            f"{_minor(host.torch_npu_version)}, and torch is {host.torch_version}",
            f"install torch-npu {_minor(host.torch_version)}, or the torch it is made for",
        )


def _cann(environment: Mapping[str, str]) -> Iterator[Problem]:
    if not (environment.get("ASCEND_HOME_PATH") or environment.get("ASCEND_TOOLKIT_HOME")):
        yield _fault(
            "CANN's environment is not set (neither ASCEND_HOME_PATH nor ASCEND_TOOLKIT_HOME)",
            "source set_env.sh of the toolkit (usually "
            "/usr/local/Ascend/ascend-toolkit/set_env.sh) in the shell that starts the run",
            is_fatal=False,
        )


def _devices(host: AscendHost, demand: AscendDemand) -> Iterator[Problem]:
    visible = visible_devices(host.environment)
    if host.num_devices == 0:
        yield _fault(
            "there is no /dev/davinci0 or any other NPU's device file",
            "install the driver, or hand the devices to the container (--device /dev/davinci0 "
            "with davinci_manager, devmm_svm and hisi_hdc)",
        )
        return
    count = host.num_devices if visible is None else len(visible)
    if count < demand.num_devices:
        value = "not set" if visible is None else repr(host.environment[variables.VISIBLE_VARIABLE])
        yield _fault(
            f"{demand.num_devices} NPUs are wanted and {count} are visible "
            f"({variables.VISIBLE_VARIABLE} is {value})",
            "make more visible, or lower trainer.n_gpus_per_node or sluice.rollout.replicas",
        )
    for entry in visible or ():
        if not entry.isdecimal() or len(set(visible or ())) != len(visible or ()):
            yield _fault(
                f"{variables.VISIBLE_VARIABLE}={host.environment[variables.VISIBLE_VARIABLE]!r} "
                "is not a list of different numbers",
                "write the numbers of `npu-smi info`, with commas: 0,1,2",
            )
            return


def _ranges(environment: Mapping[str, str]) -> Iterator[Problem]:
    for name, unit, (lowest, highest) in _RANGES:
        value = environment.get(name)
        if value is not None and not (value.isdecimal() and lowest <= int(value) <= highest):
            yield _fault(
                f"{name}={value!r} is not a whole number from {lowest} to {highest} {unit}",
                "correct it, or leave it out: it then follows from the configuration",
            )


def _queue(environment: Mapping[str, str]) -> Iterator[Problem]:
    if environment.get(variables.QUEUE_VARIABLE) == "2":
        yield _fault(
            f"{variables.QUEUE_VARIABLE}=2, with which torch_npu captures no graph, and vLLM is to "
            "capture some",
            "set it to 1, leave it out, or set actor_rollout_ref.rollout.enforce_eager=true",
        )


def _network(host: AscendHost) -> Iterator[Problem]:
    environment = host.environment
    for name in (variables.HOST_INTERFACE_VARIABLE, variables.GLOO_INTERFACE_VARIABLE):
        value = environment.get(name, "")
        is_hccl = name == variables.HOST_INTERFACE_VARIABLE
        interface = variables.single_interface(value) if is_hccl else value
        if interface and host.interfaces and interface not in host.interfaces:
            yield _fault(
                f"{name}={value!r}: there is no such interface, only "
                f"{', '.join(sorted(host.interfaces))}",
                "name the one that the other hosts reach (`ip addr`)",
            )
    enabled = environment.get(variables.WHITELIST_VARIABLE) == "0"
    if enabled and not environment.get(variables.WHITELIST_FILE_VARIABLE):
        yield _fault(
            f"{variables.WHITELIST_VARIABLE}=0 makes HCCL read a list of allowed addresses, and "
            f"{variables.WHITELIST_FILE_VARIABLE} names none",
            f"name one, or set {variables.WHITELIST_VARIABLE}=1",
        )


def _watchdog(environment: Mapping[str, str]) -> Iterator[Problem]:
    value = environment.get(variables.ASYNC_ERRORS_VARIABLE)
    if value not in (None, "0", "2"):
        yield _fault(
            f"{variables.ASYNC_ERRORS_VARIABLE}={value} ends this process when a collective is "
            "late, also one of a transfer group that only lost a replica",
            "set it to 0, or leave it out",
            is_fatal=False,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _fault(fault: str, remedy: str, *, is_fatal: bool = True) -> Problem:
    """Return a fault; nothing works with a fatal one, with another it is slower or fails later."""
    severity = Severity.ERROR if is_fatal else Severity.NOTE
    return Problem("", UNSET, fault, remedy, severity=severity)

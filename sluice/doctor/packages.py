"""Check packages: versions of extras, the build of torch, and its devices."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sluice import installed_version
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import VENDOR_ENGINES
from sluice.device.ascend_environment import AUTOLOAD_VARIABLE
from sluice.device.host import gpu_numbers, is_cpu_torch, wants_gpu
from sluice.doctor.finding import DoctorContext, Finding, fine, problem

_OLDEST = re.compile(r"([\w.-]+).*[>=]=\s*([\d.]+)")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
# Loggers of `trainer.logger` whose extra has their name.
_LOGGERS = ("wandb", "mlflow", "swanlab", "trackio")
_ENGINE = "actor_rollout_ref.rollout.name"

_PROBE_S = 110.0
# torch's own message distinguishes a missing driver from an old one.
_PROBE = """
import json, torch
reason = ""
try:
    torch.cuda.init()
except Exception as error:
    reason = str(error).strip().splitlines()[0]
print(json.dumps({
    "cuda": torch.version.cuda,
    "is_rocm": torch.version.hip is not None,
    "num_usable": 0 if reason else torch.cuda.device_count(),
    "reason": reason,
}))
"""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package, the oldest version that works, and the installed one, if any."""

    name: str
    oldest: str
    installed: str | None

    @property
    def defect(self) -> str:
        """The fault of the installed version; empty if there is none."""
        if self.installed is None:
            return f"{self.name} is not installed"
        if is_older(self.installed, self.oldest):
            return f"{self.name} {self.installed} is older than {self.oldest}"
        return ""


def requirements(extra: str) -> Iterator[Requirement]:
    """Yield the packages of an extra, from sluice's metadata."""
    try:
        lines = importlib.metadata.requires("sluice") or ()
    except importlib.metadata.PackageNotFoundError:  # a source tree that is run as it is
        return
    for line in lines:
        package, _, marker = line.partition(";")
        match, of_extra = _OLDEST.match(package), _EXTRA.search(marker)
        if match is not None and of_extra is not None and of_extra[1] == extra:
            name, oldest = match.groups()
            # vLLM's build for CPUs is a package of its own.
            installed = installed_version(name) or installed_version(f"{name}-cpu")
            yield Requirement(name, oldest, installed)


def is_older(version: str, than: str) -> bool:
    """Return whether a version's numbers come before another one's; only numbers count."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    """Return ``2.13.0rc1+cpu`` as (2, 13), without the zeros at the end."""
    match = re.match(r"[\d.]+", version)
    texts = re.sub(r"(\.0*)*$", "", match[0] if match else "").split(".")
    return tuple(map(int, filter(None, texts)))


def check_extras(context: DoctorContext) -> Iterator[Finding]:
    """Check the optional packages that the configuration needs, its engine among them."""
    yield from requirement_findings(
        (key, extra, package)
        for key, extra in needed_extras(context.config)
        for package in requirements(extra)
    )
    missing = missing_for_triton(context.environment)
    if missing and (keys := [*_compiling_keys(context)]):
        yield problem(
            f"{' and '.join(keys)} on a GPU, and there is no {' and no '.join(missing)}",
            "Triton compiles kernels with it, and processes end when they start",
            "install gcc and the headers of this Python (such as the packages gcc and "
            "python3.11-dev), or name another C compiler in CC",
        )


def missing_for_triton(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return what Triton calls or reads to compile a kernel, and does not find."""
    names = ("gcc", "clang")
    compiler = environment.get("CC") or next(filter(None, map(shutil.which, names)), None)
    # Debian's own scheme names a folder without the headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    requirements = (("C compiler", compiler is not None), (str(header), header.is_file()))
    return tuple(name for name, is_there in requirements if not is_there)


def _compiling_keys(context: DoctorContext) -> Iterator[str]:
    """Yield what the configuration sets that compiles kernels on NVIDIA GPUs."""
    config, environment = context.config, context.environment
    engine = config.actor_rollout_ref.rollout.name
    if engine in VENDOR_ENGINES and _is_on_gpu(config.sluice.rollout.device, environment):
        yield f"actor_rollout_ref.rollout.name = {engine}"
    compiles = config.actor_rollout_ref.actor.fsdp_config.use_torch_compile
    if compiles and _is_on_gpu(config.trainer.device, environment):
        yield "actor_rollout_ref.actor.fsdp_config.use_torch_compile = true"


def _is_on_gpu(device: str | None, environment: Mapping[str, str]) -> bool:
    is_there = (device or "").startswith("cuda:") or wants_gpu(device, environment)
    return is_there and not is_cpu_torch()


def requirement_findings(requirements: Iterable[tuple[str, str, Requirement]]) -> Iterator[Finding]:
    """Yield a problem for each package that is missing or too old; else one finding for all.

    Args:
        requirements: configuration key and extra that need each package.
    """
    fit: dict[str, str] = {}
    unmet: set[str] = set()
    for key, extra, requirement in requirements:
        if not requirement.defect:
            fit[requirement.name] = f"{requirement.name} {requirement.installed}"
        elif requirement.name not in unmet:
            unmet.add(requirement.name)
            without = f"take {key.partition(' = ')[2] or 'the key'} out"
            if extra in VENDOR_ENGINES:
                without = f"set {_ENGINE}=torch"
            yield problem(
                f"{key} needs a package: {requirement.defect}",
                "processes end where they import it",
                f"pip install 'sluice[{extra}]', or {without}",
            )
    if not unmet:
        yield fine(", ".join(fit.values()) or "the configuration needs none")


def needed_extras(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield keys that are set, and the extra that each needs."""
    services, engine = config.sluice, config.actor_rollout_ref.rollout.name
    if engine in VENDOR_ENGINES:
        yield f"{_ENGINE} = {engine}", engine
    for name in config.trainer.logger:
        if name in _LOGGERS or name == "tensorboard":
            yield f"trainer.logger = {name}", "train" if name == "tensorboard" else name
    for kind in ("trainer", "reward", "rollout"):
        if getattr(services, kind).endpoint.metrics_port is not None:
            yield f"sluice.{kind}.endpoint.metrics_port", "metrics"
    if services.dashboard.port is not None:
        yield "sluice.dashboard.port", "dashboard"
    for destination in ("endpoint", "file"):
        if getattr(services.telemetry.traces, destination) is not None:
            yield f"sluice.telemetry.traces.{destination}", "traces"
    if "math_verify" in config.reward.scorer_routes.values():
        yield "reward.scorer_routes = math_verify", "math-verify"


class TorchBuild(msgspec.Struct, frozen=True):
    """torch as a process sees it that imports it.

    Attributes:
        cuda: the version of CUDA that it was built with; ``None``: a build without.
        is_rocm: whether it was built for AMD GPUs.
        num_usable: the number of GPUs that it can use.
        reason: torch's own message if it can use none.
    """

    cuda: str | None = None
    is_rocm: bool = False
    num_usable: int = 0
    reason: str = ""


def check_torch(context: DoctorContext) -> Iterator[Finding]:
    """Import torch in a separate process, since that may take long or crash."""
    of_any_age = Requirement("torch", "", installed_version("torch"))
    torch = next(
        (requirement for requirement in requirements("torch") if requirement.name == "torch"),
        of_any_age,
    )
    if torch.defect:
        yield problem(
            torch.defect,
            "the trainer and the replicas compute with it (the reward service needs none)",
            "pip install 'sluice[torch]'",
        )
        return
    build = probe_torch(context.environment)
    if isinstance(build, str):
        yield problem(
            f"torch {torch.installed} cannot be imported: {build}",
            "the trainer and the replicas end where they import it",
            "install it again, in a build for this machine",
        )
        return
    devices = {
        "trainer.device": context.config.trainer.device,
        "sluice.rollout.device": context.config.sluice.rollout.device,
    }
    yield build_finding(
        f"torch {torch.installed}",
        build,
        num_devices=len(gpu_numbers({})),
        keys=[key for key, value in devices.items() if (value or "").startswith("cuda")],
        may_use_gpu=any(value in {None, "auto"} for value in devices.values()),
    )


def probe_torch(environment: Mapping[str, str]) -> TorchBuild | str:
    """Return the build of torch, or the reason why it cannot be imported."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, **environment, AUTOLOAD_VARIABLE: "0"},
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_PROBE_S:g} s"
    if process.returncode != 0:
        return (process.stderr.strip().splitlines() or [f"code {process.returncode}"])[-1]
    return msgspec.json.decode(process.stdout.splitlines()[-1], type=TorchBuild)


def build_finding(
    torch: str, build: TorchBuild, *, num_devices: int, keys: list[str], may_use_gpu: bool
) -> Finding:
    """Judge whether torch fits the machine and the run.

    Args:
        torch: name and version.
        build: the devices that it can use.
        num_devices: NVIDIA GPUs whose device file is there.
        keys: device keys of the run that require a GPU.
        may_use_gpu: whether a process of the run takes a GPU if there is one.
    """
    kind = f"CUDA {build.cuda}" if build.cuda else "ROCm" if build.is_rocm else "the CPU"
    statement = f"{torch} for {kind}"
    reason = f" ({', '.join(keys)} asks for one)" if keys else ""
    if build.num_usable:
        return fine(f"{statement}, {build.num_usable} GPU(s)")
    if num_devices and (keys or may_use_gpu):
        return problem(
            f"{statement} can use none of {num_devices} NVIDIA GPU(s){reason}: {build.reason}",
            "the run would compute on the CPU",
            "install a CUDA build of torch that the driver supports, or update the driver; in a "
            "container, check that NVIDIA's container runtime passes the GPUs on; or set "
            "trainer.device=cpu and sluice.rollout.device=cpu",
        )
    if keys:
        return problem(
            f"{statement}, and there is no GPU, but {', '.join(keys)} asks for one",
            "these processes refuse to start",
            "set the keys to cpu, or pass the GPUs on to this container",
        )
    return fine(f"{statement}; the run uses none of {num_devices} NVIDIA GPU(s)")

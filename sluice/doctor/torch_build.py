"""torch: whether it is there, and whether its build, the driver and the devices belong together."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.device.ascend_environment import AUTOLOAD_VARIABLE
from sluice.device.cuda_host import gpu_numbers
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem
from sluice.doctor.requirements import install, is_older, numbers, requirements

DEADLINE_S = 120.0
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

"""The interpreter."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, warning

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

"""gRPC's and protobuf's runtimes against the versions that generated `sluice/api`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import sluice
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, warning
from sluice.doctor.requirements import installed_version, is_older

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

"""Installed packages against the versions that sluice's own metadata asks for."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem

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

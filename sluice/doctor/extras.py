"""Optional packages that the configuration asks for by what it switches on."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.run import RunConfig
from sluice.doctor.examined import Examined
from sluice.doctor.finding import Finding, fine, problem
from sluice.doctor.requirements import Requirement, install, requirements

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
    if services.telemetry.traces.endpoint is not None:
        yield "sluice.telemetry.traces.endpoint", "traces"
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

"""Every metric that services export to Prometheus, by the kind of process that tells it."""

from __future__ import annotations

from types import ModuleType

from sluice.telemetry.instruments import fleet, process, reward, rollout, trainer
from sluice.telemetry.metrics import Instrument

__all__ = ["INSTRUMENTS", "declared_in"]


def declared_in(*modules: ModuleType) -> tuple[Instrument, ...]:
    """The instruments of modules, in the order of their names in the code."""
    found: list[Instrument] = []
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Instrument):
                found.append(value)
            elif isinstance(value, dict):
                found += [one for one in value.values() if isinstance(one, Instrument)]
    return tuple(found)


INSTRUMENTS: dict[str, tuple[Instrument, ...]] = {
    "every process": declared_in(process),
    "trainer": declared_in(trainer, fleet),
    "reward": declared_in(reward),
    "rollout": declared_in(rollout),
}
"""By who tells them."""

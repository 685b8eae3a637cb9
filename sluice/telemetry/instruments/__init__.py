"""Every metric that services export to Prometheus, by the kind of process that exports it."""

from __future__ import annotations

from types import ModuleType

from sluice.telemetry.instruments import fleet, process, reward, rollout, trainer
from sluice.telemetry.metrics import Instrument


def declared_in(*modules: ModuleType) -> tuple[Instrument, ...]:
    """Return the instruments of modules, in the order of the code."""
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
"""By the process that exports them."""

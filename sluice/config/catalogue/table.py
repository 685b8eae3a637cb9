"""The whole catalogue, by path."""

from __future__ import annotations

from sluice.config.catalogue import (
    actor,
    algorithm,
    critic,
    data,
    engine,
    megatron,
    model,
    optim,
    ref,
    reward,
    rollout,
    service,
    sharding,
    trainer,
)
from sluice.config.catalogue.entry import Entry

SECTIONS: dict[str, str] = {
    "data": "data",
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.actor": "actor",
    "actor_rollout_ref.ref": "reference",
    "actor_rollout_ref.rollout": "rollout",
    "actor_rollout_ref": "shared",
    "algorithm": "algorithm",
    "reward": "reward",
    "critic": "critic",
    "trainer": "trainer",
    "sluice": "sluice's own",
    "": "verl's launcher",
}
"""Prefix of a path to the title of the section it is listed under; the first that fits counts."""

_MODULES = (
    data,
    model,
    actor,
    optim,
    sharding,
    megatron,
    ref,
    rollout,
    engine,
    algorithm,
    reward,
    critic,
    trainer,
    service,
)


def _by_section(entries: list[Entry]) -> list[Entry]:
    order = list(SECTIONS)
    return sorted(entries, key=lambda entry: order.index(section_of(entry.path)))


def section_of(path: str) -> str:
    """The prefix in `SECTIONS` under which a key is listed."""
    return next(prefix for prefix in SECTIONS if not prefix or f"{path}.".startswith(f"{prefix}."))


_ENTRIES = _by_section([entry for module in _MODULES for entry in module.ENTRIES])
CATALOGUE: dict[str, Entry] = {entry.path: entry for entry in _ENTRIES}
"""Every entry, in the order of the sections."""

assert len(CATALOGUE) == len(_ENTRIES), "a path stands twice in the catalogue"

"""Arguments of a vendor's engine by its own names (`engine_kwargs`), which win over sluice's."""

from __future__ import annotations

from collections.abc import Mapping

from sluice.config.rollout import RolloutConfig
from sluice.errors import ConfigError

__all__ = ["with_engine_kwargs"]


def with_engine_kwargs(
    arguments: Mapping[str, object], rollout: RolloutConfig, owner: str, ours: Mapping[str, str]
) -> dict[str, object]:
    """`arguments`, and those of `engine_kwargs` in their place; nulls are left out, as verl does.

    Args:
        arguments: the rollout's keys by the vendor's names.
        owner: the vendor as it writes itself; below its name in small letters its arguments stand.
        ours: names that must be left alone, with what to do instead.

    Raises:
        ConfigError: they are no mapping, or set what is to be left alone.
    """
    name = owner.lower()
    section = f"actor_rollout_ref.rollout.engine_kwargs.{name}"
    given = rollout.engine_kwargs.get(name) or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"{section} is {given!r}; give a mapping of {owner}'s engine arguments")
    for key in given:
        if key in ours:
            raise ConfigError(f"{section}.{key} cannot be set: {ours[key]}")
    chosen = {**arguments, **{str(key): value for key, value in given.items()}}
    return {key: value for key, value in chosen.items() if value is not None}

"""Settings that the engines of vendors share."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from services.rollout.engines.settings import EngineSettings
from sluice.config.schema.rollout import RolloutConfig
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VendorSettings(EngineSettings):
    """Settings of one vendor's engine.

    Attributes:
        arguments: of the vendor's engine, by its own names.
    """

    arguments: Mapping[str, object] = field(default_factory=dict)


def with_engine_kwargs(
    arguments: Mapping[str, object], rollout: RolloutConfig, owner: str, ours: Mapping[str, str]
) -> dict[str, object]:
    """Return `arguments`, overridden by `engine_kwargs`, without nulls (as in verl).

    Args:
        arguments: the rollout's keys by the vendor's names.
        rollout: holds `engine_kwargs`.
        owner: the vendor's name; in small letters it is the section of its `engine_kwargs`.
        ours: names that users must not set, with what to do instead.

    Raises:
        ConfigError: `engine_kwargs` are no mapping, or set one of `ours`.
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


def refuse_unknown(
    owner: str, version: str, arguments: Mapping[str, object], known: Container[str]
) -> None:
    """Raise ConfigError for engine arguments that this version of the vendor's engine lacks."""
    unknown = sorted(name for name in arguments if name not in known)
    if unknown:
        raise ConfigError(
            f"{owner} {version} has no engine arguments {', '.join(unknown)}; take them out of "
            f"actor_rollout_ref.rollout.engine_kwargs.{owner.lower()}"
        )


def installed(*distributions: str) -> str | None:
    """Return the version of the first that is installed; import nothing."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None

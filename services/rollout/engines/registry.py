"""Find an engine by its name in the run configuration.

Engines are imported on demand, so that a replica needs only its own engine's packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import cast

from services.rollout.engines.protocol import Engine
from sluice.config.run import RunConfig
from sluice.errors import ConfigError

ENGINES: Mapping[str, str] = {
    "sglang": "services.rollout.engines.sglang.engine:create",
    "torch": "services.rollout.engines.embedded.engine:create",
    "vllm": "services.rollout.engines.vllm.engine:create",
}
"""Engine name to the ``module:function`` that creates one for a run configuration."""


def create_engine(config: RunConfig, engines: Mapping[str, str] = ENGINES) -> Engine:
    """Create the engine that the configuration names.

    Raises:
        ConfigError: no engine has that name, or a package it needs is not installed.
    """
    return find_engine(config.actor_rollout_ref.rollout.name, engines)(config)


def find_engine(name: str, engines: Mapping[str, str] = ENGINES) -> Callable[[RunConfig], Engine]:
    """Import the function that creates the engine called `name`.

    Raises:
        ConfigError: no engine has that name, or a package it needs is not installed.
    """
    target = engines.get(name)
    if target is None:
        known = ", ".join(sorted(engines))
        raise ConfigError(
            f"actor_rollout_ref.rollout.name is {name!r}, but no engine has that name; "
            f"choose one of: {known}"
        )
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name is {name!r}, but the engine cannot be imported "
            f"({error}); install the missing package or choose another engine"
        ) from error
    return cast("Callable[[RunConfig], Engine]", getattr(module, attribute))

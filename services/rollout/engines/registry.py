"""Create the engine that the run configuration names.

Engines are imported on demand, so that a replica needs only its own engine's packages.
"""

from __future__ import annotations

import importlib

from services.rollout.engines.protocol import Engine
from sluice.config.run import RunConfig
from sluice.errors import MissingPackageError

ENGINES: dict[str, str] = {
    "sglang": "services.rollout.engines.sglang.engine",
    "torch": "services.rollout.engines.embedded.engine",
    "vllm": "services.rollout.engines.vllm.engine",
}
"""The module of each engine by name; its `create` makes the engine for a run configuration.

`sluice.config.schema.actor_rollout_ref.EngineName` has the same names. CONTRIBUTING.md says what
else a new engine needs.
"""


def create_engine(config: RunConfig) -> Engine:
    """Create the engine that the configuration names.

    Raises:
        MissingPackageError: a package that it needs is not installed.
    """
    name = config.actor_rollout_ref.rollout.name
    try:
        module = importlib.import_module(ENGINES[name])
    except ImportError as error:
        raise MissingPackageError(
            f"actor_rollout_ref.rollout.name is {name!r}, but the engine cannot be imported "
            f"({error}); install the missing package or choose another engine"
        ) from error
    engine: Engine = module.create(config)
    return engine

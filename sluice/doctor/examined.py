"""What is examined: this machine, for one run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from sluice.config.key_settings import KeySettings, keys_as_set
from sluice.config.loader import load_config
from sluice.config.memory.model_shape import ModelShape
from sluice.config.memory.shape_reading import find_shape
from sluice.config.run import RunConfig
from sluice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Examined:
    """A machine and a run.

    Attributes:
        config: the run's; all defaults if none was named.
        settings: its keys as the user set them.
        has_run: whether one was named.
        environment: variables of the process that would start it.
        read_shape: reads the model's files, and waits as long as their file system does.
    """

    config: RunConfig
    settings: KeySettings
    has_run: bool
    environment: Mapping[str, str]
    read_shape: Callable[[], ModelShape | None]

    @property
    def shape(self) -> ModelShape | None:
        """The model's, where it is known. Checks ask in their own threads, which have deadlines."""
        return self.read_shape()


def examined_run(
    file: Path | None, overrides: Sequence[str], environment: Mapping[str, str] = os.environ
) -> Examined:
    """This machine, for the run of a file and overrides; without either for no run in particular.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    config = load_config(file, overrides)
    return Examined(
        config,
        KeySettings(config, keys_as_set(file, overrides)),
        has_run=file is not None or bool(overrides),
        environment=dict(environment),
        read_shape=cache(partial(_shape, config.actor_rollout_ref.model.path)),
    )


def _shape(model_path: str) -> ModelShape | None:
    try:
        return find_shape(model_path, None)
    except ConfigError:
        return None  # the check of the model's folder says what is wrong with it

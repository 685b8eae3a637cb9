"""Shapes of published models, from `published.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from sluice.config.memory.shape import ModelShape, shape_of
from sluice.errors import ConfigError

ModelContent = Mapping[str, object]
"""What stands in a config.json."""
_ENCODER = "vision_config"


def published_name(path: str) -> str | None:
    """Return the published model that a path or name ends with; `None`: another one."""
    last = path.rstrip("/").rpartition("/")[2]
    for suffix in ("-Instruct", "-Base", "-Thinking"):
        last = last.removesuffix(suffix)
    return last if last in _models() else None


def published_model(name: str) -> ModelContent:
    """Return what its config.json says of the language model.

    Raises:
        ConfigError: no such model is known; names those that are.
    """
    found = published_name(name)
    if found is None:
        raise ConfigError(
            f"model {name!r} is neither a folder with a config.json nor one of "
            f"{', '.join(_models())}; give one of these"
        )
    return {key: value for key, value in _models()[found].items() if key != _ENCODER}


def published_shape(name: str) -> ModelShape:
    """Return the same as a shape."""
    return shape_of(published_model(name))


def published_encoder(name: str) -> ModelContent:
    """Return the `vision_config` of a published model; empty: it reads no images."""
    found: ModelContent = _models().get(published_name(name) or "", {}).get(_ENCODER, {})
    return found


@cache
def _models() -> dict[str, dict[str, Any]]:
    file = resources.files(__package__).joinpath("published.toml")
    content = tomllib.loads(file.read_text(encoding="utf-8"))
    families = content.pop("family")
    return {
        name: {**families[family], **own}
        for family, models in content.items()
        for name, own in models.items()
    }

"""Whether a model reads images, by its `config.json` alone."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sluice.vision.vision_shape import FAMILIES

__all__ = ["reads_images"]


def reads_images(model_path: str | Path) -> bool | None:
    """Whether the model in a folder is of a family whose images this package understands.

    Args:
        model_path: a folder in the form of Hugging Face's.

    Returns:
        ``None`` where no `config.json` can be read: this machine cannot tell, another one may.
    """
    try:
        data = (Path(model_path).expanduser() / "config.json").read_bytes()
        found = msgspec.json.decode(data, type=dict[str, object])
    except (OSError, ValueError, RecursionError):
        return None
    family = found.get("model_type")
    return isinstance(family, str) and family in FAMILIES

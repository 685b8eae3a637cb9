"""Whether a model reads images, by its `config.json` alone."""

from __future__ import annotations

from pathlib import Path

import msgspec

__all__ = ["reads_images"]

_VISION_PARTS = ("vision_config", "visual")


def reads_images(model_path: str | Path) -> bool | None:
    """Whether the model in a folder has a vision part.

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
    return any(isinstance(found.get(part), dict) for part in _VISION_PARTS)

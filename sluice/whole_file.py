"""Write files that others never see half of. Imports nothing of the project."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """Write a file of a folder that is there; others see the former one or this one.

    Raises:
        OSError: the folder is gone or cannot be written, or the disk is full.
    """
    draft = file.with_name(f".{file.name}.{os.getpid()}.partial")
    draft.write_bytes(content)
    draft.replace(file)

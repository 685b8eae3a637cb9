"""Write files that others never see half of, and whole lines. Imports nothing of the project."""

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


def append_lines(path: Path, lines: bytes | bytearray) -> None:
    """Append whole lines to a file, made with its folder if missing.

    If a full disk, a kill or a hand cut the file's last line off, that is ended: it must not join
    the next one.

    Raises:
        OSError: the file cannot be read or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if file.read(1) not in (b"", b"\n"):
            file.write(b"\n")
        file.write(lines)

"""Writes files that nobody but their owner can read, and none over another by accident."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from sluice.errors import ConfigError

_OWNER_ONLY, _OWNER_ONLY_FOLDER = 0o600, 0o700


def write_private(folder: Path, files: Mapping[str, bytes], *, replace: bool) -> None:
    """Writes `files` by name into `folder`, which is made if it is missing.

    Raises:
        ConfigError: one of them is there and `replace` is not given, or the folder cannot be
            written; nothing was replaced.
    """
    there = [name for name in files if os.path.lexists(folder / name)]
    if there and not replace:
        raise ConfigError(
            f"{folder} holds {', '.join(there)} already, which a run may use; name another folder "
            "with --out, or replace all of them with --force"
        )
    try:
        folder.mkdir(mode=_OWNER_ONLY_FOLDER, parents=True, exist_ok=True)
        for name, content in files.items():
            _write(folder / f"{name}.{os.getpid()}.partial", content)
        for name in files:
            (folder / f"{name}.{os.getpid()}.partial").replace(folder / name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; name another folder") from error


def _write(path: Path, content: bytes) -> None:
    # A process with this number that was killed may have left one, and others could read it.
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with os.fdopen(os.open(path, flags, _OWNER_ONLY), "wb") as file:
        file.write(content)

"""The stamp that says a prepared directory is complete, and for which settings.

Written last and renamed into place, so a directory whose making was interrupted has none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STAMP_NAME = "prepared.json"


def settings_digest(settings: dict[str, Any]) -> str:
    """SHA-256 over the settings as canonical JSON."""
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def write_stamp(
    directory: Path, settings: dict[str, Any], files: Iterable[Path], facts: dict[str, Any]
) -> None:
    """Record the settings, a digest of each file and the facts found while making them."""
    stamp = {
        "settings_digest": settings_digest(settings),
        "settings": settings,
        "files": {str(path.relative_to(directory)): _file_digest(path) for path in files},
        "facts": facts,
    }
    draft = directory / f"{STAMP_NAME}.draft"
    draft.write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, directory / STAMP_NAME)


def read_facts(directory: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The recorded facts, or ``None`` unless every file is there, unchanged, of these settings."""
    try:
        stamp = json.loads((directory / STAMP_NAME).read_text(encoding="utf-8"))
        if stamp["settings_digest"] != settings_digest(settings):
            return None
        for name, digest in stamp["files"].items():
            if _file_digest(directory / name) != digest:
                return None
        facts: dict[str, Any] = stamp["facts"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        # A stamp that cannot be read is no stamp: the files are made anew.
        return None
    return facts


def remove_stamp(directory: Path) -> None:
    """Take the stamp away before any stamped file changes."""
    (directory / STAMP_NAME).unlink(missing_ok=True)


def _file_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

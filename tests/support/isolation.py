"""Whether this machine can isolate a launch script, and a machine that cannot."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sluice.errors import ConfigError
from sluice.launch.script import record


def _no_isolation() -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as script:
        try:
            record(Path(script.name), ())
        except ConfigError as error:
            return str(error)
    return ""


NO_ISOLATION = _no_isolation()
"""Why this machine cannot isolate a script, or nothing."""

isolated = pytest.mark.skipif(bool(NO_ISOLATION), reason=NO_ISOLATION)


def forbid_isolation(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Put an `unshare` that is refused first on the PATH, in a new folder."""
    folder.mkdir()
    unshare = folder / "unshare"
    unshare.write_text("#!/bin/sh\necho unshare failed: Not permitted >&2\nexit 1\n")
    unshare.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder.absolute()}:{os.environ['PATH']}")

"""The browser: a Chromium of this machine, or the reason why there is none."""

from __future__ import annotations

import os
import shutil

from tools.commands import NoProgramError, ensure_programs

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str:
    """Return the path of one; install Debian's package only if SLUICE_INSTALL_CHROMIUM=1.

    Raises:
        NoProgramError: there is none.
    """
    if (path := _present()) is None:
        ensure_programs(("chromium",), ("chromium",), "SLUICE_INSTALL_CHROMIUM")
        path = _present()
    if path is None:
        raise NoProgramError("no Chromium was found")
    return path


def launch_arguments() -> list[str]:
    """Return what Chromium needs in containers: as root no sandbox, and a small /dev/shm."""
    return ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]


def _present() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)

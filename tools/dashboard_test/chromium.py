"""The browser: a Chromium of this machine, or the reason why there is none."""

from __future__ import annotations

import os
import shutil
import subprocess

INSTALL_VARIABLE = "SLUICE_INSTALL_CHROMIUM"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_INSTALL_WITHIN_S = 900


class NoBrowserError(Exception):
    """Why there is no browser here."""


def chromium() -> str:
    """The path of one; installs Debian's package only if `SLUICE_INSTALL_CHROMIUM=1` says so.

    Raises:
        NoBrowserError: there is none.
    """
    if (path := _present()) is not None:
        return path
    if os.environ.get(INSTALL_VARIABLE) == "1":
        _install()
        if (path := _present()) is not None:
            return path
    raise NoBrowserError(
        "no Chromium was found; install one (Debian: apt-get install chromium), or set "
        f"{INSTALL_VARIABLE}=1 to have it installed"
    )


def launch_arguments() -> list[str]:
    """What Chromium needs in containers: as root it has no sandbox, and /dev/shm may be small."""
    return ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]


def _present() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def _install() -> None:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise NoBrowserError(f"{INSTALL_VARIABLE}=1 needs apt-get and root")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        done = subprocess.run(
            ["apt-get", "-qq", *command],
            env=environment,
            timeout=_INSTALL_WITHIN_S,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise NoBrowserError(f"apt-get {command[0]} failed: {done.stderr[-300:]}")

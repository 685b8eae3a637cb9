"""Prometheus and promtool: those that are here, or Debian's, where the caller says so."""

from __future__ import annotations

import os
import shutil

from tools.compose_test.commands import CommandError, output_of

__all__ = ["INSTALL_VARIABLE", "SKIP_VARIABLE", "NoPrometheusError", "find_programs"]

INSTALL_VARIABLE, SKIP_VARIABLE = "SLUICE_INSTALL_PROMETHEUS", "SLUICE_SKIP_WITHOUT_PROMETHEUS"
_PROGRAMS, _PACKAGE = ("prometheus", "promtool"), "prometheus"
_INSTALL_WITHIN_S = 600.0


class NoPrometheusError(Exception):
    """Why there is none here."""


def find_programs() -> str:
    """Makes sure that both can be run; the version.

    Raises:
        NoPrometheusError: they are not there; the message says what to do.
    """
    if _missing() and os.environ.get(INSTALL_VARIABLE) == "1":
        _install()
    if missing := _missing():
        raise NoPrometheusError(
            f"{', '.join(missing)}: not found; install Prometheus, or on Debian set "
            f"{INSTALL_VARIABLE}=1 to have its package {_PACKAGE} installed"
        )
    return output_of("promtool", "--version", timeout_s=20).splitlines()[0]


def _missing() -> list[str]:
    return [name for name in _PROGRAMS if shutil.which(name) is None]


def _install() -> None:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise NoPrometheusError(f"{INSTALL_VARIABLE}=1 needs apt-get and root")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    install = ("apt-get", "-qq", "install", "-y", "--no-install-recommends", _PACKAGE)
    try:
        output_of("apt-get", "-qq", "update", timeout_s=_INSTALL_WITHIN_S, environment=quiet)
        output_of(*install, timeout_s=_INSTALL_WITHIN_S, environment=quiet)
    except CommandError as error:
        raise NoPrometheusError(f"Prometheus could not be installed: {error}") from error

"""DAPO and GRPO training of language models: what the three services and their users share."""

from importlib.metadata import PackageNotFoundError, version

from sluice.errors import EnvironmentUnavailable

__all__ = ["UNINSTALLED", "EnvironmentUnavailable", "own_version"]

UNINSTALLED = "uninstalled"


def own_version() -> str:
    """Return the installed version; `UNINSTALLED` where the source tree is run as it is."""
    try:
        return version("sluice")
    except PackageNotFoundError:
        return UNINSTALLED

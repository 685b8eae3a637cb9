"""DAPO and GRPO training of language models: what the three services and their users share."""

from importlib.metadata import PackageNotFoundError, version

from sluice.errors import EnvironmentUnavailable

__all__ = ["UNINSTALLED", "EnvironmentUnavailable", "installed_version", "own_version"]

UNINSTALLED = "uninstalled"


def installed_version(distribution: str) -> str | None:
    """Return the version in this environment, if there is one; import nothing."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def own_version() -> str:
    """Return the installed version; `UNINSTALLED` where the source tree is run as it is."""
    return installed_version("sluice") or UNINSTALLED

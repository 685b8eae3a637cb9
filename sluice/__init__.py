"""DAPO and GRPO training of language models: what the three services and their users share."""

import os

from sluice.errors import EnvironmentUnavailable

__all__ = [
    "UNINSTALLED",
    "EnvironmentUnavailable",
    "installed_version",
    "own_version",
    "version_difference",
]

UNINSTALLED = "uninstalled"

# gRPC's handlers of fork() crash children of a process that has calls under way, before they become
# the program that they start: sandboxes of another user. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def installed_version(distribution: str) -> str | None:
    """Return the version in this environment, if there is one; import nothing of it."""
    # Most processes ask for none; it loads what reads mails and archives.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def own_version() -> str:
    """Return the installed version; `UNINSTALLED` where the source tree is run as it is."""
    return installed_version("sluice") or UNINSTALLED


def version_difference(peer: str) -> str:
    """Return words for the log if a peer has another version of sluice; empty if not, or if one of
    the two is not known."""
    version = own_version()
    if peer in ("", version) or UNINSTALLED in (peer, version):
        return ""
    return f"runs sluice {peer}, and this service {version}; run the same version everywhere"

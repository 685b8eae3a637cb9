"""Versions of sluice and of what it runs on: for `sluice --version`, summaries and reports."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sluice import installed_version, own_version
from sluice.config.schema.actor_rollout_ref import VENDOR_ENGINES
from sluice.report.summary import ended_summary

_PACKAGES = ("torch", "transformers", *VENDOR_ENGINES, "ray", "grpcio", "typer")
_GIT_S = 5.0


def software_versions() -> dict[str, str]:
    """Return versions by name; an absent package is left out, and so is an unknown commit."""
    found = {"sluice": own_version()}
    commit = _commit()
    if commit:
        found["commit"] = commit
    found["python"] = f"{platform.python_version()} ({platform.platform()})"
    versions = {name: installed_version(name) for name in _PACKAGES}
    return found | {name: one for name, one in versions.items() if one is not None}


def versions_of_run(run_dir: Path) -> Mapping[str, str]:
    """Return the versions that a run noted at its end; those of this process before."""
    noted = ended_summary(run_dir).get("versions")
    if not isinstance(noted, dict):
        return software_versions()
    return {str(name): str(value) for name, value in noted.items()}


@cache
def _commit() -> str:
    """Return the commit of the checkout that holds this file; empty: it is in none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_S, check=False
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""

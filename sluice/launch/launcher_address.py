"""Where the launcher of a run listens, as its folder says."""

from __future__ import annotations

import json
from pathlib import Path

from sluice.errors import NotReadyError

LAUNCHER_NAME = "launcher.json"


def launcher_address(run_dir: Path) -> str:
    """host:port of the launcher that runs in `run_dir`; one that was killed may have left it.

    Raises:
        NotReadyError: none does.
    """
    file = run_dir / LAUNCHER_NAME
    try:
        address = json.loads(file.read_text(encoding="utf-8"))["address"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotReadyError(
            f"run: {run_dir} has no {LAUNCHER_NAME}, so no launcher runs there; give the folder "
            "(sluice.run_dir) of a run that `sluice up` has started and that goes on. Replicas "
            "that another launcher has started (containers, Kubernetes) are scaled there"
        ) from error
    return str(address)

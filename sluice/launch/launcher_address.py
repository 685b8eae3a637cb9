"""Where the launcher of a run listens and what it wants to hear, as the run's folder says."""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sluice.errors import NotReadyError
from sluice.rpc.credentials import Credentials
from sluice.security.private_files import write_private
from sluice.security.token_file import GivenToken

LAUNCHER_NAME = "launcher.json"
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class LauncherAddress:
    """host:port of a launcher, and the secret that it accepts alone and that admits to nothing
    else: whoever took the port of a launcher that was killed learns no token of the run."""

    address: str
    secret: str = field(repr=False)

    @property
    def credentials(self) -> Credentials:
        """What it asks for, and is shown."""
        return Credentials(tokens=GivenToken(self.secret, LAUNCHER_NAME))


def new_secret() -> str:
    """A secret for one launcher."""
    return secrets.token_urlsafe(_SECRET_BYTES)


def write_launcher(run_dir: Path, launcher: LauncherAddress) -> None:
    """Notes a launcher of this process in the run's folder, readable by its owner alone."""
    content = {**asdict(launcher), "pid": os.getpid()}
    write_private(run_dir, {LAUNCHER_NAME: json.dumps(content).encode()}, replace=True)


def launcher_of(run_dir: Path) -> LauncherAddress:
    """The launcher that runs in `run_dir`; one that was killed may have left it.

    Raises:
        NotReadyError: none does, or its file is none that this user can use.
    """
    file = run_dir / LAUNCHER_NAME
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return LauncherAddress(str(found["address"]), str(found["secret"]))
    except PermissionError as error:
        raise NotReadyError(
            f"run: {file} belongs to another user; scale the run as the user that started it"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotReadyError(
            f"run: {run_dir} has no {LAUNCHER_NAME}, so no launcher runs there; give the folder "
            "(sluice.run_dir) of a run that `sluice up` has started and that goes on. Replicas "
            "that another launcher has started (containers, Kubernetes) are scaled there"
        ) from error

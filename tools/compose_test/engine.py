"""A Docker engine: the one that runs, or one that is started for the time of a test.

It installs packages only if the caller allows it, since that changes the machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.commands import NoProgramError, ensure_programs, started, succeeds
from tools.phases import PhaseError, until

_PACKAGES = ("docker.io", "docker-compose", "iptables")
_ANSWER_WITHIN_S, _END_WITHIN_S = 60.0, 30.0
_NOISE = ("level=info", "level=debug")


@contextmanager
def engine(log: Path) -> Iterator[str]:
    """Yield which engine there is while the block runs; end one that was started here.

    Args:
        log: of an engine that is started here.

    Raises:
        NoProgramError: there is none, and none can be started; the message has the reason.
    """
    if _answers():
        yield "the one that runs here"
        return
    try:
        ensure_programs(("dockerd",), _PACKAGES, "SLUICE_INSTALL_DOCKER")
    except NoProgramError as error:
        raise NoProgramError(f"no Docker engine answers; {error}") from error
    if os.geteuid() != 0:
        raise NoProgramError("no Docker engine answers, and only root can start one; start it")
    with started(("dockerd",), log, ends_within_s=_END_WITHIN_S) as process:
        try:
            until(
                "an answer of dockerd",
                lambda: process.poll() is not None or _answers(),
                timeout_s=_ANSWER_WITHIN_S,
            )
        except PhaseError as error:
            raise NoProgramError(f"{error}{_causes(log)}") from error
        if (code := process.poll()) is not None:
            raise NoProgramError(f"dockerd ended with code {code} at its start{_causes(log)}")
        yield f"started here, pid {process.pid}"


def _causes(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    causes = [line for line in lines if not any(word in line for word in _NOISE)]
    return "".join(f"\n  {line}" for line in causes[-8:])


def _answers() -> bool:
    return succeeds("docker", "info", timeout_s=20)

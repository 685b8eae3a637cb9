"""A Docker engine: the one that runs, or one that is started for the time of a test.

Packages are installed only where the caller says so, since that changes the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.commands import NoProgramError, ensure_programs, succeeds

_PACKAGES = ("docker.io", "docker-compose", "iptables")
_ANSWER_WITHIN_S, _END_WITHIN_S = 60.0, 30.0
_NOISE = ("level=info", "level=debug")


class NoEngineError(Exception):
    """Why there is no engine here."""


@contextmanager
def engine(log: Path) -> Iterator[str]:
    """Yield which engine there is while the block runs; end one that was started here.

    Args:
        log: of an engine that is started here.

    Raises:
        NoEngineError: there is none, and none can be started; the message says why.
    """
    if _answers():
        yield "the one that runs here"
        return
    try:
        ensure_programs(("dockerd",), _PACKAGES, "SLUICE_INSTALL_DOCKER")
    except NoProgramError as error:
        raise NoEngineError(f"no Docker engine answers; {error}") from error
    if os.geteuid() != 0:
        raise NoEngineError("no Docker engine answers, and only root can start one; start it")
    with log.open("wb") as output:
        started = subprocess.Popen(
            ["dockerd"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _await_answer(started, log)
        yield f"started here, pid {started.pid}"
    finally:
        _end(started)


def _answers() -> bool:
    return succeeds("docker", "info", timeout_s=20)


def _await_answer(started: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + _ANSWER_WITHIN_S
    while time.monotonic() < until_s:
        if started.poll() is not None:
            code = started.returncode
            raise NoEngineError(f"dockerd ended with code {code} at its start{_causes(log)}")
        if _answers():
            return
        time.sleep(0.2)
    raise NoEngineError(f"dockerd did not answer within {_ANSWER_WITHIN_S:g} s{_causes(log)}")


def _causes(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    reported = [line for line in lines if not any(word in line for word in _NOISE)]
    return "".join(f"\n  {line}" for line in reported[-8:])


def _end(started: subprocess.Popen[bytes]) -> None:
    started.terminate()
    try:
        started.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"dockerd ({started.pid}) does not end; killed\n")
        started.kill()
        started.wait()

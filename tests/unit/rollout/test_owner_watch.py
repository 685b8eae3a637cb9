"""Processes of an engine end with the process that started them; real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.rollout.engines.owner_watch import OWNER_VARIABLE, own_processes

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system watches no pid")

_ROOT = Path(__file__).parents[3]
_WAIT_S = 60
_ENGINE = "import services.rollout; print('up', flush=True); input()"


def _start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=_ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _owner() -> subprocess.Popen[str]:
    return _start("input()")


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_process_that_imports_the_service_ends_with_its_killed_owner() -> None:
    with _owner() as owner, _start(_ENGINE, **{OWNER_VARIABLE: str(owner.pid)}) as engine:
        assert _first_line(engine) == "up\n"
        owner.kill()
        assert engine.wait(_WAIT_S) == -signal.SIGKILL


def test_a_process_whose_owner_is_gone_does_not_begin() -> None:
    with _owner() as owner:
        owner.kill()
    with _start(_ENGINE, **{OWNER_VARIABLE: str(owner.pid)}) as engine:
        assert _first_line(engine) == ""
        assert engine.wait(_WAIT_S) == -signal.SIGKILL


def test_the_owner_and_processes_without_one_watch_nobody() -> None:
    environment: dict[str, str] = {}
    own_processes(environment)
    assert environment == {OWNER_VARIABLE: str(os.getpid())}
    code = f"import os; os.environ[{OWNER_VARIABLE!r}] = str(os.getpid()); {_ENGINE}"
    for watcher in (_start(code), _start(f"import os; os.environ.clear(); {_ENGINE}")):
        with watcher:
            assert _first_line(watcher) == "up\n"
            _, _ = watcher.communicate("\n", timeout=_WAIT_S)
            assert watcher.returncode == 0

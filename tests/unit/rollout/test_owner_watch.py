"""Processes of an engine end with the process that started them; real ones."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.rollout.engines.vendor_engines.owner_watch import (
    OWNER_VARIABLE,
    end_children_with_owner,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system watches no pid")

_ROOT = Path(__file__).parents[3]
_WAIT_S = 60
_ENGINE = "import services.rollout; print('up', flush=True); input()"
_WORKER = """
import threading, services.rollout
from services.rollout.engines.vendor_engines.owner_watch import end_with_owner
end_with_owner(with_parent=True)
print([thread.name for thread in threading.enumerate()].count("owner-watch"), flush=True)
input()
"""
_PARENT_OF_WORKER = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {_WORKER!r}])
input()
"""


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
    end_children_with_owner(environment)
    assert environment == {OWNER_VARIABLE: str(os.getpid())}
    code = f"import os; os.environ[{OWNER_VARIABLE!r}] = str(os.getpid()); {_ENGINE}"
    for watcher in (_start(code), _start(f"import os; os.environ.clear(); {_ENGINE}")):
        with watcher:
            assert _first_line(watcher) == "up\n"
            _, _ = watcher.communicate("\n", timeout=_WAIT_S)
            assert watcher.returncode == 0


def test_a_workers_parent_that_watches_nobody_ends_with_the_killed_owner_too() -> None:
    with (
        _owner() as owner,
        _start(_PARENT_OF_WORKER, **{OWNER_VARIABLE: str(owner.pid)}) as parent,
    ):
        assert _first_line(parent) == "1\n", "a second watch may end the process before the parent"
        owner.kill()
        assert parent.wait(_WAIT_S) == -signal.SIGKILL
        assert parent.communicate(timeout=_WAIT_S)[0] == "", "the worker holds the pipe no more"


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_where_the_system_refuses_to_watch_the_service_is_imported_all_the_same(
    refusal: int,
) -> None:
    code = f"""
import os
def refuse(pid): raise OSError({refusal}, "refused")
os.pidfd_open = refuse
{_ENGINE}
"""
    with _owner() as owner, _start(code, **{OWNER_VARIABLE: str(owner.pid)}) as engine:
        assert _first_line(engine) == "up\n"
        engine.communicate("\n", timeout=_WAIT_S)
        assert engine.returncode == 0
        owner.communicate("\n", timeout=_WAIT_S)

"""End a vendor's processes with the process that started them, even if that was killed.

vLLM's processes outlive a killed owner and keep the device; SGLang's ask the system to end them,
but only after seconds of imports. They inherit the owner's id in a variable, and watch it from the
import of `services.rollout` on. A process that a replica spawns imports that first, long before its
engine has started. `sluice.concurrency.process.end_with_supervisor` does not suffice: the kernel
then watches the parent alone, and the owner of a vLLM worker is its grandparent.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import MutableMapping

OWNER_VARIABLE = "SLUICE_ENGINE_OWNER_PID"

# Ids of processes: a forked process inherits these sets, but not the thread that watches.
_WATCHING: set[int] = set()
_TAKES_PARENT: set[int] = set()


def end_children_with_owner(environment: MutableMapping[str, str]) -> None:
    """Make the processes that this one starts from here on end with it."""
    environment[OWNER_VARIABLE] = str(os.getpid())


def end_with_owner(*, with_parent: bool = False) -> None:
    """Kill this process when its owner is gone.

    Do nothing without an owner, and where the system cannot watch processes. A process has one
    watch: a repeated call can only add `with_parent` to it.

    Args:
        with_parent: kill a process between this one and its owner first.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, os.getpid()))
    if owner == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    if with_parent:
        _TAKES_PARENT.add(os.getpid())
    if os.getpid() not in _WATCHING:
        _begin_watch(owner)


def _begin_watch(owner: int) -> None:
    parent = os.getppid()  # read while the owner lives: later it may be one that adopts orphans
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # a kernel or a sandbox without the call, or no descriptor left
        return
    _WATCHING.add(os.getpid())

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        takes_parent = os.getpid() in _TAKES_PARENT and parent not in (owner, 1)
        if takes_parent and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="owner-watch", daemon=True).start()

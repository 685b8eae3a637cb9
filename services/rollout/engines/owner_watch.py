"""The vendor's processes of an engine end with the process that started them, however that ended.

vLLM's outlive a killed owner for good and go on holding the device. They inherit the owner's id in
a variable, and watch it from the import of `services.rollout` on, which is the first thing that a
process spawned by a replica imports: long before its engine has started.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import MutableMapping

__all__ = ["OWNER_VARIABLE", "end_with_owner", "own_processes"]

OWNER_VARIABLE = "SLUICE_ENGINE_OWNER_PID"


def own_processes(environment: MutableMapping[str, str]) -> None:
    """Has the processes that this one starts from here on end with it."""
    environment[OWNER_VARIABLE] = str(os.getpid())


def end_with_owner(*, with_parent: bool = False) -> None:
    """Kills this process when its owner is gone.

    Does nothing without an owner, and where the system cannot watch processes. A repetition is
    harmless.

    Args:
        with_parent: kill a process between this one and its owner, too.
    """
    owner = int(os.environ.get(OWNER_VARIABLE, os.getpid()))
    if owner == os.getpid() or not hasattr(os, "pidfd_open"):
        return
    try:
        watched = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    parent = os.getppid()

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        if with_parent and parent not in (owner, 1) and os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="owner-watch", daemon=True).start()

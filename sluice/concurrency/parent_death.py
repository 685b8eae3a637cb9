"""Makes a supervised process end with its supervisor, however that one ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SUPERVISOR_VARIABLE = "SLUICE_SUPERVISOR_PID"
_PR_SET_PDEATHSIG = 1


def end_with_supervisor() -> None:
    """Asks the kernel for SIGKILL when the parent dies, if the parent said it supervises us.

    Linux only; elsewhere, and without a supervisor, nothing happens.
    """
    supervisor = os.environ.get(SUPERVISOR_VARIABLE)
    if supervisor is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(supervisor):  # it died before the kernel knew
        sys.exit("the supervisor is gone")

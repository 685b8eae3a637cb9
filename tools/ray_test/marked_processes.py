"""The processes of a test, found by a variable that they inherit, or by files that they hold.

Some of Ray's set a title of their own, which overwrites the environment that others see.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

MARK_VARIABLE = "SLUICE_RAY_TEST"
_POLL_S = 0.2


class MarkedProcesses:
    """Those whose environment holds one mark, or which have opened files of one folder.

    Args:
        mark: unique on this machine.
        folder: absolute; nobody else opens files there.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        self.environment = {MARK_VARIABLE: mark}
        self._needle, self._folder = f"{MARK_VARIABLE}={mark}".encode(), f"{folder}/"

    def running(self) -> dict[int, str]:
        """Return command lines by process id, without this process; zombies have ended."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal() or int(folder.name) == os.getpid():
                continue
            try:
                if self._is_mine(folder):
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = command.decode(errors="replace").strip()
            except OSError:  # it has just ended, or is a zombie
                continue
        return found

    def _is_mine(self, process: Path) -> bool:
        if self._needle in (process / "environ").read_bytes().split(b"\0"):
            return True
        links = (process / "cwd", *(process / "fd").iterdir())
        return any(_target(link).startswith(self._folder) for link in links)

    def end(self, number: signal.Signals, within_s: float) -> dict[int, str]:
        """Send a signal to all of them; those that are left after so many seconds."""
        for pid in self.running():
            send(pid, number)
        return self.left_after(within_s, lambda _: True)

    def left_after(self, seconds: float, belongs: Callable[[str], bool]) -> dict[int, str]:
        """Return matching processes, once there are none or the time is over."""
        until_s = time.monotonic() + seconds
        while True:
            left = {pid: command for pid, command in self.running().items() if belongs(command)}
            if not left or time.monotonic() > until_s:
                return left
            time.sleep(_POLL_S)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # it was closed meanwhile
        return ""


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def parent_of(pid: int) -> int:
    """Return the process that started it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()
    return int(fields[1])

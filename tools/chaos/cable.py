"""A network cable that can be cut and slowed: this machine at one end, a replica at the other.

The replica lives in a network namespace of its own. Both ends are TUN devices, and packets travel
between them through this process, which drops or delays them; so no traffic control is needed.
Needs Linux, /dev/net/tun, `ip` and the right to make devices.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

_TUNSETIFF, _IFF_TUN_NO_PI = 0x400454CA, 0x0001 | 0x1000
_MTU = 16_000
_LONGEST_POLL_S = 0.2


class CableError(Exception):
    """Why this machine has no such cable."""


class Cable:
    """Carries packets in a thread. Close it, or use it as a context manager.

    Attributes:
        near: address of this machine on the cable.
        far: the address in the namespace.
        namespace: its name.
        is_cut: packets are dropped while it is set.
        delay_s: how long each packet travels.
    """

    def __init__(self) -> None:
        number = os.getpid() % 60_000
        # Runs that start together have near ids, and need other addresses.
        block = f"10.{198 + number // 250 % 50}.{number % 250}"
        self.near, self.far = f"{block}.1", f"{block}.2"
        self.namespace = f"chaos{number}"
        self.is_cut, self.delay_s = False, 0.0
        self._ends: list[int] = []
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="cable", daemon=True)

    def __enter__(self) -> Self:
        """Set the cable up; raise CableError where the machine does not allow it."""
        if not sys.platform.startswith("linux") or shutil.which("ip") is None:
            raise CableError("there is no `ip` command")
        _ip("netns", "add", self.namespace)
        try:
            self._plug("n", self.near, self.far)
            self._plug("f", self.far, self.near, self.namespace)
            _ip("-n", self.namespace, "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inside(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return the words that run `command` at the far end."""
        return ("ip", "netns", "exec", self.namespace, *command)

    def close(self) -> None:
        """Take everything down; devices end with their descriptors."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for end in self._ends:
            os.close(end)
        self._ends.clear()
        subprocess.run(("ip", "netns", "del", self.namespace), check=False, capture_output=True)

    def _plug(self, suffix: str, own: str, peer: str, namespace: str | None = None) -> None:
        name = f"{self.namespace}{suffix}"
        self._ends.append(_open_tun(name))
        where: tuple[str, ...] = ()
        if namespace is not None:
            _ip("link", "set", name, "netns", namespace)
            where = ("-n", namespace)
        _ip(*where, "addr", "add", own, "peer", peer, "dev", name)
        _ip(*where, "link", "set", name, "mtu", str(_MTU), "up")

    def _carry(self) -> None:
        """Move packets until the cable is closed; of two with one time the first goes first."""
        near, far = self._ends
        other, number = {near: far, far: near}, 0
        travelling: list[tuple[float, int, int, bytes]] = []
        while not self._is_closed.is_set():
            now_s = time.monotonic()
            wait_s = (
                min(travelling[0][0] - now_s, _LONGEST_POLL_S) if travelling else _LONGEST_POLL_S
            )
            for end in select.select([near, far], [], [], max(0.0, wait_s))[0]:
                packet = os.read(end, _MTU + 100)
                if not self.is_cut:
                    number += 1
                    arrives_s = time.monotonic() + self.delay_s
                    heapq.heappush(travelling, (arrives_s, number, other[end], packet))
            now_s = time.monotonic()
            while travelling and travelling[0][0] <= now_s:
                _, _, end, packet = heapq.heappop(travelling)
                _write(end, packet)


@contextmanager
def cable() -> Iterator[Cable | str]:
    """Return a cable, or why there can be none here."""
    try:
        plugged = Cable().__enter__()
    except CableError as error:
        yield str(error)
        return
    with closing(plugged):
        yield plugged


def _open_tun(name: str) -> int:
    try:
        device = os.open(Path("/dev/net/tun"), os.O_RDWR)
    except OSError as error:
        raise CableError(f"/dev/net/tun: {error.strerror}") from error
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN_NO_PI))
    except OSError as error:
        os.close(device)
        raise CableError(f"no TUN device can be made: {error.strerror}") from error
    return device


def _write(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError:  # a device that is down, a packet that is none: as on any network
        return


def _ip(*arguments: str) -> None:
    done = subprocess.run(("ip", *arguments), check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise CableError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

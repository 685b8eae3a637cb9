"""Ports of this machine that are free, and stay so until a service has started and takes them.

A port that the system chooses goes back to it meanwhile, seconds in which it may give it to any
outgoing connection. So ports come from below the range that it chooses from, and from above those
that Ray's workers take by default, but not from Kubernetes' range for node ports.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

from sluice.errors import ConfigError
from sluice.rpc.bound_socket import bound_socket

_LOWEST, _BEHIND_HIGHEST = 20_000, 30_000
_TRIES = 32
_SYSTEMS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Not the interpreter's own generator, which runs seed to be repeatable: two would choose alike.
_random = random.SystemRandom()


def free_ports(hosts: list[str]) -> list[int]:
    """One free port per host, which differ: all are held until all are known.

    Args:
        hosts: addresses of this machine.

    Raises:
        ConfigError: one of them is none.
    """
    with ExitStack() as held:
        return [held.enter_context(_listening(host)).getsockname()[1] for host in hosts]


def _listening(host: str) -> socket.socket:
    choice = range(_LOWEST, min(_BEHIND_HIGHEST, _first_of_system()))
    for port in _random.sample(choice, min(_TRIES, len(choice))):
        try:
            return _listening_at(host, port)
        except (ConfigError, OSError):
            continue  # taken; an address that is not this machine's is found out below
    return _listening_at(host, 0)


def _listening_at(host: str, port: int) -> socket.socket:
    server = bound_socket(host, port)
    try:
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def _first_of_system() -> int:
    """The lowest port that the system chooses by itself."""
    try:
        return int(_SYSTEMS_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return _BEHIND_HIGHEST

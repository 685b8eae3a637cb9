"""Ports of this machine for services that start later.

A port that the system chooses goes back to it until the service has started, seconds in which it
may give it to any outgoing connection. So ports come from below its ephemeral range, and from above
those that Ray's workers take by default, but not from Kubernetes' range for node ports. Somebody
else who wants that very port may still take it first; only where none is left there, or the
ephemeral range begins as low, does the system choose.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Container
from contextlib import ExitStack
from pathlib import Path

from sluice.errors import ConfigError
from sluice.rpc.bound_socket import bound_socket, check_bindable

_LOWEST, _BEHIND_HIGHEST = 20_000, 30_000
_TRIES = 32
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Not the interpreter's own generator, which runs seed to be repeatable: two would choose alike.
_random = random.SystemRandom()


def free_ports(hosts: list[str], besides: Container[int] = ()) -> list[int]:
    """One free port per host, which differ: all are held until all are known.

    Args:
        hosts: addresses of this machine.
        besides: ports that others are going to take.

    Raises:
        ConfigError: one of them is none.
    """
    for host in dict.fromkeys(hosts):
        check_bindable(host, 0)
    with ExitStack() as held:
        sockets = [held.enter_context(_listening(host, besides)) for host in hosts]
        return [listening.getsockname()[1] for listening in sockets]


def _listening(host: str, besides: Container[int]) -> socket.socket:
    choice = range(_LOWEST, min(_BEHIND_HIGHEST, _first_ephemeral()))
    for port in _random.sample(choice, min(_TRIES, len(choice))):
        if port in besides:
            continue
        try:
            return _listening_at(host, port)
        except (ConfigError, OSError):
            continue  # taken
    return _listening_at(host, 0)


def _listening_at(host: str, port: int) -> socket.socket:
    server = bound_socket(host, port)
    try:
        server.listen()
    except OSError:
        server.close()
        raise
    return server


def _first_ephemeral() -> int:
    """The lowest port that the system chooses by itself."""
    try:
        return int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return _BEHIND_HIGHEST

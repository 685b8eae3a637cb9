"""Print the network by which a machine is a node: `node_network.py HEAD [INTERFACE [NODES]]`.

Prints three words: the head's address, this machine's address on the network that leads there (or
on INTERFACE), and that network's interface. The machine is the head if the two addresses are one.
Linux; needs no package but sluice.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import sys

from sluice.errors import SluiceError
from sluice.launch.service_spec import own_address

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
_LOOPBACK = "127."


def address_of(interface: str) -> str | None:
    """Return an interface's IPv4 address; None if it has none."""
    request = array.array("B", struct.pack("256s", interface.encode()[:_NAME_BYTES]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request, True)
        except OSError:
            return None
    return socket.inet_ntoa(request[20:24].tobytes())


def interface_of(address: str) -> str:
    """Return the interface with that address; loopback has all of 127.0.0.0/8.

    Raises:
        SystemExit: none has it.
    """
    addresses = {name: address_of(name) for _, name in socket.if_nameindex()}
    for name, found in addresses.items():
        if found == address or (address.startswith(_LOOPBACK) and found == "127.0.0.1"):
            return name
    sys.exit(
        f"no interface has the address {address}; give INTERFACE, one of {', '.join(addresses)}"
    )


def network(head: str, interface: str, num_nodes: int) -> tuple[str, str]:
    """Return the addresses of the head and of this machine; the same if this machine is the head.

    The head's own name may lead to several addresses there (Debian gives it 127.0.1.1). Only those
    that others reach make a cluster of several machines.

    Raises:
        SystemExit: the head has no such address, or INTERFACE none at all.
        OSError, SluiceError: nobody knows the head, or no network leads there.
    """
    chosen = address_of(interface) if interface else None
    if interface and chosen is None:
        sys.exit(f"INTERFACE={interface}: it has no IPv4 address")
    found = socket.getaddrinfo(head, None, socket.AF_INET, socket.SOCK_STREAM)
    addresses = [str(one[4][0]) for one in found]
    reached = [one for one in addresses if not one.startswith(_LOOPBACK)]
    if not reached:
        if num_nodes > 1:
            sys.exit(
                f"{head}: it is {addresses[0]} here, a loopback address, at which none of NODES="
                f"{num_nodes} machines finds the others; give HEAD by its address on their network "
                "(ip -4 address), or correct /etc/hosts"
            )
        own = chosen or own_address(addresses[0])
        return own, own
    # The way to an address of this machine begins at that address.
    mine = next((one for one in reached if own_address(one) == one), None)
    if mine is not None:
        return mine, mine
    return reached[0], chosen or own_address(reached[0])


def main(head: str, interface: str = "", num_nodes: str = "1") -> None:
    """Print the three words."""
    try:
        head_address, own = network(head, interface, int(num_nodes))
    except (OSError, SluiceError) as error:
        sys.exit(f"{head}: {error}")
    sys.stdout.write(f"{head_address} {own} {interface or interface_of(own)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

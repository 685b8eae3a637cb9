"""By which network a machine is a node: `node_network.py HEAD [INTERFACE]`.

Prints three words: the head's address, this machine's address on the network that leads there (or
on INTERFACE), and that network's interface. Linux; needs no package but sluice.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import sys

from sluice.errors import SluiceError
from sluice.launch.own_address import own_address

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


def address_of(interface: str) -> str | None:
    """An interface's IPv4 address; None if it has none."""
    request = array.array("B", struct.pack("256s", interface.encode()[:_NAME_BYTES]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request, True)
        except OSError:
            return None
    return socket.inet_ntoa(request[20:24].tobytes())


def interface_of(address: str) -> str:
    """The interface with that address; loopback has all of 127.0.0.0/8.

    Raises:
        SystemExit: none has it.
    """
    addresses = {name: address_of(name) for _, name in socket.if_nameindex()}
    for name, found in addresses.items():
        if found == address or (address.startswith("127.") and found == "127.0.0.1"):
            return name
    sys.exit(
        f"no interface has the address {address}; give INTERFACE, one of {', '.join(addresses)}"
    )


def main(head: str, interface: str = "") -> None:
    """Prints the three words."""
    try:
        found = socket.getaddrinfo(head, None, socket.AF_INET, socket.SOCK_STREAM)
        head_address = str(found[0][4][0])
        own = address_of(interface) if interface else own_address(head_address)
    except (OSError, SluiceError) as error:
        sys.exit(f"{head}: {error}")
    if own is None:
        sys.exit(f"INTERFACE={interface}: it has no IPv4 address")
    sys.stdout.write(f"{head_address} {own} {interface or interface_of(own)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

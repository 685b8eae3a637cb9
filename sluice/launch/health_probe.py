"""Ask a service of this host for its health: `python -m sluice.launch.health_probe KIND`.

Containers' health checks run it every few seconds, so it loads gRPC and nothing beyond it: the
question is an empty message, and the answer two bytes (grpc.health.v1, field 1: SERVING).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import grpc

from sluice.launch.network_layout import SERVICE_PORTS

_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"
_TIMEOUT_S = 4.0


def health_problem(address: str, timeout_s: float = _TIMEOUT_S) -> str | None:
    """Return why the server at `address` (host:port) is not serving; None if it is."""
    with grpc.insecure_channel(address) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_CHECK)
        try:
            answer = ask(b"", timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    return None if answer == _SERVING else f"{address}: answers, and is not serving"


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the service serves, 1 if not, 2 if there is no such service."""
    ports = {str(kind): place.health_port for kind, place in SERVICE_PORTS.items()}
    port = ports.get(arguments[0]) if len(arguments) == 1 else None
    if port is None:
        sys.stderr.write(
            f"usage: python -m sluice.launch.health_probe {{{'|'.join(ports)}}}\n"
            "example: python -m sluice.launch.health_probe trainer\n"
        )
        return 2
    problem = health_problem(f"127.0.0.1:{port}")
    if problem is not None:
        sys.stderr.write(f"{problem}\n")
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

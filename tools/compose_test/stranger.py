"""Ask a secured service for its status, with more and more of the credentials that it requires.

Runs inside a container of the project's images, which has gRPC: `python - ADDRESS CERTIFICATES`.
Prints a word for each try, on one line: the status code, or `answered`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import grpc

_STATUS = "/sluice.api.reward.v1.RewardService/GetStatus"
_NAME = (("grpc.ssl_target_name_override", "sluice"),)
_TIMEOUT_S = 10.0


def main(address: str, folder: Path) -> None:
    """Ask plainly; with the authority only; with a certificate; with a certificate and a token."""
    words = [_asked(channel, metadata) for channel, metadata in _tries(address, folder)]
    sys.stdout.write(" ".join(words) + "\n")


def _tries(
    address: str, folder: Path
) -> Iterator[tuple[grpc.Channel, tuple[tuple[str, str], ...]]]:
    authority = (folder / "ca.pem").read_bytes()
    own = (folder / "client.key").read_bytes(), (folder / "client.pem").read_bytes()
    token = (folder / "client.token").read_text(encoding="utf-8").split()[-1]
    yield grpc.insecure_channel(address), ()
    server_only = grpc.ssl_channel_credentials(authority)
    yield grpc.secure_channel(address, server_only, options=_NAME), ()
    mutual = grpc.ssl_channel_credentials(authority, *own)
    yield grpc.secure_channel(address, mutual, options=_NAME), ()
    bearer = (("authorization", f"Bearer {token}"),)
    yield grpc.secure_channel(address, mutual, options=_NAME), bearer


def _asked(channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> str:
    with channel:
        try:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(_STATUS)
            ask(b"", timeout=_TIMEOUT_S, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "answered"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

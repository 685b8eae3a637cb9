"""Certificates and tokens for tests, signed once by two authorities that do not know each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sluice.rpc.credentials import Credentials
from sluice.security.development_ca import LOCAL_NAMES, CertifiedKey, DevelopmentCa
from sluice.security.token_file import Role, Token

SERVICE_TOKEN, CLIENT_TOKEN = "service-token-0123456789", "client-token-0123456789"


@dataclass(frozen=True)
class FixedTokens:
    """A source of tokens that never changes."""

    of: tuple[Token, ...]

    def tokens(self) -> tuple[Token, ...]:
        """All of them."""
        return self.of


ACCEPTED = FixedTokens((Token(Role.SERVICE, SERVICE_TOKEN), Token(Role.CLIENT, CLIENT_TOKEN)))


def bearing(secret: str) -> FixedTokens:
    """What a caller presents."""
    return FixedTokens((Token(Role.CLIENT, secret),))


@cache
def authority(name: str) -> DevelopmentCa:
    """The authority of that name, the same one at each call."""
    return DevelopmentCa(30)


@cache
def service_key(signer: str = "ours", hosts: tuple[str, ...] = LOCAL_NAMES) -> CertifiedKey:
    """A service's certificate."""
    return authority(signer).service(hosts, 30)


@cache
def client_key(signer: str = "ours", days: int = 30) -> CertifiedKey:
    """A client's certificate."""
    return authority(signer).client(days)


def mutual(pair: CertifiedKey | None = None, *, trusts: str = "ours", **more: Any) -> Credentials:
    """Credentials of mTLS; without a pair the process has no certificate."""
    return Credentials(
        authority=authority(trusts).ca.certificate,
        certificate=pair and pair.certificate,
        key=pair and pair.key,
        is_encrypted=True,
        asks_certificate=True,
        **more,
    )


def write_pair(folder: Path, name: str, pair: CertifiedKey) -> tuple[str, str]:
    """Writes ``NAME.pem`` and ``NAME.key``; their paths."""
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    for path, content in zip(paths, (pair.certificate, pair.key), strict=True):
        path.write_bytes(content)
        path.chmod(0o600)
    return str(paths[0]), str(paths[1])


def write_security(folder: Path, hosts: tuple[str, ...] = LOCAL_NAMES) -> dict[str, str]:
    """Files of a secured run and the settings that name them."""
    certificate, key = write_pair(folder, "service", service_key(hosts=hosts))
    ca_file, token_file = folder / "ca.pem", folder / "tokens"
    ca_file.write_bytes(authority("ours").ca.certificate)
    token_file.write_text(f"service {SERVICE_TOKEN}\nclient {CLIENT_TOKEN}\n", encoding="ascii")
    token_file.chmod(0o600)
    return {
        "tls": "mtls",
        "ca_file": str(ca_file),
        "cert_file": certificate,
        "key_file": key,
        "token_file": str(token_file),
    }

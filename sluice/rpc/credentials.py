"""The certificates and tokens of a process: load them, check them, and watch when they end."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import grpc
import msgspec

from sluice.config.addresses import advertised_host, is_loopback
from sluice.config.problems import Problem, raise_problems
from sluice.config.rules.security import (
    TOKEN_KEY,
    client_problems,
    exposed_secrets,
    server_problems,
)
from sluice.config.schema.service import EndpointConfig, SecurityConfig
from sluice.security.certificates import SOON, ends_of_validity
from sluice.security.token_file import GivenToken, TokenFile, TokenSource
from sluice.types import TransferCertificates

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SLUICE_TOKEN"
FILE_VARIABLES = {
    "ca_file": "SLUICE_CA_FILE",
    "cert_file": "SLUICE_CERT_FILE",
    "key_file": "SLUICE_KEY_FILE",
    "token_file": "SLUICE_TOKEN_FILE",
}
"""Variables that name a command's files, in place of the configuration's."""
_SECTION = "sluice.security"


CERTIFICATE_ENDS: dict[str, datetime] = {}
"""When the certificates end that this service loaded at its start, by the field of
`sluice.security` that names the file."""


def _note_certificate_ends(credentials: Credentials) -> None:
    """Fill `CERTIFICATE_ENDS`, and warn of certificates that end soon."""
    # `cert_file` is a chain, so its first end counts. `ca_file` may hold several authorities, and
    # any may be the one in use, so its last end counts.
    ends = (
        ("cert_file", _end_of_validity(credentials.certificate, min)),
        ("ca_file", _end_of_validity(credentials.authority, max)),
    )
    CERTIFICATE_ENDS.clear()
    CERTIFICATE_ENDS.update((name, end) for name, end in ends if end is not None)
    now = datetime.now(UTC)
    for name, end in CERTIFICATE_ENDS.items():
        if end - now < SOON:
            logger.warning(
                "sluice.security.%s ends on %s, in %d days, and no connection is made after that; "
                "replace the file and restart this process before",
                name,
                end.strftime("%Y-%m-%d %H:%M UTC"),
                (end - now).days,
            )


def _end_of_validity(
    pem: bytes | None, choose: Callable[[Iterable[datetime]], datetime]
) -> datetime | None:
    if pem is None:
        return None
    try:
        return choose(ends_of_validity(pem))
    except ValueError:  # TLS reads it, or the service would not start
        return None


@dataclass(frozen=True, slots=True)
class Credentials:
    """The certificates and tokens of a process. Without any, servers accept every caller.

    Args:
        authority: PEM of the authorities that sign peers' certificates; None: the system's.
        certificate, key: PEM of this process's certificate and of its key; None without them.
        is_encrypted: whether connections use TLS.
        asks_certificate: whether servers ask callers for a certificate.
        server_name: the name in servers' certificates; None to expect their address.
        tokens: servers accept all of them; callers present the first.
    """

    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    is_encrypted: bool = False
    asks_certificate: bool = False
    server_name: str | None = None
    tokens: TokenSource | None = None

    @property
    def identifies_callers(self) -> bool:
        """Return whether servers know their callers."""
        return self.asks_certificate or self.tokens is not None

    def for_server(self) -> grpc.ServerCredentials:
        """Return the credentials of a server with TLS."""
        assert self.key is not None
        assert self.certificate is not None
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)],
            self.authority if self.asks_certificate else None,
            require_client_auth=self.asks_certificate,
        )

    def for_channel(self) -> grpc.ChannelCredentials:
        """Return the credentials of a channel with TLS."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def for_outsiders(self) -> Credentials:
        """Return credentials for servers outside the run: they check certificates, and show neither
        a certificate nor a token."""
        return Credentials(self.authority, is_encrypted=True, server_name=self.server_name)

    def for_transfers(self) -> TransferCertificates | None:
        """Return the certificates for the store of weight transfers; None without TLS."""
        if not self.is_encrypted:
            return None
        return TransferCertificates(
            authority=self.authority,
            certificate=self.certificate,
            key=self.key,
            asks_certificate=self.asks_certificate,
            server_name=self.server_name,
        )


OPEN = Credentials()
"""No TLS and no token: for loopback and private networks."""


def service_credentials(security: SecurityConfig, endpoint: EndpointConfig) -> Credentials:
    """Return the credentials of a service at `endpoint`.

    Warn of secrets that others can read, and of certificates that end soon.

    Raises:
        ConfigError: they cannot work; the error lists reasons and remedies.
    """
    raise_problems(server_problems(security, advertised_host(endpoint)), _SECTION)
    credentials = _load(security, os.environ.get(TOKEN_VARIABLE))
    _note_certificate_ends(credentials)
    return credentials


def client_credentials(
    security: SecurityConfig, environment: Mapping[str, str] = os.environ
) -> Credentials:
    """Return the credentials of a command or of a program that uses the SDK.

    Args:
        security: the run's configuration; files that `environment` names come first.
        environment: see `TOKEN_VARIABLE` and `FILE_VARIABLES`.

    Raises:
        ConfigError: they cannot work; the error lists reasons and remedies.
    """
    files = _files_from_environment(environment)
    # The variables may belong to another run that uses TLS.
    if security.tls == "off":
        files = {key: path for key, path in files.items() if key == "token_file"}
    if security.tls == "server" and not {"cert_file", "key_file"} <= files.keys():
        # The configuration names the service's files, and no server asks callers for any.
        files |= {"cert_file": None, "key_file": None}
    token = environment.get(TOKEN_VARIABLE)
    if token is not None:  # it replaces the file, which this user may be unable to read
        files["token_file"] = None
    merged = msgspec.structs.replace(security, **files)
    raise_problems(client_problems(merged), f"{_SECTION} and SLUICE_ variables")
    return _load(merged, token)


def _files_from_environment(environment: Mapping[str, str]) -> dict[str, str | None]:
    files = {key: environment[name] for key, name in FILE_VARIABLES.items() if name in environment}
    empty = [FILE_VARIABLES[key] for key, path in files.items() if not path]
    remedy = "name a file, or unset it"
    problems = [Problem(name, msgspec.UNSET, "is set and empty", remedy) for name in empty]
    raise_problems(problems, "SLUICE_ variables")
    return dict(files)


def _load(security: SecurityConfig, token: str | None) -> Credentials:
    for problem in exposed_secrets(security):
        logger.warning("%s", problem.text)
    tokens: TokenSource | None = None
    if security.token_file is not None:
        tokens = TokenFile(Path(security.token_file), TOKEN_KEY)
    elif token is not None:
        tokens = GivenToken(token, TOKEN_VARIABLE)
    if security.tls == "off":
        return Credentials(tokens=tokens)
    return Credentials(
        authority=_read_file(security.ca_file),
        certificate=_read_file(security.cert_file),
        key=_read_file(security.key_file),
        is_encrypted=True,
        asks_certificate=security.tls == "mtls",
        server_name=security.server_name,
        tokens=tokens,
    )


def _read_file(path: str | None) -> bytes | None:
    return Path(path).read_bytes() if path else None


def exposure_warning(host: str, credentials: Credentials) -> str | None:
    """Return a warning for a server that listens on `host`; None if there is none."""
    if is_loopback(host):
        return None
    if not credentials.identifies_callers:
        return (
            "other machines may reach this port, and can then steer the run and read its data; set "
            "sluice.security.tls=mtls or sluice.security.token_file (`sluice certs` makes the "
            "files), or keep the network private"
        )
    if not credentials.is_encrypted:
        return (
            "other machines may reach this port, and tokens and data travel unencrypted; set "
            "sluice.security.tls=mtls, or keep the network private"
        )
    return None

"""Check certificates: read their dates, and try the TLS handshake that a peer would make.

The handshake runs in memory, between OpenSSL and itself. The verifier of the package `cryptography`
is no replacement: it refuses certificates that peers accept, such as a self-signed one that is its
own authority, or one without key usage, which is what `openssl req -x509` and `openssl x509 -req`
make.
"""

from __future__ import annotations

import shlex
import ssl
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.util import find_spec

from sluice.errors import ConfigError

SOON = timedelta(days=14)
"""How long before its end a certificate causes a warning."""
DATES_PACKAGE = "the package cryptography, which reads the dates of certificates"
DATES_REMEDY = "pip install 'sluice[certs]'"

# X509_V_ERR_* of OpenSSL's x509_vfy.h.
_EXPIRED, _NOT_YET_VALID = 10, 9
_WRONG_NAMES = (62, 64)
_UNKNOWN_ISSUERS = (2, 18, 19, 20, 21)
_MAX_FLIGHTS = 10


def can_read_dates() -> bool:
    """Return whether the package that reads certificates is installed."""
    return find_spec("cryptography") is not None


def ends_of_validity(pem: bytes) -> list[datetime]:
    """Return the end of every certificate of a PEM file, in their order, with UTC as time zone.

    Raises:
        ConfigError: the package that reads them is missing.
        ValueError: the file holds no certificate, or a broken one.
    """
    try:
        # Clients check certificates too, and need no dates.
        from cryptography import x509
    except ModuleNotFoundError as error:
        raise ConfigError(f"sluice.security.tls needs {DATES_PACKAGE}; {DATES_REMEDY}") from error
    return [certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(pem)]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. `authority` None: the system's certificate authorities."""

    certificate: str
    key: str
    authority: str | None


class CertificateError(ConfigError):
    """A certificate that peers refuse; `field` of `sluice.security` names the wrong file."""

    def __init__(self, field: str, detail: str) -> None:
        self.field = field
        super().__init__(detail)


def check_pair(files: TlsFiles) -> None:
    """Raise CertificateError unless the certificate and its private key can be loaded."""
    _server_context(files, mutual=False)


def check_served_name(files: TlsFiles, name: str, *, mutual: bool) -> None:
    """Check what a peer checks that connects to `name`: chain, dates, name and purpose.

    Args:
        files: of the service.
        name: the host name or address.
        mutual: the service also shows the certificate as a client, and its peers check it.

    Raises:
        CertificateError: names the file, the fault and the remedy.
    """
    server = _server_context(files, mutual=mutual)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load_trusted(client, files, ssl.Purpose.SERVER_AUTH)
    if mutual:
        _load_pair(client, files)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(_MAX_FLIGHTS):
            # The server learns of a refusal only from what it reads after its own handshake, so
            # both ends must finish in the same round.
            if not [end for end in ends if not _advance(end)]:
                return
    except ssl.SSLCertVerificationError as error:
        raise _refusal(error, name) from error
    except ssl.SSLError as error:
        raise CertificateError("cert_file", f"fails in a handshake: {error.reason}") from error


def _advance(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _server_context(files: TlsFiles, *, mutual: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_pair(context, files)
    if mutual:
        context.verify_mode = ssl.CERT_REQUIRED
        _load_trusted(context, files, ssl.Purpose.CLIENT_AUTH)
    return context


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        # The password keeps OpenSSL from asking for one: gRPC takes no encrypted key.
        context.load_cert_chain(files.certificate, files.key, password=b"")
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            detail = (
                f"does not belong to the certificate {files.certificate!r}; give the key it was "
                "made with"
            )
        else:
            detail = (
                f"and the certificate {files.certificate!r} are no PEM files of a certificate and "
                "an unencrypted private key"
            )
        raise CertificateError("key_file", detail) from error


def _load_trusted(context: ssl.SSLContext, files: TlsFiles, purpose: ssl.Purpose) -> None:
    if files.authority is None:
        context.load_default_certs(purpose)
        return
    try:
        context.load_verify_locations(files.authority)
    except ssl.SSLError as error:
        raise CertificateError("ca_file", "is no PEM file of certificates") from error


def _refusal(error: ssl.SSLCertVerificationError, name: str) -> CertificateError:
    code = error.verify_code
    if code in _UNKNOWN_ISSUERS:
        return CertificateError("ca_file", "did not sign the certificate; give the CA that did")
    if code == _EXPIRED:
        detail = "has expired; make another one (`sluice certs --force`)"
    elif code == _NOT_YET_VALID:
        detail = "is not valid yet; check this machine's clock"
    elif code in _WRONG_NAMES:
        detail = (
            f"does not name {name}, where peers connect to; make one that does "
            f"(`sluice certs --host {shlex.quote(name)}`), or set sluice.security.server_name to a "
            "name in it"
        )
    else:
        detail = f"is refused by peers: {error.verify_message}"
    return CertificateError("cert_file", detail)

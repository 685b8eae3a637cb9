"""Check certificates: their dates, and what a peer would answer, by a TLS handshake in memory."""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sluice.errors import ConfigError

SOON = timedelta(days=14)
"""How long before their end certificates are warned of."""
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17


@dataclass(frozen=True, slots=True)
class Validity:
    """Both ends, in UTC."""

    begins: datetime
    ends: datetime


def validities(pem: bytes) -> list[Validity]:
    """Of every certificate in a PEM file, in their order.

    Raises:
        ValueError: one of them is no certificate.
    """
    try:
        return [_validity(base64.b64decode(body)) for body in _PEM.findall(pem)]
    except (IndexError, StopIteration) as error:
        raise ValueError("a certificate ends in the middle") from error


def _validity(der: bytes) -> Validity:
    (_, certificate), *_ = _parts(der)
    (_, content), *_ = _parts(certificate)
    fields = list(_parts(content))
    # version (explicit, may be absent), serial number, signature, issuer, validity
    place = 4 if fields[0][0] == _VERSION else 3
    begins, ends = (_time(tag, text) for tag, text in _parts(fields[place][1]))
    return Validity(begins, ends)


def _parts(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each part in a row."""
    at = 0
    while at < len(der):
        tag, length, start = der[at], der[at + 1], at + 2
        if length & 0x80:
            start += length & 0x7F
            length = int.from_bytes(der[at + 2 : start], "big")
        if start + length > len(der):
            raise IndexError
        yield tag, der[start : start + length]
        at = start + length


def _time(tag: int, text: bytes) -> datetime:
    # Years of two digits are 1950 to 2049 (RFC 5280, 4.1.2.5.1); strptime turns at 1969.
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if int(digits[:2]) >= 50 else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


# X509_V_ERR_* of OpenSSL's x509_vfy.h.
_EXPIRED, _NOT_YET_VALID = 10, 9
_WRONG_NAMES = (62, 64)
_UNKNOWN_ISSUERS = (2, 18, 19, 20, 21)
_MOST_FLIGHTS = 10


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files. `authority` none: the system's certificate authorities."""

    certificate: str
    key: str
    authority: str | None


class CertificateError(ConfigError):
    """A certificate that peers refuse; `is_about` is "cert", "key" or "ca"."""

    def __init__(self, is_about: str, detail: str) -> None:
        self.is_about = is_about
        super().__init__(detail)


def check_pair(files: TlsFiles) -> None:
    """Raises CertificateError unless the certificate and its private key can be loaded."""
    _server_context(files, mutual=False)


def check_served_name(files: TlsFiles, name: str, *, mutual: bool) -> None:
    """What a peer does that connects to `name`: chain, dates, name and purpose are checked.

    Args:
        mutual: the same certificate is also shown as a client's, which the server checks.

    Raises:
        CertificateError: says what is wrong, and the remedy.
    """
    server = _server_context(files, mutual=mutual)
    client = _client_context(files, mutual=mutual)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(_MOST_FLIGHTS):
            # The server hears of a refused certificate only in what it reads after its handshake.
            if not [end for end in ends if not _advance(end)]:
                return
    except ssl.SSLCertVerificationError as error:
        raise _refusal(error, name) from error
    except ssl.SSLError as error:
        raise CertificateError("cert", f"fails in a handshake: {error.reason}") from error


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
        _trust(context, files, ssl.Purpose.CLIENT_AUTH)
    return context


def _client_context(files: TlsFiles, *, mutual: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _trust(context, files, ssl.Purpose.SERVER_AUTH)
    if mutual:
        _load_pair(context, files)
    return context


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        # A password is never asked for: gRPC takes no key that needs one.
        context.load_cert_chain(files.certificate, files.key, password=b"")
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            raise CertificateError(
                "key",
                f"does not belong to the certificate {files.certificate!r}; give the key it was "
                "made with",
            ) from error
        raise CertificateError(
            "key",
            f"and the certificate {files.certificate!r} are no PEM files of a certificate and an "
            "unencrypted private key",
        ) from error


def _trust(context: ssl.SSLContext, files: TlsFiles, purpose: ssl.Purpose) -> None:
    if files.authority is None:
        context.load_default_certs(purpose)
        return
    try:
        context.load_verify_locations(files.authority)
    except ssl.SSLError as error:
        raise CertificateError("ca", "is no PEM file of certificates") from error


def _refusal(error: ssl.SSLCertVerificationError, name: str) -> CertificateError:
    code = error.verify_code
    if code == _EXPIRED:
        return CertificateError("cert", "has expired; make another one (`sluice certs --force`)")
    if code == _NOT_YET_VALID:
        return CertificateError("cert", "is not valid yet; check this machine's clock")
    if code in _WRONG_NAMES:
        return CertificateError(
            "cert",
            f"does not name {name}, where peers connect to; make one that does "
            f"(`sluice certs --host {name}`), or set sluice.security.server_name to a name in it",
        )
    if code in _UNKNOWN_ISSUERS:
        return CertificateError("ca", "did not sign the certificate; give the CA that did")
    return CertificateError("cert", f"is refused by peers: {error.verify_message}")

"""From when until when a certificate holds, read from its file without a library.

A certificate is DER (X.690): a tree of tag, length and content. Its fourth or fifth part holds the
two dates (RFC 5280, section 4.1).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

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

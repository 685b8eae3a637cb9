"""Until when the certificates hold that this process has loaded: it reads no file again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime

from sluice.security.certificate_dates import SOON, validities

__all__ = ["CERTIFICATE_ENDS", "CertificateEnds"]

logger = logging.getLogger(__name__)

CERT_FILE, CA_FILE = "cert_file", "ca_file"


class CertificateEnds:
    """What a service loaded at its start.

    Attributes:
        by_file: the end by the field of `sluice.security` that names the file; of `cert_file`, a
            chain, that of the first certificate to end, and of `ca_file` that of the last, since
            each of several authorities may be the one that counts.
    """

    def __init__(self) -> None:
        self.by_file: Mapping[str, datetime] = {}

    def note(self, certificate: bytes | None, authority: bytes | None) -> None:
        """Takes the place of what was noted before; warns of what ends soon.

        Args:
            certificate, authority: PEM; none: there is none.
        """
        found = ((CERT_FILE, _end(certificate, min)), (CA_FILE, _end(authority, max)))
        self.by_file = {name: end for name, end in found if end is not None}
        now = datetime.now(UTC)
        for name, end in self.by_file.items():
            if end - now < SOON:
                logger.warning(
                    "sluice.security.%s ends on %s, in %d days, and no connection is made after "
                    "that; replace the file and start this process again before",
                    *(name, end.strftime("%Y-%m-%d %H:%M UTC"), (end - now).days),
                )


CERTIFICATE_ENDS = CertificateEnds()
"""Of this process."""


def _end(pem: bytes | None, of: Callable[[Iterable[datetime]], datetime]) -> datetime | None:
    try:
        ends = [one.ends for one in validities(pem or b"")]
    except ValueError:  # TLS can read it, or the service would not start
        return None
    return of(ends) if ends else None

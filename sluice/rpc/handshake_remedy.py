"""What a failed connection says about the TLS settings of both sides."""

from __future__ import annotations

_KEY = "sluice.security"
# Words of gRPC and BoringSSL, the more telling first.
_REMEDY_BY_SIGN = (
    (
        "Hostname Verification",
        f"its certificate does not name the address we connect to; set {_KEY}.server_name to a "
        "name in it, or make one with `sluice certs --host`",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        f"its certificate is not one that we trust; check {_KEY}.ca_file here and the dates of "
        f"{_KEY}.cert_file there",
    ),
    ("WRONG_VERSION_NUMBER", f"it speaks no TLS; set {_KEY}.tls alike on both sides"),
    ("andshake failed", f"TLS fails; compare {_KEY} of both sides"),
)
_CLOSED = ("Socket closed", "Connection reset")

_run_has_no_tls = False


def expect_no_tls() -> None:
    """Say that this process is a service of a run without TLS.

    A peer that ends a connection at once has then died, rather than missed a certificate. Clients,
    whose settings may differ from the run's, do not call this.
    """
    global _run_has_no_tls
    _run_has_no_tls = True


def handshake_remedy(details: str) -> str:
    """What to do about an UNAVAILABLE status with these details; empty if TLS is not the cause."""
    if _run_has_no_tls:
        return ""
    for sign, remedy in _REMEDY_BY_SIGN:
        if sign in details:
            return remedy
    if "failed to connect" in details and any(sign in details for sign in _CLOSED):
        return (
            "it ended the connection at once, as servers with TLS do when the caller has none, or "
            f"shows a certificate that is missing, expired or of another CA; compare {_KEY} of "
            "both sides"
        )
    return ""

"""Translate errors to gRPC statuses and back, by one table, and count them.

Several errors share a code, so a status also carries the error's class in its trailing metadata.
The class counts only if the table gives it the code that came with it. Clients in other languages
may ignore it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import grpc

from sluice import errors
from sluice.safe_text import encodable
from sluice.telemetry.metrics import EventCounts

RPC_ERRORS = EventCounts()
"""By side (``server`` or ``client``), method and code."""

QUOTA_REFUSALS = EventCounts()
"""By the key of the limiting setting."""

_SECTION = "sluice.security"
# Words of gRPC and BoringSSL, the more specific ones first.
_REMEDY_BY_SIGN = (
    (
        "Hostname Verification",
        f"its certificate does not name the address we connect to; set {_SECTION}.server_name to a "
        "name in it, or make one with `sluice certs --host`",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        f"its certificate is not one that we trust; check {_SECTION}.ca_file here and the dates of "
        f"{_SECTION}.cert_file there",
    ),
    (
        "WRONG_VERSION_NUMBER",
        f"it speaks no TLS; set {_SECTION}.tls to the same value on both sides",
    ),
    ("andshake failed", f"TLS fails; compare {_SECTION} of both sides"),
)
_CLOSED = ("Socket closed", "Connection reset")

CLASS_KEY = "sluice-error"
# Details travel as percent-encoded metadata, and peers accept 8 KiB of metadata.
_LONGEST_DETAILS_BYTES = 2000

_CODE_BY_ERROR: tuple[tuple[type[errors.SluiceError], grpc.StatusCode], ...] = (
    (errors.PromptTooLongError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.SequenceTooLongError, grpc.StatusCode.OUT_OF_RANGE),
    (errors.HistoryRewrittenError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.LeaseEndedError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.AccessDeniedError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.NotReadyError, grpc.StatusCode.UNAVAILABLE),
    (errors.EnvironmentUnavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.EnvironmentDefectError, grpc.StatusCode.INTERNAL),
    (errors.ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    # Before its base: the first class that fits counts.
    (errors.DataExhaustedError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BatchUnfillableError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ValidationFailedError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.WeightSyncError, grpc.StatusCode.ABORTED),
    # Before its base, too.
    (errors.PeerDefectError, grpc.StatusCode.INTERNAL),
    (errors.HandshakeError, grpc.StatusCode.UNAVAILABLE),
    (errors.PeerError, grpc.StatusCode.UNAVAILABLE),
    (errors.EngineError, grpc.StatusCode.INTERNAL),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DataError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
)

# Codes that do not identify the error.
_AMBIGUOUS_CODES = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_ERROR_BY_NAME = {
    (kind.__name__, code): kind for kind, code in _CODE_BY_ERROR if code in _AMBIGUOUS_CODES
}

_ERROR_BY_CODE: Mapping[grpc.StatusCode, type[errors.SluiceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: errors.SequenceTooLongError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
}
"""Codes that identify the error and whose details are complete."""


def short_method(path: str) -> str:
    """Return ``Service/Method`` of a path such as ``/sluice.api.reward.v1.RewardService/Score``."""
    service, _, method = path.removeprefix("/").partition("/")
    return f"{service.rpartition('.')[2]}/{method}"


_run_has_no_tls = False


def expect_no_tls() -> None:
    """Declare this process a service of a run without TLS.

    A peer that closes a connection at once has then died, and did not miss a certificate. Clients
    do not call this, because their settings may differ from the run's.
    """
    global _run_has_no_tls
    _run_has_no_tls = True


def handshake_remedy(details: str) -> str:
    """Return the remedy for UNAVAILABLE with these details; empty: TLS is not at fault."""
    if _run_has_no_tls:
        return ""
    for sign, remedy in _REMEDY_BY_SIGN:
        if sign in details:
            return remedy
    if "failed to connect" in details and any(sign in details for sign in _CLOSED):
        return (
            "it ended the connection at once, as servers with TLS do when the caller has none, or "
            f"shows a certificate that is missing, expired or of another CA; compare {_SECTION} of "
            "both sides"
        )
    return ""


class CallStatus(NamedTuple):
    """The arguments of `context.abort`, in their order."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...]


def status_of(error: errors.SluiceError) -> CallStatus:
    """Return the status for `error`; INTERNAL if the table does not know it."""
    details = _cut(encodable(str(error)))  # with another text gRPC would send no status at all
    for kind, code in _CODE_BY_ERROR:
        if isinstance(error, kind):
            return CallStatus(code, details, ((CLASS_KEY, kind.__name__),))
    return CallStatus(grpc.StatusCode.INTERNAL, details, ())


def error_of(
    code: grpc.StatusCode,
    details: str,
    class_name: str | None,
    *,
    peer: str,
    phase: str,
    deadline_s: float,
) -> errors.SluiceError:
    """Return the exception that a caller sees for a failed call to `peer` during `phase`.

    A peer that is not ready counts as failed (`PeerError`), because the remedy, a retry, is the
    same. So does any status that is not in the table. INTERNAL is a `PeerDefectError`.

    Args:
        code, details: code and details of the status.
        class_name: the value of `CLASS_KEY` in the trailing metadata; None if not sent.
        peer, phase: for the error.
        deadline_s: seconds that the call had.
    """
    error_class = _ERROR_BY_NAME.get((class_name or "", code)) or _ERROR_BY_CODE.get(code)
    if error_class is not None:
        return error_class(details)
    match code:
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return errors.AccessDeniedError(f"{peer}: refused while {phase}: {details}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineError(peer, phase, deadline_s, details)
        case grpc.StatusCode.ABORTED:
            return errors.WeightSyncError(peer, phase, details)
        case grpc.StatusCode.INTERNAL:
            return errors.PeerDefectError(peer, phase, f"{code.name}: {details}")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:  # gRPC's own words
            remedy = "raise sluice.max_message_mb on both sides, or send less"
            return errors.InvalidRequestError(f"{peer}: while {phase}: {details}; {remedy}")
        case grpc.StatusCode.UNAVAILABLE if remedy := handshake_remedy(details):
            return errors.HandshakeError(peer, phase, f"{remedy} ({details})")
        case _:
            return errors.PeerError(peer, phase, f"{code.name}: {details}")


def _cut(details: str) -> str:
    """Return the longest prefix that fits into `_LONGEST_DETAILS_BYTES` on the wire.

    gRPC over HTTP/2 (section Responses) writes bytes of UTF-8 outside of 0x20 to 0x7E, and the
    percent sign, as three bytes each.
    """
    num_bytes = 0
    for index, character in enumerate(details):
        is_plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if is_plain else 3 * len(character.encode())
        if num_bytes > _LONGEST_DETAILS_BYTES:
            return details[:index]
    return details

"""Translate errors to gRPC statuses and back (the only table), and count them."""

from __future__ import annotations

from typing import NamedTuple

import grpc

from sluice import errors
from sluice.telemetry.metrics import EventCounts

RPC_ERRORS = EventCounts()
"""By side (``server`` or ``client``), method and code."""

QUOTA_REFUSALS = EventCounts()
"""By the key of the setting that limits."""


def short_method(path: str) -> str:
    """``Service/Method`` of a gRPC path such as ``/sluice.api.reward.v1.RewardService/Score``."""
    service, _, method = path.removeprefix("/").partition("/")
    return f"{service.rpartition('.')[2]}/{method}"


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


# Errors <-> gRPC statuses: the only table.
#
# Several errors share a code, so a status also carries the error's class in its trailing
# metadata. The class is believed only if the table gives it the code that came with it; clients
# in other languages may ignore it.

CLASS_KEY = "sluice-error"
# Details travel as percent-encoded metadata, of which peers take 8 KiB.
_LONGEST_DETAILS_BYTES = 2000

_CODE_BY_ERROR: tuple[tuple[type[errors.SluiceError], grpc.StatusCode], ...] = (
    (errors.PromptTooLongError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.AccessDeniedError, grpc.StatusCode.UNAUTHENTICATED),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.NotReadyError, grpc.StatusCode.UNAVAILABLE),
    (errors.ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    # Above its base: the first class that fits counts.
    (errors.DataExhaustedError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.BatchUnfillableError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.WeightSyncError, grpc.StatusCode.ABORTED),
    # Above its base, too.
    (errors.PeerDefectError, grpc.StatusCode.INTERNAL),
    (errors.HandshakeError, grpc.StatusCode.UNAVAILABLE),
    (errors.PeerError, grpc.StatusCode.UNAVAILABLE),
    (errors.EngineError, grpc.StatusCode.INTERNAL),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DataError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
)

# Codes that alone do not say which error it was: grpc itself gives RESOURCE_EXHAUSTED to a message
# over the limit, and repeating that one helps nobody.
_CLASS_NEEDED = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_ERROR_BY_NAME = {
    (kind.__name__, code): kind for kind, code in _CODE_BY_ERROR if code in _CLASS_NEEDED
}


class CallStatus(NamedTuple):
    """What `context.abort` takes, in its order."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...]


def status_of(error: errors.SluiceError) -> CallStatus:
    """The status that carries `error`; INTERNAL for one the table does not know."""
    details = _cut(str(error))
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
    """The exception a caller sees for a failed call to `peer` while `phase`.

    A peer that is not ready counts as one that failed (`PeerError`): the remedy, asking again, is
    the same. So does any status the table cannot place. INTERNAL, whatever raised it there, is a
    `PeerDefectError`.

    Args:
        code: of the status.
        details: of the status.
        class_name: under `CLASS_KEY` in the trailing metadata; none: it was not sent.
        peer: who was called.
        phase: what for.
        deadline_s: seconds the call was given.
    """
    named = _ERROR_BY_NAME.get((class_name or "", code))
    if named is not None:
        return named(details)
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequestError(details)
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return errors.AccessDeniedError(f"{peer}: refused while {phase}: {details}")
        case grpc.StatusCode.NOT_FOUND:
            return errors.NotFoundError(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineError(peer, phase, deadline_s, details)
        case grpc.StatusCode.ABORTED:
            return errors.WeightSyncError(peer, phase, details)
        case grpc.StatusCode.INTERNAL:
            return errors.PeerDefectError(peer, phase, f"{code.name}: {details}")
        case _:
            return _failed_peer(code, details, peer, phase)


def _cut(details: str) -> str:
    """The longest beginning that travels in `_LONGEST_DETAILS_BYTES`.

    gRPC over HTTP/2, section Responses: bytes of UTF-8 outside of 0x20 to 0x7E, and the percent
    sign, take three each.
    """
    num_bytes = 0
    for index, character in enumerate(details):
        is_plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if is_plain else 3 * len(character.encode(errors="surrogatepass"))
        if num_bytes > _LONGEST_DETAILS_BYTES:
            return details[:index]
    return details


def _failed_peer(code: grpc.StatusCode, details: str, peer: str, phase: str) -> errors.PeerError:
    if code is grpc.StatusCode.UNAVAILABLE and (remedy := handshake_remedy(details)):
        return errors.HandshakeError(peer, phase, f"{remedy} ({details})")
    return errors.PeerError(peer, phase, f"{code.name}: {details}")

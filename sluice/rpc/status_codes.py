"""Errors <-> gRPC statuses: the only table.

Several errors share a code, so a status also carries the error's class in its trailing metadata.
The class is believed only if the table gives it the code that came with it; clients in other
languages may ignore it.
"""

from __future__ import annotations

from typing import NamedTuple

import grpc

from sluice import errors
from sluice.rpc.handshake_remedy import handshake_remedy

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


class Status(NamedTuple):
    """What `context.abort` takes, in its order."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str], ...]


def status_of(error: errors.SluiceError) -> Status:
    """The status that carries `error`; INTERNAL for one the table does not know."""
    details = _cut(str(error))
    for kind, code in _CODE_BY_ERROR:
        if isinstance(error, kind):
            return Status(code, details, ((CLASS_KEY, kind.__name__),))
    return Status(grpc.StatusCode.INTERNAL, details, ())


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

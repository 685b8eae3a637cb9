"""Errors <-> gRPC status codes: the only table."""

from __future__ import annotations

import grpc

from sluice import errors

_CODE_BY_ERROR: tuple[tuple[type[errors.SluiceError], grpc.StatusCode], ...] = (
    (errors.InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.NotFoundError, grpc.StatusCode.NOT_FOUND),
    (errors.NotReadyError, grpc.StatusCode.UNAVAILABLE),
    (errors.ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.BatchUnfillableError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.WeightSyncError, grpc.StatusCode.ABORTED),
    (errors.PeerError, grpc.StatusCode.UNAVAILABLE),
    (errors.EngineError, grpc.StatusCode.INTERNAL),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.DataError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.CheckpointError, grpc.StatusCode.FAILED_PRECONDITION),
)


def code_of(error: errors.SluiceError) -> grpc.StatusCode:
    """The status code that carries `error`; INTERNAL for one the table does not know."""
    for kind, code in _CODE_BY_ERROR:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def error_of(
    code: grpc.StatusCode, details: str, *, peer: str, phase: str, deadline_s: float
) -> errors.SluiceError:
    """The exception a caller sees for a failed call to `peer` while `phase`."""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            return errors.InvalidRequestError(details)
        case grpc.StatusCode.NOT_FOUND:
            return errors.NotFoundError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.ExhaustedError(details)
        case grpc.StatusCode.FAILED_PRECONDITION:
            return errors.BatchUnfillableError(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return errors.DeadlineError(peer, phase, deadline_s, details)
        case grpc.StatusCode.ABORTED:
            return errors.WeightSyncError(peer, phase, details)
        case _:
            return errors.PeerError(peer, phase, f"{code.name}: {details}")

"""Errors in OpenAI's JSON shape."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.errors import (
    DeadlineError,
    ExhaustedError,
    InvalidRequestError,
    LeaseEndedError,
    NotFoundError,
    NotReadyError,
    PeerDefectError,
    PeerError,
    SluiceError,
)

_STATUS: tuple[tuple[type[SluiceError], int, str, str | None], ...] = (
    (InvalidRequestError, 400, "invalid_request_error", None),
    (NotFoundError, 410, "invalid_request_error", "lease_expired"),
    (LeaseEndedError, 409, "invalid_request_error", "lease_ended"),
    (ExhaustedError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (DeadlineError, 504, "timeout_error", "deadline_exceeded"),
    (PeerDefectError, 500, "server_error", None),
    (NotReadyError, 503, "server_error", "unavailable"),
    (PeerError, 503, "server_error", "unavailable"),
)


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """An HTTP status and the content of `error`."""

    status: int
    message: str
    kind: str
    code: str | None = None
    param: str | None = None

    def body(self) -> dict[str, object]:
        """Return the answer's JSON object."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class RefusedError(InvalidRequestError):
    """A request for something unknown, or for a feature that is not offered."""

    def __init__(
        self, message: str, param: str, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def error_answer(error: SluiceError) -> ErrorAnswer:
    """Return the status of one of our errors; 500 where the caller did not cause it."""
    if isinstance(error, RefusedError):
        return ErrorAnswer(
            error.status, str(error), "invalid_request_error", error.code, error.param
        )
    cause = error.__cause__
    # A deadline passed while all replicas were full: capacity is missing.
    judged = cause if isinstance(cause, ExhaustedError) else error
    for kind, status, name, code in _STATUS:
        if isinstance(judged, kind):
            return ErrorAnswer(status, str(error), name, code)
    return ErrorAnswer(500, str(error), "server_error")


CROSS_SITE = ErrorAnswer(
    403,
    "a page in a browser sent this, and the server requires no key; start the server with one",
    "invalid_request_error",
)
DEFECT = ErrorAnswer(500, "the server failed; its log has the reason", "server_error")
NO_KEY = ErrorAnswer(
    401,
    "no API key that this server accepts; send `Authorization: Bearer KEY`",
    "invalid_request_error",
    "invalid_api_key",
)

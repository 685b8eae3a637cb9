"""Errors become statuses and errors again."""

from __future__ import annotations

import inspect
from urllib.parse import quote

import grpc
import pytest

from sluice import errors
from sluice.rpc.status import CLASS_KEY, error_of, status_of

PLAIN = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
ALL_ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.SluiceError) and kind is not errors.SluiceError
]


def example(kind: type[errors.SluiceError]) -> errors.SluiceError:
    if kind is errors.DeadlineError:
        return errors.DeadlineError("rollout-3", "counting", 2.0)
    if issubclass(kind, errors.PeerError | errors.WeightSyncError):
        return kind("rollout-3", "counting", "it fell over")
    return kind("field x: 7 is too much; use 5")


def over_the_wire(error: errors.SluiceError) -> errors.SluiceError:
    status = status_of(error)
    return error_of(
        status.code,
        status.details,
        dict(status.trailing_metadata).get(CLASS_KEY),
        peer="reward service",
        phase="taking a batch",
        deadline_s=5.0,
    )


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_error_has_a_code_of_its_own_or_carries_its_class(
    kind: type[errors.SluiceError],
) -> None:
    status = status_of(example(kind))
    assert status.code is not grpc.StatusCode.UNKNOWN
    assert dict(status.trailing_metadata) == {CLASS_KEY: kind.__name__}


# A peer that is not ready has failed us, and one whose engine fails is broken.
ARRIVES_AS = {
    errors.HandshakeError: errors.PeerError,  # another one's handshake
    errors.NotReadyError: errors.PeerError,
    errors.EngineError: errors.PeerDefectError,
}


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_an_error_arrives_as_what_it_was_with_its_words(kind: type[errors.SluiceError]) -> None:
    sent = example(kind)
    arrived = over_the_wire(sent)
    assert type(arrived) is ARRIVES_AS.get(kind, kind)
    assert str(sent) in str(arrived)


def test_a_subclass_travels_as_the_class_in_the_table() -> None:
    class GroupFailedError(errors.DataError):
        pass

    assert type(over_the_wire(GroupFailedError("x"))) is errors.DataError


@pytest.mark.parametrize(
    ("code", "reserved"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, None),
        (grpc.StatusCode.FAILED_PRECONDITION, ""),
        (grpc.StatusCode.FAILED_PRECONDITION, "InvalidRequestError"),  # of another code
        (grpc.StatusCode.FAILED_PRECONDITION, "KeyboardInterrupt"),
        (grpc.StatusCode.UNAVAILABLE, "BatchUnfillableError"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, None),  # grpc's own: a message over the limit
        (grpc.StatusCode.CANCELLED, None),
        (grpc.StatusCode.UNIMPLEMENTED, None),
    ],
)
def test_a_class_that_the_table_does_not_give_this_code_is_not_believed(
    code: grpc.StatusCode, reserved: str | None
) -> None:
    error = error_of(code, "words", reserved, peer="trainer", phase="asking", deadline_s=1.0)
    assert type(error) is errors.PeerError
    assert str(error) == f"trainer: failed while asking: {code.name}: words"


@pytest.mark.parametrize("reserved", [None, "BatchUnfillableError", "EngineError"])
def test_an_internal_error_is_a_defect_of_the_peer_and_still_an_error_of_it(
    reserved: str | None,
) -> None:
    code = grpc.StatusCode.INTERNAL
    error = error_of(code, "words", reserved, peer="trainer", phase="asking", deadline_s=1.0)
    assert type(error) is errors.PeerDefectError
    assert isinstance(error, errors.PeerError)
    assert str(error) == "trainer: failed while asking: INTERNAL: words"


def test_details_are_cut_to_what_metadata_can_carry() -> None:
    for text in ("é" * 100_000, "x" * 100_000, "%" * 3000, "日本\n" * 3000, "\U0001f600" * 3000):
        details = status_of(errors.DataError(text)).details
        encoded = quote(details, safe=PLAIN)
        assert text.startswith(details)
        assert 1980 < len(encoded) <= 2000
    assert status_of(errors.DataError("é" * 333)).details == "é" * 333

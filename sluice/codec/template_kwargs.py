"""Arguments of a chat template <-> protobuf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from sluice.codec.field_rules import shortened
from sluice.errors import InvalidRequestError

if TYPE_CHECKING:
    from sluice.api.common.v1 import common_pb2 as common

__all__ = ["MAX_TEMPLATE_KWARGS_BYTES", "template_kwargs_from_proto", "template_kwargs_to_proto"]

MAX_TEMPLATE_KWARGS_BYTES = 1 << 16
# A message's numbers are doubles, which hold no larger integer.
_LARGEST_INTEGER = 1 << 53
# Each level is several of a message, of which protobuf reads 100.
_MAX_LEVELS = 16
_FIELD = "chat_template_kwargs"
_JSON_TYPES = (bool, int, float, str, list, tuple, Mapping, type(None))


def template_kwargs_to_proto(values: Mapping[str, object]) -> Struct | None:
    """Encodes arguments; none for none at all.

    Raises:
        InvalidRequestError: a value is no JSON, lies too deep, or there are too many bytes.
    """
    if not values:
        return None
    _check_levels(values, _FIELD, _MAX_LEVELS)
    struct = Struct()
    try:
        struct.update(cast("dict[str, Any]", values))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidRequestError(
            f"{_FIELD}: cannot be sent ({str(error)[:100]}); give texts, finite numbers, lists, "
            "mappings"
        ) from error
    _check_size(struct)
    return struct


def template_kwargs_from_proto(chat: common.ChatPrompt) -> dict[str, Any]:
    """Decodes the arguments of a conversation; whole numbers are integers, 1.0 like 1.

    Raises:
        InvalidRequestError: too many bytes or levels, or a number that is not finite.
    """
    if not chat.HasField("template_kwargs"):
        return {}
    _check_size(chat.template_kwargs)
    try:
        values = dict(MessageToDict(chat.template_kwargs))
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"{_FIELD}: not JSON ({str(error)[:100]}); send texts, finite numbers, lists, mappings"
        ) from error
    _check_levels(values, _FIELD, _MAX_LEVELS)
    return {key: _with_integers(value) for key, value in values.items()}


def _with_integers(value: Any) -> Any:  # noqa: ANN401 - JSON
    """A template that counts or prints must find the number that was sent."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _with_integers(inner) for key, inner in value.items()}
    return [_with_integers(inner) for inner in value] if isinstance(value, list) else value


def _check_size(struct: Struct) -> None:
    if (size := struct.ByteSize()) > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequestError(
            f"{_FIELD}: {size} bytes; send at most {MAX_TEMPLATE_KWARGS_BYTES}"
        )


def _check_levels(value: object, place: str, levels: int) -> None:
    if not isinstance(value, _JSON_TYPES):
        raise InvalidRequestError(
            f"{place}: a {type(value).__name__}; give texts, finite numbers, lists, mappings"
        )
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise InvalidRequestError(
            f"{place}: {shortened(value)}; give whole numbers up to 2**53 either way, or a text"
        )
    inner: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        inner = [(f"{place}.{str(key)[:60]}", each) for key, each in value.items()]
    elif isinstance(value, list | tuple):
        inner = [(place, each) for each in value]
    if inner and not levels:
        raise InvalidRequestError(
            f"{_FIELD}: {shortened(place)} lies more than {_MAX_LEVELS} levels deep; send less deep"
        )
    for name, each in inner:
        _check_levels(each, name, levels - 1)

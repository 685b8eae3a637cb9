"""Values that several protos share: replicas, images, chat template arguments and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from sluice.algorithm.accounting import COUNTER_NAMES, ReplicaCounters
from sluice.algorithm.routing import AnnouncedReplica, ReplicaUse
from sluice.api.common.v1 import common_pb2 as common
from sluice.codec.bounds import check_fields
from sluice.codec.fields import check_count, shorten
from sluice.concurrency.waits import Waiting, merge_waits, present_waits
from sluice.concurrency.watchdog import no_progress_seconds
from sluice.errors import InvalidRequestError
from sluice.types import ReplicaInfo
from sluice.vision.image_limits import ImageLimits, check_images

if TYPE_CHECKING:
    from sluice.api.reward.v1 import reward_pb2 as reward
    from sluice.api.rollout.v1 import rollout_pb2 as rollout
    from sluice.api.trainer.v1 import trainer_pb2 as trainer

MAX_REPLICAS = 4096

MAX_TEMPLATE_KWARGS_BYTES = 1 << 16
# A Struct's numbers are doubles, which hold no larger integer exactly.
_LARGEST_INTEGER = 1 << 53
# Each level takes several levels of a message, and protobuf reads 100.
_MAX_LEVELS = 16
_FIELD = "chat_template_kwargs"
_JSON_TYPES = (bool, int, float, str, list, tuple, Mapping, type(None))

_MAX_WAITS = 64

ItemT = TypeVar("ItemT")


def replica_to_proto(replica: ReplicaInfo, policy_version: int) -> common.Replica:
    """Encode a replica and its policy version (ignored in a registration)."""
    return common.Replica(
        name=replica.name,
        instance_id=replica.instance_id,
        address=replica.address,
        slots=replica.slots,
        policy_version=policy_version,
        ranks=replica.ranks,
        kv_tokens=replica.kv_tokens,
    )


_USES = {
    common.REPLICA_USE_UNSPECIFIED: ReplicaUse.ANY,
    common.REPLICA_USE_TRAINING: ReplicaUse.TRAINING,
    common.REPLICA_USE_VALIDATION: ReplicaUse.VALIDATION,
}
_USES_TO_PROTO = {use: number for number, use in _USES.items()}


def announced_to_proto(replica: AnnouncedReplica) -> common.Replica:
    """Encode a replica with the version that it serves and its use."""
    message = replica_to_proto(replica.info, replica.policy_version)
    message.use = _USES_TO_PROTO[replica.use]
    return message


def announced_from_proto(message: common.Replica) -> AnnouncedReplica:
    """Decode a replica whose fields were checked.

    Raises:
        InvalidRequestError: its use is unknown.
    """
    use = _USES.get(message.use)
    if use is None:
        raise InvalidRequestError(
            f"replicas.use: {message.use} is unknown; use the protocol files of this release"
        )
    return AnnouncedReplica(replica_from_proto(message), message.policy_version, use)


def replica_from_proto(message: common.Replica) -> ReplicaInfo:
    """Decode a replica whose fields were checked."""
    return ReplicaInfo(
        message.name,
        message.instance_id,
        message.address,
        message.slots,
        message.ranks or 1,
        kv_tokens=message.kv_tokens,
    )


def counters_to_fields(counters: ReplicaCounters, wall_seconds: float) -> dict[str, Any]:
    """Return the counters as fields of a heartbeat or a status answer, with the process's age."""
    return {name: getattr(counters, name) for name in COUNTER_NAMES} | {
        "wall_seconds": wall_seconds
    }


def counters_from_proto(
    message: trainer.HeartbeatRequest | rollout.GetStatusResponse,
) -> ReplicaCounters:
    """Return a replica's counters from its heartbeat or its status answer."""
    values = {name: getattr(message, name) for name in COUNTER_NAMES}
    return ReplicaCounters(**{**values, "seconds_by_state": dict(message.seconds_by_state)})


def check_replicas(replicas: Sequence[common.Replica]) -> None:
    """Check each replica, their number, and unique names. Raise InvalidRequestError."""
    check_count("replicas", replicas, MAX_REPLICAS)
    names: set[str] = set()
    for index, replica in enumerate(replicas):
        check_fields(replica, f"replicas[{index}].")
        if replica.name in names:
            raise InvalidRequestError(
                f"replicas[{index}].name: {shorten(replica.name)} is announced twice; send each "
                "replica once"
            )
        names.add(replica.name)


def check_chat_images(prompt: common.ChatPrompt, limits: ImageLimits) -> None:
    """Check the images of a prompt to generate from: within the limits, one for each mark.

    Raises:
        InvalidRequestError: names the image, the value and the remedy.
    """
    texts = (turn.content for turn in prompt.messages)
    check_images("prompt.chat.images", prompt.images, texts, limits)


def check_submitted_images(
    request: reward.SubmitPromptsRequest, limits: ImageLimits | None
) -> None:
    """Check the images of a prompt to train on, as `check_chat_images`.

    Args:
        request: the prompt.
        limits: of images; ``None``: the run reads none.

    Raises:
        InvalidRequestError: names the image, the value and the remedy.
    """
    if limits is not None:
        texts = (turn.content for turn in request.messages)
        check_images("images", request.images, texts, limits)
    elif request.images:
        raise InvalidRequestError(
            f"images: {len(request.images)} given, and this run is text-only; send prompts "
            "without images, or train Qwen2-VL, Qwen2.5-VL or Qwen3-VL, without a critic"
        )


def struct_to_proto(values: Mapping[str, object], field: str) -> Struct | None:
    """Encode a JSON object; return None for an empty mapping.

    Raises:
        InvalidRequestError: a value is no JSON; names `field`.
    """
    if not values:
        return None
    struct = Struct()
    try:
        struct.update(cast("dict[str, Any]", values))
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidRequestError(
            f"{field}: cannot be sent ({str(error)[:100]}); give texts, finite numbers, lists, "
            "mappings"
        ) from error
    return struct


def struct_from_proto(struct: Struct, field: str, max_bytes: int, key: str = "") -> dict[str, Any]:
    """Decode a JSON object. Whole numbers become integers up to 2**53, 1.0 like 1.

    Names are in their alphabetical order: clients in some languages, such as Go, send them in
    another order each time, and a prompt that is sent again is recognized by its digest.

    Args:
        key: the setting of that size, for errors; empty: it is fixed.

    Raises:
        InvalidRequestError: it has more bytes, too many levels, or a number that is not finite.
    """
    if (size := struct.ByteSize()) > max_bytes:
        limit = f"{key} allows {max_bytes}; send less" if key else f"send at most {max_bytes}"
        raise InvalidRequestError(f"{field}: {size} bytes; {limit}")
    try:
        values: dict[str, Any] = _with_integers(MessageToDict(struct))
    except (ValueError, RecursionError) as error:
        # The error quotes the value, which may be long.
        raise InvalidRequestError(
            f"{field}: not JSON ({str(error)[:100]}); send texts, finite numbers, lists, mappings"
        ) from error
    return values


def template_kwargs_to_proto(values: Mapping[str, object]) -> Struct | None:
    """Encode arguments; return None for an empty mapping.

    Raises:
        InvalidRequestError: a value is no JSON, is nested too deep, or there are too many bytes.
    """
    _check_levels(values, _FIELD, _MAX_LEVELS)
    struct = struct_to_proto(values, _FIELD)
    if struct is not None:
        struct_from_proto(struct, _FIELD, MAX_TEMPLATE_KWARGS_BYTES)  # as the replica reads it
    return struct


def template_kwargs_from_proto(chat: common.ChatPrompt | common.Continuation) -> dict[str, Any]:
    """Decode the arguments of a conversation.

    Raises:
        InvalidRequestError: too many bytes or levels, or a number that is not finite.
    """
    values = struct_from_proto(chat.template_kwargs, _FIELD, MAX_TEMPLATE_KWARGS_BYTES)
    _check_levels(values, _FIELD, _MAX_LEVELS)
    return values


def _with_integers(value: Any) -> Any:  # noqa: ANN401 - JSON
    # What counts or prints needs the integer that was sent; a Struct holds a double.
    if isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST_INTEGER:
        return int(value)
    if isinstance(value, dict):
        return {key: _with_integers(inner) for key, inner in sorted(value.items())}
    return [_with_integers(inner) for inner in value] if isinstance(value, list) else value


def _check_levels(value: object, path: str, levels: int) -> None:
    if not isinstance(value, _JSON_TYPES):
        raise InvalidRequestError(
            f"{path}: a {type(value).__name__}; give texts, finite numbers, lists, mappings"
        )
    if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
        raise InvalidRequestError(
            f"{path}: {shorten(value)}; give whole numbers up to 2**53 either way, or a text"
        )
    inner: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        inner = [(f"{path}.{str(key)[:60]}", child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        inner = [(path, child) for child in value]
    if inner and not levels:
        raise InvalidRequestError(
            f"{_FIELD}: {shorten(path)} lies more than {_MAX_LEVELS} levels deep; flatten it"
        )
    for name, child in inner:
        _check_levels(child, name, levels - 1)


def bundles(
    items: Iterable[ItemT], size_of: Callable[[ItemT], int], max_bytes: int = 1 << 20
) -> Iterator[list[ItemT]]:
    """Yield items that travel together, in lists of at most `max_bytes`, or of one larger item."""
    bundle, num_bytes = list[ItemT](), 0
    for item in items:
        size = size_of(item)
        if bundle and num_bytes + size > max_bytes:
            yield bundle
            bundle, num_bytes = [], 0
        bundle.append(item)
        num_bytes += size
    if bundle:
        yield bundle


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A process's waits, the longest first.

    `still_s`: seconds without progress although there is work; ``None``: no work, or no watchdog.
    """

    waits: tuple[Waiting, ...]
    still_s: float | None


def present_waits_to_proto(further: Iterable[Waiting] = ()) -> common.WaitReport:
    """Encode this process's waits, and `further` ones that only its service knows."""
    waits = merge_waits((*further, *present_waits()), _MAX_WAITS)
    return common.WaitReport(
        waits=[
            common.Wait(
                peer=wait.peer,
                phase=wait.phase,
                seconds=max(wait.seconds, 0.0),
                count=wait.count,
                task=wait.task,
            )
            for wait in waits
        ],
        still_seconds=no_progress_seconds(),
    )


def wait_report_from_proto(message: common.WaitReport) -> WaitReport:
    """Decode a report of waits."""
    waits = (Waiting(w.peer, w.phase, w.seconds, w.count, w.task) for w in message.waits)
    still_s = message.still_seconds if message.HasField("still_seconds") else None
    return WaitReport(tuple(waits), still_s)

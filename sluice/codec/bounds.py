"""The bounds of single fields of requests, in one table.

docs/hostile-input.md lists them for users. Rules that combine several fields are next to the code
that decodes the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from sluice.api.common.v1 import common_pb2 as common
from sluice.api.reward.v1 import reward_pb2 as reward
from sluice.api.rollout.v1 import rollout_pb2 as rollout
from sluice.api.trainer.v1 import trainer_pb2 as trainer
from sluice.api.weights.v1 import weights_pb2 as weights
from sluice.codec.fields import MAX_NUMBER, check_name, check_range, check_text, shorten
from sluice.config.addresses import split_host_port
from sluice.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from google.protobuf.message import Message

MAX_PRIORITY = 100
MAX_SAMPLE_INDEX = 1023
MAX_TEMPERATURE = 100
_MAX_ADDRESS_BYTES = 300
_DAY_S = 24 * 3600.0

Rule = Callable[[str, Any], None]
"""Takes a field's name and value. Raises InvalidRequestError."""

_NAME: Rule = check_name
_NAME_OR_NONE: Rule = partial(check_name, may_be_empty=True)


def check_fields(message: Message, prefix: str = "") -> None:
    """Check the fields of a message that have a rule; an absent optional field passes.

    Args:
        message: a key of `RULES`.
        prefix: precedes the fields' names in errors, such as ``replicas[3].``.

    Raises:
        InvalidRequestError: names the field, its value and the remedy.
    """
    fields = message.DESCRIPTOR.fields_by_name
    for name, rule in RULES[type(message)].items():
        if not fields[name].has_presence or message.HasField(name):
            rule(f"{prefix}{name}", getattr(message, name))


def _range_rule(lowest: int, highest: int) -> Rule:
    return partial(check_range, lowest=lowest, highest=highest)


def _text_rule(max_bytes: int) -> Rule:
    return partial(check_text, max_bytes=max_bytes)


def _seconds_rule(max_s: float, remedy: str = "") -> Rule:
    def check(field: str, value: float) -> None:
        if not 0.0 < value <= max_s:
            raise InvalidRequestError(
                f"{field}: {value}; send more than 0, at most {max_s:g}{remedy}"
            )

    return check


def _check_address(field: str, value: str) -> None:
    check_text(field, value, _MAX_ADDRESS_BYTES)
    try:
        port = split_host_port(value)[1] if value.isprintable() else None
    except ConfigError:
        port = None
    if port is None or any(sign.isspace() for sign in value):
        raise InvalidRequestError(
            f"{field}: {shorten(value)} is not host:port; send an address that peers can connect to"
        )


def _check_store_key(field: str, value: bytes) -> None:
    if len(value) not in (0, 32):  # a secret: only its length is shown
        raise InvalidRequestError(f"{field}: {len(value)} bytes; send 32, or none")


_NUMBER, _STEP = _range_rule(0, MAX_NUMBER), _range_rule(1, MAX_NUMBER)
_SOURCE = _text_rule(256)

RULES: Mapping[type[Message], Mapping[str, Rule]] = {
    common.Replica: {
        "name": _NAME,
        "instance_id": _NAME,
        "slots": _range_rule(1, 65536),
        "policy_version": _NUMBER,
        "address": _check_address,
        "ranks": _range_rule(0, 1024),  # one for each device; 0 is 1
        "kv_tokens": _NUMBER,
    },
    common.DataProgress: {"low_water": _NUMBER},
    rollout.GenerateRequest: {
        "request_id": _NAME_OR_NONE,
        "linger_ms": _range_rule(0, 60_000),
        "partial_interval_ms": _range_rule(0, 3_600_000),
        "priority": _range_rule(-MAX_PRIORITY, MAX_PRIORITY),
        "affinity": _NAME_OR_NONE,
        "max_sequence_tokens": _range_rule(0, MAX_NUMBER),
    },
    reward.SubmitPromptsRequest: {"data_source": _SOURCE},
    reward.ScoreItem: {"data_source": _SOURCE},
    reward.LeaseSamplesRequest: {
        "count": _range_rule(0, 1024),
        "wait_s": _seconds_rule(60.0),
        "holder": _NAME_OR_NONE,
        "keep_alive_s": _range_rule(0, 3600),
    },
    reward.ChatRequest: {"lease_id": _NAME, "request_digest": _NAME},
    reward.EndEpisodeRequest: {"lease_id": _NAME, "failure": _text_rule(2000)},
    reward.TakeBatchRequest: {"step": _STEP, "policy_version": _NUMBER},
    reward.TakeSamplesRequest: {"batch_id": _NAME},
    reward.AcknowledgeBatchRequest: {"batch_id": _NAME, "step": _STEP},
    reward.AnnouncePolicyRequest: {
        "trainer_instance_id": _NAME,
        "policy_version": _NUMBER,
        "rolled_back_to": _NUMBER,
        "sluice_version": _NAME_OR_NONE,
    },
    reward.EvaluateRequest: {
        "policy_version": _NUMBER,
        "n": _range_rule(1, 1024),
        "temperature": _range_rule(0, MAX_TEMPERATURE),
    },
    trainer.RegisterReplicaRequest: {
        "weights_layout_digest": _NAME,
        "sluice_version": _NAME_OR_NONE,
    },
    trainer.HeartbeatRequest: {"name": _NAME, "instance_id": _NAME, "policy_version": _NUMBER},
    trainer.WatchStepsRequest: {"from_step": _NUMBER},
    trainer.PauseRequest: {
        "holder": _NAME_OR_NONE,
        "lease_seconds": _seconds_rule(7 * _DAY_S, "; leave it out to pause until Resume"),
    },
    trainer.ResumeRequest: {"holder": _NAME_OR_NONE},
    trainer.StopRequest: {"reason": _text_rule(2000)},
    weights.JoinGroupRequest: {
        "epoch": _NUMBER,
        "host": _NAME,
        "port": _range_rule(1, 65535),
        "world_size": _range_rule(2, 65536),
        "backend": _NAME,
        "plan_digest": _NAME,
        "bucket_bytes": _range_rule(4096, 2**34),
        "timeout_seconds": _seconds_rule(_DAY_S),
        "store_key": _check_store_key,
    },
    weights.WorkerPlace: {
        "group": _range_rule(0, 65535),
        "world_size": _range_rule(2, 65536),
        "plan_digest": _NAME,
    },
    weights.StageUpdateRequest: {"epoch": _NUMBER, "policy_version": _NUMBER},
    weights.CommitUpdateRequest: {"epoch": _NUMBER, "policy_version": _NUMBER, "digest": _NAME},
    weights.AbortUpdateRequest: {"epoch": _NUMBER, "reason": _text_rule(4000)},
}

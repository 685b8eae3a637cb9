"""What a replica that is registered or announced must say of itself."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.api.common.v1 import common_pb2 as common
from sluice.codec.field_rules import check_count, check_name, check_range, check_text, shortened
from sluice.codec.numbers import MAX_NUMBER
from sluice.config.host_port import split_host_port
from sluice.errors import ConfigError, InvalidRequestError

__all__ = ["MAX_REPLICAS", "MAX_SLOTS", "check_replica", "check_replicas"]

MAX_REPLICAS, MAX_SLOTS = 4096, 65536
_MAX_ADDRESS_BYTES = 300


def check_replica(replica: common.Replica, field: str) -> None:
    """Names, an address of the form host:port and slots. Raises InvalidRequestError."""
    check_name(f"{field}.name", replica.name)
    check_name(f"{field}.incarnation", replica.incarnation)
    check_range(f"{field}.slots", replica.slots, 1, MAX_SLOTS)
    check_range(f"{field}.policy_version", replica.policy_version, 0, MAX_NUMBER)
    _check_address(f"{field}.address", replica.address)


def check_replicas(replicas: Sequence[common.Replica]) -> None:
    """Each as `check_replica`, no name twice, not too many. Raises InvalidRequestError."""
    check_count("replicas", replicas, MAX_REPLICAS)
    seen: set[str] = set()
    for index, replica in enumerate(replicas):
        check_replica(replica, f"replicas[{index}]")
        if replica.name in seen:
            raise InvalidRequestError(
                f"replicas[{index}].name: {shortened(replica.name)} is announced twice; send each "
                "replica once"
            )
        seen.add(replica.name)


def _check_address(field: str, address: str) -> None:
    check_text(field, address, _MAX_ADDRESS_BYTES)
    try:
        port = split_host_port(address)[1] if address.isprintable() else None
    except ConfigError:
        port = None
    if port is None or any(sign.isspace() for sign in address):
        raise InvalidRequestError(
            f"{field}: {shortened(address)} is not host:port; send an address that peers can "
            "connect to"
        )

"""Policy losses by verl's names (`actor.policy_loss.loss_mode`). Imports torch only on demand."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from sluice.algorithm.on_demand import import_named

if TYPE_CHECKING:
    from sluice.algorithm.losses.policy_loss import PolicyLossFunction

POLICY_LOSSES: Mapping[str, str] = MappingProxyType(
    {"vanilla": "sluice.algorithm.losses.vanilla:vanilla_policy_loss"}
)


def policy_loss(name: str) -> PolicyLossFunction:
    """Import the loss called `name`.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    found = import_named(POLICY_LOSSES, name, key="actor.policy_loss.loss_mode")
    return cast("PolicyLossFunction", found)

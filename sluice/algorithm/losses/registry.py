"""Policy losses by verl's names (`actor.policy_loss.loss_mode`). Imports torch only on demand."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from sluice.algorithm.on_demand import import_named

if TYPE_CHECKING:
    from sluice.algorithm.losses.objective import ObjectiveFunction

KEY = "actor.policy_loss.loss_mode"
HERE = "sluice.algorithm.losses"

POLICY_OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {
        "vanilla": f"{HERE}.vanilla:vanilla_objective",
        "dppo_tv": f"{HERE}.dppo:dppo_tv_objective",
        "dppo_kl": f"{HERE}.dppo:dppo_kl_objective",
        "gspo": f"{HERE}.gspo:gspo_objective",
        "sapo": f"{HERE}.sapo:sapo_objective",
        "gpg": f"{HERE}.gpg:gpg_objective",
        "clip_cov": f"{HERE}.clip_cov:clip_cov_objective",
        "kl_cov": f"{HERE}.kl_cov:kl_cov_objective",
        "geo_mean": f"{HERE}.geo_mean:geo_mean_objective",
        "dro": f"{HERE}.dro:dro_objective",
        "cispo": f"{HERE}.cispo:cispo_objective",
        "bypass_mode": f"{HERE}.bypass:bypass_objective",
        "adpo": f"{HERE}.adpo:adpo_objective",
    }
)

BOUNDED_FROM_BELOW = frozenset({"vanilla", "gspo", "clip_cov", "bypass_mode"})
"""Losses whose clip must keep ``1 - clip_ratio_low`` above 0, as it stops the ratio's fall there.

``cispo`` clips a weight that is never negative, so that verl's example switches its lower bound off
with 10 (``examples/cispo_trainer``); ``dppo_*`` bound probabilities and divergences, ``geo_mean``
log ratios; the others have no bound.
"""

GROUP_LOSSES = frozenset({"adpo"})
"""Losses that need all rows of a prompt in one micro-batch."""

SILENT_AT_ZERO_ADVANTAGE = frozenset(
    {
        "vanilla",
        "dppo_tv",
        "dppo_kl",
        "gspo",
        "sapo",
        "gpg",
        "geo_mean",
        "cispo",
        "bypass_mode",
    }
)
"""Losses to which a row adds nothing, value and gradient, where its advantages are 0.

Of the others ``dro`` and ``kl_cov`` have a term without the advantage, ``clip_cov`` and ``kl_cov``
choose tokens by comparing all of them, and ``adpo`` compares the rows of a group.
"""


def policy_objective(name: str) -> ObjectiveFunction:
    """Import the objective called `name`: weighed, aggregated, with its metrics.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    return cast("ObjectiveFunction", import_named(POLICY_OBJECTIVES, name, key=KEY))

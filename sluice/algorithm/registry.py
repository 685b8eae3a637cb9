"""Advantage estimators and policy losses by verl's names. Imports torch only on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from sluice.errors import ConfigError

if TYPE_CHECKING:
    from sluice.algorithm.advantages.inputs import AdvantageInputs, Advantages, AdvantageSettings
    from sluice.algorithm.losses.objective import ObjectiveFunction

    BatchAdvantages = Callable[[AdvantageInputs, AdvantageSettings], Advantages]

_ADVANTAGES = "sluice.algorithm.advantages"

BATCH_ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {
        "gae": f"{_ADVANTAGES}.gae:gae",
        "grpo": f"{_ADVANTAGES}.grpo:grpo",
        "grpo_vectorized": f"{_ADVANTAGES}.grpo:grpo_vectorized",
        "grpo_passk": f"{_ADVANTAGES}.grpo_passk:grpo_passk",
        "gdpo": f"{_ADVANTAGES}.gdpo:gdpo",
        "reinforce_plus_plus": f"{_ADVANTAGES}.reinforce_plus_plus:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": (
            f"{_ADVANTAGES}.reinforce_plus_plus:reinforce_plus_plus_baseline"
        ),
        "rloo": f"{_ADVANTAGES}.rloo:rloo",
        "rloo_vectorized": f"{_ADVANTAGES}.rloo:rloo_vectorized",
        "opo": f"{_ADVANTAGES}.opo:opo",
        "remax": f"{_ADVANTAGES}.remax:remax",
        "gpg": f"{_ADVANTAGES}.gpg:gpg",
        "optimal_token_baseline": f"{_ADVANTAGES}.optimal_token_baseline:optimal_token_baseline",
        "tir_optimal_token_baseline": (
            f"{_ADVANTAGES}.optimal_token_baseline:tir_optimal_token_baseline"
        ),
        "adpo": f"{_ADVANTAGES}.adpo:adpo",
    }
)
"""Estimators of whole batches by `algorithm.adv_estimator`, as ``module:function``.

`AdvantageInputs` lists what a batch may hold; each estimator's docstring the fields that it needs.
"""

_LOSSES = "sluice.algorithm.losses"

POLICY_OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {
        "vanilla": f"{_LOSSES}.vanilla:vanilla_objective",
        "dppo_tv": f"{_LOSSES}.dppo:dppo_tv_objective",
        "dppo_kl": f"{_LOSSES}.dppo:dppo_kl_objective",
        "gspo": f"{_LOSSES}.gspo:gspo_objective",
        "sapo": f"{_LOSSES}.sapo:sapo_objective",
        "gpg": f"{_LOSSES}.gpg:gpg_objective",
        "clip_cov": f"{_LOSSES}.covariance:clip_cov_objective",
        "kl_cov": f"{_LOSSES}.covariance:kl_cov_objective",
        "geo_mean": f"{_LOSSES}.geo_mean:geo_mean_objective",
        "dro": f"{_LOSSES}.dro:dro_objective",
        "cispo": f"{_LOSSES}.cispo:cispo_objective",
        "bypass_mode": f"{_LOSSES}.bypass:bypass_objective",
        "adpo": f"{_LOSSES}.adpo:adpo_objective",
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
"""Losses that get neither value nor gradient from a row whose advantages are 0.

Of the others ``dro`` and ``kl_cov`` have a term without the advantage, ``clip_cov`` and ``kl_cov``
choose tokens by comparing all of them, and ``adpo`` compares the rows of a group.
"""


def import_named(table: Mapping[str, str], name: str, *, key: str) -> object:
    """Import what `table` holds under `name` as ``"module:attribute"``.

    Args:
        table: known names and where they live.
        name: the configured name.
        key: the configuration key that held `name`, for the error.

    Raises:
        ConfigError: `name` is not in `table`.
    """
    target = table.get(name)
    if target is None:
        raise ConfigError(f"{key}: unknown value '{name}'; known: {', '.join(sorted(table))}")
    module, _, attribute = target.partition(":")
    found: object = getattr(import_module(module), attribute)
    return found


def batch_estimator(name: str) -> BatchAdvantages:
    """Import the estimator called `name`; it maps a padded batch to values of [rows, width].

    Raises:
        ConfigError: the name is unknown (lists the known ones), or, when the estimator runs, the
            batch lacks a field.
    """
    found = import_named(BATCH_ESTIMATORS, name, key="algorithm.adv_estimator")
    return cast("BatchAdvantages", found)


def policy_objective(name: str) -> ObjectiveFunction:
    """Import the objective called `name`: weighed, aggregated, with its metrics.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return cast("ObjectiveFunction", import_named(POLICY_OBJECTIVES, name, key=key))

"""Advantage estimators and policy losses by verl's names. Imports torch only on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, cast

from sluice.errors import ConfigError

if TYPE_CHECKING:
    from sluice.algorithm.advantages.inputs import AdvantageInputs, Advantages, AdvantageSettings
    from sluice.algorithm.losses.objective import ObjectiveFunction

    BatchAdvantages = Callable[[AdvantageInputs, AdvantageSettings], Advantages]

_ADVANTAGES = "sluice.algorithm.advantages"
_OF_GROUPS, _OF_TOKENS = f"{_ADVANTAGES}.group_relative", f"{_ADVANTAGES}.token_returns"

BATCH_ESTIMATORS: Mapping[str, str] = MappingProxyType(
    {
        "gae": _OF_TOKENS,
        "grpo": _OF_GROUPS,
        "grpo_vectorized": _OF_GROUPS,
        "grpo_passk": _OF_GROUPS,
        "gdpo": _OF_GROUPS,
        "reinforce_plus_plus": _OF_TOKENS,
        "reinforce_plus_plus_baseline": _OF_GROUPS,
        "rloo": _OF_GROUPS,
        "rloo_vectorized": _OF_GROUPS,
        "opo": _OF_GROUPS,
        "remax": _OF_TOKENS,
        "gpg": _OF_GROUPS,
        "optimal_token_baseline": _OF_TOKENS,
        "tir_optimal_token_baseline": _OF_TOKENS,
        "adpo": _OF_GROUPS,
    }
)
"""Modules of the estimators of whole batches, by `algorithm.adv_estimator`, which is the name of
the function, too.

`AdvantageInputs` lists what a batch may hold; each estimator's docstring the fields that it needs.
"""

_LOSSES, _ADPO = "sluice.algorithm.losses.policy_losses", "sluice.algorithm.losses.adpo"

POLICY_OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {
        "vanilla": _LOSSES,
        "dppo_tv": _LOSSES,
        "dppo_kl": _LOSSES,
        "gspo": _LOSSES,
        "sapo": _LOSSES,
        "gpg": _LOSSES,
        "clip_cov": _LOSSES,
        "kl_cov": _LOSSES,
        "geo_mean": _LOSSES,
        "dro": _LOSSES,
        "cispo": _LOSSES,
        "bypass_mode": _LOSSES,
        "adpo": _ADPO,
    }
)
"""Modules of the policy losses by ``loss_mode``; the function's name adds ``_objective``."""

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


def batch_estimator(name: str) -> BatchAdvantages:
    """Import the estimator called `name`; it maps a padded batch to values of [rows, width].

    Raises:
        ConfigError: the name is unknown (lists the known ones), or, when the estimator runs, the
            batch lacks a field.
    """
    module = _module_of(BATCH_ESTIMATORS, name, key="algorithm.adv_estimator")
    return cast("BatchAdvantages", getattr(module, name))


def policy_objective(name: str) -> ObjectiveFunction:
    """Import the objective called `name`: weighed, aggregated, with its metrics.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    module = _module_of(POLICY_OBJECTIVES, name, key=key)
    return cast("ObjectiveFunction", getattr(module, f"{name}_objective"))


def _module_of(table: Mapping[str, str], name: str, *, key: str) -> ModuleType:
    if name not in table:
        raise ConfigError(f"{key}: unknown value '{name}'; known: {', '.join(sorted(table))}")
    return import_module(table[name])

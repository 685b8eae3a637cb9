"""Advantage estimators and policy losses by their names in a configuration, verl's where it has
them. Imports torch only on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, cast

from sluice.errors import ConfigError

if TYPE_CHECKING:
    from sluice.algorithm.advantages.inputs import AdvantageInputs, Advantages, AdvantageSettings
    from sluice.algorithm.losses.objective import ObjectiveFunction

    BatchAdvantages = Callable[[AdvantageInputs, AdvantageSettings], Advantages]

_Entry = TypeVar("_Entry")
_ADVANTAGES = "sluice.algorithm.advantages"
_GROUP_RELATIVE, _TOKEN_RETURNS = f"{_ADVANTAGES}.group_relative", f"{_ADVANTAGES}.token_returns"


@dataclass(frozen=True, slots=True)
class Estimator:
    """The properties of an advantage estimator that a run needs before importing it.

    `tests/unit/algorithm/test_batch_advantages.py` runs each estimator to check its row.

    Attributes:
        module: the module of the function.
        needs: the optional fields of `AdvantageInputs` that it requires. ``group_index`` is one: an
            estimator that compares the rows of a prompt names it.
        needs_others: a group of one row gets advantage 0, or the estimator refuses it. Without
            this, an estimator with groups gives the row its raw reward, as verl does. It decides
            whether ``rollout.n=1`` is an error or a note.
        credits_turns: with `turn_rewards`, each turn of an episode gets the rewards from that turn
            on. Without this, ``sluice.trainer.turn_rewards`` is refused.
        reads_mask: if rollout correction takes a token out of the mask, the advantages of other
            tokens change. Rejection then has to be known before the estimator runs. Without this,
            an estimator only spreads one number per row over the mask.
        whitens: it shifts advantages by the mean of the batch, so that equal rewards do not give 0.
            ``sluice.trainer.skip_zero_advantage`` is then refused.
    """

    module: str
    needs: tuple[str, ...] = ()
    needs_others: bool = False
    credits_turns: bool = False
    reads_mask: bool = False
    whitens: bool = False


_GROUPS = ("group_index",)  # the `needs` of those that compare the rows of a prompt
_OPTIMAL = Estimator(_TOKEN_RETURNS, (*_GROUPS, "old_logprobs", "sum_pi_squared"), reads_mask=True)

BATCH_ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "gae": Estimator(
            _TOKEN_RETURNS, ("values",), credits_turns=True, reads_mask=True, whitens=True
        ),
        "grpo": Estimator(_GROUP_RELATIVE, _GROUPS, credits_turns=True),
        "grpo_vectorized": Estimator(_GROUP_RELATIVE, _GROUPS, credits_turns=True),
        "grpo_passk": Estimator(_GROUP_RELATIVE, _GROUPS, needs_others=True),
        "gdpo": Estimator(
            _GROUP_RELATIVE, (*_GROUPS, "reward_components"), reads_mask=True, whitens=True
        ),
        "reinforce_plus_plus": Estimator(
            _TOKEN_RETURNS, credits_turns=True, reads_mask=True, whitens=True
        ),
        "reinforce_plus_plus_baseline": Estimator(
            _GROUP_RELATIVE, _GROUPS, reads_mask=True, whitens=True
        ),
        "rloo": Estimator(_GROUP_RELATIVE, _GROUPS),
        "rloo_vectorized": Estimator(_GROUP_RELATIVE, _GROUPS, needs_others=True),
        "opo": Estimator(_GROUP_RELATIVE, _GROUPS, reads_mask=True),
        "remax": Estimator(_TOKEN_RETURNS, ("baselines",), reads_mask=True),
        "gpg": Estimator(_GROUP_RELATIVE, _GROUPS),
        "optimal_token_baseline": _OPTIMAL,
        "tir_optimal_token_baseline": _OPTIMAL,
        "adpo": Estimator(_GROUP_RELATIVE, _GROUPS, needs_others=True, reads_mask=True),
    }
)
"""The estimators of whole batches, by `algorithm.adv_estimator`, which is also the function's name.

`EstimatorName` in the schema lists the same names in the same order.
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
    module = _entry(BATCH_ESTIMATORS, name, key="algorithm.adv_estimator").module
    return cast("BatchAdvantages", getattr(import_module(module), name))


def policy_objective(name: str) -> ObjectiveFunction:
    """Import the objective called `name`: weighed, aggregated, with its metrics.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    module = _entry(POLICY_OBJECTIVES, name, key=key)
    return cast("ObjectiveFunction", getattr(import_module(module), f"{name}_objective"))


def _entry(table: Mapping[str, _Entry], name: str, *, key: str) -> _Entry:
    if name not in table:
        raise ConfigError(f"{key}: unknown value '{name}'; known: {', '.join(sorted(table))}")
    return table[name]

"""Inputs and results of advantage estimators (a whole train batch padded to one width), and
statistics over masked positions and over the rows of a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from sluice.errors import ConfigError

TABLES = ("mask", "values", "old_logprobs", "sum_pi_squared", "importance_weights", "turn_rewards")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AdvantageInputs:
    """A train batch. Estimators name the optional fields that they need.

    Args:
        rewards: float [rows, width], token-level; the score of a response is its row's sum.
        mask: bool [rows, width], True where the policy chose the token.
        group_index: int64 [rows]; equal numbers mark rows of one prompt, in any order.
        values: float [rows, width], the critic's before the update.
        baselines: float [rows], reward of the prompt's greedy response.
        old_logprobs: float [rows, width], of the policy before the update.
        sum_pi_squared: float [rows, width], sum over the vocabulary of squared probabilities.
        importance_weights: float [rows, width], of rollout correction.
        reward_components: float [rows] by the name of the component.
        turn_rewards: float [rows, width], the part of `rewards` that belongs to turns, at each
            turn's last token; None if only whole rows have rewards.

    Raises:
        ValueError: a shape or the dtype of the mask is wrong; the error names the field.
    """

    rewards: torch.Tensor
    mask: torch.Tensor
    group_index: torch.Tensor | None = None
    values: torch.Tensor | None = None
    baselines: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    importance_weights: torch.Tensor | None = None
    reward_components: Mapping[str, torch.Tensor] = field(default_factory=dict)
    turn_rewards: torch.Tensor | None = None

    def __post_init__(self) -> None:
        shape = self.rewards.shape
        if self.rewards.ndim != 2:
            raise ValueError(f"rewards must have shape [rows, width], got {list(shape)}")
        if self.mask.dtype != torch.bool:
            raise ValueError(f"mask must be bool, got {self.mask.dtype}; pass mask.bool()")
        for name in TABLES:
            _check_shape(name, getattr(self, name), shape)
        for name in ("group_index", "baselines"):
            _check_shape(name, getattr(self, name), shape[:1])
        for key, component in self.reward_components.items():
            _check_shape(f"reward_components[{key!r}]", component, shape[:1])

    def required(self, name: str) -> torch.Tensor:
        """Return an optional field.

        Raises:
            ConfigError: it was not given.
        """
        table: torch.Tensor | None = getattr(self, name)
        if table is None:
            raise ConfigError(
                f"algorithm.adv_estimator needs {name}, which the batch lacks; "
                "give it or choose another estimator"
            )
        return table

    def row_rewards(self) -> torch.Tensor:
        """Score of each row, float64 [rows]; rewards outside the mask count, as in verl."""
        return self.rewards.sum(-1, dtype=torch.float64)

    def reward_to_go(self) -> torch.Tensor:
        """Return the undiscounted sum of masked rewards from each position on, [rows, width]."""
        masked = torch.where(self.mask, self.rewards, torch.zeros_like(self.rewards))
        return masked.flip(-1).cumsum(-1).flip(-1)

    def spread_over_tokens(self, row_values: torch.Tensor) -> torch.Tensor:
        """Spread a number per row [rows] over its masked positions, 0 elsewhere: [rows, width]."""
        return row_values.to(self.rewards.dtype).unsqueeze(-1) * self.mask


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """Constants of the estimators, by verl's names and defaults where it has them.

    Args:
        gamma: discount per token (gae, reinforce_plus_plus).
        lam: GAE's lambda.
        norm_by_std: divide by the group's standard deviation (grpo, grpo_vectorized, grpo_passk,
            adpo); False is Dr. GRPO.
        gdpo_reward_weights: weight of each reward component, in the components' order; None: 1.
    """

    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    gdpo_reward_weights: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """Both float [rows, width] in the rewards' dtype, without gradient.

    `returns` is the critic's target, if there is one; estimators over whole responses put the
    advantages there.
    """

    advantages: torch.Tensor
    returns: torch.Tensor


def _check_shape(name: str, value: torch.Tensor | None, shape: torch.Size) -> None:
    if value is not None and value.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(value.shape)}")


MEAN_EPSILON = 1e-8
WHITEN_EPSILON = 1e-8


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Sum over `dim`, or over everything, of the selected values; 0 where none is selected."""
    selected = torch.where(mask.bool(), values, torch.zeros_like(values))
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """``masked_sum / (count + 1e-8)`` over `dim`, or over everything; 0 where none is selected."""
    selected = mask.bool()
    count = selected.sum() if dim is None else selected.sum(dim)
    return masked_sum(values, selected, dim) / (count + MEAN_EPSILON)


def masked_var(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the unbiased variance (count - 1) of the selected values, a 0-d tensor.

    Raises:
        ValueError: fewer than two positions are selected.
    """
    count = int(mask.bool().sum())
    if count < 2:
        raise ValueError(f"a variance needs at least 2 selected positions, the mask has {count}")
    centred = values - masked_mean(values, mask)
    return masked_mean(centred.square(), mask) * (count / (count - 1))


def masked_whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``(values - mean) / sqrt(variance + 1e-8)``, both over the selected positions.

    Positions outside the mask are transformed too; multiply by the mask where they must be 0.

    Raises:
        ValueError: fewer than two positions are selected.
    """
    variance = masked_var(values, mask)
    return (values - masked_mean(values, mask)) * torch.rsqrt(variance + WHITEN_EPSILON)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Groups numbered 0..num_groups - 1, of any sizes and in any order of rows.

    Args:
        of_row: int64 [rows], number of the row's group.
        sizes: int64 [groups], all >= 1.
    """

    of_row: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, inputs: AdvantageInputs) -> Groups:
        """Return the groups of a batch.

        Raises:
            ConfigError: the batch has no group index.
        """
        index = inputs.required("group_index")
        _, of_row, sizes = torch.unique(index, return_inverse=True, return_counts=True)
        return cls(of_row, sizes)

    @property
    def row_sizes(self) -> torch.Tensor:
        """Size of each row's group, int64 [rows]."""
        return self.sizes[self.of_row]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over each row's group, on the row: values [rows, ...] to the same shape."""
        zeros = values.new_zeros((self.sizes.numel(), *values.shape[1:]))
        return zeros.index_add_(0, self.of_row, values)[self.of_row]

    def subtract_means(self, values: torch.Tensor) -> torch.Tensor:
        """``value - mean of its group``, float [rows].

        Exactly 0 in a group of equal values: rounding of the mean must not be blown up by a
        division that follows.
        """
        deviations = values - self.sum(values) / self.row_sizes
        return torch.where(self._largest(values) == -self._largest(-values), 0.0, deviations)

    def std(self, values: torch.Tensor) -> torch.Tensor:
        """Return the unbiased (n - 1) std of each row's group; 1 for a group of one."""
        squares = self.sum(self.subtract_means(values).square())
        deviations = (squares / (self.row_sizes - 1).clamp(min=1)).sqrt()
        return torch.where(self.row_sizes == 1, 1.0, deviations)

    def two_largest(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of the largest and second largest value of each group with several rows.

        Args:
            values: [rows]; of equal values the first row counts as larger.

        Returns:
            two int64 tensors, [groups with several rows] each.
        """
        order = torch.argsort(values, descending=True, stable=True)
        order = order[torch.argsort(self.of_row[order], stable=True)]
        largest_place = (self.sizes.cumsum(0) - self.sizes)[self.sizes > 1]
        return order[largest_place], order[largest_place + 1]

    def _largest(self, values: torch.Tensor) -> torch.Tensor:
        lowest = values.new_full((self.sizes.numel(),), float("-inf"))
        return lowest.scatter_reduce_(0, self.of_row, values, "amax")[self.of_row]

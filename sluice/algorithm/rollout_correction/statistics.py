"""Sums over the rows of a micro-batch, and statistics of numbers spread over micro-batches and
ranks, verl's ``rollout_probs_diff`` metrics among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

import torch

WEIGHT_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Which row each token belongs to; only rows with tokens are numbered.

    A row without tokens has no ratio. verl counts it as ratio 0 and perplexity 1, which shows
    nothing about the policies.

    Args:
        of_token: int64 [tokens], values in ``0..rows - 1``.
        lengths: int64 [rows], all >= 1.
    """

    of_token: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, row_index: torch.Tensor) -> TokenRows:
        """Number the rows that occur in `row_index` [tokens]."""
        _, of_token, lengths = torch.unique(row_index, return_inverse=True, return_counts=True)
        return cls(of_token, lengths)

    def on_cpu(self) -> TokenRows:
        """Return the same rows for tensors in host memory."""
        return TokenRows(self.of_token.cpu(), self.lengths.cpu())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over each row: float [tokens] to [rows]."""
        return values.new_zeros(self.lengths.numel()).index_add_(0, self.of_token, values)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean over each row: float [tokens] to [rows]."""
        return self.sum(values) / self.lengths

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the maximum over each row: float [tokens] to [rows]."""
        lowest = values.new_full((self.lengths.numel(),), float("-inf"))
        return lowest.scatter_reduce_(0, self.of_token, values, "amax")

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Return whether a flag is set in each row: bool [tokens] to [rows]."""
        return self.sum(flags.float()) > 0


class Reduction(StrEnum):
    """The statistics that follow from the moments of some numbers."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    STD = "std"  # of the population (n)
    SAMPLE_STD = "sample_std"  # unbiased (n - 1); 0 for one number
    EFFECTIVE_FRACTION = "effective_fraction"  # mean^2 / mean of squares (Kish 1965)
    NORMALIZER = "normalizer"  # the mean, 1 where it is no more than 1e-8


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, sum, sum of squares, minimum and maximum of some numbers."""

    count: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    @classmethod
    def of(cls, values: torch.Tensor) -> Moments:
        """Return moments of the numbers [n], taken in float64; bool counts as 0 and 1."""
        if values.numel() == 0:
            return cls()
        numbers = values.detach().cpu().double()
        moments = torch.stack([numbers.sum(), numbers @ numbers, numbers.min(), numbers.max()])
        return cls(float(numbers.numel()), *moments.tolist())

    def merge(self, other: Moments) -> Moments:
        """Return moments of the numbers of both."""
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )

    def read(self, reading: Reduction) -> float:
        """Return one statistic; there must be a number."""
        mean, mean_square = self.total / self.count, self.squares / self.count
        variance = max(mean_square - mean * mean, 0.0)
        match reading:
            case Reduction.MEAN:
                return mean
            case Reduction.MAX:
                return self.largest
            case Reduction.MIN:
                return self.smallest
            case Reduction.STD:
                return math.sqrt(variance)
            case Reduction.SAMPLE_STD:
                return math.sqrt(variance * self.count / max(self.count - 1.0, 1.0))
            case Reduction.EFFECTIVE_FRACTION:
                return (mean + WEIGHT_EPSILON) ** 2 / mean_square if mean_square else 0.0
            case Reduction.NORMALIZER:
                return mean if mean > WEIGHT_EPSILON else 1.0


@dataclass(frozen=True, slots=True)
class Statistic:
    """A metric before its parts are put together."""

    moments: Moments
    reading: Reduction


Statistics = Mapping[str, Statistic]


def merge_statistics(first: Statistics, second: Statistics) -> dict[str, Statistic]:
    """Return the same metrics over the numbers of both; both have the same names."""
    return {
        name: Statistic(statistic.moments.merge(second[name].moments), statistic.reading)
        for name, statistic in first.items()
    }


def _values(record: Moments | ProbsDiffSums) -> list[Any]:
    """Return its fields' values as they are; `astuple` copies each number of each tuple."""
    return [getattr(record, field.name) for field in fields(record)]


def statistics_to_vector(statistics: Statistics) -> list[float]:
    """Return five numbers a metric for an all-gather, in the order of the names as given."""
    return [number for statistic in statistics.values() for number in _values(statistic.moments)]


def statistics_from_vector(template: Statistics, vector: Sequence[float]) -> dict[str, Statistic]:
    """Undo `statistics_to_vector`; take names and readings from `template`."""
    return {
        name: Statistic(Moments(*vector[5 * i : 5 * i + 5]), statistic.reading)
        for i, (name, statistic) in enumerate(template.items())
    }


def metrics_of(statistics: Statistics) -> dict[str, float]:
    """Return metrics by name; a statistic over no numbers is left out."""
    return {
        f"rollout_corr/{name}": statistic.moments.read(statistic.reading)
        for name, statistic in statistics.items()
        if statistic.moments.count
    }


# Upper edges of the histogram of logprob differences, four a doubling from 1e-6 to 20.
_GAP_EDGES = tuple(math.exp2(quarter / 4) for quarter in range(-80, 19))


@dataclass(frozen=True, slots=True)
class ProbsDiffSums:
    """Sums over tokens, in float64; add them over micro-batches and ranks with `merge`.

    p is the trainer's probability of a token, q the engine's, d is ``|p - q|``, gap is
    ``|log p - log q|`` and k3 is Schulman's estimate of KL(q || p), ``p / q - 1 - log(p / q)``.
    """

    num_tokens: float = 0.0
    d: float = 0.0
    dd: float = 0.0
    p: float = 0.0
    q: float = 0.0
    pp: float = 0.0
    qq: float = 0.0
    pq: float = 0.0
    gap: float = 0.0
    k3: float = 0.0
    max_d: float = 0.0
    gap_counts: tuple[float, ...] = field(default=(0.0,) * (len(_GAP_EDGES) + 1), kw_only=True)

    @classmethod
    def of_tokens(
        cls, old_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> ProbsDiffSums:
        """Return sums over the tokens of a micro-batch; both tensors are [tokens]."""
        if old_logprobs.numel() == 0:
            return cls()
        trainer = old_logprobs.detach().cpu().double()
        engine = behavior_logprobs.detach().cpu().double()
        p, q, log_ratio = trainer.exp(), engine.exp(), trainer - engine
        d, gap = (p - q).abs(), log_ratio.abs()
        k3 = log_ratio.expm1() - log_ratio
        sums = [d.sum(), d @ d, p.sum(), q.sum(), p @ p, q @ q, p @ q, gap.sum(), k3.sum(), d.max()]
        bucket = torch.bucketize(gap, torch.tensor(_GAP_EDGES, dtype=torch.float64))
        counts = bucket.bincount(minlength=len(_GAP_EDGES) + 1).double()
        return cls.from_vector([float(p.numel()), *torch.cat([torch.stack(sums), counts]).tolist()])

    @classmethod
    def from_vector(cls, vector: Sequence[float]) -> ProbsDiffSums:
        """Undo `to_vector`."""
        cut = len(vector) - len(_GAP_EDGES) - 1
        return cls(*vector[:cut], gap_counts=tuple(vector[cut:]))

    def to_vector(self) -> tuple[float, ...]:
        """Return numbers for an all-gather; all add up but `max_d`."""
        *numbers, counts = _values(self)
        return (*numbers, *counts)

    def merge(self, other: ProbsDiffSums) -> ProbsDiffSums:
        """Return sums over the tokens of both."""
        pairs = zip(self.to_vector(), other.to_vector(), strict=True)
        added = ProbsDiffSums.from_vector([a + b for a, b in pairs])
        return replace(added, max_d=max(self.max_d, other.max_d))

    def metrics(self) -> dict[str, float]:
        """Return validity, maximum, mean and unbiased std of d, the correlation of p and q, mean
        and 99.9th percentile of gap, and the mean of k3.

        No tokens: only ``training/rollout_probs_diff_valid``, 0. Std needs two tokens, the
        correlation needs p and q to vary; undefined ones are left out.
        """
        n = self.num_tokens
        if n == 0.0:
            return {"training/rollout_probs_diff_valid": 0.0}
        metrics = {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": self.max_d,
            "training/rollout_probs_diff_mean": self.d / n,
            "training/rollout_logprobs_diff_mean": self.gap / n,
            "training/rollout_logprobs_diff_p999": self._gap_below(0.999),
            "training/rollout_k3_kl": self.k3 / n,
        }
        if n > 1.0:
            variance = max(self.dd - self.d * self.d / n, 0.0) / (n - 1.0)
            metrics["training/rollout_probs_diff_std"] = math.sqrt(variance)
        variation = (self.pp - self.p * self.p / n) * (self.qq - self.q * self.q / n)
        if variation > 0.0:
            covariation = self.pq - self.p * self.q / n
            correlation = max(-1.0, min(1.0, covariation / math.sqrt(variation)))
            metrics["training/rollout_actor_probs_pearson_corr"] = correlation
        return metrics

    def _gap_below(self, share: float) -> float:
        """Return a gap that this share of the tokens does not exceed: at most 19 % too large."""
        num_counted = 0.0
        for count, edge in zip(self.gap_counts, _GAP_EDGES, strict=False):
            num_counted += count
            if num_counted >= share * self.num_tokens:
                return edge
        return math.inf

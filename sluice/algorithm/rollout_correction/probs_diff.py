"""How far the trainer's probabilities are from the engine's: verl's rollout_probs_diff metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch


@dataclass(frozen=True, slots=True)
class ProbsDiffSums:
    """Sums over tokens, in float64; add them over micro-batches and ranks with `merge`.

    p is the trainer's probability of a token, q the engine's, d is ``|p - q|``.
    """

    num_tokens: float = 0.0
    d: float = 0.0
    dd: float = 0.0
    p: float = 0.0
    q: float = 0.0
    pp: float = 0.0
    qq: float = 0.0
    pq: float = 0.0
    max_d: float = 0.0

    @classmethod
    def of_tokens(
        cls, old_logprobs: torch.Tensor, behavior_logprobs: torch.Tensor
    ) -> ProbsDiffSums:
        """Sums over the tokens of a micro-batch; both tensors are [tokens]."""
        if old_logprobs.numel() == 0:
            return cls()
        p = old_logprobs.detach().cpu().double().exp()
        q = behavior_logprobs.detach().cpu().double().exp()
        d = (p - q).abs()
        sums = torch.stack([d.sum(), d @ d, p.sum(), q.sum(), p @ p, q @ q, p @ q, d.max()])
        return cls.from_vector([float(p.numel()), *sums.tolist()])

    @classmethod
    def from_vector(cls, vector: Sequence[float]) -> ProbsDiffSums:
        """Undo `to_vector`."""
        return cls(*vector)

    def to_vector(self) -> tuple[float, ...]:
        """Nine numbers for an all-gather; all add up except the last, which is a maximum."""
        return astuple(self)

    def merge(self, other: ProbsDiffSums) -> ProbsDiffSums:
        """Sums over the tokens of both."""
        added = [a + b for a, b in zip(astuple(self)[:-1], astuple(other)[:-1], strict=True)]
        return ProbsDiffSums.from_vector([*added, max(self.max_d, other.max_d)])

    def metrics(self) -> dict[str, float]:
        """Validity, maximum, mean and unbiased std of d, and the correlation of p and q.

        No tokens: only ``training/rollout_probs_diff_valid``, 0. Std needs two tokens, the
        correlation needs p and q to vary; what is undefined is left out.
        """
        n = self.num_tokens
        if n == 0.0:
            return {"training/rollout_probs_diff_valid": 0.0}
        found = {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_max": self.max_d,
            "training/rollout_probs_diff_mean": self.d / n,
        }
        if n > 1.0:
            variance = max(self.dd - self.d * self.d / n, 0.0) / (n - 1.0)
            found["training/rollout_probs_diff_std"] = math.sqrt(variance)
        variation = (self.pp - self.p * self.p / n) * (self.qq - self.q * self.q / n)
        if variation > 0.0:
            covariation = self.pq - self.p * self.q / n
            correlation = max(-1.0, min(1.0, covariation / math.sqrt(variation)))
            found["training/rollout_actor_probs_pearson_corr"] = correlation
        return found

"""The update's metrics: sums over tokens, micro-batches and ranks, and seconds by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from services.trainer.learner.ranks.parallel import DataParallel
from sluice.algorithm.losses.inputs import MetricMean
from sluice.algorithm.losses.objective import TotalLoss
from sluice.algorithm.rollout_correction.probs_diff import ProbsDiffSums
from sluice.algorithm.rollout_correction.statistics import (
    Statistics,
    merge_statistics,
    metrics_of,
    statistics_from_vector,
    statistics_to_vector,
)

LOSSES = ("actor/pg_loss", "actor/entropy_loss", "actor/kl_loss", "actor/loss")
ENTROPY = "actor/entropy"


class PhaseTimer:
    """Seconds of an update's phases, by name.

    Args:
        now_s: a clock, seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last_s = now_s()
        self.seconds: dict[str, float] = {}

    def end_phase(self, name: str, *, shown: bool = True) -> None:
        """Add the seconds since the last call to phase `name`; drop them if not shown."""
        now_s = self._now_s()
        if shown:
            self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s


class UpdateSums:
    """Sums of one train batch on this rank; `metrics` adds those of all ranks.

    Args:
        means: names of the means that the policy loss reports. They are known before the first
            loss, so that all ranks gather equally long vectors, even a rank without rows.
        corrections: empty statistics with the names that rollout correction reports.
    """

    def __init__(self, means: Sequence[str], corrections: Statistics) -> None:
        self._names = tuple(sorted(means))
        self._sums = dict.fromkeys((*self._names, *LOSSES), 0.0)
        self._counts = dict.fromkeys(self._names, 0.0)
        self._with_entropy = False
        self._with_kl = False
        self._entropy_sum = 0.0
        self._entropy_tokens = 0
        self._probs_diff = ProbsDiffSums()
        self._corrections = corrections
        self._unread: list[Tensor] = []

    def add_loss(self, total: TotalLoss, means: Mapping[str, MetricMean]) -> None:
        """Add a micro-batch's shares of the mini-batch's losses, and its sums for the means."""
        zero = torch.zeros_like(total.policy)
        entropy = zero if total.entropy is None else total.entropy
        kl = zero if total.kl is None else total.kl
        self._with_entropy |= total.entropy is not None
        self._with_kl |= total.kl is not None
        values = [means[name].total for name in self._names]
        values += [total.policy, entropy, kl, total.total.detach()]
        # Read after the optimizer step: reading now would wait for the accelerator's queue.
        self._unread.append(torch.stack([value.float() for value in values]))
        for name in self._names:
            self._counts[name] += means[name].count

    def end_step(self) -> None:
        """Read the losses that were added since the last optimizer step."""
        for vector in self._unread:
            for name, value in zip(self._sums, vector.tolist(), strict=True):
                self._sums[name] += value
        self._unread.clear()

    def add_entropy(self, entropy: Tensor) -> None:
        """Add entropies [N] of tokens under the policy before this batch."""
        self._entropy_sum += float(entropy.detach().sum(dtype=torch.float32))
        self._entropy_tokens += entropy.numel()

    def add_probs_diff(self, trainer_logprobs: Tensor, behavior_logprobs: Tensor) -> None:
        """Add the trainer's and the engine's logprobs [N] of the same tokens."""
        found = ProbsDiffSums.of_tokens(trainer_logprobs, behavior_logprobs)
        self._probs_diff = self._probs_diff.merge(found)

    def add_correction(self, statistics: Statistics) -> None:
        """Add the statistics of rollout correction for a micro-batch."""
        self._corrections = merge_statistics(self._corrections, statistics)

    @property
    def corrections(self) -> Statistics:
        """Return this rank's statistics of rollout correction so far."""
        return self._corrections

    def metrics(self, parallel: DataParallel, num_steps: int) -> dict[str, float]:
        """Return means over all ranks' tokens, and losses as means over `num_steps` steps.

        Collective: one vector of all numbers, so that metrics cost one exchange.
        """
        # In a fixed order, which `_losses` and `_means` read back: sums, counts, entropy, flags.
        own = [
            *self._sums.values(),
            *self._counts.values(),
            self._entropy_sum,
            float(self._entropy_tokens),
            float(self._with_entropy),
            float(self._with_kl),
        ]
        diff = self._probs_diff.to_vector()
        corrections = statistics_to_vector(self._corrections)
        vectors = parallel.all_gather([*own, *diff, *corrections], "summing the update's metrics")
        totals = [sum(column) for column in zip(*(v[: len(own)] for v in vectors), strict=True)]
        return {
            **self._losses(totals, num_steps),
            **self._means(totals),
            **self._of_ranks([vector[len(own) :] for vector in vectors], len(diff)),
        }

    def _losses(self, totals: Sequence[float], num_steps: int) -> dict[str, float]:
        sums = dict(zip(self._sums, totals, strict=False))
        shown = {name: sums[name] / max(num_steps, 1) for name in LOSSES}
        with_entropy, with_kl = totals[-2:]
        if not with_entropy:
            del shown["actor/entropy_loss"]
        if not with_kl:
            del shown["actor/kl_loss"]
        return shown

    def _means(self, totals: Sequence[float]) -> dict[str, float]:
        sums = dict(zip(self._sums, totals, strict=False))
        counts = dict(zip(self._names, totals[len(self._sums) :], strict=False))
        entropy_sum, entropy_tokens = totals[-4:-2]
        return {
            **{name: sums[name] / max(counts[name], 1.0) for name in self._names},
            **({ENTROPY: entropy_sum / entropy_tokens} if entropy_tokens else {}),
        }

    def _of_ranks(self, vectors: Sequence[Sequence[float]], num_diff: int) -> dict[str, float]:
        # These are no plain sums (they hold extremes too), so each has its own merge.
        probs_diff, corrections = ProbsDiffSums(), None
        for vector in vectors:
            probs_diff = probs_diff.merge(ProbsDiffSums.from_vector(vector[:num_diff]))
            found = statistics_from_vector(self._corrections, vector[num_diff:])
            corrections = found if corrections is None else merge_statistics(corrections, found)
        return {**probs_diff.metrics(), **metrics_of(corrections or {})}

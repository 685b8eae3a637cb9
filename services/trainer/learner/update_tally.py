"""Exact sums over tokens, micro-batches and ranks, and the update's metrics made of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from services.trainer.learner.parallel import DataParallel
from sluice.algorithm.probs_diff import ProbsDiffSums

LOSS = "actor/pg_loss"
ENTROPY = "actor/entropy"


class UpdateTally:
    """Sums of one train batch on this rank; `metrics` adds up all ranks'.

    Args:
        loss_metrics: names of the token sums that the policy loss reports.
    """

    def __init__(self, loss_metrics: tuple[str, ...]) -> None:
        self._names = (*sorted(loss_metrics), LOSS)
        self._sums = dict.fromkeys(self._names, 0.0)
        self._loss_tokens = 0
        self._entropy_sum, self._entropy_tokens = 0.0, 0
        self._probs_diff = ProbsDiffSums()
        self._unread: list[Tensor] = []

    def add_loss(self, metric_sums: Mapping[str, Tensor], loss: Tensor, num_tokens: int) -> None:
        """A micro-batch's token sums and its share of the mini-batch's policy loss."""
        values = {**metric_sums, LOSS: loss.detach()}
        # Not read before the optimizer step: that would stall an accelerator's queue.
        self._unread.append(torch.stack([values[name].float() for name in self._names]))
        self._loss_tokens += num_tokens

    def end_step(self) -> None:
        """Read what was added since the last optimizer step."""
        for vector in self._unread:
            for name, value in zip(self._names, vector.tolist(), strict=True):
                self._sums[name] += value
        self._unread.clear()

    def add_entropy(self, entropy: Tensor) -> None:
        """Entropies [N] of tokens under the policy as it came into the batch."""
        self._entropy_sum += float(entropy.detach().sum(dtype=torch.float32))
        self._entropy_tokens += entropy.numel()

    def add_probs_diff(self, trainer_logprobs: Tensor, behavior_logprobs: Tensor) -> None:
        """The trainer's and the engine's logprobs [N] of the same tokens."""
        seen = ProbsDiffSums.of_tokens(trainer_logprobs, behavior_logprobs)
        self._probs_diff = self._probs_diff.merge(seen)

    def metrics(self, parallel: DataParallel, num_steps: int) -> dict[str, float]:
        """Means over all ranks' tokens; the loss is the mean over `num_steps` optimizer steps."""
        own = [
            *self._sums.values(),
            float(self._loss_tokens),
            self._entropy_sum,
            float(self._entropy_tokens),
        ]
        vectors = parallel.all_gather(
            [*own, *self._probs_diff.to_vector()], "summing the update's metrics"
        )
        totals = [sum(column) for column in zip(*(v[: len(own)] for v in vectors), strict=True)]
        sums = dict(zip(self._names, totals, strict=False))
        loss_tokens, entropy_sum, entropy_tokens = totals[len(self._names) :]
        probs_diff = ProbsDiffSums()
        for vector in vectors:
            probs_diff = probs_diff.merge(ProbsDiffSums.from_vector(vector[len(own) :]))
        loss = sums.pop(LOSS)
        return {
            LOSS: loss / max(num_steps, 1),
            ENTROPY: entropy_sum / max(entropy_tokens, 1.0),
            **{name: value / max(loss_tokens, 1.0) for name, value in sums.items()},
            **probs_diff.metrics(),
        }

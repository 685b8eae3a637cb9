"""A micro-batch with all that its loss reads, filled in as the update learns it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.trainer.learner.micro_batch import MicroBatch
from services.trainer.learner.mini_batch import MiniBatch
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs


@dataclass(slots=True, eq=False)
class PreparedMicroBatch:
    """Tensors are [N], a value a response token.

    `old_logprobs` are ``None`` until a pass of the policy as it came into the batch yields them;
    `weights` and `kept` stay ``None`` without importance weights and rejections.
    """

    micro_batch: MicroBatch
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None
    kept: Tensor | None = None

    def loss_inputs(self, logprobs: Tensor, *, seed: int) -> LossInputs:
        """What the policy loss reads, rejected tokens included; old logprobs must be known."""
        assert self.old_logprobs is not None
        micro_batch = self.micro_batch
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=self.old_logprobs,
            advantages=self.advantages,
            row_index=micro_batch.rows,
            num_rows=micro_batch.num_rows,
            rollout_weights=self.weights,
            rollout_logprobs=micro_batch.behavior_logprobs,
            row_groups=micro_batch.row_groups,
            row_advantages=first_of_rows(self.advantages, micro_batch),
            seed=seed,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMiniBatch:
    """This rank's part of one optimizer step, and the step's counts over all ranks."""

    micro_batches: tuple[PreparedMicroBatch, ...]
    counts: GlobalCounts


def prepare(mini_batch: MiniBatch) -> PreparedMiniBatch:
    """Nothing is known yet; advantages are 0."""
    return PreparedMiniBatch(
        tuple(
            PreparedMicroBatch(micro_batch, torch.zeros_like(micro_batch.behavior_logprobs))
            for micro_batch in mini_batch.micro_batches
        ),
        GlobalCounts(
            tokens=mini_batch.global_tokens,
            rows=mini_batch.global_rows,
            groups=mini_batch.global_groups,
        ),
    )


def first_of_rows(values: Tensor, micro_batch: MicroBatch) -> Tensor:
    """The value of each row's first token, [R]; 0 for a row without tokens."""
    firsts = torch.zeros(micro_batch.num_rows, dtype=values.dtype, device=values.device)
    is_first = micro_batch.columns == 0
    firsts[micro_batch.rows[is_first]] = values[is_first]
    return firsts

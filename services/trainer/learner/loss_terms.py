"""The configured loss of one micro-batch: policy, entropy bonus, divergence from the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.trainer.learner.forward import TokenOutputs
from services.trainer.learner.prepared import PreparedMicroBatch
from services.trainer.learner.update_settings import UpdateSettings
from sluice.algorithm.kl.estimator import kl_estimate
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective
from sluice.algorithm.losses.registry import policy_objective
from sluice.algorithm.losses.total_loss import TotalLoss, total_loss
from sluice.algorithm.rollout_correction.correction import (
    RolloutCorrection,
    normalized_weights,
    rollout_correction,
)
from sluice.algorithm.rollout_correction.statistics import Moments, Statistics


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchLoss:
    """`total.total` is to be differentiated."""

    total: TotalLoss
    objective: PolicyObjective


class LossTerms:
    """The loss as configured; a function of what a micro-batch holds."""

    def __init__(self, settings: UpdateSettings) -> None:
        self._settings, self._actor = settings, settings.actor
        self._objective = policy_objective(settings.loss_mode)

    def loss(
        self,
        outputs: TokenOutputs,
        prepared: PreparedMicroBatch,
        counts: GlobalCounts,
        *,
        seed: int,
    ) -> MicroBatchLoss:
        """This micro-batch's share of the mini-batch's loss.

        Rejected tokens are left out; the denominators stay those of `counts`.
        """
        inputs = prepared.loss_inputs(outputs.logprobs, seed=seed)
        kept = prepared.kept
        if kept is not None:
            inputs = inputs.keeping(kept)
        objective = self._objective(inputs, counts, self._settings.loss)
        kl, entropy = None, _kept(outputs.entropy, kept)
        if self._actor.use_kl_loss:
            assert prepared.ref_logprobs is not None
            reference = _kept(prepared.ref_logprobs, kept)
            assert reference is not None
            kl = kl_estimate(inputs.logprobs, reference, kind=self._actor.kl_loss_type)
        shows_entropy = self._actor.entropy_coeff != 0.0 or self._actor.calculate_entropy
        total = total_loss(
            objective,
            inputs,
            counts,
            self._settings.loss,
            entropy=entropy if shows_entropy else None,
            entropy_coeff=self._actor.entropy_coeff,
            kl=kl,
            kl_loss_coef=self._actor.kl_loss_coef,
        )
        return MicroBatchLoss(total, objective)

    def correct(self, prepared: PreparedMicroBatch) -> Statistics | None:
        """Set weights and rejections from the old and the behaviour logprobs.

        ``None`` where both are the same, or the loss corrects by itself.
        """
        settings = self._settings
        if settings.old_is_behavior or not settings.plan.corrects_old_policy:
            return None
        assert prepared.old_logprobs is not None
        found = rollout_correction(
            prepared.old_logprobs,
            prepared.micro_batch.behavior_logprobs,
            prepared.micro_batch.rows,
            settings.correction,
        )
        prepared.weights = found.weights
        prepared.kept = found.kept if settings.correction.rollout_rs is not None else None
        return found.statistics

    def normalize(self, prepared: PreparedMicroBatch, batch_statistics: Statistics) -> None:
        """Divide the weights by their mean over the batch, where configured."""
        if prepared.weights is not None:
            prepared.weights = normalized_weights(prepared.weights, batch_statistics)

    def mean_names(self) -> tuple[str, ...]:
        """Names of the means that the loss reports."""
        samples = self._settings.loss.adpo.num_generations
        tokens = torch.zeros(2 * samples)
        inputs = LossInputs(
            logprobs=tokens,
            old_logprobs=tokens,
            advantages=tokens,
            row_index=torch.arange(samples).repeat_interleave(2),
            num_rows=samples,
            rollout_logprobs=tokens,
            row_groups=(0,) * samples,
            row_advantages=torch.zeros(samples),
        )
        counts = GlobalCounts(tokens=2 * samples, rows=samples, groups=1)
        return tuple(self._objective(inputs, counts, self._settings.loss).metrics)

    def no_corrections(self) -> Statistics:
        """The statistics that `correct` returns, of no tokens."""
        if self._settings.old_is_behavior or not self._settings.plan.corrects_old_policy:
            return {}
        found: RolloutCorrection = rollout_correction(
            torch.zeros(2), torch.zeros(2), torch.tensor([0, 1]), self._settings.correction
        )
        return {n: replace(one, moments=Moments()) for n, one in found.statistics.items()}


def _kept(values: Tensor | None, kept: Tensor | None) -> Tensor | None:
    return values if values is None or kept is None else values[kept]

"""The configured policy loss of one micro-batch, and its inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.batch.mini_batch import MiniBatch
from services.trainer.learner.model.forward import TokenOutputs
from services.trainer.learner.update.settings import UpdateSettings
from sluice.algorithm.kl_estimator import kl_estimate
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.objective import PolicyObjective, TotalLoss, total_loss
from sluice.algorithm.registry import policy_objective
from sluice.algorithm.rollout_correction.correction import (
    RolloutCorrection,
    normalized_weights,
    rollout_correction,
)
from sluice.algorithm.rollout_correction.statistics import Moments, Statistics


@dataclass(slots=True, eq=False)
class PreparedMicroBatch:
    """A micro-batch and the inputs of its loss, [N] each: one value per response token.

    `old_logprobs` are ``None`` until a pass of the policy before this batch yields them. `weights`
    and `kept` stay ``None`` without importance weights and without rejections.
    """

    micro_batch: MicroBatch
    advantages: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    weights: Tensor | None = None
    kept: Tensor | None = None

    def loss_inputs(self, logprobs: Tensor, *, seed: int) -> LossInputs:
        """Return the policy loss's inputs, with rejected tokens; old logprobs must be known."""
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
    """Return the mini-batch before any pass, with advantages 0."""
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
    """Return the value of each row's first token, [R]; 0 for a row without tokens."""
    firsts = torch.zeros(micro_batch.num_rows, dtype=values.dtype, device=values.device)
    is_first = micro_batch.columns == 0
    firsts[micro_batch.rows[is_first]] = values[is_first]
    return firsts


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchLoss:
    """The loss of a micro-batch; backward runs from `total.total`."""

    total: TotalLoss
    objective: PolicyObjective


class LossTerms:
    """The configured loss, corrections included."""

    def __init__(self, settings: UpdateSettings) -> None:
        self._settings = settings
        self._actor = settings.actor
        self._objective = policy_objective(settings.loss_mode)

    def loss(
        self,
        outputs: TokenOutputs,
        prepared: PreparedMicroBatch,
        counts: GlobalCounts,
        *,
        seed: int,
    ) -> MicroBatchLoss:
        """Return this micro-batch's share of the mini-batch's loss.

        Rejected tokens are left out, but the denominators remain those of `counts`.
        """
        inputs = prepared.loss_inputs(outputs.logprobs, seed=seed)
        kept = prepared.kept  # the denominators in `counts` do not depend on it
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
        """Set weights and rejections from old and behavior logprobs; return the statistics.

        ``None``: both logprobs are the same, or the loss itself corrects.
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
        """Divide importance weights, if there are any, by their mean over the batch."""
        if prepared.weights is not None:
            prepared.weights = normalized_weights(prepared.weights, batch_statistics)

    def mean_names(self) -> tuple[str, ...]:
        """Return the names of the means that the loss reports, by a trial on made-up tokens."""
        # One whole group of samples, since some losses compare all samples of a group.
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
        """Return the statistics of `correct` for no tokens."""
        if self._settings.old_is_behavior or not self._settings.plan.corrects_old_policy:
            return {}
        found: RolloutCorrection = rollout_correction(
            torch.zeros(2), torch.zeros(2), torch.tensor([0, 1]), self._settings.correction
        )
        return {n: replace(one, moments=Moments()) for n, one in found.statistics.items()}


def _kept(values: Tensor | None, kept: Tensor | None) -> Tensor | None:
    return values if values is None or kept is None else values[kept]

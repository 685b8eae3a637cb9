"""One policy update: every optimizer step of one train batch (DAPO, GRPO)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.learner.forward import EntropyUse, TokenOutputs, token_outputs
from services.trainer.learner.micro_batch import MicroBatch
from services.trainer.learner.mini_batch import MiniBatch, Share, split_batch
from services.trainer.learner.model import compute_context
from services.trainer.learner.optimizer import PolicyOptimizer
from services.trainer.learner.parallel import DataParallel
from services.trainer.learner.update_settings import UpdateSettings
from services.trainer.learner.update_tally import UpdateTally
from sluice.algorithm.advantages.registry import advantage_estimator
from sluice.algorithm.batch_metrics import batch_metrics, batch_rows
from sluice.algorithm.importance import truncated_importance_weights
from sluice.algorithm.losses.aggregate import aggregate
from sluice.algorithm.losses.policy_loss import PolicyLoss
from sluice.algorithm.losses.registry import policy_loss
from sluice.algorithm.throughput_metrics import throughput_metrics
from sluice.device.protocol import Device
from sluice.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Advantages = list[npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Replica:
    """What one rank updates: its copy of the model, and where it stands among the ranks."""

    model: PreTrainedModel
    optimizer: PolicyOptimizer
    parallel: DataParallel
    device: Device


class PolicyUpdate:
    """Turns train batches into new weights. Collective: every rank runs the same batches.

    The gradient of a mini-batch does not depend on how it is cut: each micro-batch's loss is
    divided by the mini-batch's global counts, gradients are added up over micro-batches by
    backward and over ranks by one collective before the optimizer step.
    """

    def __init__(self, replica: Replica, settings: UpdateSettings) -> None:
        self._model, self._optimizer = replica.model, replica.optimizer
        self._parallel, self._device = replica.parallel, replica.device
        self._settings, self._actor = settings, settings.actor
        self._loss_function = policy_loss(self._actor.policy_loss.loss_mode)
        self._loss_metrics = tuple(self._policy_loss(*[torch.zeros(0)] * 3).metric_sums)

    def run(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Train on one batch.

        Args:
            batch: the same on every rank.
            step: number of this train batch in the run, from 1.

        Returns:
            metrics by verl's names, the same on every rank but for timings.

        Raises:
            ConfigError: the batch's groups do not divide into mini-batches.
            DeadlineError: another rank did not arrive at a collective.
            PeerError: another rank failed.
        """
        began_s = time.perf_counter()
        advantages = self._advantages(batch)
        share = Share(self._parallel.rank, self._parallel.world_size)
        mini_batches = split_batch(
            batch.groups,
            advantages,
            self._actor,
            share,
            step=step,
            device=self._device.torch_device,
        )
        tally = UpdateTally(self._loss_metrics)
        rate = self._optimizer.begin_batch(step - 1)
        old_logprobs = self._old_logprobs(mini_batches, tally)
        recomputed_s = self._now_s()
        norms = [
            self._optimizer_step(mini_batch, old, tally, first_pass=epoch == 0)
            for epoch in range(self._actor.ppo_epochs)
            for mini_batch, old in zip(mini_batches, old_logprobs, strict=True)
        ]
        ended_s = self._now_s()
        finite = [norm for norm in norms if math.isfinite(norm)]
        return {
            **self._batch_metrics(batch, advantages),
            **tally.metrics(self._parallel, len(norms)),
            **self._speed(batch, recomputed_s - began_s, ended_s - recomputed_s),
            **({"actor/grad_norm": float(np.mean(finite))} if finite else {}),
            "actor/lr": rate,
            "actor/skipped_updates": float(len(norms) - len(finite)),
        }

    def _advantages(self, batch: TrainBatch) -> Advantages:
        estimate = advantage_estimator(self._settings.adv_estimator)
        return [
            estimate(
                np.array([scored.reward for scored in group.scores], dtype=np.float64),
                norm_by_std=self._settings.norm_adv_by_std,
            )
            for group in batch.groups
        ]

    def _old_logprobs(
        self, mini_batches: Sequence[MiniBatch], tally: UpdateTally
    ) -> list[list[Tensor | None]]:
        """Logprobs of the policy as it came into the batch, by mini-batch and micro-batch.

        ``None`` stands for the first mini-batch's: no weight has changed before its first pass,
        so that pass itself yields them. All others must be computed before the first step.
        """
        if self._actor.use_rollout_log_probs:
            return [[m.behavior_logprobs for m in mini.micro_batches] for mini in mini_batches]
        known: list[list[Tensor | None]] = [[None] * len(mini_batches[0].micro_batches)]
        known += [
            [self._recompute(m, tally) for m in mini.micro_batches] for mini in mini_batches[1:]
        ]
        return known

    def _recompute(self, micro_batch: MicroBatch, tally: UpdateTally) -> Tensor:
        with torch.no_grad():
            outputs = self._forward(micro_batch, EntropyUse.METRIC)
        _observe_old_policy(outputs, micro_batch, tally)
        return outputs.logprobs

    def _optimizer_step(
        self,
        mini_batch: MiniBatch,
        old_logprobs: list[Tensor | None],
        tally: UpdateTally,
        *,
        first_pass: bool,
    ) -> float:
        """Accumulate gradients over the mini-batch, sum them over ranks and step; the norm.

        Fills in `old_logprobs` where they are ``None``.
        """
        for number, micro_batch in enumerate(mini_batch.micro_batches):
            old = old_logprobs[number]
            bypassed = first_pass and self._actor.use_rollout_log_probs
            outputs = self._forward(micro_batch, self._entropy_use(old is None or bypassed))
            if old is None:
                _observe_old_policy(outputs, micro_batch, tally)
                old = old_logprobs[number] = outputs.logprobs.detach()
            elif bypassed and outputs.entropy is not None:
                tally.add_entropy(outputs.entropy)
            self._backward(outputs, old, micro_batch, mini_batch, tally)
        self._parallel.all_reduce_sum(self._optimizer.gradients.buffers, "summing gradients")
        norm = self._optimizer.step()
        tally.end_step()
        return norm

    def _backward(
        self,
        outputs: TokenOutputs,
        old_logprobs: Tensor,
        micro_batch: MicroBatch,
        mini_batch: MiniBatch,
        tally: UpdateTally,
    ) -> None:
        loss = self._policy_loss(outputs.logprobs, old_logprobs, micro_batch.advantages)
        token_loss = loss.loss
        if self._settings.importance_level is not None:
            token_loss = token_loss * truncated_importance_weights(
                old_logprobs,
                micro_batch.behavior_logprobs,
                micro_batch.rows,
                len(micro_batch.row_indices),
                level=self._settings.importance_level,
                threshold=self._settings.importance_threshold,
            )
        policy_share = self._aggregate(token_loss, micro_batch, mini_batch)
        total = policy_share
        if self._actor.entropy_coeff != 0.0 and outputs.entropy is not None:
            bonus = self._aggregate(outputs.entropy, micro_batch, mini_batch)
            total = total - self._actor.entropy_coeff * bonus
        total.backward()
        tally.add_loss(loss.metric_sums, policy_share, loss.num_tokens)

    def _policy_loss(self, logprobs: Tensor, old: Tensor, advantages: Tensor) -> PolicyLoss:
        return self._loss_function(
            logprobs,
            old,
            advantages,
            clip_low=self._actor.clip_ratio_low,
            clip_high=self._actor.clip_ratio_high,
            clip_c=self._actor.clip_ratio_c,
        )

    def _aggregate(self, values: Tensor, micro_batch: MicroBatch, mini_batch: MiniBatch) -> Tensor:
        return aggregate(
            values,
            micro_batch.rows,
            mode=self._actor.loss_agg_mode,
            global_tokens=mini_batch.global_tokens,
            global_rows=mini_batch.global_rows,
            loss_scale_factor=self._settings.loss_scale_factor,
        )

    def _forward(self, micro_batch: MicroBatch, entropy: EntropyUse) -> TokenOutputs:
        with self._precision():
            return token_outputs(
                self._model,
                micro_batch,
                temperature=self._settings.temperature,
                entropy=entropy,
            )

    def _precision(self) -> AbstractContextManager[object]:
        return compute_context(self._actor.fsdp_config, self._device.torch_device)

    def _entropy_use(self, reported: bool) -> EntropyUse:
        if self._actor.entropy_coeff != 0.0:
            return EntropyUse.BONUS
        return EntropyUse.METRIC if reported else EntropyUse.NONE

    def _batch_metrics(self, batch: TrainBatch, advantages: Advantages) -> dict[str, float]:
        return batch_metrics(
            batch_rows(batch, np.concatenate(advantages)),
            max_prompt_tokens=self._settings.max_prompt_tokens,
            max_response_tokens=self._settings.max_response_tokens,
        )

    def _speed(self, batch: TrainBatch, recompute_s: float, update_s: float) -> dict[str, float]:
        responses = sum(r.num_tokens for group in batch.groups for r in group.rollouts)
        prompts = sum(g.prompt_token_ids.size * len(g.rollouts) for g in batch.groups)
        return {
            **throughput_metrics(
                {"old_log_prob": recompute_s, "update_actor": update_s},
                total_tokens=int(responses + prompts),
                response_tokens=responses,
                num_ranks=self._parallel.world_size,
            ),
            "perf/trained_response_tokens_per_s": responses / (recompute_s + update_s),
        }

    def _now_s(self) -> float:
        self._device.synchronize()
        return time.perf_counter()


def _observe_old_policy(outputs: TokenOutputs, micro_batch: MicroBatch, tally: UpdateTally) -> None:
    if outputs.entropy is not None:
        tally.add_entropy(outputs.entropy)
    tally.add_probs_diff(outputs.logprobs, micro_batch.behavior_logprobs)

"""How long the stages of an update take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.batch.mini_batch import Share, split_batch
from services.trainer.learner.batch.tables import (
    BatchTable,
    batch_table,
    gather_tokens,
    reward_components,
    tokens_of,
)
from services.trainer.learner.model.forward import EntropyUse, TokenOutputs, token_outputs
from services.trainer.learner.model.loading import compute_context
from services.trainer.learner.model.optimizer import PolicyOptimizer
from services.trainer.learner.model.sharding import EvenPasses, Shards
from services.trainer.learner.ranks.parallel import DataParallel
from services.trainer.learner.update.advantages import (
    BatchInputs,
    TokenAdvantages,
    token_advantages,
    zero_advantage_rows,
)
from services.trainer.learner.update.critic import Critic, value_metrics
from services.trainer.learner.update.loss import (
    LossTerms,
    PreparedMicroBatch,
    PreparedMiniBatch,
    prepare,
)
from services.trainer.learner.update.metrics import UpdateSums
from services.trainer.learner.update.reference import ReferencePolicy
from services.trainer.learner.update.settings import UpdateSettings
from sluice.algorithm.batch_metrics import batch_metrics, batch_rows, throughput_metrics
from sluice.algorithm.rollout_correction.statistics import (
    Statistics,
    merge_statistics,
    statistics_from_vector,
    statistics_to_vector,
)
from sluice.device.protocol import Device
from sluice.types import TrainBatch
from sluice.vision.image_prompts import ImagePromptReader

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PhaseTimer:
    """Seconds between laps, by name.

    Args:
        now_s: a clock, seconds.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._last_s = now_s()
        self.seconds: dict[str, float] = {}

    def end_phase(self, name: str, *, shown: bool = True) -> None:
        """Ends a lap, whose seconds are added to others of the name; if not shown it is dropped."""
        now_s = self._now_s()
        if shown:
            self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._last_s
        self._last_s = now_s


# One update: every optimizer step of one train batch, of the policy and of a critic.
#
# cut -> old logprobs, reference, values -> advantages -> critic steps -> policy steps

_SEEDS_PER_BATCH = 1_000_003  # a prime: seeds of micro-batches of different batches differ


@dataclass(frozen=True, slots=True)
class Replica:
    """What one rank updates: its copy of the models, and where it stands among the ranks."""

    model: PreTrainedModel
    optimizer: PolicyOptimizer
    parallel: DataParallel
    device: Device
    reference: ReferencePolicy | None = None
    critic: Critic | None = None
    shards: Shards | None = None
    image_prompts: ImagePromptReader | None = None


class PolicyUpdate:
    """Turns train batches into new weights. Collective: every rank runs the same batches.

    The gradient of a mini-batch does not depend on how it is cut: each micro-batch's loss is
    divided by the mini-batch's global counts, gradients are added up over micro-batches by
    backward and over ranks by one collective before the optimizer step.

    Attributes:
        kl_controller: weight of the divergence in the reward; part of a checkpoint.
    """

    def __init__(self, replica: Replica, settings: UpdateSettings) -> None:
        self._model = replica.model
        self._optimizer = replica.optimizer
        self._parallel = replica.parallel
        self._device = replica.device
        self._reference = replica.reference
        self._critic = replica.critic
        self._image_prompts = replica.image_prompts
        self._settings = settings
        self._actor = settings.actor
        self._terms = LossTerms(settings)
        self._mean_names = self._terms.mean_names()
        self._no_corrections = self._terms.no_corrections()
        self.kl_controller = settings.kl_controller
        self._passes = EvenPasses(
            replica.shards, self._parallel, self._idle_pass, self._device.torch_device
        )

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
        clock = PhaseTimer(self._now_s)
        table = batch_table(batch, self._device.torch_device)
        known, skipped = None, frozenset[int]()
        if self._settings.skip_zero_advantage:  # no estimator that needs passes goes with it
            known = self._advantages(batch, table, BatchInputs())
            skipped = zero_advantage_rows(known.advantages, self._parallel)
            clock.end_phase("adv")
        mini_batches = self._cut(batch, step, skipped)
        sums = UpdateSums(self._mean_names, self._no_corrections)
        sum_pi_squared = self._old_logprobs(mini_batches, sums, table)
        clock.end_phase("old_log_prob")
        self._reference_logprobs(mini_batches)
        clock.end_phase("ref", shown=self._reference is not None)
        values = self._critic.values(batch, table, step) if self._critic else None
        clock.end_phase("values", shown=self._critic is not None)
        batch_inputs = self._batch_inputs(mini_batches, table, values, sum_pi_squared)
        estimates = known or self._advantages(batch, table, batch_inputs)
        for prepared in _micro_batches(mini_batches):
            prepared.advantages = tokens_of(estimates.advantages, prepared.micro_batch)
        clock.end_phase("adv")
        critic_metrics = self._update_critic(values, estimates, step)
        clock.end_phase("update_critic", shown=self._critic is not None)
        policy_metrics = {}
        if step >= self._settings.critic_warmup:
            policy_metrics = self._policy_steps(mini_batches, sums, step)
        clock.end_phase("update_actor")
        return {
            **self._batch_metrics(batch),
            **estimates.metrics,
            **critic_metrics,
            **policy_metrics,
            **({} if known is None else {"actor/skipped_samples": float(len(skipped))}),
            **self._speed(batch, clock.seconds),
        }

    def _cut(
        self, batch: TrainBatch, step: int, skipped: Container[int]
    ) -> list[PreparedMiniBatch]:
        mini_batches = split_batch(
            batch.groups,
            self._settings.cut,
            Share(self._parallel.rank, self._parallel.world_size),
            step=step,
            device=self._device.torch_device,
            image_prompts=self._image_prompts,
            skipped=skipped,
        )
        return [prepare(mini_batch) for mini_batch in mini_batches]

    def _old_logprobs(
        self, mini_batches: Sequence[PreparedMiniBatch], sums: UpdateSums, table: BatchTable
    ) -> Tensor | None:
        """Logprobs of the policy as it came into the batch; returns sums of squares, if needed.

        Left out are the first mini-batch's: no weight has changed before its first pass, so that
        pass itself yields them, unless something has to know them before. All others must be
        computed before the first step.
        """
        if self._settings.old_is_behavior:
            for prepared in _micro_batches(mini_batches):
                prepared.old_logprobs = prepared.micro_batch.behavior_logprobs
            if not self._settings.needs_sum_pi_squared:
                return None
        first = 0 if self._settings.needs_old_logprobs_first else 1
        squares: list[tuple[MicroBatch, Tensor]] = []
        passed = _micro_batches(mini_batches[first:])
        self._passes.begin(len(passed))
        for prepared in passed:
            with torch.no_grad():
                outputs = self._forward(
                    prepared.micro_batch,
                    EntropyUse.METRIC,
                    with_sum_pi_squared=self._settings.needs_sum_pi_squared,
                )
            if outputs.sum_pi_squared is not None:
                squares.append((prepared.micro_batch, outputs.sum_pi_squared))
            self._note_old_policy(prepared, outputs, sums)
        self._passes.end_forward_only()
        if self._settings.correction.rollout_is_batch_normalize:
            self._normalize_weights(mini_batches, sums)
        if not self._settings.needs_sum_pi_squared:
            return None
        return gather_tokens(squares, table, self._parallel, "gathering squared probabilities")

    def _note_old_policy(
        self, prepared: PreparedMicroBatch, outputs: TokenOutputs, sums: UpdateSums
    ) -> None:
        """A pass of the policy as it came into the batch has been made."""
        if outputs.entropy is not None:
            sums.add_entropy(outputs.entropy)
        if prepared.old_logprobs is None:
            prepared.old_logprobs = outputs.logprobs.detach()
        sums.add_probs_diff(outputs.logprobs, prepared.micro_batch.behavior_logprobs)
        statistics = self._terms.correct(prepared)
        if statistics is not None:
            sums.add_correction(statistics)

    def _normalize_weights(
        self, mini_batches: Sequence[PreparedMiniBatch], sums: UpdateSums
    ) -> None:
        own = statistics_to_vector(sums.corrections)
        vectors = self._parallel.all_gather(own, "normalising importance weights")
        merged: Statistics = self._no_corrections
        for vector in vectors:
            found = statistics_from_vector(self._no_corrections, vector)
            merged = merge_statistics(merged, found)
        for prepared in _micro_batches(mini_batches):
            self._terms.normalize(prepared, merged)

    def _reference_logprobs(self, mini_batches: Sequence[PreparedMiniBatch]) -> None:
        if self._reference is None:
            return
        prepared = _micro_batches(mini_batches)
        found = self._reference.logprobs(
            [one.micro_batch for one in prepared], self._settings.temperature
        )
        for one, logprobs in zip(prepared, found, strict=True):
            one.ref_logprobs = logprobs

    def _batch_inputs(
        self,
        mini_batches: Sequence[PreparedMiniBatch],
        table: BatchTable,
        values: Tensor | None,
        sum_pi_squared: Tensor | None,
    ) -> BatchInputs:
        if not self._settings.needs_old_logprobs_first:
            return BatchInputs(values=values)
        prepared, settings = _micro_batches(mini_batches), self._settings

        def gathered(of: Callable[[PreparedMicroBatch], Tensor | None], what: str) -> Tensor:
            known = [(one.micro_batch, found) for one in prepared if (found := of(one)) is not None]
            return gather_tokens(known, table, self._parallel, f"gathering {what}")

        with_reference = settings.advantages.kl_kind is not None
        rejects = settings.rejects_before_advantages
        return BatchInputs(
            old_logprobs=gathered(lambda one: one.old_logprobs, "old logprobs"),
            ref_logprobs=gathered(lambda one: one.ref_logprobs, "reference logprobs")
            if with_reference
            else None,
            values=values,
            sum_pi_squared=sum_pi_squared,
            importance_weights=(
                gathered(lambda one: one.weights, "importance weights")
                if settings.weighs_baselines
                else None
            ),
            kept=gathered(lambda one: one.kept, "rejections") > 0 if rejects else None,
        )

    def _advantages(
        self, batch: TrainBatch, table: BatchTable, batch_inputs: BatchInputs
    ) -> TokenAdvantages:
        components = reward_components(
            batch, self._settings.component_keys, self._device.torch_device
        )
        estimates = token_advantages(
            table, batch_inputs, components, self._settings.advantages, self.kl_controller
        )
        self.kl_controller = estimates.controller
        return estimates

    def _update_critic(
        self, values: Tensor | None, estimates: TokenAdvantages, step: int
    ) -> dict[str, float]:
        if self._critic is None or values is None:
            return {}
        return {
            **value_metrics(values, estimates.returns, estimates.mask),
            **self._critic.update(estimates.returns, estimates.mask, step),
        }

    def _policy_steps(
        self, mini_batches: Sequence[PreparedMiniBatch], sums: UpdateSums, step: int
    ) -> dict[str, float]:
        # The schedule begins with the policy's first update, which a warm-up of the critic delays.
        rate = self._optimizer.begin_batch(step - max(1, self._settings.critic_warmup))
        norms = [
            self._optimizer_step(mini_batch, sums, seed, first_pass=epoch == 0)
            for epoch in range(self._actor.ppo_epochs)
            for seed, mini_batch in enumerate(
                mini_batches, step * _SEEDS_PER_BATCH + epoch * len(mini_batches)
            )
        ]
        finite = [norm for norm in norms if math.isfinite(norm)]
        return {
            **sums.metrics(self._parallel, len(norms)),
            **({"actor/grad_norm": float(np.mean(finite))} if finite else {}),
            **({"actor/kl_coef": self._actor.kl_loss_coef} if self._actor.use_kl_loss else {}),
            "actor/lr": rate,
            "actor/skipped_updates": float(len(norms) - len(finite)),
        }

    def _optimizer_step(
        self, mini_batch: PreparedMiniBatch, sums: UpdateSums, seed: int, *, first_pass: bool
    ) -> float:
        """Accumulate gradients over the mini-batch, sum them over ranks and step; the norm."""
        self._passes.begin(len(mini_batch.micro_batches))
        for number, prepared in enumerate(mini_batch.micro_batches):
            is_old_policy = prepared.old_logprobs is None
            bypassed = first_pass and self._settings.old_is_behavior
            reported = (
                is_old_policy
                or (bypassed and not self._settings.needs_sum_pi_squared)
                or self._actor.calculate_entropy
            )
            outputs = self._forward(prepared.micro_batch, self._entropy_use(reported))
            if is_old_policy:
                self._note_old_policy(prepared, outputs, sums)
            elif bypassed and outputs.entropy is not None:
                sums.add_entropy(outputs.entropy)
            loss = self._terms.loss(
                outputs,
                prepared,
                mini_batch.counts,
                seed=(seed * _SEEDS_PER_BATCH + number) % 2**62,
            )
            self._passes.before_backward()
            loss.total.total.backward()
            sums.add_loss(loss.total, loss.objective.metrics)
        self._passes.end_step()
        self._parallel.all_reduce_sum(self._optimizer.gradients.buffers, "summing gradients")
        norm = self._optimizer.step()
        sums.end_step()
        return norm

    def _forward(
        self, micro_batch: MicroBatch, entropy: EntropyUse, *, with_sum_pi_squared: bool = False
    ) -> TokenOutputs:
        with self._precision():
            return token_outputs(
                self._model,
                micro_batch,
                temperature=self._settings.temperature,
                entropy=entropy,
                with_sum_pi_squared=with_sum_pi_squared,
            )

    def _idle_pass(self, micro_batch: MicroBatch) -> Tensor:
        return self._forward(micro_batch, EntropyUse.NONE).logprobs

    def _precision(self) -> AbstractContextManager[object]:
        return compute_context(self._actor.fsdp_config, self._device.torch_device)

    def _entropy_use(self, reported: bool) -> EntropyUse:
        if self._actor.entropy_coeff != 0.0:
            return EntropyUse.BONUS
        return EntropyUse.METRIC if reported else EntropyUse.NONE

    def _batch_metrics(self, batch: TrainBatch) -> dict[str, float]:
        rows = sum(len(group.rollouts) for group in batch.groups)
        return batch_metrics(
            batch_rows(batch, np.zeros(rows)),
            max_prompt_tokens=self._settings.max_prompt_tokens,
            max_response_tokens=self._settings.max_response_tokens,
        )

    def _speed(self, batch: TrainBatch, seconds: dict[str, float]) -> dict[str, float]:
        responses = sum(r.num_tokens for group in batch.groups for r in group.rollouts)
        prompts = sum(g.prompt_token_ids.size * len(g.rollouts) for g in batch.groups)
        busy_s = sum(seconds.values())
        return {
            **throughput_metrics(
                seconds,
                total_tokens=int(responses + prompts),
                response_tokens=responses,
                num_ranks=self._parallel.world_size,
            ),
            "perf/trained_response_tokens_per_s": responses / busy_s,
        }

    def _now_s(self) -> float:
        self._device.synchronize()
        return time.perf_counter()


def _micro_batches(mini_batches: Sequence[PreparedMiniBatch]) -> list[PreparedMicroBatch]:
    return [prepared for mini_batch in mini_batches for prepared in mini_batch.micro_batches]

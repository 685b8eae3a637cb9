"""One update: every optimizer step of one train batch, of the policy and of a critic.

    split -> old logprobs, reference, values -> advantages -> critic steps -> policy steps

Passes run on packed micro-batches of this rank's rows. Advantages need the whole batch:
the results of all passes are gathered over ranks into tables [rows, W], the advantages are computed
there, and each micro-batch takes its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.batch.train_batch import (
    BatchTable,
    MiniBatch,
    batch_table,
    gather_tokens,
    own_rows,
    reward_components,
    split_batch,
    tokens_of,
)
from services.trainer.learner.model.experts import (
    Routing,
    agreement_metrics,
    balance_metrics,
    idle_routing,
    routing_tape,
)
from services.trainer.learner.model.forward import EntropyUse, TokenPass
from services.trainer.learner.model.passes import TokenPasses, idle_micro_batch
from services.trainer.learner.model.trained_model import TrainedModel
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.step_measures import MemoryPeaks, PhaseTimer, update_flops
from services.trainer.learner.update.advantages import (
    AdvantageEstimate,
    PassTables,
    estimate_by_source,
    token_advantages,
    zero_advantage_rows,
)
from services.trainer.learner.update.critic import Critic, value_metrics
from services.trainer.learner.update.loss import (
    LossTerms,
    PreparedMicroBatch,
    PreparedMiniBatch,
    UpdateSums,
    prepare,
)
from services.trainer.learner.update.reference import Reference, ReferencePolicy
from services.trainer.learner.update.settings import UpdateSettings
from sluice.algorithm.batch_metrics import (
    batch_metrics,
    batch_rows,
    batch_tokens,
    sequence_balance_metrics,
    throughput_metrics,
)
from sluice.algorithm.kl import KlController
from sluice.algorithm.rollout_correction.correction import normalized_weights
from sluice.algorithm.rollout_correction.statistics import (
    Statistics,
    merge_statistics,
    statistics_from_vector,
    statistics_to_vector,
)
from sluice.algorithm.sources import source_metric
from sluice.algorithm.token_statistics import TokenStatistics
from sluice.config.memory.shape import find_shape
from sluice.device.protocol import Device
from sluice.types import TrainBatch
from sluice.vision.image_prompts import ImagePromptReader

if TYPE_CHECKING:
    from torch import Tensor

_SEEDS_PER_BATCH = 1_000_003  # a prime: micro-batches of different batches have different seeds


class PolicyUpdate:
    """The update of one policy. Collective: every rank runs the same batches.

    The gradient of a mini-batch does not depend on how it is cut into micro-batches and over ranks:
    each micro-batch's loss is divided by the mini-batch's global counts, backward adds gradients up
    over micro-batches, and one collective adds them up over ranks before the optimizer step.

    Args:
        reference: frozen policy, if a term measures the divergence from it.
        critic: value model, if the estimator needs one.

    Attributes:
        kl_controller: weight of the divergence in the reward; part of a checkpoint.
    """

    def __init__(
        self,
        settings: UpdateSettings,
        policy: TrainedModel,
        parallel: ParallelContext,
        device: Device,
        *,
        peaks: MemoryPeaks,
        reference: Reference | None = None,
        critic: Critic | None = None,
        image_prompts: ImagePromptReader | None = None,
    ) -> None:
        self._settings = settings
        self._actor = settings.actor
        self._model = policy.model
        self._optimizer = policy.optimizer
        self._weights = list(policy.parameters.values())
        # Adapters' reference computes with the policy's weights.
        other_models = [critic, reference if isinstance(reference, ReferencePolicy) else None]
        moves = settings.actor.fsdp_config.param_offload and any(other_models)
        self._host = policy.host if moves else None
        self._parallel = parallel
        self._device = device
        self._peaks = peaks
        self._reference = reference
        self._critic = critic
        self._image_prompts = image_prompts
        self._shape = find_shape(settings.config.actor_rollout_ref.model.path)
        tables = settings.sources or {"": settings}
        self._terms = {name: LossTerms(source_settings) for name, source_settings in tables.items()}
        of_sources = {name: terms.mean_names() for name, terms in self._terms.items()}
        self._mean_names = tuple(dict.fromkeys(chain(*of_sources.values())))
        self._source_means = of_sources if settings.sources else {}
        # The correction is the same in all sources.
        self._no_corrections = next(iter(self._terms.values())).no_corrections()
        control = settings.config.algorithm.kl_ctrl
        self.kl_controller = KlController(
            type=control.type,
            coef=control.kl_coef,
            target_kl=control.target_kl,
            horizon=control.horizon,
        )
        self._passes = TokenPasses(
            policy.model, policy.shards, parallel, device.torch_device, policy.stage
        )
        tape = routing_tape(policy.model)
        self._cut = replace(settings.cut, routed_layers=None if tape is None else tape.local_layers)

    def own_rows(self, batch: TrainBatch, step: int) -> list[int]:
        """Return the numbers of the batch's samples that this rank's passes read. Collective."""
        _, skipped = self._estimate_early(batch)
        rows = own_rows(batch.groups, self._cut, self._parallel, step=step, skipped=skipped)
        if self._critic is not None:
            rows |= self._critic.own_rows(batch, step)
        return sorted(rows)

    def run(self, batch: TrainBatch, step: int) -> dict[str, float]:
        """Train on one batch. Collective.

        Args:
            batch: the same on every rank, except for tokens of samples that are not its `own_rows`.
            step: number of this train batch in the run, from 1.

        Returns:
            metrics by verl's names; except for timings the same on every rank.

        Raises:
            ConfigError: the batch's groups do not divide into mini-batches.
            DeadlineError: another rank did not arrive at a collective.
            PeerError: another rank failed.
        """
        timer = PhaseTimer(self._device, self._peaks)
        early, skipped = self._estimate_early(batch)
        if early is not None:
            timer.end_phase("adv")
        table = batch_table(batch, self._device.torch_device)
        # Passes that need the policy before this batch come first: optimizer steps change it.
        cut = self._split(batch, step, skipped)
        mini_batches = [prepare(mini_batch) for mini_batch in cut]
        if self._settings.replays_routing:
            for prepared in _micro_batches(mini_batches):
                prepared.routing = Routing(engine_experts=prepared.micro_batch.routing)
        sums = UpdateSums(self._mean_names, self._no_corrections, self._source_means)
        sum_pi_squared = self._old_logprobs(mini_batches, sums, table)
        timer.end_phase("old_log_prob")
        with ExitStack() as away:
            # The reference of adapters is the policy itself, without them.
            if isinstance(self._reference, ReferencePolicy):
                away.enter_context(self._without_policy())
            self._reference_logprobs(mini_batches)
            timer.end_phase("ref", shown=self._reference is not None)
            away.enter_context(self._without_policy())
            values = self._critic.values(batch, table, step) if self._critic else None
            timer.end_phase("values", shown=self._critic is not None)
        passed = self._pass_tables(mini_batches, table, values, sum_pi_squared)
        estimate = early or self._estimate(batch, table, passed)
        for prepared in _micro_batches(mini_batches):
            prepared.advantages = tokens_of(estimate.advantages, prepared.micro_batch)
        timer.end_phase("adv")
        with self._without_policy():
            critic_metrics = self._update_critic(values, estimate, step)
        timer.end_phase("update_critic", shown=self._critic is not None)
        # During the warm-up only the critic trains.
        trains = step >= self._settings.config.trainer.critic_warmup
        policy_metrics = self._policy_steps(mini_batches, sums, step) if trains else {}
        timer.end_phase("update_actor")
        if policy_metrics:
            policy_metrics |= self._flops_utilization(batch, timer.seconds["update_actor"], skipped)
        return {
            **self._batch_metrics(batch, cut),
            **estimate.metrics,
            **critic_metrics,
            **policy_metrics,
            **({} if early is None else {"actor/skipped_samples": float(len(skipped))}),
            **self._speed(batch, timer.seconds),
        }

    def _estimate_early(self, batch: TrainBatch) -> tuple[AdvantageEstimate | None, frozenset[int]]:
        """Return the estimate and the rows that ``skip_zero_advantage`` leaves out. Collective.

        Without that setting they are None and no rows. The setting allows only estimators that need
        no forward pass.
        """
        if not self._settings.config.sluice.trainer.skip_zero_advantage:
            return None, frozenset()
        table = batch_table(batch, self._device.torch_device)
        estimate = self._estimate(batch, table, PassTables())
        return estimate, zero_advantage_rows(estimate.advantages, self._parallel)

    def _split(self, batch: TrainBatch, step: int, skipped: Container[int]) -> list[MiniBatch]:
        return split_batch(
            batch.groups,
            self._cut,
            self._parallel,
            step=step,
            device=self._device.torch_device,
            image_prompts=self._image_prompts,
            skipped=skipped,
        )

    def _old_logprobs(
        self, mini_batches: Sequence[PreparedMiniBatch], sums: UpdateSums, table: BatchTable
    ) -> Tensor | None:
        """Compute logprobs of the policy before this batch; return sums of squares, if needed.

        The first mini-batch needs no pass of its own: no weight has changed before its first
        training pass, which yields the old logprobs, unless an earlier stage needs them. All other
        mini-batches need them before the first optimizer step.
        """
        if self._settings.old_is_behavior:
            for prepared in _micro_batches(mini_batches):
                prepared.old_logprobs = prepared.micro_batch.behavior_logprobs
            if not self._settings.needs_sum_pi_squared:
                return None
        # Squared probabilities need a pass over every mini-batch, even if the logprobs are known.
        start = 0 if self._settings.needs_old_logprobs_first else 1
        squares: list[tuple[MicroBatch, Tensor]] = []
        to_pass = _micro_batches(mini_batches[start:])
        self._passes.begin(len(to_pass))
        for mini_batch in mini_batches[start:]:
            mini_batch.is_routed = self._settings.replays_routing

        def read(number: int, outputs: TokenStatistics) -> None:
            prepared = to_pass[number]
            if outputs.sum_pi_squared is not None:  # kept separately: only the estimator reads them
                squares.append((prepared.micro_batch, outputs.sum_pi_squared))
            self._note_old_policy(prepared, outputs, sums)

        with_squares = self._settings.needs_sum_pi_squared
        self._passes.forward(
            [
                self._pass(prepared, EntropyUse.METRIC, with_sum_pi_squared=with_squares)
                for prepared in to_pass
            ],
            read,
        )
        if self._settings.correction.rollout_is_batch_normalize:
            self._normalize_weights(mini_batches, sums)
        if not self._settings.needs_sum_pi_squared:
            return None
        return gather_tokens(squares, table, self._parallel, "gathering squared probabilities")

    def _note_old_policy(
        self, prepared: PreparedMicroBatch, outputs: TokenStatistics, sums: UpdateSums
    ) -> None:
        """Keep the results of a pass of the policy before this batch."""
        if outputs.entropy is not None:
            sums.add_entropy(outputs.entropy, prepared.micro_batch.source)
        if prepared.old_logprobs is None:
            prepared.old_logprobs = outputs.logprobs.detach()
        sums.add_probs_diff(outputs.logprobs, prepared.micro_batch.behavior_logprobs)
        statistics = self._terms[prepared.micro_batch.source].correct(prepared)
        if statistics is not None:
            sums.add_correction(statistics)

    def _normalize_weights(
        self, mini_batches: Sequence[PreparedMiniBatch], sums: UpdateSums
    ) -> None:
        """Divide importance weights by their mean over the whole batch, that is over all ranks."""
        local = statistics_to_vector(sums.read_corrections())
        vectors = self._parallel.gather_rows(local, "normalising importance weights")
        merged: Statistics = self._no_corrections
        for vector in vectors:
            of_rank = statistics_from_vector(self._no_corrections, vector)
            merged = merge_statistics(merged, of_rank)
        for prepared in _micro_batches(mini_batches):
            if prepared.weights is not None:
                prepared.weights = normalized_weights(prepared.weights, merged)

    def _without_policy(self) -> AbstractContextManager[None]:
        """Keep the policy's weights on the host while another model computes, if configured."""
        return nullcontext() if self._host is None else self._host.on_host(self._weights)

    def _reference_logprobs(self, mini_batches: Sequence[PreparedMiniBatch]) -> None:
        if self._reference is None:
            return
        # A source without a divergence needs none of these passes.
        prepared = [
            part
            for part in _micro_batches(mini_batches)
            if self._settings.for_source(part.micro_batch.source).needs_reference
        ]
        by_micro_batch = self._reference.logprobs(
            [part.micro_batch for part in prepared], self._settings.temperature
        )
        for part, logprobs in zip(prepared, by_micro_batch, strict=True):
            part.ref_logprobs = logprobs

    def _pass_tables(
        self,
        mini_batches: Sequence[PreparedMiniBatch],
        table: BatchTable,
        values: Tensor | None,
        sum_pi_squared: Tensor | None,
    ) -> PassTables:
        settings = self._settings
        if not settings.needs_old_logprobs_first:
            return PassTables(values=values)
        prepared = _micro_batches(mini_batches)

        def gather(read: Callable[[PreparedMicroBatch], Tensor | None], content: str) -> Tensor:
            tensors = [(part.micro_batch, read(part)) for part in prepared]
            outputs = [(micro_batch, t) for micro_batch, t in tensors if t is not None]
            return gather_tokens(outputs, table, self._parallel, f"gathering {content}")

        # Each table costs a collective, so only those that the estimator reads are gathered.
        return PassTables(
            old_logprobs=gather(lambda part: part.old_logprobs, "old logprobs"),
            ref_logprobs=(
                gather(lambda part: part.ref_logprobs, "reference logprobs")
                if settings.kl_kind is not None
                else None
            ),
            values=values,
            sum_pi_squared=sum_pi_squared,
            importance_weights=(
                gather(lambda part: part.weights, "importance weights")
                if settings.weighs_baselines
                else None
            ),
            kept=(
                gather(lambda part: part.kept, "rejections") > 0
                if settings.rejects_before_advantages
                else None
            ),
        )

    def _estimate(
        self, batch: TrainBatch, table: BatchTable, passed: PassTables
    ) -> AdvantageEstimate:
        if self._settings.sources:
            return estimate_by_source(batch, table, passed, self._settings, self.kl_controller)
        names = self._settings.config.algorithm.gdpo_reward_keys or ()
        components = reward_components(batch, names, self._device.torch_device)
        estimate = token_advantages(table, passed, components, self._settings, self.kl_controller)
        self.kl_controller = estimate.controller
        return estimate

    def _update_critic(
        self, values: Tensor | None, estimate: AdvantageEstimate, step: int
    ) -> dict[str, float]:
        if self._critic is None or values is None:
            return {}
        return {
            **value_metrics(values, estimate.returns, estimate.mask),
            **self._critic.update(values, estimate.returns, estimate.mask, step),
        }

    def _policy_steps(
        self, mini_batches: Sequence[PreparedMiniBatch], sums: UpdateSums, step: int
    ) -> dict[str, float]:
        # The schedule starts at the policy's first update, which critic_warmup delays.
        first_step = max(1, self._settings.config.trainer.critic_warmup)
        rate = self._optimizer.begin_batch(step - first_step)
        # Some losses choose tokens at random: each pass has its own seed, equal in a resumed run.
        norms = [
            self._optimizer_step(mini_batch, sums, seed, first_pass=epoch == 0)
            for epoch in range(self._actor.ppo_epochs)
            for seed, mini_batch in enumerate(
                mini_batches, step * _SEEDS_PER_BATCH + epoch * len(mini_batches)
            )
        ]
        # The optimizer has skipped the steps whose norm is not finite.
        finite = [norm for norm in norms if math.isfinite(norm)]
        return {
            **sums.metrics(self._parallel, len(norms)),
            **self._expert_balance(),
            **({"actor/grad_norm": float(np.mean(finite))} if finite else {}),
            **self._kl_coefficients(),
            "actor/lr": rate,
            "actor/skipped_updates": float(len(norms) - len(finite)),
        }

    def _kl_coefficients(self) -> dict[str, float]:
        tables = self._settings.sources or {"": self._settings}
        return {
            source_metric(source, "actor/kl_coef"): settings.actor.kl_loss_coef
            for source, settings in tables.items()
            if settings.actor.use_kl_loss
        }

    def _expert_balance(self) -> Mapping[str, float]:
        """Return how evenly the passes since the last call used a model's experts."""
        tape = routing_tape(self._model)
        if tape is None:
            return {}
        device = self._device.torch_device
        load, agreement = tape.take_load(device), tape.take_agreement(device)
        self._parallel.all_reduce_sum([load, agreement], "summing the experts' loads")
        return {**balance_metrics(load), **agreement_metrics(agreement)}

    def _optimizer_step(
        self, mini_batch: PreparedMiniBatch, sums: UpdateSums, seed: int, *, first_pass: bool
    ) -> float:
        """Accumulate gradients over the mini-batch, sum them over ranks, step; return the norm."""
        self._passes.begin(len(mini_batch.micro_batches))
        if mini_batch.is_routed:
            self._passes.follow_idle(self._exchange(mini_batch))
        mini_batch.is_routed = self._settings.replays_routing
        self._accumulate(mini_batch, sums, seed, first_pass=first_pass)
        # Empty for a sharded model, whose last backward pass has summed its gradients.
        self._parallel.all_reduce_sum(self._optimizer.gradients.buffers, "summing gradients")
        self._peaks.end_phase("update_actor")
        norm = self._optimizer.step()
        self._peaks.end_phase("optimizer_step")
        sums.end_step()
        return norm

    def _accumulate(
        self, mini_batch: PreparedMiniBatch, sums: UpdateSums, seed: int, *, first_pass: bool
    ) -> None:
        # Where the behavior logprobs are the old ones, the first epoch's passes come before any
        # update of their rows, so they stand for the old policy in the entropy metric.
        bypassed = first_pass and self._settings.old_is_behavior

        def shows_entropy(prepared: PreparedMicroBatch) -> bool:
            return (
                prepared.old_logprobs is None
                or (bypassed and not self._settings.needs_sum_pi_squared)
                or self._actor.calculate_entropy
            )

        def loss(number: int, outputs: TokenStatistics) -> Tensor:
            prepared = mini_batch.micro_batches[number]
            if prepared.old_logprobs is None:
                # No weight has changed yet, so this pass also yields the old logprobs.
                self._note_old_policy(prepared, outputs, sums)
            elif bypassed and outputs.entropy is not None:
                sums.add_entropy(outputs.entropy, prepared.micro_batch.source)
            total, objective = self._terms[prepared.micro_batch.source].loss(
                outputs,
                prepared,
                mini_batch.counts,
                seed=(seed * _SEEDS_PER_BATCH + number) % 2**62,
            )
            sums.add_loss(total, objective.metrics, prepared.micro_batch.source)
            if objective.statistics:
                sums.add_correction(lambda: objective.statistics)
            return total.total

        passes = [
            self._pass(prepared, self._entropy_use(shows_entropy(prepared)))
            for prepared in mini_batch.micro_batches
        ]
        self._passes.train(passes, loss)

    def _pass(
        self,
        prepared: PreparedMicroBatch,
        entropy: EntropyUse,
        *,
        with_sum_pi_squared: bool = False,
    ) -> TokenPass:
        return TokenPass(
            prepared.micro_batch,
            self._settings.temperature,
            entropy,
            with_sum_pi_squared,
            prepared.routing,
        )

    def _exchange(self, mini_batch: PreparedMiniBatch) -> list[Routing]:
        """Exchange the expert counts of all passes of this step that replay a routing. Collective.

        Return the routings of the idle passes.
        """
        tape, idle = routing_tape(self._model), []
        if tape is not None:
            row = idle_micro_batch(self._device.torch_device, self._parallel)
            tokens, number = row.input_ids.numel(), self._passes.num_idle
            idle = [idle_routing(self._model, tokens) for _ in range(number)]
            routings = [prepared.routing for prepared in mini_batch.micro_batches]
            tape.exchange([routing for routing in (*routings, *idle) if routing is not None])
        return [routing for routing in idle if routing is not None]

    def _entropy_use(self, is_shown: bool) -> EntropyUse:
        if self._actor.entropy_coeff != 0.0:
            return EntropyUse.BONUS
        return EntropyUse.METRIC if is_shown else EntropyUse.NONE

    def _batch_metrics(
        self, batch: TrainBatch, mini_batches: Sequence[MiniBatch]
    ) -> dict[str, float]:
        num_rows = sum(len(group.rollouts) for group in batch.groups)
        rows = batch_rows(batch)
        replays = self._actor.router_replay.mode == "R3"
        of_ranks = zip(*(mini_batch.rank_rows for mini_batch in mini_batches), strict=True)
        return {
            **batch_metrics(
                rows,
                max_prompt_tokens=self._settings.config.data.max_prompt_length,
                max_response_tokens=self._settings.config.data.max_response_length,
            ),
            **({"actor/moe/engine_samples": batch.num_routed / num_rows} if replays else {}),
            **sequence_balance_metrics(
                rows.lengths,
                [list(chain(*parts)) for parts in of_ranks],
            ),
        }

    def _speed(self, batch: TrainBatch, seconds: dict[str, float]) -> dict[str, float]:
        responses, total = batch_tokens(batch)
        busy_s = sum(seconds.values())
        return {
            **throughput_metrics(
                seconds,
                total_tokens=total,
                response_tokens=responses,
                num_ranks=self._parallel.world_size,
            ),
            "perf/trained_response_tokens_per_s": responses / busy_s,
        }

    def _flops_utilization(
        self, batch: TrainBatch, seconds: float, skipped: Container[int]
    ) -> dict[str, float]:
        peak = self._device.peak_flops()
        if peak is None or self._shape is None:
            return {}
        flops = self._actor.ppo_epochs * update_flops(self._shape, batch, skipped)
        return {"perf/mfu/actor": flops / (seconds * peak * self._parallel.world_size)}


def _micro_batches(mini_batches: Sequence[PreparedMiniBatch]) -> list[PreparedMicroBatch]:
    return [prepared for mini_batch in mini_batches for prepared in mini_batch.micro_batches]

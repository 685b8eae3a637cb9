"""The critic: its values before the update, and its optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.batch.train_batch import (
    BatchCut,
    BatchTable,
    MiniBatch,
    gather_tokens,
    own_rows,
    split_batch,
    tokens_of,
)
from services.trainer.learner.model.forward import TokenPass
from services.trainer.learner.model.loading import LoadedModel, load_critic
from services.trainer.learner.model.passes import ValuePasses
from services.trainer.learner.model.stages import keep_stage, own_stage
from services.trainer.learner.model.tensor_cut import check_cuttable
from services.trainer.learner.model.trained_model import CRITIC_SHARDING, trained_model
from services.trainer.learner.rank_shares import check_shareable
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.batch_metrics import spread
from sluice.algorithm.losses.objective import ValueLoss, value_loss
from sluice.config.derived import max_row_tokens, padding_step
from sluice.config.run import RunConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.protocol import Device
from sluice.errors import ConfigError
from sluice.types import TrainBatch

_LOSSES = ("critic/vf_loss", "critic/loss")
"""The same number, since the critic's loss has one term; verl logs both names."""

_TOKEN_MEANS = ("critic/vf_clipfrac", "critic/vpred_mean")


def _model_config(config: RunConfig) -> ModelConfig:
    policy, critic = config.actor_rollout_ref.model, config.critic.model
    return structs.replace(
        policy,
        path=critic.path or policy.path,
        enable_gradient_checkpointing=critic.enable_gradient_checkpointing,
    )


def _load(config: RunConfig, parallel: ParallelContext) -> LoadedModel:
    """Return the critic, or this rank's stage of it, not sharded yet."""
    model, fsdp, actor = _model_config(config), config.critic.fsdp, config.actor_rollout_ref.actor
    sizes, cut = actor.fsdp_config, actor.megatron.override_transformer_config
    tensor, max_tokens = sizes.tensor_parallel_size, max_row_tokens(config.data)
    try:
        loaded = load_critic(model, fsdp, max_tokens, is_sharded=parallel.world_size > 1)
        check_cuttable(loaded.model, tensor)
        check_shareable(sizes.ulysses_sequence_parallel_size, loaded.model.config, tensor)
        return keep_stage(loaded, own_stage(loaded.model, fsdp, cut, parallel))
    except ConfigError as error:  # it may name the policy's keys, which critics follow
        raise ConfigError(f"critic.model.path={model.path!r}: {error}") from error


def _cut(config: RunConfig) -> BatchCut:
    critic, actor = config.critic, config.actor_rollout_ref.actor
    by_tokens = actor.use_dynamic_bsz if critic.use_dynamic_bsz is None else critic.use_dynamic_bsz
    shuffles = actor.shuffle if critic.shuffle is None else critic.shuffle
    shared = actor.fsdp_config.ulysses_sequence_parallel_size
    return BatchCut(
        mini_batch_groups=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        token_budget=critic.ppo_max_token_len_per_gpu * shared if by_tokens else None,
        rows_per_micro=(
            None
            if by_tokens
            else critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
        ),
        shuffle_seed=critic.data_loader_seed if shuffles else None,
        pad_to=padding_step(critic.fsdp),
    )


class Critic:
    """A value model with its own optimizer. Collective: every rank runs the same batches.

    A null setting of the critic follows the actor's, and so do its stages. With param_offload its
    weights are on the device only during `values` and `update`, else in host memory.

    Raises:
        ConfigError: the model cannot be loaded or trained.
    """

    def __init__(
        self, config: RunConfig, parallel: ParallelContext, device: Device, total_steps: int
    ) -> None:
        critic, actor = config.critic, config.actor_rollout_ref.actor
        scale = critic.loss_scale_factor or actor.loss_scale_factor
        self._loss_scale_factor = float(scale or config.data.max_response_length)
        self._loss_agg_mode = critic.loss_agg_mode or actor.loss_agg_mode
        self._cliprange_value = critic.cliprange_value
        self._epochs = critic.ppo_epochs or actor.ppo_epochs
        self._cut = _cut(config)
        self._parallel = parallel
        self._device = device
        self.trained = trained_model(
            _load(config, parallel),
            critic.fsdp,
            critic.optim,
            parallel,
            total_steps,
            key=CRITIC_SHARDING,
            device=device.torch_device,
        )
        self._optimizer = self.trained.optimizer
        self._passes = ValuePasses(
            self.trained.model,
            self.trained.shards,
            parallel,
            device.torch_device,
            self.trained.stage,
        )
        self._weights = list(self.trained.parameters.values())
        if critic.fsdp.param_offload:
            self.trained.host.move_out(self._weights)
        self._mini_batches: list[MiniBatch] = []

    def own_rows(self, batch: TrainBatch, step: int) -> set[int]:
        """Return the numbers of the batch's samples that this rank's passes read."""
        return own_rows(batch.groups, self._cut, self._parallel, step=step)

    def values(self, batch: TrainBatch, table: BatchTable, step: int) -> Tensor:
        """Return values [rows, W] before the update, on all ranks; keep the batch for `update`."""
        self._mini_batches = split_batch(
            batch.groups,
            self._cut,
            self._parallel,
            step=step,
            device=self._device.torch_device,
        )
        passed = [micro for mini_batch in self._mini_batches for micro in mini_batch.micro_batches]
        outputs: list[tuple[MicroBatch, Tensor]] = []  # in a pipeline only on the last stage

        def read(number: int, values: Tensor) -> None:
            outputs.append((passed[number], values))

        with self.trained.host.on_device(self._weights):
            self._passes.begin(len(passed))
            self._passes.forward([TokenPass(micro_batch) for micro_batch in passed], read)
        return gather_tokens(outputs, table, self._parallel, "gathering the critic's values")

    def update(self, values: Tensor, returns: Tensor, mask: Tensor, step: int) -> dict[str, float]:
        """Run all optimizer steps of the batch given to `values`.

        Args:
            values: [rows, W], what `values` has returned.
            returns: [rows, W], the targets of the values.
            mask: bool [rows, W], false at tokens that are left out; denominators still count them.

        Returns:
            ``critic/vf_loss``, ``loss``, ``vf_clipfrac``, ``vpred_mean``, ``grad_norm``, ``lr``.
        """
        with self.trained.host.on_device(self._weights):
            return self._steps(values, returns, mask, step)

    def _steps(self, values: Tensor, returns: Tensor, mask: Tensor, step: int) -> dict[str, float]:
        rate = self._optimizer.begin_batch(step - 1)
        losses: list[ValueLoss] = []
        norms = []
        for _ in range(self._epochs):
            for mini_batch in self._mini_batches:
                losses += self._accumulate(mini_batch, values, returns, mask)
                self._parallel.all_reduce_sum(
                    self._optimizer.gradients.buffers, "summing the critic's gradients"
                )
                norms.append(self._optimizer.step())
        self._mini_batches = []  # free the batch's tensors
        return {**self._means(losses, len(norms)), **_norm(norms), "critic/lr": rate}

    def _accumulate(
        self, mini_batch: MiniBatch, values: Tensor, returns: Tensor, mask: Tensor
    ) -> list[ValueLoss]:
        losses: list[ValueLoss] = []

        def loss(number: int, predicted: Tensor) -> Tensor:
            micro_batch = mini_batch.micro_batches[number]
            # Rejected tokens leave the sums; the global counts stay the denominators.
            is_kept = tokens_of(mask, micro_batch)
            terms = value_loss(
                predicted[is_kept],
                tokens_of(values, micro_batch)[is_kept],
                tokens_of(returns, micro_batch)[is_kept],
                micro_batch.rows[is_kept],
                mini_batch.counts,
                cliprange_value=self._cliprange_value,
                mode=self._loss_agg_mode,
                loss_scale_factor=self._loss_scale_factor,
            )
            losses.append(replace(terms, loss=terms.loss.detach()))
            return terms.loss

        self._passes.begin(len(mini_batch.micro_batches))
        self._passes.train([TokenPass(micro) for micro in mini_batch.micro_batches], loss)
        return losses

    def _means(self, losses: Sequence[ValueLoss], num_steps: int) -> dict[str, float]:
        # Stacked on the device and read once, without waiting for each pass.
        sums = [
            torch.stack([part.loss, *(part.metric_sums[name] for name in _TOKEN_MEANS)])
            for part in losses
        ]
        local = torch.stack(sums).sum(0).tolist() if sums else [0.0] * (1 + len(_TOKEN_MEANS))
        num_tokens = sum(part.num_tokens for part in losses)
        # Losses are shares of a step's loss, so they add up; the other metrics are means of tokens.
        vectors = self._parallel.gather_rows([*local, num_tokens], "summing the critic's metrics")
        loss, *totals, tokens = (sum(column) for column in zip(*vectors, strict=True))
        means = {n: t / max(tokens, 1.0) for n, t in zip(_TOKEN_MEANS, totals, strict=True)}
        return {**dict.fromkeys(_LOSSES, loss / max(num_steps, 1)), **means}


def value_metrics(values: Tensor, returns: Tensor, mask: Tensor) -> dict[str, float]:
    """Return ``critic/values/*`` and ``critic/vf_explained_var`` over the tokens of `mask`.

    The explained variance is ``1 - var(returns - values) / (var(returns) + 1e-5)`` with unbiased
    variances, as in verl (`verl/trainer/ppo/metric_utils.py`). Empty for fewer than two tokens.
    """
    predicted, target = values[mask].double(), returns[mask].double()
    if predicted.numel() < 2:
        return {}
    explained = 1.0 - (target - predicted).var() / (target.var() + 1e-5)
    return {
        **spread("critic/values", predicted),
        "critic/vf_explained_var": float(explained),
    }


def _norm(norms: Sequence[float]) -> dict[str, float]:
    finite = [norm for norm in norms if math.isfinite(norm)]
    return {"critic/grad_norm": float(np.mean(finite))} if finite else {}

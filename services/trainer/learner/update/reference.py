"""The frozen reference policy: KL terms measure the divergence from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.model.forward import token_outputs
from services.trainer.learner.model.loading import load_policy
from services.trainer.learner.model.lora import without_adapters
from services.trainer.learner.model.sharding import EvenPasses
from services.trainer.learner.model.trained_model import ACTOR_SHARDING, TrainedModel, share_model
from services.trainer.learner.ranks import DataParallel
from sluice.config.schema.actor import FsdpConfig
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.protocol import Device

CPU = torch.device("cpu")


class ReferencePolicy:
    """The model at step 0 of the run; a resumed run loads the same files.

    As in verl, its weights are on the device only during `logprobs`, else in host memory. They are
    sharded like the policy's.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: FsdpConfig,
        device: Device,
        max_tokens: int,
        parallel: DataParallel,
    ) -> None:
        loaded = load_policy(model, precision, max_tokens, is_sharded=parallel.world_size > 1)
        self._model = loaded.model
        self._model.requires_grad_(requires_grad=False)
        self._device = device
        shards = share_model(
            loaded, precision, parallel, key=ACTOR_SHARDING, device=device.torch_device
        )
        self._passes = EvenPasses(shards, parallel, self._idle_pass, device.torch_device)
        self._model.to(CPU)  # type: ignore[arg-type]  # transformers narrows the overloads

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Return logprobs [N] of each micro-batch's tokens at `temperature`. Collective."""
        device = self._device.torch_device
        self._passes.begin(len(micro_batches))
        self._model.to(device)  # type: ignore[arg-type]  # transformers narrows the overloads
        try:
            found = [self._one(micro_batch, temperature) for micro_batch in micro_batches]
            self._passes.end_forward_only()
            return found
        finally:
            self._model.to(CPU)  # type: ignore[arg-type]
            self._device.empty_cache()  # the update needs blocks of other sizes

    def _idle_pass(self, micro_batch: MicroBatch) -> Tensor:
        return self._one(micro_batch, 1.0)

    def _one(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        return token_outputs(self._model, micro_batch, temperature=temperature).logprobs


class AdapterReference:
    """The policy without its adapters: the model at model.path, and no second one."""

    def __init__(self, policy: TrainedModel, device: Device, parallel: DataParallel) -> None:
        self._model = policy.model
        self._passes = EvenPasses(policy.shards, parallel, self._idle_pass, device.torch_device)

    @torch.no_grad()
    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Return logprobs [N] of each micro-batch's tokens at `temperature`. Collective."""
        self._passes.begin(len(micro_batches))
        with without_adapters(self._model):
            found = [self._one(micro_batch, temperature) for micro_batch in micro_batches]
            self._passes.end_forward_only()
        return found

    def _idle_pass(self, micro_batch: MicroBatch) -> Tensor:
        return self._one(micro_batch, 1.0)

    def _one(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        return token_outputs(self._model, micro_batch, temperature=temperature).logprobs


Reference: TypeAlias = ReferencePolicy | AdapterReference

"""The frozen reference policy: KL terms measure the divergence from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch
from services.trainer.learner.model.experts import without_load_counts
from services.trainer.learner.model.forward import TokenPass
from services.trainer.learner.model.loading import load_policy
from services.trainer.learner.model.lora import without_adapters
from services.trainer.learner.model.passes import TokenPasses
from services.trainer.learner.model.stages import keep_stage, own_stage
from services.trainer.learner.model.trained_model import ACTOR_SHARDING, TrainedModel, share_model
from services.trainer.learner.ranks import ParallelContext
from sluice.algorithm.token_statistics import TokenStatistics
from sluice.config.schema.actor import FsdpConfig, TransformerOverrides
from sluice.config.schema.actor_rollout_ref import ModelConfig
from sluice.device.protocol import Device

CPU = torch.device("cpu")


class ReferencePolicy:
    """The model at step 0 of the run; a resumed run loads the same files.

    As in verl, its weights are on the device only during `logprobs`, else in host memory. They are
    sharded, and cut into stages, like the policy's.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: FsdpConfig,
        device: Device,
        max_tokens: int,
        parallel: ParallelContext,
        cut: TransformerOverrides,
    ) -> None:
        loaded = load_policy(model, precision, max_tokens, is_sharded=parallel.world_size > 1)
        loaded.model.requires_grad_(requires_grad=False)
        stage = own_stage(loaded.model, precision, cut, parallel)
        loaded = keep_stage(loaded, stage)
        self._model = loaded.model
        self._device = device
        shards = share_model(
            loaded, precision, parallel, key=ACTOR_SHARDING, device=device.torch_device
        )
        self._passes = TokenPasses(self._model, shards, parallel, device.torch_device, stage)
        self._model.to(CPU)  # type: ignore[arg-type]  # transformers narrows the overloads

    def logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> list[Tensor | None]:
        """Return logprobs [N] of each micro-batch's tokens at `temperature`. Collective.

        ``None`` on pipeline stages before the last.
        """
        device = self._device.torch_device
        self._passes.begin(len(micro_batches))
        self._model.to(device)  # type: ignore[arg-type]  # transformers narrows the overloads
        try:
            return _logprobs(self._passes, micro_batches, temperature)
        finally:
            self._model.to(CPU)  # type: ignore[arg-type]
            self._device.empty_cache()  # the update needs blocks of other sizes


class AdapterReference:
    """The policy without its adapters, which is the model at model.path: no second model is
    needed."""

    def __init__(self, policy: TrainedModel, device: Device, parallel: ParallelContext) -> None:
        self._model = policy.model
        self._passes = TokenPasses(
            policy.model, policy.shards, parallel, device.torch_device, policy.stage
        )

    def logprobs(
        self, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> list[Tensor | None]:
        """Return logprobs as `ReferencePolicy.logprobs` does. Collective."""
        self._passes.begin(len(micro_batches))
        with without_adapters(self._model), without_load_counts(self._model):
            return _logprobs(self._passes, micro_batches, temperature)


def _logprobs(
    passes: TokenPasses, micro_batches: Sequence[MicroBatch], temperature: float
) -> list[Tensor | None]:
    logprobs: list[Tensor | None] = [None] * len(micro_batches)

    def read(number: int, outputs: TokenStatistics) -> None:
        logprobs[number] = outputs.logprobs

    passes.forward([TokenPass(micro_batch, temperature) for micro_batch in micro_batches], read)
    return logprobs


Reference: TypeAlias = ReferencePolicy | AdapterReference

"""The frozen reference policy, which divergences are measured from."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from services.trainer.learner.forward import token_outputs
from services.trainer.learner.micro_batch import MicroBatch
from services.trainer.learner.model import compute_context, load_policy
from sluice.config.actor import FsdpConfig
from sluice.config.model import ModelConfig
from sluice.device.protocol import Device

CPU = torch.device("cpu")


class ReferencePolicy:
    """The model as the run began with; a resumed run reads it from the same files.

    Its weights wait in the CPU's memory and are on the device only during `logprobs`, like verl's.

    Raises:
        ConfigError: the model cannot be loaded.
    """

    def __init__(
        self, model: ModelConfig, precision: FsdpConfig, device: Device, max_tokens: int
    ) -> None:
        self._model = load_policy(model, precision, CPU, max_tokens)
        self._model.requires_grad_(requires_grad=False)
        self._precision, self._device = precision, device

    @torch.no_grad()
    def logprobs(self, micro_batches: Iterable[MicroBatch], temperature: float) -> list[Tensor]:
        """Logprobs [N] of each micro-batch's tokens, at the sampling temperature."""
        device = self._device.torch_device
        self._model.to(device)  # type: ignore[arg-type]  # transformers narrows the overloads
        try:
            return [self._one(micro_batch, temperature) for micro_batch in micro_batches]
        finally:
            self._model.to(CPU)  # type: ignore[arg-type]

    def _one(self, micro_batch: MicroBatch, temperature: float) -> Tensor:
        with compute_context(self._precision, self._device.torch_device):
            return token_outputs(self._model, micro_batch, temperature=temperature).logprobs

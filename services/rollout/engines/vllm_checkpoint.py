"""Weights by the names of a checkpoint's files, which are those that vLLM's loader knows.

A model in memory may hold as one tensor what its checkpoint splits (the experts of a layer), or
call it otherwise; the trainer sends what the model in memory has. Transformers knows for each
family how the one becomes the other, since it saves checkpoints that way.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import cast

import torch

from services.rollout.engines.causal_lm import build_causal_lm
from services.rollout.engines.torch_settings import TorchEngineSettings
from sluice.errors import ConfigError

__all__ = ["CheckpointNames"]

_Revert = Callable[[torch.nn.Module, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class CheckpointNames:
    """The names of one model.

    Args:
        model_path: directory with a Hugging Face configuration.
        trust_remote_code: run model code that ships with it.

    Raises:
        ConfigError: `model_path` holds no model that transformers knows, or transformers does not
            say how it saves one.
    """

    def __init__(self, model_path: str, *, trust_remote_code: bool) -> None:
        described = TorchEngineSettings(model_path, trust_remote_code=trust_remote_code)
        self._model = build_causal_lm(described, torch.device("meta")).model
        self._revert = _revert_weight_conversion()

    def of(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The same weights as a checkpoint has them, as views where they are only renamed or cut.

        Args:
            weights: by the names of the model in memory.
        """
        return self._revert(self._model, dict(weights))


def _revert_weight_conversion() -> _Revert:
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        return cast("_Revert", loading.revert_weight_conversion)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "transformers has no core_model_loading.revert_weight_conversion, by which vLLM's "
            "workers get weights by their checkpoint's names; install transformers 5.19, with "
            "which this adapter was run"
        ) from error

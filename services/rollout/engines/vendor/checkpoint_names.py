"""What the weights of a model are called in its checkpoint's files, which vendors' loaders know."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from services.rollout.engines.causal_lm import CausalLM
from sluice.checkpoint.safetensors_files import tensor_names
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Revert = Callable[[torch.nn.Module, dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class CheckpointNames:
    """The names of one model's weights in files.

    A model in memory may hold as one tensor what its checkpoint splits (the experts of a layer), or
    under another name; the trainer sends what the model in memory has. Transformers knows the
    conversion for each family, since it saves checkpoints with it.

    Args:
        model: with or without memory.

    Raises:
        ConfigError: this transformers does not offer the conversion.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._revert = _revert_weight_conversion()

    def of(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the weights as a checkpoint has them; renamed or split ones are views.

        Args:
            weights: by the names of the model in memory.
        """
        return self._revert(self._model, dict(weights))


def check_files(folder: Path, described: CausalLM) -> None:
    """Refuse files without all weights of a model, which a vendor's engine might make up.

    Files whose names transformers does not write are the vendor's to judge.

    Args:
        folder: of the model.
        described: the model, without memory.

    Raises:
        CheckpointError: a file is missing or damaged, or lacks a tensor that the index names.
        ConfigError: other weights are missing.
    """
    found = tensor_names(folder).keys()
    names, state = CheckpointNames(described.model), described.model.state_dict()
    known = names.of(state).keys()
    own = names.of({spec.name: state[spec.name] for spec in described.layout.tensors})
    missing = own.keys() - found
    if not found or (missing and found <= known):
        lacks = f"{len(missing)} weights, first {min(missing)}" if found else "*.safetensors"
        raise ConfigError(
            f"actor_rollout_ref.model.path={str(folder)!r} lacks {lacks}; copy the complete "
            "checkpoint"
        )


def _revert_weight_conversion() -> _Revert:
    try:
        loading = importlib.import_module("transformers.core_model_loading")
        return cast("_Revert", loading.revert_weight_conversion)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "transformers has no core_model_loading.revert_weight_conversion, which gives "
            "the engine's workers weights by their checkpoint's names; install transformers 5.19 "
            "(sluice was run with it)"
        ) from error

"""A model's checkpoint layout without a byte of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from services.rollout.engines.causal_lm import build_causal_lm
from services.rollout.engines.torch_settings import TorchEngineSettings
from sluice.types import TensorSpec
from sluice.weights.dtypes import dtype_name

__all__ = ["CheckpointLayout", "checkpoint_layout"]


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """What a checkpoint of the model holds.

    Attributes:
        vocab_size: width of the logits.
        eos_token_ids: tokens that end a response.
        tensors: in the model's order; of tied ones only the first.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]


def checkpoint_layout(
    model_path: str,
    *,
    trust_remote_code: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> CheckpointLayout:
    """The layout of the model at `model_path`, as the trainer computes it.

    Raises:
        ConfigError: `model_path` holds no causal language model that transformers knows.
    """
    described = TorchEngineSettings(
        model_path=model_path,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
    )
    built = build_causal_lm(described, torch.device("meta"))
    model = built.model
    # Tensors without memory have no address: the same parameter is the same object.
    own: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own |= dict(model.named_buffers(remove_duplicate=False))
    state, tied = model.state_dict(), model.all_tied_weights_keys
    seen: set[int] = set()
    kept = set()
    for name in sorted(state, key=lambda name: name in tied):
        if id(own[name]) not in seen:
            kept.add(name)
        seen.add(id(own[name]))
    tensors = tuple(
        TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in state.items()
        if name in kept
    )
    return CheckpointLayout(built.vocab_size, built.eos_token_ids, tensors)

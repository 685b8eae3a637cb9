"""Choose which activations the backward pass recomputes, and where the others are kept.

In Megatron's terms (`megatron.core.transformer.TransformerConfig`), ``full`` recomputes layers, all
of them (``uniform``) or the first ones (``block``); ``selective`` recomputes modules of every
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from sluice.config.schema.actor import TransformerOverrides
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEY = "actor_rollout_ref.actor.megatron.override_transformer_config"
# Attention keeps no scores for the backward pass, so it has nothing to recompute.
_MODULES: dict[str, tuple[str, ...]] = {
    "core_attn": (),
    "layernorm": ("input_layernorm", "post_attention_layernorm"),
    "mlp": ("mlp",),
    "moe": ("mlp",),
}


def recompute_layers(model: PreTrainedModel, count: int | None = None, first: int = 0) -> None:
    """Recompute decoder layers in the backward pass.

    transformers does this only for layers in training mode. So the flag is set on the layers, but
    not on the modules inside them, whose dropout stays off.

    Args:
        model: in evaluation mode.
        count: how many layers; ``None`` for all, including those of a vision tower.
        first: number of the first of these layers.

    Raises:
        ConfigError: the model's family does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"actor_rollout_ref.model.enable_gradient_checkpointing: {type(model).__name__} does "
            "not support it; set it to false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = _layers(model) if count is None else _layers(model.get_decoder())
    for number, layer in enumerate(layers):
        layer.training = count is None or first <= number < first + count


def recompute_as_configured(
    model: PreTrainedModel, overrides: TransformerOverrides, first_layer: int = 0
) -> None:
    """Apply Megatron's keys, which override `enable_gradient_checkpointing`.

    Args:
        first_layer: first layer of the pipeline stage, from which ``block`` counts.

    Raises:
        ConfigError: a value is missing or names no module; names key, value and remedy.
    """
    if overrides.recompute_granularity is None:
        return
    for layer in _layers(model):
        layer.training = False
    if overrides.recompute_granularity == "selective":
        _recompute_modules(model, overrides.recompute_modules)
        return
    count = None
    if overrides.recompute_method == "block":
        count = overrides.recompute_num_layers
        if count is None:
            raise ConfigError(
                f"{_KEY}.recompute_method=block needs recompute_num_layers: the number of layers, "
                "from the first, that the backward pass recomputes; set it, or uniform for all"
            )
    recompute_layers(model, count, first_layer)


def keep_inputs_on_host(model: PreTrainedModel) -> None:
    """Keep the inputs of recomputed layers in host memory until the backward pass.

    Raises:
        ConfigError: no layer is recomputed, so there are no inputs to move.
    """
    layers = [layer for layer in _layers(model) if layer.training]
    if not layers:
        raise ConfigError(
            "actor_rollout_ref.model.enable_activation_offload moves the inputs of recomputed "
            "layers, and none is; set actor_rollout_ref.model.enable_gradient_checkpointing=true "
            "too"
        )
    for layer in layers:
        layer._gradient_checkpointing_func = partial(_on_host, layer._gradient_checkpointing_func)


class _HostInput:
    """A layer's input: the tensor itself for the forward pass, a copy from the host after it."""

    def __init__(self, hidden: Tensor) -> None:
        self._hidden: Tensor | None = hidden
        self._device, self._has_gradient = hidden.device, hidden.requires_grad
        pinned = hidden.device.type == "cuda"  # otherwise the copy would not overlap with kernels
        self._copy = torch.empty_like(hidden, device="cpu", pin_memory=pinned)
        self._copy.copy_(hidden.detach(), non_blocking=True)

    def take(self) -> Tensor:
        """Return the input; the first call drops the reference to the tensor."""
        hidden, self._hidden = self._hidden, None
        if hidden is not None:
            return hidden
        copy = self._copy.to(self._device, non_blocking=True)
        return copy.detach().requires_grad_(self._has_gradient)


def _on_host(
    recomputed: Callable[..., Any], layer: Callable[..., Any], hidden: Tensor, *arguments: object
) -> Any:  # noqa: ANN401 - a layer's output
    if not torch.is_grad_enabled():
        return layer(hidden, *arguments)
    # torch's checkpoint keeps the arguments that it calls with. Gradients flow through the first
    # call, so the second one only needs equal values.
    host_input = _HostInput(hidden)
    del hidden
    return recomputed(lambda *rest: layer(host_input.take(), *rest), *arguments)


def _recompute_modules(model: PreTrainedModel, names: Sequence[str]) -> None:
    unknown = [name for name in names if name not in _MODULES]
    if unknown:
        raise ConfigError(
            f"{_KEY}.recompute_modules: {', '.join(unknown)} cannot be recomputed alone; give some "
            f"of {', '.join(_MODULES)}, or recompute_granularity=full"
        )
    wanted = {child for name in names for child in _MODULES[name]}
    for layer in _layers(model):
        for name, child in layer.named_children():
            if name in wanted:
                child.forward = partial(checkpoint, child.forward, use_reentrant=False)


def _layers(model: torch.nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]

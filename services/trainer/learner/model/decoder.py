"""The trainer's own decoder layers, which replace those of transformers.

transformers builds, reads and saves a model, which keeps its class, configuration, embeddings,
rotary embedding, last norm and head. `use_native_layers` replaces each decoder layer by a
`DecoderLayer` with the same parameters: names, tied weights and weight files stay those of
transformers. One class covers all `FAMILIES`, with biases and query and key norms as options.
Vision towers keep their layers.

These layers pass the layout directly to attention, never make the host wait for a device, and
consist of parts before and after attention that can be compiled. A test compares their logprobs and
gradients with those of transformers' layers.

Weights that ranks divide are stored as DTensors, but matrix products use plain tensors: that takes
less than half of the host's time and makes communication explicit
(`services.trainer.learner.rank_shares`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.functional import linear, rms_norm
from transformers.modeling_layers import GradientCheckpointingLayer

from services.trainer.learner.model.attention import packed_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from services.trainer.learner.batch.micro_batch import PackedLayout
    from services.trainer.learner.rank_shares import TensorShare

logger = logging.getLogger(__name__)

FAMILIES = frozenset(
    {
        "llama.modeling_llama.LlamaDecoderLayer",
        "qwen2.modeling_qwen2.Qwen2DecoderLayer",  # and Qwen2.5
        "qwen3.modeling_qwen3.Qwen3DecoderLayer",
        "qwen3_moe.modeling_qwen3_moe.Qwen3MoeDecoderLayer",
        "qwen2_vl.modeling_qwen2_vl.Qwen2VLDecoderLayer",
        "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLDecoderLayer",
        "qwen3_vl.modeling_qwen3_vl.Qwen3VLTextDecoderLayer",
        "qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeTextDecoderLayer",
    }
)
"""transformers' decoder layers that `DecoderLayer` replaces, by class below
``transformers.models``."""

VALUE_HEADS = ("score", "classifier")
"""Names of a critic's head, with one output per token, in transformers' models."""

_MODELS = "transformers.models."
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_GATED_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def use_native_layers(model: PreTrainedModel, *, compiled: bool = False) -> None:
    """Replace the decoder layers of a model in place; leave a model of another family as it is.

    Args:
        model: built by transformers, its weights read or not; not sharded yet.
        compiled: compile what a layer does before and after attention.
    """
    replaceable = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if _class_name(layer) in FAMILIES
    ]
    unknown = sorted({part for _, _, layer in replaceable for part in _unknown_parts(layer)})
    if not replaceable or unknown:
        reason = f"their {', '.join(unknown)} is new" if unknown else "the family has no own ones"
        reason += "; use_torch_compile does not compile them" if compiled else ""
        logger.info("%s trains with transformers' layers: %s", type(model).__name__, reason)
        return
    for parent, name, layer in replaceable:
        native_layer = DecoderLayer(layer)
        if compiled:
            native_layer.compile_parts()
        parent.register_module(name, native_layer)
    # Sharding and recomputation find layers by class name.
    model._no_split_modules = {*(model._no_split_modules or ()), DecoderLayer.__name__}


def _class_name(module: nn.Module) -> str:
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix(_MODELS)


def _unknown_parts(layer: Any) -> set[str]:  # noqa: ANN401 - transformers' layers have no common type
    """Return the parts of a layer that `DecoderLayer` does not compute."""
    parts = {name for name, _ in layer.named_children()}
    inner = dict(layer.self_attn.named_children())
    foreign = {name for name in _PROJECTIONS if type(inner.get(name)) is not nn.Linear}
    return (parts ^ _LAYER) | foreign | (inner.keys() - _PROJECTIONS - _HEAD_NORMS)


class DecoderLayer(GradientCheckpointingLayer):
    """Attention, then the MLP or the experts, each with a norm before it and a residual connection.

    Args:
        original: the layer of transformers, whose parameters this one takes over.
    """

    def __init__(self, original: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.self_attn = Attention(original.self_attn)
        self.mlp = _native_mlp(original.mlp)
        self.input_layernorm = FloatRmsNorm(original.input_layernorm)
        self.post_attention_layernorm = FloatRmsNorm(original.post_attention_layernorm)

    def forward(
        self,
        hidden: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        packed_layout: PackedLayout | None = None,
        **_: object,
    ) -> Tensor:
        """Return the hidden states after this layer, [1, T, width] like `hidden`.

        Args:
            hidden: [1, T, width].
            attention_mask: ``None``, or packed attention refuses it.
            position_embeddings: cosines and sines, [1, T, head dim] each.
        """
        states = self._heads(hidden, *position_embeddings)
        attended = self.self_attn.attend(*states, attention_mask, packed_layout)
        return self._after_attention(hidden, attended)

    def compile_parts(self) -> None:
        """Compile the layer except experts and attention, whose blocks differ between passes.

        Layers share compiled code. A second number of tokens recompiles it for any number.
        """
        self._heads = torch.compile(self._heads)  # type: ignore[method-assign]
        if isinstance(self.mlp, GatedMlp):
            self._after_attention = torch.compile(self._after_attention)  # type: ignore[method-assign]

    def _heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.heads(self.input_layernorm(hidden), cos, sin)

    def _after_attention(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + self.self_attn.output(attended)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Attention(nn.Module):
    """Causal attention with rotary embedding and grouped query heads.

    Attributes:
        tensor: the ranks that divide the heads among them.
    """

    def __init__(self, original: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.head_dim: int = original.head_dim
        self.scaling: float = original.scaling
        self.sliding_window: int | None = getattr(original, "sliding_window", None)
        self.tensor: TensorShare | None = None
        self.q_proj = native_linear(original.q_proj)
        self.k_proj = native_linear(original.k_proj)
        self.v_proj = native_linear(original.v_proj)
        self.o_proj = native_linear(original.o_proj)
        self.q_norm = self.k_norm = None
        if hasattr(original, "q_norm"):
            self.q_norm, self.k_norm = FloatRmsNorm(original.q_norm), FloatRmsNorm(original.k_norm)

    def heads(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, [1, heads, T, head dim] each.

        Args:
            hidden: [1, T, width]; if ranks divide the heads, this rank's part of the tokens.
            cos: [1, T, head dim]; both halves are equal.
            sin: the same.
        """
        if self.tensor is not None:
            hidden = self.tensor.gather(hidden)
        query, key, value = (
            project(hidden).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        # Negate the sines, which all heads share, instead of the states.
        first_half, second_half = sin.unsqueeze(-2).chunk(2, dim=-1)
        cos, sin = cos.unsqueeze(-2), torch.cat((-first_half, second_half), dim=-1)
        query, key = (_rotate(states, cos, sin).transpose(1, 2) for states in (query, key))
        return query, key, value.transpose(1, 2)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_layout: PackedLayout | None,
    ) -> Tensor:
        """Return [1, T, heads, head dim]; see `packed_attention`."""
        attended, _ = packed_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            packed_layout=packed_layout,
            sliding_window=self.sliding_window,
        )
        return attended

    def output(self, attended: Tensor) -> Tensor:
        """Return what attention adds to this rank's tokens, [1, t, width], from [1, T, heads,
        dim]."""
        projected: Tensor = self.o_proj(attended.flatten(2))
        return projected if self.tensor is None else self.tensor.scatter(projected)


def _rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [1, T, heads, head dim] by position (Su et al. 2021, halves as in Llama)."""
    return states * cos + states.roll(states.shape[-1] // 2, dims=-1) * sin


class GatedMlp(nn.Module):
    """A gated MLP (Shazeer 2020).

    Attributes:
        tensor: the ranks that divide its inner width among them.
    """

    def __init__(self, original: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.tensor: TensorShare | None = None
        self.gate_proj = native_linear(original.gate_proj)
        self.up_proj = native_linear(original.up_proj)
        self.down_proj = native_linear(original.down_proj)
        self.act_fn: nn.Module = original.act_fn

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [1, T, width] like `hidden`."""
        if self.tensor is not None:
            hidden = self.tensor.gather(hidden)
        gated = self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden)
        output: Tensor = self.down_proj(gated)
        return output if self.tensor is None else self.tensor.scatter(output)


def _native_mlp(original: nn.Module) -> nn.Module:
    """Return the trainer's own MLP; experts stay those of transformers."""
    parts = {name for name, _ in original.named_children()}
    return GatedMlp(original) if parts == _GATED_MLP else original


def own_part(weight: Tensor) -> Tensor:
    """Return the plain tensor that this rank computes with: its part of a weight, or a whole weight
    that is not cut.

    Ranks that cut a layer apply an uncut weight to different tokens, or to different parts of a
    sum. So its gradient is the sum over these ranks: in the dtype of the pass if the step has only
    one, else in float32, as passes add up.
    """
    if not isinstance(weight, DTensor):
        return weight
    gradients = [Partial() if place.is_replicate() else place for place in weight.placements]
    local: Tensor = weight.to_local(grad_placements=gradients)
    return local


def value_head(model: nn.Module) -> nn.Module | None:
    """Return a critic's head; ``None`` for a policy."""
    return next((module for name, module in model.named_children() if name in VALUE_HEADS), None)


class Linear(nn.Linear):
    """A linear layer that ranks may divide among them.

    Attributes:
        cut: the dimension of the weight that ranks cut: 0, the outputs; 1, the inputs, so that the
            output is a part of a sum over ranks; ``None`` if every rank has the whole weight.
    """

    cut: int | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., outputs] of this rank."""
        weight, bias = self.weight, cast("Tensor | None", self.bias)
        if bias is None:
            return linear(hidden, own_part(weight))
        local_bias = own_part(bias)
        if isinstance(weight, DTensor) and weight.placements[-1] == Shard(1):
            # Every rank adds it to its part of the sum.
            local_bias = local_bias / weight.device_mesh.size()
        return linear(hidden, own_part(weight), local_bias)


def native_linear(original: nn.Linear) -> Linear:
    """Return a layer with the same parameters."""
    # Without memory: it takes over the parameters of the other layer.
    native = Linear(original.in_features, original.out_features, bias=False, device="meta")
    native.weight, native.bias = original.weight, original.bias
    return native


class FloatRmsNorm(nn.Module):
    """RMSNorm computed in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, original: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.weight: nn.Parameter = original.weight
        self.eps: float = original.variance_epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [..., width] like `hidden`."""
        # vLLM and transformers round before they apply the weight; SGLang rounds after, by default.
        return rms_norm(hidden, self.weight.shape, eps=self.eps) * own_part(self.weight)

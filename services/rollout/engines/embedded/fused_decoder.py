"""A hand-written forward of the Llama family (Llama, Mistral, Qwen2, Qwen3) with few kernel calls.

The query, key and value projections form one matrix, and so do gate and up. The model's parameters
become views of these matrices, so weights copied into the model arrive here too. If the model's
parameters point to other memory, the matrix is that memory, or a copy if its parts are not
contiguous. Rotary tables are computed once. Prefill stops at the last layer's keys and values,
since it needs no logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from services.rollout.engines.embedded.decoder import (
    DecodeBatch,
)
from services.rollout.engines.embedded.kv_cache import (
    PrefillForward,
    SlotDecoder,
    decode_attention,
    prefill_attention,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class RmsNorm:
    """RMSNorm in few operations (Zhang and Sennrich, "Root mean square layer normalization", 2019).

    ``w x / sqrt(mean(x^2) + eps)`` is ``(w sqrt(n)) x / hypot(|x|, sqrt(n eps))`` for x of n
    numbers. In float32 this takes four kernels, and torch's own composition on the CPU about ten;
    in batches of few rows the calls cost more than the arithmetic.

    Args:
        parts: weights [n], each with the number of heads it serves, or with ``None`` where the
            input has no axis of heads. Several parts follow each other along that axis.
        eps: added to the mean square.
    """

    def __init__(self, parts: Sequence[tuple[torch.Tensor, int | None]], eps: float) -> None:
        self._parts = tuple(parts)
        self._eps = eps
        weight = parts[0][0]
        self._width = weight.shape[-1]
        self._composed = weight.dtype == torch.float32
        self._floor = torch.tensor((self._width * eps) ** 0.5, device=weight.device)
        self.refresh()

    def refresh(self) -> None:
        """Take over changed weights."""
        weights = [
            weight if heads is None else weight.expand(heads, -1) for weight, heads in self._parts
        ]
        factor = self._width**0.5 if self._composed else 1.0
        self._weight = torch.cat(weights) * factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize [..., n] or [..., heads, n]."""
        if not self._composed:
            # Half precision needs the sum of squares in float32, as torch does it.
            return torch.rms_norm(x, (self._width,), None, self._eps).mul_(self._weight)
        size = torch.linalg.vector_norm(x, 2, -1, True)
        return torch.div(x, torch.hypot(size, self._floor)).mul_(self._weight)


@dataclass(frozen=True, slots=True, eq=False)
class _Norms:
    before: RmsNorm
    qk: RmsNorm | None  # of all query heads, then all key heads
    after: RmsNorm

    def refresh(self) -> None:
        self.before.refresh()
        self.after.refresh()
        if self.qk is not None:
            self.qk.refresh()


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    norms: _Norms
    qkv: torch.Tensor  # [(heads + 2 kv heads) * head dim, hidden]
    qkv_bias: torch.Tensor | None
    output: torch.Tensor  # [heads * head dim, hidden], transposed view
    output_bias: torch.Tensor | None
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [intermediate, hidden], transposed view
    down_bias: torch.Tensor | None


def _fuse(linears: Sequence[nn.Linear]) -> None:
    """Make the weights and biases of `linears` views of one weight and one bias."""
    for name in ("weight", "bias") if _has_bias(linears[0]) else ("weight",):
        parts: list[torch.Tensor] = [getattr(linear, name) for linear in linears]
        views = torch.cat([part.detach() for part in parts]).split([len(part) for part in parts])
        for linear, view in zip(linears, views, strict=True):
            setattr(linear, name, nn.Parameter(view, requires_grad=False))


def _fuse_linears(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one weight and bias for `linears`: views if the parts are neighbours in memory."""
    weight = _merge_parts([linear.weight.data for linear in linears])
    return weight, _merge_parts([x.bias.data for x in linears]) if _has_bias(linears[0]) else None


def _merge_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first_part, place = parts[0], parts[0].data_ptr()
    # Neighbours in one storage are one matrix already; everything else has to be copied.
    for part in parts:
        if part.data_ptr() != place or not part.is_contiguous():
            return torch.cat(list(parts))
        place += part.nbytes
    storage = first_part.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():
        return torch.cat(list(parts))
    rows = sum(len(part) for part in parts)
    return first_part.as_strided((rows, *first_part.shape[1:]), first_part.stride())


def _has_bias(linear: nn.Linear) -> bool:
    bias: torch.Tensor | None = linear.bias
    return bias is not None


def _require(condition: bool, requirement: str) -> None:
    if not condition:
        raise NotImplementedError(requirement)


class FusedDecoder(SlotDecoder):
    """A decoder of one model; see the module.

    Raises:
        NotImplementedError: the model is not of the family, or uses an option not covered.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_model_len: int) -> None:
        config = model.config
        _require(config.model_type in _FAMILY, f"model type {config.model_type!r}")
        _require(config.hidden_act == "silu", f"activation {config.hidden_act!r}")
        rope = (config.rope_parameters or {}).get("rope_type", "default")
        _require(rope not in _LENGTH_DEPENDENT_ROPE, f"rope type {rope!r}")
        window = config.sliding_window if hasattr(config, "sliding_window") else None
        _require(window is None or window >= max_model_len, f"sliding window {window}")
        self._model = model
        self._device = model.device
        # Heads of one token lie in the order queries, keys, values in every fused product.
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._eps: float = config.rms_norm_eps
        self._embedding: torch.Tensor = model.model.embed_tokens.weight
        self._head: nn.Linear = model.lm_head
        self._last_norm = RmsNorm([(model.model.norm.weight, None)], self._eps)
        attention = model.model.layers[0].self_attn
        self._head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self._modules = [(module, self._norms(module)) for module in model.model.layers]
        for module, _ in self._modules:
            attention = module.self_attn
            mlp = module.mlp
            _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
            _fuse([mlp.gate_proj, mlp.up_proj])
        self.refresh()
        self._rotary_tables(max_model_len)
        shape = (len(self._layers), self._kv_heads, self._head_dim)
        super().__init__(shape, slots, max_model_len, model)

    def _norms(self, module: nn.Module) -> _Norms:
        input_norm: Any = module.input_layernorm
        output_norm: Any = module.post_attention_layernorm
        attention: Any = module.self_attn
        qk_norm = None
        if hasattr(attention, "q_norm"):
            parts = (
                (attention.q_norm.weight, self._heads),
                (attention.k_norm.weight, self._kv_heads),
            )
            qk_norm = RmsNorm(parts, self._eps)
        return _Norms(
            RmsNorm([(input_norm.weight, None)], self._eps),
            qk_norm,
            RmsNorm([(output_norm.weight, None)], self._eps),
        )

    def _layer(self, module: nn.Module, norms: _Norms) -> _Layer:
        attention: Any = module.self_attn
        mlp: Any = module.mlp
        qkv, qkv_bias = _fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        gate_up, gate_up_bias = _fuse_linears([mlp.gate_proj, mlp.up_proj])
        return _Layer(
            norms=norms,
            qkv=qkv,
            qkv_bias=qkv_bias,
            output=attention.o_proj.weight.t(),
            output_bias=attention.o_proj.bias,
            gate_up=gate_up,
            gate_up_bias=gate_up_bias,
            down=mlp.down_proj.weight.t(),
            down_bias=mlp.down_proj.bias,
        )

    def _rotary_tables(self, max_model_len: int) -> None:
        """Set cos and signed sin, [positions, 1, head dim].

        Transformers rotates by ``x cos + rotate_half(x) sin``; `rotate_half` is a roll by half the
        head with its first half negated. The sign is moved into the table.
        """
        positions = torch.arange(max_model_len, device=self._device)[None]
        reference = torch.empty(0, dtype=self._layers[0].qkv.dtype, device=self._device)
        cos, sin = self._model.model.rotary_emb(reference, positions)
        _require(cos.shape[-1] == self._head_dim, "partial rotary embedding")
        sign = torch.ones_like(sin)
        sign[..., : self._head_dim // 2] = -1
        self._cos, self._sin = cos[0, :, None].clone(), (sin * sign)[0, :, None].clone()

    def refresh(self) -> None:
        # Norms copy their weights; everything else is the model's.
        for _, norms in self._modules:
            norms.refresh()
        self._layers = [self._layer(module, norms) for module, norms in self._modules]
        self._last_norm.refresh()

    def _project(
        self, layer: _Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated queries, and rotated keys with values; [tokens, heads, head dim]."""
        normed = layer.norms.before(hidden)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(len(hidden), -1, self._head_dim)
        # Heads lie in the order queries, keys, values; only the first two are rotated, in place.
        rotated = self._heads + self._kv_heads
        unrotated = qkv[:, :rotated]
        qk = unrotated if layer.norms.qk is None else layer.norms.qk(unrotated)
        # The roll is rotate_half without its sign, which the table of sines has.
        turned = torch.roll(qk, self._head_dim // 2, -1)
        torch.addcmul(qk * cos, turned, sin, out=unrotated)
        queries, keys_values = qkv.split((self._heads, 2 * self._kv_heads), 1)
        return queries, keys_values

    def _finish(self, layer: _Layer, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return output projection, residuals and the feed-forward part; [tokens, hidden]."""
        # `addmm` adds the residual in the kernel of the product.
        hidden = torch.addmm(hidden, attended.reshape(len(hidden), -1), layer.output)
        if layer.output_bias is not None:
            hidden = hidden + layer.output_bias
        normed = layer.norms.after(hidden)
        gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        hidden = torch.addmm(hidden, F.silu(gate).mul_(up), layer.down)
        return hidden if layer.down_bias is None else hidden + layer.down_bias

    def _compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        forward: PrefillForward,
        *,
        to_end: bool = False,
    ) -> torch.Tensor:
        batch, longest = token_ids.shape
        flat = positions.reshape(-1)
        cos, sin = self._cos[flat], self._sin[flat]
        hidden = F.embedding(token_ids.view(-1), self._embedding)
        for number, layer in enumerate(self._layers, start=1):
            queries, keys_values = (
                part.unflatten(0, (batch, longest)).transpose(1, 2)
                for part in self._project(layer, hidden, cos, sin)
            )
            keys, values = keys_values.chunk(2, 1)
            keys, values, visible = forward.add(keys, values, None)
            # The last layer's output would only give logits, which most prefills do not need.
            if to_end or number < len(self._layers):
                attended = prefill_attention(
                    queries, keys, values, scaling=self._scale, visible=visible
                )
                hidden = self._finish(layer, hidden, attended.transpose(1, 2))
        if not to_end:
            return hidden
        logits: torch.Tensor = self._head(self._last_norm(hidden))
        return logits

    def decode(self, batch: DecodeBatch) -> torch.Tensor:
        positions = torch.from_numpy(batch.positions).to(self._device)
        token_ids = torch.from_numpy(batch.token_ids).to(self._device)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        # Index, mask and views are the same for all layers: computed once a step.
        bias = self._bias.rows(positions, batch.length, self._kv_heads)
        index = self._cache.append_index(positions)
        caches = self._cache.views(len(positions), batch.length)
        hidden = F.embedding(token_ids, self._embedding)
        for number, layer in enumerate(self._layers):
            queries, keys_values = self._project(layer, hidden, cos, sin)
            self._cache.append(number, index, keys_values)
            attended = decode_attention(queries, *caches[number], bias, self._scale)
            hidden = self._finish(layer, hidden, attended)
        logits: torch.Tensor = self._head(self._last_norm(hidden))
        return logits

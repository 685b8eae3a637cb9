"""Cut a model's layers over ranks: heads, inner widths and the vocabulary (`TensorShare`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import embedding, linear, pad

from services.trainer.learner.model.decoder import (
    VALUE_HEADS,
    Attention,
    DecoderLayer,
    FloatRmsNorm,
    GatedMlp,
    Linear,
    native_linear,
    own_part,
)
from services.trainer.learner.model.experts import routing_tape
from services.trainer.learner.rank_shares import TensorShare
from sluice.algorithm.token_statistics import VocabularyPart
from sluice.config.parallel_layout import TENSOR_KEY, nearest_divisors
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_SHARE = "sluice_tensor_share"
_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")


def tensor_share(model: nn.Module) -> TensorShare | None:
    """Return this rank's share of a model whose layers are cut."""
    share: TensorShare | None = getattr(model, _SHARE, None)
    return share


def check_cuttable(model: PreTrainedModel, size: int) -> None:
    """Refuse a model whose layers this number of ranks cannot cut.

    Raises:
        ConfigError: names family, numbers and remedy.
    """
    if size == 1:
        return
    family, layers = model.config.model_type, getattr(model.get_decoder(), "layers", ())
    if not layers or not all(isinstance(layer, DecoderLayer) for layer in layers):
        raise ConfigError(
            f"{TENSOR_KEY}={size}: the trainer cuts the layers of Llama, Qwen2, Qwen3, "
            f"Qwen3-MoE and Qwen-VL models, and none of a {family} model; set it to 1"
        )
    config = model.config.get_text_config()
    heads: int = config.num_attention_heads
    numbers = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "columns of the multilayer perceptron": config.intermediate_size,
    }
    if not any(isinstance(layer.mlp, GatedMlp) for layer in layers):
        del numbers["columns of the multilayer perceptron"]
    for things, number in numbers.items():
        if number % size:
            possible = nearest_divisors(size, math.gcd(*numbers.values()))
            raise ConfigError(
                f"{TENSOR_KEY}={size} does not divide the {number} {things} of the {family} model; "
                f"give {possible}"
            )
    rows = cast("nn.Embedding", model.get_input_embeddings()).weight.shape[0]
    if -(-rows // size) * (size - 1) >= rows:
        possible_sizes = [n for n in range(1, size) if -(-rows // n) * (n - 1) < rows]
        raise ConfigError(
            f"{TENSOR_KEY}={size}: {rows} rows of the vocabulary of the {family} model leave none "
            f"for the last rank; give {max(possible_sizes)}"
        )


def cut_modules(model: PreTrainedModel, share: TensorShare) -> None:
    """Make a model's modules compute with parts of their weights, which `cut_weights` makes.

    Args:
        model: has passed `check_cuttable`, not sharded yet.
    """
    base: Any = model.get_decoder()
    for block in (part for layer in base.layers for part in (layer.self_attn, layer.mlp)):
        if isinstance(block, Attention | GatedMlp):
            block.tensor = share
            _cut_layers(block)
    if isinstance(base.embed_tokens, nn.Embedding):  # a stage may lack it, as well as norm and head
        base.embed_tokens = CutEmbedding(base.embed_tokens, share)
    if hasattr(base.norm, "variance_epsilon"):
        base.norm = FloatRmsNorm(base.norm)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        model.set_output_embeddings(CutHead(head, share))
    for name, child in list(model.named_children()):
        if name in VALUE_HEADS and isinstance(child, nn.Linear):
            model.register_module(name, native_linear(child))
    if (tape := routing_tape(model)) is not None:
        tape.tensor = share
    setattr(model, _SHARE, share)


def cut_weights(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep only this rank's parts of a module's weights, on the mesh's device.

    Args:
        module: weights that are DTensors already stay as they are.
        mesh: one-dimensional, of the ranks that cut.
    """
    cut: dict[nn.Parameter, nn.Parameter] = {}  # tied ones are one
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                continue
            if parameter not in cut:
                cut[parameter] = _local_part(parameter, getattr(owner, "cut", None), mesh)
            owner.register_parameter(name, cut[parameter])


def _local_part(parameter: nn.Parameter, dimension: int | None, mesh: DeviceMesh) -> nn.Parameter:
    local, is_cut = parameter.detach(), dimension is not None and dimension < parameter.ndim
    if is_cut:
        local = local.chunk(mesh.size(), dimension or 0)[mesh.get_local_rank()]
    placement = Shard(dimension or 0) if is_cut else Replicate()
    # A cut by columns would keep the whole tensor's row stride.
    local = local.to(mesh.device_type).contiguous()
    # The last rank may have fewer rows of the vocabulary than the others.
    part = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(part, parameter.requires_grad)


def _cut_layers(block: nn.Module) -> None:
    for names, dimension in ((_BY_OUTPUTS, 0), (_BY_INPUTS, 1)):
        for name in names:
            _cut_layer(getattr(block, name, None), dimension)


def _cut_layer(layer: nn.Module | None, dimension: int) -> None:
    """Make ranks cut a linear layer's weight and the matching half of its adapter."""
    if isinstance(layer, Linear):
        layer.cut = dimension
    half = getattr(layer, "lora_A" if dimension else "lora_B", None)
    if isinstance(half, Linear):
        half.cut = dimension


class CutEmbedding(nn.Module):
    """The embeddings of a part of the vocabulary."""

    cut = 0

    def __init__(self, original: nn.Embedding, share: TensorShare) -> None:
        super().__init__()
        self.weight = cast("nn.Parameter", original.weight)
        self._padding, self._share = original.padding_idx, share

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return embeddings of this rank's tokens, [1, T / size, width], from ids [1, T]."""
        weight = own_part(self.weight)
        rows, first_row = weight.shape[0], self._share.rank * _max_rows(self.weight, self._share)
        local_ids = token_ids - first_row
        is_local = (local_ids >= 0) & (local_ids < rows)
        padding = None if self._padding is None else self._padding - first_row
        if padding is not None and not 0 <= padding < rows:
            padding = None
        embedded = embedding(local_ids.clamp(0, rows - 1), weight, padding)
        return self._share.scatter(embedded * is_local.unsqueeze(-1))


class CutHead(nn.Module):
    """The head of a part of the vocabulary. Passes use its weight instead of calling it."""

    cut = 0

    def __init__(self, original: nn.Linear, share: TensorShare) -> None:
        super().__init__()
        self.weight, self._share = original.weight, share
        self.bias: nn.Parameter | None = original.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Return all logits of all tokens, [1, T, vocabulary], without a gradient."""
        tokens = self._share.gather(hidden).squeeze(0)
        bias = None if self.bias is None else own_part(self.bias)
        logits = linear(tokens, own_part(self.weight), bias).detach()
        # [T, vocabulary / size] -> [vocabulary, T]; equally many rows travel from each rank.
        rows = pad(logits, (0, _max_rows(self.weight, self._share) - logits.shape[1])).t()
        all_rows = self._share.gather(rows.unsqueeze(0)).squeeze(0)
        return all_rows[: self.weight.shape[0]].t().unsqueeze(0)

    def part(self) -> VocabularyPart:
        """Return the vocabulary part, by which statistics are combined over ranks."""
        max_rows = _max_rows(self.weight, self._share)
        return VocabularyPart(self._share.rank * max_rows, max_rows, self._reduce_max, self._reduce)

    def _reduce_max(self, values: Tensor) -> None:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._share.group)

    def _reduce(self, values: Tensor) -> None:
        dist.all_reduce(values, group=self._share.group)


def _max_rows(weight: Tensor, share: TensorShare) -> int:
    """Return the vocabulary rows per rank; the last rank may have fewer."""
    return -(-weight.shape[0] // share.size)

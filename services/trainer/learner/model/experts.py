"""Mixture of experts: the block of Qwen3-MoE, with experts on one or several ranks
(docs/architecture.md, "Ranks that divide the experts").

    probabilities = softmax(tokens @ gate.weight.T)    float32 [tokens, experts]
    output        = sum over the k best experts of weight * expert(token)

(Shazeer et al. 2017, "Outrageously Large Neural Networks"; Qwen3 technical report, 2025.)
Parameters have transformers' names: ``gate.weight``, ``experts.gate_up_proj``,
``experts.down_proj``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor, Shard
from transformers.activations import ACT2FN

from services.trainer.learner.batch.micro_batch import PackedRouting
from services.trainer.learner.model.decoder import own_part
from services.trainer.learner.rank_shares import all_to_all
from sluice.algorithm.token_statistics import F, compile_once
from sluice.config.parallel_layout import EXPERT_KEY, check_experts
from sluice.errors import ConfigError
from sluice.types import expert_dtype
from sluice.weights.adapters import PROJECTIONS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedConfig, PreTrainedModel

    from services.trainer.learner.rank_shares import TensorShare

_BLOCKS = frozenset({"Qwen3MoeSparseMoeBlock", "Qwen3VLMoeTextSparseMoeBlock"})
_TAPE = "sluice_routing"
_ROW_BYTES = 16
_GROUPED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None)  # missing in torch 2.9


@dataclass(frozen=True, slots=True, eq=False)
class _ExpertRows:
    """Where a layer's rows go over the ranks: a row is a token at one of its experts.

    Args:
        counts: int64 [ranks, experts / ranks], rows for each of this rank's experts, by sender.
        sent: rows for each rank.
        received: rows from each rank.
    """

    counts: Tensor
    sent: list[int]
    received: list[int]


@dataclass(slots=True, eq=False)
class Routing:
    """The choices of one pass, by the index of the layer among those with experts.

    Without `experts`, each layer takes the `engine_experts` where they are known, else its router's
    choices, and stores them here.

    Args:
        experts: [tokens, k] each, of a small integer dtype: numbers of experts.
        engine_experts: the engine's experts of these tokens, in the layers of this stage.
        is_exchanged: `rows` already belong to the next pass.
    """

    experts: dict[int, Tensor] = field(default_factory=dict)
    engine_experts: PackedRouting | None = None
    rows: dict[int, _ExpertRows] = field(default_factory=dict)
    is_exchanged: bool = False


class RoutingTape:
    """The routing of a model's current pass, and the load of each expert.

    Every pass starts with a new routing, unless `follow` has set one.
    """

    def __init__(self, num_experts: int) -> None:
        self.current = Routing()
        self.num_layers = 0
        """The number of layers with experts, including those of other pipeline stages."""
        self.local_layers = slice(None)  # the layers with experts of this stage
        self.group: ProcessGroup | None = None
        """The ranks that divide the experts; None: each rank has all."""
        self.tensor: TensorShare | None = None
        """The ranks that divide packed tokens between layers; None if each has all."""
        self.receive: Callable[[Tensor, ProcessGroup], Tensor] = _all_to_all_counts
        """Exchanges counts [ranks, ...] by receiver for counts by sender; a dry run replaces it."""
        self._num_experts = num_experts
        self._next: Routing | None = None
        self._load: dict[int, Tensor] = {}
        self._engine: PackedRouting | None = None  # the engine's experts, on the pass's device
        self._agreed: Tensor | None = None

    def follow(self, routing: Routing | None) -> None:
        """Set the routing of the next pass; either all ranks of the group have choices, or none."""
        self._next = routing

    def begin(self) -> None:
        """Begin a pass."""
        self.current, self._next, self._engine = self._next or Routing(), None, None
        if self.current.experts and not self.current.is_exchanged:
            self.exchange([self.current])
        elif not self.current.experts:
            self.current.rows.clear()
        self.current.is_exchanged = False  # for one pass only: the next pass of other ranks differs

    def exchange(self, routings: Sequence[Routing]) -> None:
        """Exchange the counts of later passes whose choices are complete.

        The host reads them here instead of in the passes. Collective over `group`.

        Args:
            routings: one for each pass, in order; the same number on all ranks.
        """
        pairs = [(routing, layer) for routing in routings for layer in sorted(routing.experts)]
        if not pairs:
            return
        counts = torch.stack([self._count_rows(routing.experts[layer]) for routing, layer in pairs])
        for (routing, layer), rows in zip(pairs, self._exchange_counts(counts), strict=True):
            routing.rows[layer], routing.is_exchanged = rows, True

    def note(self, layer: int, experts: Tensor) -> None:
        """Record a layer's choices, int64 [tokens, k], or the engine's in their place."""
        experts = self._replace_by_engine(layer, experts)
        # Kept for a whole batch if passes replay, so keep it small.
        small = torch.uint8 if expert_dtype(self._num_experts).itemsize == 1 else torch.int16
        self.current.experts[layer] = experts.to(small)
        counts = self._count_rows(experts)
        previous = self._load.get(layer)
        self._load[layer] = counts if previous is None else previous + counts
        (self.current.rows[layer],) = self._exchange_counts(counts[None])

    def _replace_by_engine(self, layer: int, chosen: Tensor) -> Tensor:
        """Return the engine's experts where known, else the layer's choices."""
        engine = self.current.engine_experts
        if engine is None:
            return chosen
        if self._engine is None:  # all layers of this stage at once
            share = self.tensor
            tokens = share.local_slice(engine.known.numel()) if share else slice(None)
            experts, is_known = engine.experts[:, tokens], engine.known[tokens]
            self._engine = PackedRouting(experts.to(chosen.device), is_known.to(chosen.device))
        number = layer - (self.local_layers.start or 0)
        experts, is_known = self._engine.experts[number].long(), self._engine.known[:, None]
        same = (experts[:, :, None] == chosen[:, None, :]).any(-1)
        agreed = torch.stack(((same & is_known).sum(), is_known.sum() * chosen.shape[1]))
        self._agreed = agreed if self._agreed is None else self._agreed + agreed
        return torch.where(is_known, experts, chosen)

    def take_agreement(self, device: torch.device) -> Tensor:
        """Return how many of the engine's experts the routers also chose, and the total.

        Both count since the last call, int64 [2].
        """
        agreed, self._agreed = self._agreed, None
        return torch.zeros(2, dtype=torch.int64, device=device) if agreed is None else agreed

    def take_load(self, device: torch.device) -> Tensor:
        """Return rows by layer and expert since the last call, int64 [layers, experts].

        It is 0 on a rank without rows.
        """
        load, self._load = self._load, {}
        none = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        return torch.stack([load.get(layer, none) for layer in range(self.num_layers)])

    def _count_rows(self, experts: Tensor) -> Tensor:
        """Return rows by expert, int64 [experts]."""
        chosen = experts.flatten().long()
        counts = chosen.new_zeros(self._num_experts)
        return counts.scatter_add_(0, chosen, torch.ones_like(chosen))

    def _exchange_counts(self, counts: Tensor) -> list[_ExpertRows]:
        """Return where the rows of layers go, whose counts are int64 [layers, experts]."""
        if self.group is None:
            return [_ExpertRows(layer_counts[None], [], []) for layer_counts in counts]
        # [layers, experts] -> [ranks, layers, experts / ranks]
        parts = counts.unflatten(1, (self.group.size(), -1)).transpose(0, 1).contiguous()
        received = self.receive(parts, self.group)
        # The only wait for the device.
        sent, got = torch.stack((parts.sum(-1).t(), received.sum(-1).t())).tolist()
        return [_ExpertRows(*part) for part in zip(received.unbind(1), sent, got, strict=True)]


class Router(nn.Module):
    """The router, with weight [experts, hidden]; computes in float32 for any dtype."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return probabilities, float32 [tokens, experts], for tokens [tokens, hidden]."""
        logits = nn.functional.linear(tokens.float(), own_part(self.weight).float())
        return logits.softmax(-1)


class _Half(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class ExpertAdapter(nn.Module):
    """Adapters of one projection of all experts of a block: ``lora_A.weight`` [experts, rank, in]
    and ``lora_B.weight`` [experts, out, rank], not initialized yet.

    Args:
        shape: of the experts' weights, [experts, out, in].
    """

    def __init__(
        self,
        shape: Sequence[int],
        rank: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        experts, rows, columns = shape
        self.lora_A = _Half(torch.empty(experts, rank, columns, dtype=dtype, device=device))
        self.lora_B = _Half(torch.empty(experts, rows, rank, dtype=dtype, device=device))
        self.rank, self.scale = rank, scale
        self.is_on = True

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return what is added to the output [n, out] of rows [n, in]; see `_expert_products`."""
        a, b = own_part(self.lora_A.weight), own_part(self.lora_B.weight)
        # Grouped products need matrices whose row size is a multiple of this many bytes.
        missing = -self.rank % (_ROW_BYTES // a.itemsize)
        if missing:
            a, b = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b, (0, missing))
        return self.scale * _expert_products(_expert_products(rows, a, ends), b, ends)


class Experts(nn.Module):
    """Gated feed-forward networks of equal shape; each rank has its own experts."""

    def __init__(self, config: PreTrainedConfig, *, is_compiled: bool = False) -> None:
        super().__init__()
        self._is_compiled = is_compiled
        experts, width, hidden = (
            config.num_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.activation = ACT2FN[config.hidden_act]
        self.each = nn.ModuleDict()  # adapters, named by `EACH`

    def adapt(self, projection: str, rank: int, scale: float, dtype: torch.dtype) -> ExpertAdapter:
        """Add an adapter to one of `PROJECTIONS` of each expert, and return it."""
        weight = self.get_parameter(PROJECTIONS[projection].weight)
        part = PROJECTIONS[projection].view(weight)
        adapter = ExpertAdapter(part.shape, rank, scale, dtype, weight.device)
        self.each[projection] = adapter
        return adapter

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return each row's output [n, hidden].

        Args:
            rows: [n, hidden], sorted by expert.
            counts: int64 [experts of this rank], rows per expert.
        """
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = _expert_products(rows, own_part(self.gate_up_proj), ends).chunk(2, dim=-1)
        gate = self._add_adapter("gate_proj", gate, rows, ends)
        gated = compile_once(_gate) if self._is_compiled else _gate
        inner = gated(self.activation, gate, self._add_adapter("up_proj", up, rows, ends))
        down = _expert_products(inner, own_part(self.down_proj), ends)
        return self._add_adapter("down_proj", down, inner, ends)

    def _add_adapter(self, projection: str, output: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        if projection not in self.each or not self.each[projection].is_on:
            return output
        added: Tensor = self.each[projection](rows, ends)
        return output + added


class SparseExperts(nn.Module):
    """The block of a decoder layer: router and experts.

    Args:
        config: has transformers' names: ``num_experts``, ``num_experts_per_tok``,
            ``moe_intermediate_size``, ``norm_topk_prob`` (true where it is missing).
        layer: its index among the blocks of the whole model.
        is_compiled: compile everything but matrix products; layers share the code.
    """

    def __init__(
        self, config: PreTrainedConfig, layer: int, tape: RoutingTape, *, is_compiled: bool = False
    ) -> None:
        super().__init__()
        self.experts = Experts(config, is_compiled=is_compiled)  # in transformers' order
        self.gate = Router(config)
        self.num_experts: int = config.num_experts
        self.num_chosen: int = config.num_experts_per_tok
        self._normalizes: bool = getattr(config, "norm_topk_prob", True)
        self.layer, self._tape = layer, tape
        self._is_compiled = is_compiled

    def divide(self, mesh: DeviceMesh) -> None:
        """Keep only this rank's experts: rows of the parameters, over a mesh of one dimension."""
        self._tape.group = mesh.get_group()
        num_local = self.num_experts // mesh.size()
        start = mesh.get_local_rank() * num_local
        for module in self.experts.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                rows = parameter.detach()[start : start + num_local].to(mesh.device_type)
                shard = DTensor.from_local(rows, mesh, [Shard(0)], run_check=False)
                module.register_parameter(name, nn.Parameter(shard, parameter.requires_grad))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the experts' weighted output [..., hidden], of the input's shape and dtype."""
        tokens = hidden_states.flatten(0, -2)
        probabilities = self.gate(tokens)
        experts, rows = self._route(probabilities)
        weights = probabilities.gather(1, experts)
        if self._normalizes:
            weights = weights / weights.sum(-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)  # row n is `order[n]` by token
        places = torch.empty_like(order)  # the rows of each token
        places.scatter_(0, order, torch.arange(order.numel(), device=order.device))
        places, token = places.view(experts.shape), order // self.num_chosen
        spread: Tensor = _Dispatch.apply(tokens, token, places, self._is_compiled)  # type: ignore[no-untyped-call]
        outputs = self._compute_rows(spread, rows)
        combined: Tensor = _Combine.apply(outputs, weights, order, places, self._is_compiled)  # type: ignore[no-untyped-call]
        return combined.view(hidden_states.shape)

    @torch.no_grad()
    def _route(self, probabilities: Tensor) -> tuple[Tensor, _ExpertRows]:
        """Return the experts of each token, int64 [tokens, k], and where its rows go."""
        if self.layer not in self._tape.current.rows:
            best = probabilities.topk(self.num_chosen, dim=-1).indices
            self._tape.note(self.layer, best)
        routing = self._tape.current
        return routing.experts[self.layer].long(), routing.rows[self.layer]

    def _compute_rows(self, spread: Tensor, rows: _ExpertRows) -> Tensor:
        """Return the output of every row of this rank's tokens, [tokens * k, hidden]."""
        counts, group = rows.counts, self._tape.group
        if group is None:
            computed: Tensor = self.experts(spread, counts[0])
            return computed
        received = all_to_all(spread, group, rows.sent, rows.received)
        # Received rows are ordered by sender, then by expert.
        expert_index = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
        by_row = expert_index.repeat_interleave(counts.flatten(), output_size=received.shape[0])
        order = by_row.argsort(stable=True)
        outputs = self.experts(received.index_select(0, order), counts.sum(0))
        returned = torch.empty_like(outputs).index_copy(0, order, outputs)
        return all_to_all(returned, group, rows.received, rows.sent)


def use_native_experts(model: PreTrainedModel, *, compiled: bool = False) -> None:
    """Replace the blocks of a model of transformers, if its family is known; keep the weights.

    Args:
        model: built by transformers, not sharded yet.
    """
    config = model.config.get_text_config()
    tape, layer = RoutingTape(getattr(config, "num_experts", 0)), 0
    for owner in list(model.modules()):
        for name, block in list(owner.named_children()):
            if type(block).__name__ not in _BLOCKS:
                continue
            with torch.device("meta"):
                native_block = SparseExperts(config, layer, tape, is_compiled=compiled)
            native_block.gate.weight = block.gate.weight  # type: ignore[union-attr,assignment]
            for weight, parameter in block.experts.named_parameters():  # type: ignore[union-attr]
                native_block.experts.register_parameter(weight, parameter)
            owner.register_module(name, native_block)
            layer += 1
    if not layer:
        return
    tape.num_layers = layer
    setattr(model, _TAPE, tape)
    for owner in list(model.modules()):
        layers = getattr(owner, "layers", None)
        if isinstance(layers, nn.ModuleList) and any(True for _ in expert_blocks(layers)):
            owner.register_forward_pre_hook(lambda *_: tape.begin())


def check_native_experts(model: PreTrainedModel, setting: str, otherwise: object) -> None:
    """Refuse a setting for a model without the trainer's own experts.

    Args:
        setting: the key and value.
        otherwise: the value that such a model needs.

    Raises:
        ConfigError: names family, setting and remedy.
    """
    if routing_tape(model) is None:
        raise ConfigError(
            f"{setting}: the trainer has own experts for qwen3_moe and qwen3_vl_moe, and none for "
            f"a {model.config.model_type} model; set it to {otherwise}"
        )


def check_dividable(model: PreTrainedModel, size: int) -> None:
    """Refuse ranks that cannot divide a model's experts evenly.

    Raises:
        ConfigError: names family, numbers and remedy.
    """
    if size > 1:
        check_native_experts(model, f"{EXPERT_KEY}={size}", 1)
        config = model.config.get_text_config()
        check_experts(size, config.num_experts, model.config.model_type)


def expert_blocks(module: nn.Module) -> Iterator[SparseExperts]:
    """Yield the blocks inside a module."""
    return (block for block in module.modules() if isinstance(block, SparseExperts))


def idle_routing(model: nn.Module, tokens: int) -> Routing | None:
    """Return choices for an idle pass, for use beside ranks whose passes replay choices."""
    blocks, tape = list(expert_blocks(model)), routing_tape(model)
    if tape is None or not blocks:
        return None
    tokens //= tape.tensor.size if tape.tensor else 1
    device = blocks[0].gate.weight.device
    choices = torch.arange(blocks[0].num_chosen, device=device).expand(tokens, -1)
    return Routing(dict.fromkeys((block.layer for block in blocks), choices))


def routing_tape(model: nn.Module) -> RoutingTape | None:
    """Return the routing tape of a model with the trainer's own experts."""
    tape: RoutingTape | None = getattr(model, _TAPE, None)
    return tape


@contextmanager
def without_load_counts(model: nn.Module) -> Iterator[None]:
    """Do not count the experts' load inside the block."""
    tape = routing_tape(model)
    if tape is None:
        yield
        return
    load, tape._load = tape._load, {}
    try:
        yield
    finally:
        tape._load = load


def balance_metrics(load: Tensor) -> Mapping[str, float]:
    """Return the load balance of experts, by verl's formulas of ``rollout/moe``.

    A layer's violation is an expert's load over the mean load, minus 1: 0 for equal loads.

    Args:
        load: [layers, experts], rows of all ranks.
    """
    violation = load / load.float().mean(1, keepdim=True).clamp_min(1e-9) - 1.0
    max_violation = violation.amax(1)
    return {
        "actor/moe/max_vio/avg": float(max_violation.mean()),
        "actor/moe/max_vio/max": float(max_violation.max()),
        "actor/moe/avg_vio/avg": float(violation.abs().mean()),
    }


def agreement_metrics(agreement: Tensor) -> Mapping[str, float]:
    """Return the share of the engine's experts that the routers also chose; empty without such
    experts.

    Args:
        agreement: int64 [2], the number of equal choices and of the engine's, over all ranks.
    """
    num_agreed, num_total = agreement.tolist()
    return {"actor/moe/engine_agreement": num_agreed / num_total} if num_total else {}


def _all_to_all_counts(parts: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _expert_products(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply the rows [n, in] of each expert by its weight: [experts, out, in] -> [n, out]."""
    rows = rows.to(weights.dtype)
    if not len(rows):  # no token came to this rank; CUDA kernels refuse products over no rows
        return rows @ weights[0].t()
    if _grouped_mm is not None and weights.dtype in _GROUPED_DTYPES:
        product: Tensor = _grouped_mm(rows, weights.transpose(1, 2), offs=ends)
        return product
    parts = rows.tensor_split(ends.tolist()[:-1])
    return torch.cat([part @ weight.t() for part, weight in zip(parts, weights, strict=True)])


class _ExpertContext(FunctionCtx):
    is_compiled: bool
    saved_tensors: tuple[Tensor, ...]


class _Dispatch(torch.autograd.Function):
    """Tokens [tokens, hidden] to rows [tokens * k, hidden]; gradients add up in a fixed order."""

    @staticmethod
    def forward(
        ctx: _ExpertContext, tokens: Tensor, token: Tensor, places: Tensor, is_compiled: bool
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.is_compiled = is_compiled
        return tokens.index_select(0, token)

    @staticmethod
    def backward(ctx: _ExpertContext, of_rows: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return _compiled_if_set(_sum_rows, ctx)(of_rows, places), None, None, None


class _Combine(torch.autograd.Function):
    """Rows to tokens: sums in float32, weighted by float32 [tokens, k], in the rows' dtype."""

    @staticmethod
    def forward(
        ctx: _ExpertContext,
        rows: Tensor,
        weights: Tensor,
        order: Tensor,
        places: Tensor,
        is_compiled: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, order, places)
        ctx.is_compiled = is_compiled
        return _compiled_if_set(_weighted_sum, ctx)(rows, places, weights)

    @staticmethod
    def backward(ctx: _ExpertContext, of_tokens: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows, weights, order, places = ctx.saved_tensors
        token, weight = order // weights.shape[1], weights.flatten().index_select(0, order)
        of_rows = _compiled_if_set(_weighted_tokens, ctx)(of_tokens, token, weight)
        of_weights = _compiled_if_set(_row_products, ctx)(rows, places, of_tokens)
        return of_rows, of_weights, None, None, None


def _gate(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    gated: Tensor = activation(gate) * up
    return gated


def _compiled_if_set(function: F, ctx: _ExpertContext) -> F:
    return compile_once(function) if ctx.is_compiled else function


def _sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Return the sum of each token's rows [n, hidden], in their dtype.

    Args:
        rows: sorted by expert.
        places: int64 [tokens, k], the rows of each token.
    """
    # One expert of every token at a time: float32 rows would take several times the memory.
    total = rows.new_zeros((len(places), rows.shape[1]), dtype=torch.float32)
    for place in places.unbind(1):
        total += rows.index_select(0, place)
    return total.to(rows.dtype)


def _weighted_sum(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows; see `_sum_rows`."""
    total = weights.new_zeros((len(places), rows.shape[1]))
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        total.addcmul_(rows.index_select(0, place).float(), weight[:, None])
    return total.to(rows.dtype)


def _weighted_tokens(tokens: Tensor, token: Tensor, weight: Tensor) -> Tensor:
    """Return each row's token [tokens, hidden] times its weight."""
    return tokens.index_select(0, token).mul_(weight[:, None])


def _row_products(rows: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
    """Return the scalar product of each token with each of its rows, float32 [tokens, k]."""
    wide = tokens.float()
    parts = [
        torch.linalg.vecdot(wide, rows.index_select(0, place).float()) for place in places.unbind(1)
    ]
    return torch.stack(parts, 1)

"""Memory of one trainer device, in bytes, for a layout over devices.

Model state of mixed-precision Adam is 16 bytes a parameter (ZeRO, Rajbhandari et al. 2020,
section 3.1). Activations follow the counting of Korthikanti et al. 2022 ("Reducing activation
recomputation in large transformer models", sections 4 and 5) for gated MLPs, grouped-query
attention and a fused attention kernel. Allocator waste and communication buffers are not counted:
leave a tenth of the device free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sluice.config.memory.shape import ModelShape

Backend = Literal["fsdp", "megatron", "replicated"]

LOGIT_BYTES = 4 + 2 + 1
"""Per token and vocabulary entry: a float32 and a bfloat16 copy, and part of a temporary (verl)."""


@dataclass(frozen=True, slots=True)
class TrainingLayout:
    """Sizes and switches of one trainer.

    Args:
        backend: fsdp shards everything over `shard` ranks; megatron cuts the model by tensor,
            pipeline and expert; replicated holds the whole model on each rank.
        world: trainer ranks.
        shard: ranks of one FSDP shard group.
        micro_tokens: tokens of a training micro-batch on one device, after sequence or context
            parallelism has cut them.
        master_bytes: bytes of a stored parameter (4 for float32).
        compute_bytes: bytes of a parameter and an activation in a forward pass (2 for bfloat16).
        streamed_offload: parameters, gradients and optimizer live on the host and pass through
            the device layer by layer (FSDP2's CPU offload policy).
        optimizer_host_share: share of the optimizer that always lives on the host (Megatron's
            hybrid optimizer).
        fused_logits: logprobs are computed without ever holding all logits.
        head_bytes: bytes per weight of the head that its gradient takes then.
        adapter_rank: of adapters beside frozen weights, which are stored in `compute_bytes`; 0: all
            weights are trained.
        recomputed_layers: layers, from the first, that are recomputed then; `None`: all.
        whole_gradients: FSDP's gradients are added up whole on each rank before they are summed.
    """

    backend: Backend
    world: int
    micro_tokens: int
    shard: int = 1
    sp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    master_bytes: int = 4
    compute_bytes: int = 2
    param_offload: bool = False
    optimizer_offload: bool = False
    grad_offload: bool = False
    streamed_offload: bool = False
    optimizer_host_share: float = 0.0
    gradient_checkpointing: bool = False
    recomputed_layers: int | None = None
    activation_offload: bool = False
    fused_logits: bool = False
    head_bytes: int = 0
    reshard_after_forward: bool = True
    whole_gradients: bool = False
    adapter_rank: int = 0

    @property
    def data_parallel(self) -> int:
        """Ranks that train different rows."""
        cut = {"fsdp": self.sp, "megatron": self.tp * self.pp * self.cp, "replicated": 1}
        return max(self.world // cut[self.backend], 1)

    def recomputed_of(self, layers: int) -> int:
        """Return how many of so many layers the backward pass recomputes."""
        if not self.gradient_checkpointing:
            return 0
        return layers if self.recomputed_layers is None else min(self.recomputed_layers, layers)


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes on one device, by what they hold, and when.

    Args:
        gathered: copies of the layers at work, in the dtype of the passes.
        layer_activations: activations of one layer; what a forward pass without gradients holds.
        idle: what stays on the device between updates, while a colocated engine generates.
        log_prob: peak while logprobs are recomputed.
        host: bytes on the host for this device while nothing is trained.
    """

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    layer_activations: float
    idle: float
    log_prob: float
    host: float

    @property
    def update(self) -> float:
        """Peak during the policy update."""
        state = self.parameters + self.gradients + self.optimizer + self.gathered
        return state + self.activations + self.logits


def training_memory(shape: ModelShape, layout: TrainingLayout) -> TrainingMemory:
    """Estimate the memory of the device that holds most.

    Offloads move whole phases (verl): a component is back on the device for the update, so they
    lower `log_prob` and `idle`, not `update`; only `streamed_offload` and `optimizer_host_share`
    lower the update's peak.
    """
    parameters, gradients, optimizer = _model_state(shape, layout)
    on_host = optimizer * layout.optimizer_host_share
    optimizer -= on_host
    gathered, layer = _gathered(shape, layout), _layer_activations(shape, layout)
    logits = _logits(shape, layout)
    if layout.streamed_offload:
        on_host += parameters + gradients + optimizer
        parameters = gradients = optimizer = 0.0
    idle_parameters = 0.0 if layout.param_offload else parameters
    idle_optimizer = 0.0 if layout.optimizer_offload else optimizer
    # FSDP frees gradients after the step; Megatron keeps its buffers.
    keeps = layout.backend == "megatron" and not layout.grad_offload
    idle_gradients = gradients if keeps else 0.0
    away = (parameters - idle_parameters) + (optimizer - idle_optimizer)
    if layout.backend == "megatron" and layout.grad_offload:
        away += gradients
    return TrainingMemory(
        parameters,
        gradients,
        optimizer,
        gathered,
        _activations(shape, layout),
        logits,
        layer,
        idle=idle_parameters + idle_gradients + idle_optimizer,
        log_prob=parameters + idle_gradients + idle_optimizer + gathered + layer + logits,
        host=on_host + away,
    )


def _model_state(shape: ModelShape, layout: TrainingLayout) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer on one device."""
    if layout.backend == "megatron":
        dense, experts = megatron_parameters(shape, layout)
        # bf16 parameters, fp32 gradients; master copy and two moments in fp32, sharded over the
        # ranks that hold the same parameters (Megatron-Core's distributed optimizer: 6 + 12/d).
        dense_copies = max(layout.world // (layout.tp * layout.pp), 1)
        expert_copies = max(layout.world // (layout.ep * layout.etp * layout.pp), 1)
        optimizer = 12 * (dense / dense_copies + experts / expert_copies)
        return 2 * (dense + experts), 4 * (dense + experts), optimizer
    ranks = layout.shard if layout.backend == "fsdp" else 1
    others = shape.total_parameters - shape.expert_parameters
    experts = shape.expert_parameters * _expert_share(shape, layout, ranks)
    weights = others / ranks + experts
    held = trained = weights * layout.master_bytes
    if layout.adapter_rank:
        trained = shape.adapter_parameters(layout.adapter_rank) / ranks * layout.master_bytes
        held = weights * layout.compute_bytes + trained
    gradients = trained * ranks if layout.whole_gradients else trained
    return held, gradients, 2 * trained


def _expert_share(shape: ModelShape, layout: TrainingLayout, ranks: int) -> float:
    """Return the share of the experts on the fullest rank: FSDP2 cuts between whole experts.

    Only experts that ranks divide are cut within, each matrix whose rows are a multiple of the
    ranks: gate and up together, two thirds, and down.
    """
    if not shape.experts:
        return 0.0
    each, over = shape.experts // layout.ep, max(ranks // layout.ep, 1)
    share = 0.0
    for part, rows in ((2 / 3, 2 * shape.expert_intermediate), (1 / 3, shape.hidden)):
        is_even = layout.ep > 1 and rows % over == 0
        share += part * (1 / ranks if is_even else math.ceil(each / over) / shape.experts)
    return share


def megatron_parameters(shape: ModelShape, layout: TrainingLayout) -> tuple[float, float]:
    """Return dense and expert parameters of the fullest pipeline stage on one device.

    Layers are cut evenly; the first and the last stage hold a vocabulary matrix each, and one
    stage alone holds both.
    """
    dense = shape.dense_parameters / layout.pp / layout.tp
    matrices = shape.vocabulary_parameters if layout.pp == 1 else shape.embedding_parameters
    experts = shape.expert_parameters / layout.pp / (layout.ep * layout.etp)
    return dense + matrices / layout.tp, experts


def _gathered(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return the bytes of parameters that are gathered in the compute dtype."""
    if layout.backend != "fsdp":
        return 0.0
    if not layout.reshard_after_forward:
        return float(shape.total_parameters * layout.compute_bytes)
    # The root unit (vocabulary matrices) stays whole; one layer works while the next arrives.
    # Experts that ranks divide are gathered among those that hold the same ones.
    experts = shape.expert_parameters / shape.layers
    layer = shape.layer_parameters - experts + experts / layout.ep
    units = shape.vocabulary_parameters + 2 * layer
    return float(units * layout.compute_bytes)


def activation_values(shape: ModelShape) -> int:
    """Return the values that one layer keeps per token for its backward pass (2 bytes each).

    A norm that computes in float32, as Transformers' do, keeps a float32 copy of its input, the
    normalised values and its output: 4h for each of the two, and three times the heads' width more
    where queries and keys are normalised. Attention keeps queries and its output (2Hd), keys and
    values (2KVd); the gated MLP gate, its activation, up and the product (4 times its width);
    routing the permuted copies of each token's input and output.
    """
    norms = 8 * shape.hidden
    if shape.qk_norm:
        norms += 3 * (shape.query_width + shape.kv_width)
    attention = 2 * shape.query_width + 2 * shape.kv_width
    routing = 2 * shape.experts_per_token * shape.hidden if shape.expert_layers else 0
    return norms + attention + 4 * shape.mlp_width + routing


def _layer_activations(shape: ModelShape, layout: TrainingLayout) -> float:
    values = activation_values(shape) * layout.micro_tokens
    return values * layout.compute_bytes / layout.tp


def _activations(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return the bytes that all layers keep, and the bytes of the layer at work.

    The first pipeline stage keeps as many micro-batches as there are stages (1F1B), so pipeline
    parallelism does not lower the sum (Korthikanti et al., section 4.2.3).
    """
    layer = _layer_activations(shape, layout)
    inputs = shape.hidden * layout.micro_tokens * layout.compute_bytes / layout.tp
    if layout.activation_offload:
        # The layer at work and the inputs that are on their way to and from the host.
        return layer + 2 * inputs
    recomputed = layout.recomputed_of(shape.layers)
    kept = shape.layers - recomputed
    return recomputed * inputs + kept * layer + (layer if recomputed else 0.0)


def _logits(shape: ModelShape, layout: TrainingLayout) -> float:
    if layout.fused_logits:
        return float(layout.head_bytes * shape.embedding_parameters)
    return layout.micro_tokens * shape.vocab * LOGIT_BYTES / layout.tp

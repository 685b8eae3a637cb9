"""How a trainer spreads a model over devices, as far as memory depends on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["fsdp", "megatron", "replicated"]


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
        whole_gradients: FSDP's gradients are added up whole on each rank before they are summed.
        gathers_masters: FSDP gathers stored parameters, which are cast to the compute dtype then.
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
    activation_offload: bool = False
    fused_logits: bool = False
    reshard_after_forward: bool = True
    whole_gradients: bool = False
    gathers_masters: bool = False

    @property
    def data_parallel(self) -> int:
        """Ranks that train different rows."""
        cut = {"fsdp": self.sp, "megatron": self.tp * self.pp * self.cp, "replicated": 1}
        return max(self.world // cut[self.backend], 1)

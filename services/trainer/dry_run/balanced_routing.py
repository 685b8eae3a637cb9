"""Routing for a pass whose values do not matter: every expert gets equally many rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from services.trainer.learner.model.experts import Routing, expert_blocks, routing_tape

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PreTrainedModel


def balanced_routing(model: PreTrainedModel, tokens: int) -> Routing | None:
    """Return choices for a pass over so many tokens of this rank that load all experts alike.

    Choices and counts are real tensors also among fake ones: the host reads them.
    """
    blocks = list(expert_blocks(model))
    if not blocks:
        return None
    with unset_fake_temporarily():
        number = torch.arange(tokens * blocks[0].num_chosen) % blocks[0].num_experts
        experts = number.view(tokens, -1).to(torch.int16)
    return Routing(dict.fromkeys(range(len(blocks)), experts))


def plan_routing(model: PreTrainedModel) -> None:
    """Let a rank without peers receive from each what it sends to itself."""
    tape = routing_tape(model)
    if tape is None:
        return
    begin = tape.begin

    def really_begin() -> None:
        with unset_fake_temporarily():
            begin()

    tape.begin = really_begin  # type: ignore[method-assign]
    tape.receive = _alike


def _alike(parts: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)  # counted, but nothing comes
    return received.copy_(parts[dist.get_rank(group)].expand_as(parts))

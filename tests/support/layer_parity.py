"""Logprobs and gradients of made-up rows: from plain layers, row by row, and from packed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from services.trainer.learner.batch.micro_batch import MicroBatch, build_micro_batch
from services.trainer.learner.batch.packed_rows import TrainingRow, training_rows
from services.trainer.learner.rank_shares import SequenceShare
from sluice.algorithm.packing import plan_micro_batches
from sluice.checkpoint.adapter_files import Adapter
from sluice.types import TokenIds
from sluice.weights.adapters import (
    A_SUFFIX,
    B_SUFFIX,
    EACH,
    PROJECTIONS,
    adapted_part,
    is_of_experts,
    names_in_files,
)
from tests.support.episodes import (
    COMPACTED,
    LINEAR,
    NO_TOKENS,
    READS_FIRST,
    TREE,
    make_episodes,
    sequence_before,
)
from tests.support.tiny_policy import make_group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEMPERATURE = 0.7
MAX_ERROR = 1e-5
"""Of a gradient, relative to its largest element; 3e-6 are float32's."""

Gradients = dict[str, torch.Tensor]


def parity_rows(data_rank: int = 0, data_size: int = 1) -> list[TrainingRow]:
    """The rows of one of so many ranks: four of a prompt; two prompts have episodes."""
    lengths = [(1, 16, 3, 7), (2, 2, 9, 1), (16, 15, 14, 13), (5, 1, 1, 12)]
    groups = [make_group(seed, one) for seed, one in enumerate(lengths)]
    groups += [
        make_episodes(4, (LINEAR, TREE, COMPACTED, READS_FIRST)),
        make_episodes(5, (TREE, NO_TOKENS, LINEAR, COMPACTED)),
    ]
    rows = training_rows(groups, [range(4 * g, 4 * g + 4) for g in range(len(groups))])
    return [row for row in rows if row.group % data_size == data_rank]


def pack(
    rows: list[TrainingRow], share: SequenceShare | None = None, pad_to: int = 1
) -> MicroBatch:
    """All rows in one micro-batch, in their order."""
    (plan,) = plan_micro_batches(
        [row.size for row in rows], range(len(rows)), rows_per_micro=len(rows)
    )
    micro_batch = build_micro_batch(rows, plan, torch.device("cpu"), share=share, pad_to=pad_to)
    assert micro_batch is not None
    return micro_batch


def weighed(
    logprobs: torch.Tensor, micro_batch: MicroBatch, entropy: torch.Tensor | None = None
) -> torch.Tensor:
    """A loss to which every token adds its own part."""
    loss = (logprobs * (31.0 * micro_batch.batch_rows + micro_batch.columns).sin()).sum()
    return loss if entropy is None else loss + 0.1 * entropy.sum()


def plain(
    model: PreTrainedModel,
    *,
    with_entropy: bool = False,
    some: list[TrainingRow] | None = None,
) -> tuple[torch.Tensor, Gradients]:
    """Logprobs [N] and gradients of rows, of a model with eager attention and no packing.

    The rows are those of `parity_rows`, unless there are `some`.
    """
    rows = some or parity_rows()
    packed = pack(rows)
    found = [_of_row(model, row) for row in rows]
    # The tokens that are trained, in packed order.
    places = list(zip(packed.rows.tolist(), packed.columns.tolist(), strict=True))
    logprobs, entropy = (
        torch.stack([found[row][part][column] for row, column in places]) for part in (0, 1)
    )
    loss = weighed(logprobs, packed, entropy if with_entropy else None)
    return logprobs.detach(), gradients(model, loss)


def plain_adapters(model: PreTrainedModel, adapter: Adapter) -> Gradients:
    """Gradients of an adapter by those of the weights it is merged into, which stay merged.

    With W' = W + s B A and G of W', B has s G A^T and A has s B^T G.
    """
    halves = {
        layer: [
            torch.stack([adapter.tensors[one] for one in names_in_files(layer + suffix, experts)])
            for suffix in (A_SUFFIX, B_SUFFIX)
        ]
        for layer, experts in _layers(model).items()
    }
    with torch.no_grad():
        for layer, (a, b) in halves.items():
            part = adapted_part(layer)
            part.view(model.get_parameter(part.weight)).add_((adapter.scale * b @ a).squeeze(0))
    _, whole = plain(model, with_entropy=True)
    found: Gradients = {}
    for layer, (a, b) in halves.items():
        part = adapted_part(layer)
        gradient = adapter.scale * part.view(whole[part.weight])
        squeezed = [b.mT @ gradient, gradient @ a.mT]
        if not is_of_experts(layer):
            squeezed = [one.squeeze(0) for one in squeezed]
        found |= zip((layer + A_SUFFIX, layer + B_SUFFIX), squeezed, strict=True)
    return found


def random_adapter(model: PreTrainedModel, rank: int = 3) -> Adapter:
    """An adapter of all linear layers but the head, and of all experts; no part of it is zero."""
    generator, tensors = torch.Generator().manual_seed(2), {}
    for layer, experts in _layers(model).items():
        part = adapted_part(layer)
        rows, columns = part.view(model.get_parameter(part.weight)).shape[-2:]
        for suffix, shape in ((A_SUFFIX, (rank, columns)), (B_SUFFIX, (rows, rank))):
            for name in names_in_files(layer + suffix, experts):
                tensors[name] = 0.2 * torch.randn(shape, generator=generator)
    return Adapter(rank, 2.0 * rank, tensors, "tiny")


def _layers(model: PreTrainedModel) -> dict[str, int]:
    """The layers to adapt, by the trainer's names, and the experts that each stands for."""
    found: dict[str, int] = {}
    for name, module in model.base_model.named_modules(prefix=model.base_model_prefix):
        if isinstance(module, torch.nn.Linear):
            found[name] = 1
        elif name.endswith(".experts"):
            count = len(module.get_parameter("down_proj"))
            found |= {f"{name}.{EACH}.{one}": count for one in PROJECTIONS}
    return found


def _of_row(model: PreTrainedModel, row: TrainingRow) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies [tokens] of all that was sampled; each turn has a pass of its own."""
    turns = [
        (sequence_before(row.prompt_token_ids, row.turns, number), turn.token_ids)
        for number, turn in enumerate(row.turns)
    ]
    parts = [
        _sampled(model, before, own)
        for before, own in turns or [(row.prompt_token_ids, row.token_ids)]
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def _sampled(
    model: PreTrainedModel, before: TokenIds, own: TokenIds
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(np.concatenate([before, own]).astype(np.int64))
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    logprobs = (logits[before.size - 1 : -1] / TEMPERATURE).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, tokens[before.size :, None])[:, 0], entropy


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> Gradients:
    """Of the loss, by parameter."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst_error(found: Gradients, expected: Gradients) -> float:
    """The largest error of an element, relative to the largest element of its gradient."""
    assert found.keys() == expected.keys()
    errors = [(found[name] - one).abs().max() / one.abs().max() for name, one in expected.items()]
    return float(torch.stack(errors).max())  # nan if one is

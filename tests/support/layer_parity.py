"""Logprobs and gradients of made-up rows: from plain layers, row by row, and from packed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from services.trainer.learner.batch.micro_batch import (
    MicroBatch,
    TrainingRow,
    build_micro_batch,
    training_rows,
)
from services.trainer.learner.sequence_share import SequenceShare
from sluice.algorithm.packing import plan_micro_batches
from tests.support.tiny_policy import make_group

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEMPERATURE = 0.7
MOST_ERROR = 1e-5
"""Of a gradient, relative to its largest element; 3e-6 are float32's."""

Gradients = dict[str, torch.Tensor]


def parity_rows(data_rank: int = 0, data_size: int = 1) -> list[TrainingRow]:
    """The rows of one of so many ranks: four of a prompt."""
    lengths = [(1, 16, 3, 7), (2, 2, 9, 1), (16, 15, 14, 13), (5, 1, 1, 12)]
    groups = [make_group(seed, one) for seed, one in enumerate(lengths)]
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


def weighed(logprobs: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
    """A loss to which every token adds its own part."""
    return (logprobs * (31.0 * micro_batch.batch_rows + micro_batch.columns).sin()).sum()


def plain(model: PreTrainedModel) -> tuple[torch.Tensor, Gradients]:
    """Logprobs [N] and gradients of all rows, of a model with eager attention and no packing."""
    rows = parity_rows()
    logprobs = torch.cat([_of_row(model, row) for row in rows])
    return logprobs.detach(), gradients(model, weighed(logprobs, pack(rows)))


def _of_row(model: PreTrainedModel, row: TrainingRow) -> torch.Tensor:
    tokens = np.concatenate([row.prompt_token_ids, row.token_ids]).astype(np.int64)
    logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    prompt = row.prompt_token_ids.size
    logprobs = (logits[prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(tokens[prompt:, None]))[:, 0]


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> Gradients:
    """Of the loss, by parameter."""
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst_error(found: Gradients, expected: Gradients) -> float:
    """The largest error of an element, relative to the largest element of its gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - one).abs().max() / one.abs().max()) for n, one in expected.items())

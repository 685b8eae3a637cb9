"""Logprobs and entropy of a micro-batch's response tokens under the model's present weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.trainer.learner.micro_batch import MicroBatch
from services.trainer.learner.packed_images import image_for_all_ranks, logits_with_images
from sluice.algorithm.entropy import (
    entropy_from_logits,
    logprobs_and_entropy,
    logprobs_from_logits,
)
from sluice.concurrency.advance import advance

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EntropyUse(StrEnum):
    """What the entropy of a forward pass is for; a bonus costs a pass over the logits."""

    NONE = "none"
    METRIC = "metric"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """Per response token, float32 [N]. `entropy` is there if used, with a gradient for a bonus;
    `sum_pi_squared`, the sum of all squared probabilities, if asked for."""

    logprobs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None = None


def token_outputs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    temperature: float,
    entropy: EntropyUse = EntropyUse.NONE,
    with_sum_pi_squared: bool = False,
) -> TokenOutputs:
    """Run the model once over the packed tokens; logits exist at predecessors only.

    Args:
        model: loaded by `model.load_policy`.
        micro_batch: on the model's device.
        temperature: sampling temperature; logits are divided by it.
        entropy: whether to compute the entropies, and whether they are differentiated.
        with_sum_pi_squared: compute them, without a gradient.
    """
    advance()
    logits = response_logits(model, micro_batch)
    labels, entropies = micro_batch.labels, None
    if entropy is EntropyUse.METRIC:
        logprobs, entropies = logprobs_and_entropy(logits, labels, temperature)
    else:
        logprobs = logprobs_from_logits(logits, labels, temperature)
    if entropy is EntropyUse.BONUS:
        entropies = entropy_from_logits(logits, temperature)
    squares = sum_pi_squared(logits, temperature) if with_sum_pi_squared else None
    return TokenOutputs(logprobs, entropies, squares)


@torch.no_grad()
def sum_pi_squared(logits: Tensor, temperature: float) -> Tensor:
    """Sum over the vocabulary of ``softmax(logits / temperature)`` squared, float32 [N].

    ``exp(logsumexp(2 z) - 2 logsumexp(z))`` for scaled logits z: no probability is stored.
    """
    scaled = logits.float() / temperature
    return torch.exp(torch.logsumexp(2 * scaled, -1) - 2 * torch.logsumexp(scaled, -1))


def response_values(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Values [N], float32, that a critic gives the state before each response token."""
    advance()
    outputs = model(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        packed_layout=micro_batch.layout,
    )
    values: Tensor = outputs.logits[0, :, 0].float()
    return values.index_select(0, micro_batch.predecessors)


def response_logits(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Logits [N, vocab] that predict each response token, in the dtype of the forward pass."""
    images = micro_batch.images or image_for_all_ranks(model, micro_batch.input_ids)
    if images is not None:
        return logits_with_images(
            model,
            images,
            micro_batch.input_ids,
            micro_batch.position_ids,
            micro_batch.predecessors,
            packed_layout=micro_batch.layout,
        ).squeeze(0)
    outputs = model(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        logits_to_keep=micro_batch.predecessors,
        packed_layout=micro_batch.layout,
    )
    logits: Tensor = outputs.logits
    return logits.squeeze(0)  # the gradient of logits[0] would be a second tensor of their size

"""Logprobs and entropy of a micro-batch's response tokens under the model's present weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from services.trainer.learner.micro_batch import MicroBatch
from sluice.algorithm.entropy import entropy_from_logits, logprobs_from_logits

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class EntropyUse(StrEnum):
    """What the entropy of a forward pass is for; it costs a pass over the logits."""

    NONE = "none"
    METRIC = "metric"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """Per response token, float32 [N]. `entropy` is there if used, with a gradient for a bonus."""

    logprobs: Tensor
    entropy: Tensor | None


def token_outputs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    temperature: float,
    entropy: EntropyUse = EntropyUse.NONE,
) -> TokenOutputs:
    """Run the model once over the packed tokens; logits exist at predecessors only.

    Args:
        model: loaded by `model.load_policy`.
        micro_batch: on the model's device.
        temperature: sampling temperature; logits are divided by it.
        entropy: whether to compute the entropies, and whether they are differentiated.
    """
    logits = response_logits(model, micro_batch)
    logprobs = logprobs_from_logits(logits, micro_batch.labels, temperature)
    if entropy is EntropyUse.NONE:
        return TokenOutputs(logprobs, None)
    differentiated = logits if entropy is EntropyUse.BONUS else logits.detach()
    return TokenOutputs(logprobs, entropy_from_logits(differentiated, temperature))


def response_logits(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Logits [N, vocab] that predict each response token, in the dtype of the forward pass."""
    outputs = model(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        logits_to_keep=micro_batch.predecessors,
        packed_layout=micro_batch.layout,
    )
    logits: Tensor = outputs.logits
    return logits[0]

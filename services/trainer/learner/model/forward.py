"""Forward passes over a micro-batch: logprobs, entropy and values, and the check that packing
does not change them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from services.trainer.learner.batch.micro_batch import MicroBatch, TrainingRow, build_micro_batch
from services.trainer.learner.model.image_pass import image_for_all_ranks, logits_with_images
from services.trainer.learner.model.sharding import plain_class
from sluice.algorithm.entropy import (
    entropy_from_logits,
    logprobs_and_entropy,
    logprobs_from_logits,
)
from sluice.algorithm.packing import plan_micro_batches
from sluice.concurrency.deadlines import advance
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EntropyUse(StrEnum):
    """The use of a pass's entropy; a bonus costs another pass over the logits."""

    NONE = "none"
    METRIC = "metric"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """Results of one pass per response token, float32 [N].

    `entropy` has a gradient if it is a bonus. `sum_pi_squared` is the sum of all squared
    probabilities. Both are ``None`` unless requested.
    """

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
    """Run the model once over the packed tokens; compute logits at predecessors only.

    Args:
        model: loaded by `load_policy`.
        micro_batch: on the model's device.
        temperature: sampling temperature; logits are divided by it.
        entropy: whether to compute entropies, and whether with a gradient.
        with_sum_pi_squared: whether to compute squared probabilities, without a gradient.
    """
    advance()
    logits = response_logits(model, micro_batch)
    labels, entropies = micro_batch.labels, None
    # For a metric, one pass over the logits gives both; its entropy has no gradient.
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
    """Return the sum over the vocabulary of ``softmax(logits / temperature)`` squared, [N].

    Computed as ``exp(logsumexp(2 z) - 2 logsumexp(z))`` for scaled logits z, in float32, so that no
    probabilities [N, vocab] are stored.
    """
    scaled = logits.float() / temperature
    return torch.exp(torch.logsumexp(2 * scaled, -1) - 2 * torch.logsumexp(scaled, -1))


def response_values(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Return a critic's values [N], float32, of the state before each response token."""
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
    """Return logits [N, vocab] that predict each response token, in the pass's dtype."""
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
    return logits.squeeze(0)  # logits[0] would make a second gradient tensor of this size


_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_PROMPT_TOKENS = (5, 8)
_ROW_TOKENS = (6, 9)


def check_packing(
    model: PreTrainedModel, naming_failures: AbstractContextManager[object] | None = None
) -> None:
    """Compare logprobs of a few made-up rows, packed together and each alone.

    Some model families use their own attention, or carry state from token to token. They would run
    on packed tokens without any error and learn nonsense. Collective if the model is sharded.

    Args:
        model: the model that will be trained.
        naming_failures: names errors of other ranks, as opposed to errors of the model.

    Raises:
        ConfigError: they differ by more than rounding.
        DeadlineError, PeerError: from `naming_failures`.
    """
    rows = _made_up_rows(model.config.get_text_config().vocab_size)
    try:
        with torch.no_grad(), naming_failures or nullcontext():
            together = _logprobs(model, rows)
            alone = torch.cat([_logprobs(model, [row]) for row in rows])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise _refusal(model, repr(error)) from error
    # `not <=` also refuses NaN.
    gap = float((together - alone).abs().mean())
    if not gap <= _TOLERANCE[model.dtype]:
        raise _refusal(model, f"logprobs of packed and single rows differ by {gap:.2g} on average")


def _refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"actor_rollout_ref.model.path: {plain_class(model).__name__} cannot be trained on packed "
        f"tokens ({reason}); choose a model family whose attention can be replaced in transformers"
    )


def _made_up_rows(vocabulary: int) -> list[TrainingRow]:
    generator = np.random.default_rng(0)
    rows: list[TrainingRow] = []
    for group, prompt_tokens in enumerate(_PROMPT_TOKENS):
        prompt = generator.integers(vocabulary, size=prompt_tokens).astype(np.uint32)
        for tokens in _ROW_TOKENS:
            response = generator.integers(vocabulary, size=tokens).astype(np.uint32)
            logprobs = np.zeros(tokens, np.float32)
            rows.append(TrainingRow(len(rows), group, prompt, response, logprobs))
    return rows


def _logprobs(model: PreTrainedModel, rows: list[TrainingRow]) -> torch.Tensor:
    """Return logprobs in the order of the rows: they are given by group, so packing keeps it."""
    (plan,) = plan_micro_batches(
        [row.size for row in rows], range(len(rows)), rows_per_micro=len(rows)
    )
    micro_batch = build_micro_batch(rows, plan, model.device)
    assert micro_batch is not None
    return token_outputs(model, micro_batch, temperature=1.0).logprobs

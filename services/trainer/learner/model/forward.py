"""Logprobs and entropy of a micro-batch under the current weights, and a check that packing
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
from services.trainer.learner.batch.packing import image_for_all_ranks, logits_with_images
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


# A trial at start: packing must not change what the model says.
#
# Some model families keep an attention of their own, or carry state from token to token; they
# would run on packed tokens without any error and learn nonsense. So a few made-up rows are
# computed packed together and each alone, which must agree.

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_PROMPT_TOKENS = (5, 8)
_ROW_TOKENS = (6, 9)


def check_packing(
    model: PreTrainedModel, naming_failures: AbstractContextManager[object] | None = None
) -> None:
    """Compare mean logprobs of packed and single rows. Collective if the model is sharded.

    Args:
        model: to be trained.
        naming_failures: tells what other ranks did wrong from what the model did.

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
    gap = float((together - alone).abs().mean())
    if not gap <= _TOLERANCE[model.dtype]:
        raise _refusal(model, f"logprobs of packed and single rows differ by {gap:.2g} on average")


def _refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"actor_rollout_ref.model.path: {plain_class(model).__name__} cannot be trained on packed "
        f"tokens ({reason}); choose a model family whose attention transformers lets others "
        "implement"
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
    """In order of the rows; they are given by group, so packing keeps it."""
    (plan,) = plan_micro_batches(
        [row.size for row in rows], range(len(rows)), rows_per_micro=len(rows)
    )
    micro_batch = build_micro_batch(rows, plan, model.device)
    assert micro_batch is not None
    return token_outputs(model, micro_batch, temperature=1.0).logprobs

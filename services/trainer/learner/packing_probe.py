"""A trial at start: packing must not change what the model says.

Some model families keep an attention of their own, or carry state from token to token; they would
run on packed tokens without any error and learn nonsense. So a few made-up rows are computed
packed together and each alone, which must agree.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.trainer.learner.forward import token_outputs
from services.trainer.learner.micro_batch import TrainingRow, build_micro_batch
from services.trainer.learner.shards import plain_class
from sluice.algorithm.packing import plan_micro_batches
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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

"""Supervised warm start: teach the format and the arithmetic, slips included, in seconds.

The loss is the mean cross entropy over the answer tokens of a batch; prompts are context only.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from sluice.quickstart.settings import WarmStartSettings
from sluice.quickstart.tokenizer import encode_dialogue
from sluice.quickstart.worked_answers import Dialogue

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

WarmStartProgress = Callable[[int, int, float], None]
"""Called after each step with the steps done, all steps, and the step's loss in nats a token."""

_IGNORED = -100
_BATCHES_PER_SORT = 8


@dataclass(frozen=True, slots=True)
class _Batch:
    token_ids: torch.Tensor  # [dialogues, width] int64, padded on the right
    targets: torch.Tensor  # [dialogues, width] int64, the next token where it is an answer's


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    dialogues: tuple[Dialogue, ...],
    settings: WarmStartSettings,
    seed: int,
    progress: WarmStartProgress,
) -> float:
    """Train `model` in place on one pass over `dialogues`; the mean loss of the last tenth.

    Raises:
        ValueError: the number of dialogues is not ``settings.num_dialogues``.
    """
    if len(dialogues) != settings.num_dialogues:
        raise ValueError(f"{len(dialogues)} dialogues given, {settings.num_dialogues} are needed")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    losses: list[float] = []
    model.train()
    for step, batch in enumerate(_make_batches(tokenizer, dialogues, settings, seed)):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * learning_rate_share(settings, step)
        loss = _answer_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        progress(step + 1, settings.num_steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail)


def learning_rate_share(settings: WarmStartSettings, step: int) -> float:
    """The learning rate of 0-based `step` as a share of the peak."""
    warm = (step + 1) / max(1, settings.warmup_steps)
    cool = (settings.num_steps - step) / max(1.0, settings.num_steps * settings.decay_share)
    return min(1.0, warm, cool)


def _answer_loss(model: Qwen3ForCausalLM, batch: _Batch) -> torch.Tensor:
    # No attention mask: padding is on the right, where causal attention never looks. Logits are
    # made for answer positions alone, which halves the cost of the output layer.
    hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    trained = batch.targets != _IGNORED
    return functional.cross_entropy(model.lm_head(hidden[trained]), batch.targets[trained])


def _make_batches(
    tokenizer: Tokenizer, dialogues: tuple[Dialogue, ...], settings: WarmStartSettings, seed: int
) -> list[_Batch]:
    """Batches of similar length: sorted within windows of some batches, then shuffled."""
    encoded = [encode_dialogue(tokenizer, dialogue) for dialogue in dialogues]
    window = settings.batch_dialogues * _BATCHES_PER_SORT
    rows: list[tuple[list[int], list[int]]] = []
    for start in range(0, len(encoded), window):
        rows += sorted(encoded[start : start + window], key=lambda row: len(row[0]) + len(row[1]))
    starts = list(range(0, len(rows), settings.batch_dialogues))
    random.Random(f"{seed}/batches").shuffle(starts)
    return [_collate(rows[start : start + settings.batch_dialogues]) for start in starts]


def _collate(rows: list[tuple[list[int], list[int]]]) -> _Batch:
    width = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full((len(rows), width), _IGNORED, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(rows):
        inputs = (prompt + answer)[:-1]
        token_ids[row, : len(inputs)] = torch.tensor(inputs)
        targets[row, len(prompt) - 1 : len(inputs)] = torch.tensor(answer)
    return _Batch(token_ids, targets)

"""Supervised warm start: teach the format and the arithmetic, slips included, in seconds.

The loss is the mean cross entropy over the answer tokens of a batch; prompts are context only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from sluice.quickstart.schedule import HoldThenDecay, slip_entropy
from sluice.quickstart.settings import WarmStartSettings
from sluice.quickstart.tokenizer import encode_dialogue
from sluice.quickstart.worked_answers import Dialogue

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

WarmStartProgress = Callable[[int, int, float], None]
"""Called after each step with the steps done, all steps, and the step's loss in nats a token.

All steps are an upper bound until the learning rate starts to decay."""

_IGNORED = -100


@dataclass(frozen=True, slots=True)
class WarmStartResult:
    """Steps taken and the mean excess loss of the last tenth of them, in nats a token."""

    num_steps: int
    excess_loss: float


@dataclass(frozen=True, slots=True)
class _Batch:
    token_ids: torch.Tensor  # [dialogues, width] int64, padded on the right
    targets: torch.Tensor  # [dialogues, width] int64, the next token where it is an answer's
    worked_steps_per_token: float


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: Tokenizer,
    dialogues: Iterable[Dialogue],
    settings: WarmStartSettings,
    progress: WarmStartProgress,
) -> WarmStartResult:
    """Train `model` in place on `dialogues`, one batch after the other, until the rate is zero.

    Raises:
        ValueError: fewer dialogues than that takes (at most ``settings.max_dialogues``).
    """
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    entropy = slip_entropy(settings.wrong_step_rate)
    schedule = HoldThenDecay(settings)
    batches = _batches(tokenizer, dialogues, settings.batch_dialogues)
    excess_losses: list[float] = []
    model.train()
    while not schedule.done:
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"the dialogues ran out after {len(excess_losses)} steps")
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * schedule.share
        loss = _train_step(model, optimizer, batch, settings.max_grad_norm)
        excess_losses.append(loss - entropy * batch.worked_steps_per_token)
        schedule.advance(excess_losses[-1])
        progress(len(excess_losses), schedule.num_steps, loss)
    model.eval()
    tail = excess_losses[-max(1, len(excess_losses) // 10) :]
    return WarmStartResult(len(excess_losses), sum(tail) / len(tail))


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """One thread is fastest for a model this small, and sums alike whatever the machine's cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _train_step(
    model: Qwen3ForCausalLM, optimizer: torch.optim.Optimizer, batch: _Batch, max_grad_norm: float
) -> float:
    # No attention mask: padding is on the right, where causal attention never looks. Logits are
    # made for answer positions alone, which halves the cost of the output layer.
    hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    trained = batch.targets != _IGNORED
    loss = functional.cross_entropy(model.lm_head(hidden[trained]), batch.targets[trained])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return float(loss.detach())


def _batches(
    tokenizer: Tokenizer, dialogues: Iterable[Dialogue], batch_dialogues: int
) -> Iterator[_Batch]:
    """Whole batches in the order given.

    Not sorted by length, though that saves a fifth of the time: batches of one length are batches
    of one number of terms, and a model trained on those learns to find its operands far later.
    """
    remaining = iter(dialogues)
    while len(chunk := list(islice(remaining, batch_dialogues))) == batch_dialogues:
        yield _collate(tokenizer, chunk)


def _collate(tokenizer: Tokenizer, dialogues: list[Dialogue]) -> _Batch:
    rows = [encode_dialogue(tokenizer, dialogue) for dialogue in dialogues]
    width = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full((len(rows), width), _IGNORED, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(rows):
        inputs = (prompt + answer)[:-1]
        token_ids[row, : len(inputs)] = torch.tensor(inputs)
        targets[row, len(prompt) - 1 : len(inputs)] = torch.tensor(answer)
    num_worked_steps = sum(dialogue.answer.num_steps for dialogue in dialogues)
    num_answer_tokens = sum(len(answer) for _, answer in rows)
    return _Batch(token_ids, targets, num_worked_steps / num_answer_tokens)

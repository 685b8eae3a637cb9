"""The quickstart's model, a Qwen3 of about 122,000 parameters, and its supervised warm start.

Other tasks have a Qwen2 or a mixture of experts of the same depth and width.

The warm start teaches format and arithmetic, slips included, in seconds. Its loss is the mean cross
entropy over the answer tokens of a batch; prompts are context only.

Why the learning rate is held until the loss is low: a small transformer learns to find the next
operand suddenly, at a step that differs by hundreds between seeds. Reinforcement learning removes
slips within a few batches but hardly teaches that, so a start that ends before it learns slowly
whatever the settings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging as transformers_logging

from sluice.quickstart.arithmetic import Family
from sluice.quickstart.settings import PrepareProgress, WarmStartSettings
from sluice.quickstart.tokenizer import PAD_TOKEN, TURN_END

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BatchT = TypeVar("BatchT")

MAX_POSITIONS = 512
IGNORED = -100  # a target that is not trained
_MEAN_OF_STEPS = 25
_READABLE = 0o644

QuickstartModel = Qwen2ForCausalLM | Qwen3ForCausalLM | Qwen3MoeForCausalLM

WarmStartProgress = Callable[[PrepareProgress], None]
"""Called after each step; all steps are an upper bound until the learning rate starts to decay."""


def make_config(
    tokenizer: Tokenizer, num_experts: int = 0, family: Family = "qwen3"
) -> Qwen2Config | Qwen3Config | Qwen3MoeConfig:
    """Return two layers of width 64, four heads of 16 over two KV heads, tied embeddings.

    Args:
        tokenizer: of the vocabulary.
        num_experts: of each layer of a Qwen3, two for a token; 0: dense layers.
        family: of the model; Qwen2.5 is of `qwen2`.
    """
    values: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": True,
        # Contexts are short: slower frequencies would hardly distinguish positions in them, and
        # the warm start learns last to find the next operand.
        "rope_parameters": {"rope_type": "default", "rope_theta": 200.0},
        # Small models learn faster from larger weights than the usual 0.02.
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(TURN_END),
        "pad_token_id": tokenizer.token_to_id(PAD_TOKEN),
        "dtype": "float32",
    }
    if family == "qwen2":
        return Qwen2Config(**values)
    values["head_dim"] = 16
    if not num_experts:
        return Qwen3Config(**values)
    return Qwen3MoeConfig(
        **values,
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        norm_topk_prob=True,
    )


def make_model(
    tokenizer: Tokenizer, seed: int, num_experts: int = 0, family: Family = "qwen3"
) -> QuickstartModel:
    """Return a model with random weights from `seed`; the global random state stays as it is."""
    config = make_config(tokenizer, num_experts, family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: QuickstartModel
        match config:
            case Qwen2Config():
                model = Qwen2ForCausalLM(config)
            case Qwen3MoeConfig():
                model = Qwen3MoeForCausalLM(config)
            case _:
                model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    return model


def save_model(model: PreTrainedModel, directory: Path) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors`."""
    transformers_logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        transformers_logging.enable_progress_bar()
    for file in directory.glob("*.safetensors"):
        file.chmod(_READABLE)  # safetensors makes them readable for the owner only


def slip_entropy(wrong_step_rate: float) -> float:
    """Return the entropy of a slip in nats: the loss that no model avoids in a worked step."""
    shares = (wrong_step_rate, 1.0 - wrong_step_rate)
    return -sum(share * math.log(share) for share in shares if share > 0)


class HoldThenDecay:
    """The learning rate of each step as a share of the peak, from the excess losses so far."""

    def __init__(self, settings: WarmStartSettings) -> None:
        self._settings = settings
        self._step = 0
        self._hold_steps = settings.max_hold_steps
        self._is_held = True
        self._recent: deque[float] = deque(maxlen=_MEAN_OF_STEPS)

    @property
    def num_steps(self) -> int:
        """The number of steps; an upper bound while the rate is held."""
        return self._hold_steps + self._settings.decay_steps

    @property
    def done(self) -> bool:
        """Whether the rate has decayed to zero."""
        return self._step >= self.num_steps

    @property
    def share(self) -> float:
        """The learning rate of the next step as a share of the peak, in ``(0, 1]``."""
        warm = (self._step + 1) / max(1, self._settings.warmup_steps)
        cool = (self.num_steps - self._step) / max(1, self._settings.decay_steps)
        return min(1.0, warm, cool)

    def advance(self, excess_loss: float) -> None:
        """Count a step and its excess loss in nats per token."""
        self._step += 1
        self._recent.append(excess_loss)
        if self._is_held and self._step >= self._settings.max_hold_steps:
            self._is_held = False
        elif self._is_held and self._learned_enough():
            self._hold_steps = self._step
            self._is_held = False

    def _learned_enough(self) -> bool:
        mean = sum(self._recent) / len(self._recent)
        full = len(self._recent) == _MEAN_OF_STEPS
        return full and mean < self._settings.hold_until_excess_loss


@dataclass(frozen=True, slots=True)
class WarmStartRow:
    """One dialogue: its token ids, which of them are imitated, and the entropy of the teacher's
    choices in nats, which no model avoids.
    """

    token_ids: list[int]
    is_answer: list[bool]
    entropy: float


@dataclass(frozen=True, slots=True)
class _Batch:
    token_ids: torch.Tensor  # [dialogues, width] int64, padded on the right
    targets: torch.Tensor  # [dialogues, width] int64, the next token where it is an answer's
    entropy: float  # nats per trained token


def warm_start(
    model: QuickstartModel,
    rows: Iterable[WarmStartRow],
    settings: WarmStartSettings,
    progress: WarmStartProgress,
) -> None:
    """Train `model` in place on `rows`, one batch after the other, until the rate is zero.

    Raises:
        ValueError: there are too few rows (``settings.max_dialogues`` are always enough).
    """

    def loss_of(batch: _Batch) -> tuple[torch.Tensor, float]:
        # No attention mask: padding is on the right, where causal attention never looks. Logits
        # only for answer positions halve the cost of the output layer.
        hidden = model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
        trained = batch.targets != IGNORED
        loss = functional.cross_entropy(model.lm_head(hidden[trained]), batch.targets[trained])
        return loss, batch.entropy

    fit(
        model,
        map(_collate, whole_batches(rows, settings.batch_dialogues)),
        loss_of,
        settings,
        progress,
    )


def fit(
    model: torch.nn.Module,
    batches: Iterator[BatchT],
    loss_of: Callable[[BatchT], tuple[torch.Tensor, float]],
    settings: WarmStartSettings,
    progress: WarmStartProgress,
) -> None:
    """Train `model` in place, one step per batch, until the learning rate is zero.

    Args:
        model: the model, in float32 on the CPU.
        batches: enough of them for all steps.
        loss_of: returns the loss of a batch, and the part that no model avoids: the entropy of
            the slips. Both are in nats per token.
        settings: of the optimizer and its schedule.
        progress: called after each step.

    Raises:
        ValueError: there are too few batches.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    schedule, step = HoldThenDecay(settings), 0
    model.train()
    while not schedule.done:
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"the dialogues ran out after {step} steps")
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * schedule.share
        loss, unavoidable = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        step += 1
        schedule.advance(float(loss.detach()) - unavoidable)
        progress(PrepareProgress("warm-start", step, schedule.num_steps, float(loss.detach())))
    model.eval()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Use one thread: fastest for so small a model, and sums do not depend on the cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def whole_batches(dialogues: Iterable[BatchT], batch_dialogues: int) -> Iterator[list[BatchT]]:
    """Yield whole batches in the given order.

    Sorting by length would save a fifth of the time. But then all problems of a batch have the
    same number of terms, and the model learns far later to find its operands.
    """
    remaining = iter(dialogues)
    while len(chunk := list(islice(remaining, batch_dialogues))) == batch_dialogues:
        yield chunk


def _collate(rows: list[WarmStartRow]) -> _Batch:
    width = max(len(row.token_ids) for row in rows) - 1
    token_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    targets = torch.full((len(rows), width), IGNORED, dtype=torch.int64)
    for number, row in enumerate(rows):
        ids, is_answer = torch.tensor(row.token_ids), torch.tensor(row.is_answer)
        token_ids[number, : len(ids) - 1] = ids[:-1]
        targets[number, : len(ids) - 1] = torch.where(is_answer[1:], ids[1:], IGNORED)
    num_trained = sum(sum(row.is_answer) for row in rows)
    return _Batch(token_ids, targets, sum(row.entropy for row in rows) / num_trained)

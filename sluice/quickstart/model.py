"""The quickstart model, a Qwen3 of about 122,000 parameters, and its supervised warm start."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch.nn import functional
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from sluice.quickstart.arithmetic import Dialogue
from sluice.quickstart.settings import WarmStartSettings
from sluice.quickstart.tokenizer import PAD_TOKEN, TURN_END, encode_dialogue

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_POSITIONS = 512


def make_config(tokenizer: Tokenizer) -> Qwen3Config:
    """Two layers of width 64, four heads of 16 over two KV heads, tied embeddings, float32."""
    return Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        # Contexts are short: slower frequencies would turn too little over them to tell places
        # apart, and finding the next operand is what the warm start learns last.
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
        # Small models start faster from larger weights than the 0.02 usual at scale.
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(TURN_END),
        pad_token_id=tokenizer.token_to_id(PAD_TOKEN),
        dtype="float32",
    )


def make_model(tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """A model with random weights from `seed`; the global random state is left as it was."""
    config = make_config(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    return model


def save_model(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write `config.json`, `generation_config.json` and `model.safetensors`.

    Written here rather than by `save_pretrained`, which draws a progress bar over the console and
    leaves the weights readable by their owner alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    # The output layer is the embedding matrix (tied) and is stored once, under that name.
    weights = {
        name: weight.detach().contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


# The warm start's learning rate: warm up, hold until enough is learned, decay to zero.
#
# A small transformer learns to find the next operand all at once, at a step that differs by
# hundreds between seeds. Reinforcement removes slips within a few batches but hardly teaches
# that, so a start that was stopped before it learns slowly whatever the settings. Hence the hold
# ends by the loss.

_MEAN_OF_STEPS = 25


def slip_entropy(wrong_step_rate: float) -> float:
    """Nats that one worked step cannot be predicted by: the entropy of slipping or not."""
    shares = (wrong_step_rate, 1.0 - wrong_step_rate)
    return -sum(share * math.log(share) for share in shares if share > 0)


class HoldThenDecay:
    """Learning rate of each step as a share of the peak, given the excess losses so far."""

    def __init__(self, settings: WarmStartSettings) -> None:
        self._settings = settings
        self._step = 0
        self._hold_steps = settings.max_hold_steps
        self._held = True
        self._recent: deque[float] = deque(maxlen=_MEAN_OF_STEPS)

    @property
    def num_steps(self) -> int:
        """Steps in all; an upper bound while the rate is held."""
        return self._hold_steps + self._settings.decay_steps

    @property
    def done(self) -> bool:
        """Whether the rate has decayed to zero."""
        return self._step >= self.num_steps

    @property
    def share(self) -> float:
        """The learning rate of the step to come as a share of the peak, in ``(0, 1]``."""
        warm = (self._step + 1) / max(1, self._settings.warmup_steps)
        cool = (self.num_steps - self._step) / max(1, self._settings.decay_steps)
        return min(1.0, warm, cool)

    def advance(self, excess_loss: float) -> None:
        """Count a step taken, and its loss in nats a token above the slips' entropy."""
        self._step += 1
        self._recent.append(excess_loss)
        if self._held and self._step >= self._settings.max_hold_steps:
            self._held = False
        elif self._held and self._learned_enough():
            self._hold_steps, self._held = self._step, False

    def _learned_enough(self) -> bool:
        mean = sum(self._recent) / len(self._recent)
        full = len(self._recent) == _MEAN_OF_STEPS
        return full and mean < self._settings.hold_until_excess_loss


# Supervised warm start: teach the format and the arithmetic, slips included, in seconds.
#
# The loss is the mean cross entropy over the answer tokens of a batch; prompts are context only.

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

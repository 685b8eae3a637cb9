"""Settings of the quickstart's files, and reports about making them. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class WarmStartSettings:
    """The supervised warm start: AdamW with a learning rate that is held until the loss is low.

    The rate warms up over `warmup_steps`, is held until the excess loss falls under
    `hold_until_excess_loss` (or `max_hold_steps` have passed) and then decays linearly to zero
    over `decay_steps`. The excess loss, in nats per token, is the loss above the entropy of the
    teachers' slips. `wrong_step_rate` is the share of wrong steps in the imitated answers.
    """

    batch_dialogues: int = 16
    learning_rate: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    warmup_steps: int = 50
    hold_until_excess_loss: float = 0.06
    max_hold_steps: int = 1_000
    decay_steps: int = 250
    wrong_step_rate: float = 0.35

    @property
    def max_dialogues(self) -> int:
        """The maximum of dialogues: each is used once."""
        return (self.max_hold_steps + self.decay_steps) * self.batch_dialogues


@dataclass(frozen=True, slots=True)
class PrepareSettings:
    """Sizes of all files that `prepare` makes."""

    num_train: int = 8_000
    num_held_out: int = 256
    num_tokenizer_dialogues: int = 2_000
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)


JARS_SETTINGS = PrepareSettings(
    num_train=6_000,
    warm_start=WarmStartSettings(
        batch_dialogues=32,
        hold_until_excess_loss=0.02,
        max_hold_steps=600,
        decay_steps=150,
        wrong_step_rate=0.4,
    ),
)
"""Settings of `jars`; `wrong_step_rate` is the share of numbers that teachers guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartTask:
    """A task: its name, the token limits of its job, and further settings of the job.

    No prompt and no teacher's answer, in the tokens of the task's tokenizer, is longer.
    """

    name: str
    max_prompt_tokens: int
    max_response_tokens: int
    overlong_buffer_tokens: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """The progress of the preparation; `loss` is the warm start's, in nats per token.

    ``reused`` comes once and alone; otherwise ``data`` once, then ``warm-start`` at every step.
    """

    stage: Literal["reused", "data", "warm-start"]
    done: int
    total: int
    loss: float | None = None

"""What is told while the quickstart's files are made, and found out by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """How far the making is; `loss` is the warm start's, in nats a token.

    ``reused`` comes once and alone; otherwise ``data`` once, then ``warm-start`` step by step.
    """

    stage: Literal["reused", "data", "warm-start"]
    done: int
    total: int
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class QuickstartFacts:
    """Numbers found while making the files.

    The longest prompt and worked answer are of a sample of dialogues.
    `warm_start_excess_loss` is the mean over the last tenth of the steps, in nats a token above
    what the teachers' slips leave unpredictable.
    """

    num_parameters: int
    vocabulary_size: int
    num_train: int
    num_held_out: int
    longest_prompt_tokens: int
    longest_answer_tokens: int
    warm_start_steps: int
    warm_start_excess_loss: float
    seconds: float

"""The warm start's learning rate: warm up, hold until enough is learned, decay to zero.

A small transformer learns to find the next operand all at once, at a step that differs by hundreds
between seeds. Reinforcement removes slips within a few batches but hardly teaches that, so a start
that was stopped before it learns slowly whatever the settings. Hence the hold ends by the loss.
"""

from __future__ import annotations

import math
from collections import deque

from sluice.quickstart.settings import WarmStartSettings

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

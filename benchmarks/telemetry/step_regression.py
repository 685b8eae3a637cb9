"""What a switch that is on in some steps of a run and off in others adds to a step's cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FEWEST_STEPS = 10


@dataclass(frozen=True, slots=True)
class Step:
    """One step: its cost in seconds, whether the switch was on, and how much work it was."""

    seconds: float
    is_on: bool
    generated_tokens: float
    trained_tokens: float


@dataclass(frozen=True, slots=True)
class Added:
    """What the switch adds, as a share of the mean step's cost, and its standard error."""

    share: float
    error: float


def added(steps: Sequence[Step]) -> Added:
    """Fit seconds = base + drift + per generated and per trained token + switch.

    By least squares. The drift, by the step's place, is the machine's and the run's. No step is
    left out: what the switch adds may be rare and large.

    Raises:
        ValueError: fewer than 10 steps, or the switch was never turned.
    """
    turned = {step.is_on for step in steps}
    if len(steps) < _FEWEST_STEPS or len(turned) < 2:
        raise ValueError(f"{len(steps)} steps with the switch at {turned}: measure more of both")
    work = np.array(
        [
            (1.0, step.is_on, place, step.generated_tokens, step.trained_tokens)
            for place, step in enumerate(steps)
        ]
    )
    work /= np.maximum(np.abs(work).max(axis=0), 1.0)
    seconds = np.array([step.seconds for step in steps])
    fit = np.linalg.lstsq(work, seconds)[0]
    # The pseudo-inverse bears work that never varied.
    rank = int(np.linalg.matrix_rank(work))
    variance = float(((seconds - work @ fit) ** 2).sum()) / (len(steps) - rank)
    error = np.sqrt(variance * np.linalg.pinv(work.T @ work)[1, 1])
    return Added(float(fit[1] / seconds.mean()), float(error / seconds.mean()))

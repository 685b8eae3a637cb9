"""What a switch that is on in some steps of a run and off in others adds to a step's cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST_DEVIATIONS, _TRIMS = 2.5, 3


@dataclass(frozen=True, slots=True)
class MeasuredStep:
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


def added(steps: Sequence[MeasuredStep]) -> Added:
    """By least squares: seconds = base + drift + per generated token + per trained token + switch.

    The drift, by the step's place, is the machine's and the run's.

    Steps farther than 2.5 standard deviations from the fit (another program had the machine) are
    left out.

    Raises:
        ValueError: fewer than 10 steps, or the switch was never turned.
    """
    turned = {step.is_on for step in steps}
    if len(steps) < 10 or len(turned) < 2:
        raise ValueError(f"{len(steps)} steps with the switch at {turned}: measure more of both")
    work = np.array(
        [
            (1.0, step.is_on, place, step.generated_tokens, step.trained_tokens)
            for place, step in enumerate(steps)
        ]
    )
    scale = np.maximum(np.abs(work).max(axis=0), 1.0)
    work /= scale
    seconds = np.array([step.seconds for step in steps])
    kept = np.ones(len(steps), dtype=bool)
    for _ in range(_TRIMS):
        fit = np.linalg.lstsq(work[kept], seconds[kept], rcond=None)[0]
        rest = seconds - work @ fit
        deviation = rest[kept].std(ddof=min(work.shape[1], kept.sum() - 1))
        kept = np.abs(rest) <= max(_MOST_DEVIATIONS * deviation, 1e-9)
    # The pseudo-inverse bears work that never varied.
    spread = deviation**2 * np.linalg.pinv(work[kept].T @ work[kept])
    mean = float(seconds.mean())
    return Added(float(fit[1]) / mean, float(np.sqrt(spread[1, 1])) / mean)

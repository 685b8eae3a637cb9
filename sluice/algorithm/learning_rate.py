"""Learning-rate multiplier by train batch: linear warm-up, then one of four shapes."""

from __future__ import annotations

import math


def resolve_warmup_steps(warmup_steps: int, warmup_ratio: float, total_steps: int) -> int:
    """Return `warmup_steps` if positive, else the share `warmup_ratio` of the run (verl's rule)."""
    return warmup_steps if warmup_steps > 0 else int(warmup_ratio * total_steps)


def learning_rate_multiplier(
    step: int,
    *,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Return the factor on the peak learning rate for train batch `step` (0-based).

    All optimizer steps of one train batch share the factor. Warm-up is ``step / warmup_steps``, so
    the first batch of a run with warm-up has factor 0, as in verl. After it, with
    ``p = (step - warmup_steps) / (total_steps - warmup_steps)``, not beyond 1:
    ``constant`` 1; ``cosine`` between 1 and `min_lr_ratio` over `num_cycles` waves (one half is a
    single descent); ``linear`` from 1 to `min_lr_ratio`; ``inverse_square_root``
    ``sqrt(warmup_steps / step)``, counts below 1 taken as 1, not below `min_lr_ratio` and whatever
    the total. (verl has the last two with its Megatron backend.)

    Args:
        step: train batch, >= 0.
        schedule: ``constant``, ``cosine``, ``linear`` or ``inverse_square_root``.
        warmup_steps: from `resolve_warmup_steps`.
        total_steps: train batches of the run.
        min_lr_ratio: floor of all but ``constant``, in 0..1; warm-up goes below it.
        num_cycles: waves of ``cosine``, > 0.
    """
    if step < warmup_steps:
        return step / warmup_steps
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_square_root":
        return max(min_lr_ratio, math.sqrt(max(warmup_steps, 1) / max(step, 1)))
    progress = min((step - warmup_steps) / max(1, total_steps - warmup_steps), 1.0)
    if schedule == "linear":
        return 1.0 - (1.0 - min_lr_ratio) * progress
    wave = math.cos(2.0 * math.pi * num_cycles * progress)
    return max(min_lr_ratio, wave * (1.0 - min_lr_ratio) / 2.0 + (1.0 + min_lr_ratio) / 2.0)

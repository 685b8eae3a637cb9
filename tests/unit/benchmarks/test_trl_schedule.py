"""The learning rate of the TRL baseline, step by step, as transformers computes it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import get_scheduler

from benchmarks.trl_settings import LR_SCHEDULE, DapoJob, lr_schedule_arguments

# transformers says that the plateau outweighs the number of steps, which is meant.
pytestmark = pytest.mark.filterwarnings("ignore:.*num_stable_steps:UserWarning")


def learning_rates(max_steps: int, num_steps: int) -> list[float]:
    job = DapoJob()
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=job.learning_rate)
    scheduler = get_scheduler(
        LR_SCHEDULE,
        optimizer,
        num_warmup_steps=job.warmup_steps,
        num_training_steps=max_steps,
        scheduler_specific_kwargs=lr_schedule_arguments(job),
    )
    rates = []
    for _ in range(num_steps):
        rates.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return rates


def test_the_rate_starts_at_its_peak_and_falls_linearly_to_a_half() -> None:
    last = DapoJob().schedule_steps
    rates = learning_rates(max_steps=last, num_steps=last + 1)
    assert max(rates) == rates[0] == pytest.approx(1e-3)
    assert rates[last] == pytest.approx(5e-4)
    falls = [before - after for before, after in pairwise(rates)]
    assert falls == pytest.approx([falls[0]] * len(falls), rel=1e-6)


@pytest.mark.parametrize("max_steps", [6, 60, 240])
def test_the_bound_on_batches_does_not_change_the_rate(max_steps: int) -> None:
    assert learning_rates(max_steps, num_steps=40) == learning_rates(40, num_steps=40)

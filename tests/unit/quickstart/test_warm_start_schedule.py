"""The warm start holds its learning rate until enough is learned, then decays it to zero."""

from __future__ import annotations

import math

import pytest

from sluice.quickstart.model import HoldThenDecay, slip_entropy
from sluice.quickstart.settings import WarmStartSettings

SETTINGS = WarmStartSettings(
    warmup_steps=10, hold_until_excess_loss=0.1, max_hold_steps=200, decay_steps=20
)


def run(losses: list[float]) -> tuple[HoldThenDecay, list[float]]:
    """The schedule after these losses, repeated without end, and every step's share."""
    schedule = HoldThenDecay(SETTINGS)
    shares: list[float] = []
    while not schedule.done:
        shares.append(schedule.share)
        schedule.advance(losses[min(len(shares), len(losses)) - 1])
    return schedule, shares


def test_the_rate_warms_up_holds_and_decays_in_equal_steps() -> None:
    _, shares = run([1.0])
    assert len(shares) == 220
    assert shares[:10] == pytest.approx([share / 10 for share in range(1, 11)])
    assert shares[10:201] == [1.0] * 191
    assert shares[200:] == pytest.approx([share / 20 for share in range(20, 0, -1)])


def test_the_hold_ends_when_the_mean_of_25_losses_is_low_enough() -> None:
    schedule, shares = run([1.0] * 50 + [0.0])
    # The 25 last losses hold two of 1.0 (mean 0.08) after 23 of 0.0.
    assert schedule.num_steps == len(shares) == 50 + 23 + 20


def test_a_single_low_loss_does_not_end_the_hold() -> None:
    schedule = HoldThenDecay(SETTINGS)
    schedule.advance(0.0)
    assert schedule.num_steps == 220


def test_losses_that_rise_again_do_not_resume_the_hold() -> None:
    schedule, _ = run([0.0] * 25 + [9.0])
    assert schedule.num_steps == 45


@pytest.mark.parametrize(
    ("rate", "nats"), [(0.0, 0.0), (0.5, math.log(2)), (0.25, 0.5623351), (1.0, 0.0)]
)
def test_slips_leave_the_entropy_of_a_biased_coin(rate: float, nats: float) -> None:
    assert slip_entropy(rate) == pytest.approx(nats)

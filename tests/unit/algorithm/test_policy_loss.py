"""Properties of the clipped loss, its aggregation and the loss registry."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algorithm.losses.inputs import MetricMean
from sluice.algorithm.losses.objective import LossAggregation, aggregate
from sluice.algorithm.losses.policy_losses import vanilla_policy_loss
from sluice.algorithm.losses.settings import PolicyLossSettings

ACTOR = r"actor_rollout_ref\.actor"
MODES = [str(mode) for mode in LossAggregation]
SETTINGS = PolicyLossSettings(clip_high=0.28, clip_c=10.0)


def loss_of(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, MetricMean]]:
    return vanilla_policy_loss(logprobs, old, advantages, SETTINGS)


def tokens(seed: int, number: int) -> torch.Tensor:
    return torch.randn(number, generator=torch.Generator().manual_seed(seed))


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    old = -tokens(0, 8).abs()
    advantages = tokens(1, 8)
    logprobs = old.clone().requires_grad_()
    loss, metrics = loss_of(logprobs, old, advantages)
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert all(metric.mean == 0.0 for metric in metrics.values())


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "flows"),
    [
        (1.0, 0.3, False),
        (1.0, 0.2, True),
        (1.0, -3.0, True),
        (-1.0, -0.3, False),
        (-1.0, 3.0, False),
    ],
)
def test_no_gradient_flows_where_a_bound_holds(
    advantage: float, log_ratio: float, flows: bool
) -> None:
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    loss, _ = loss_of(logprobs, torch.zeros(1), torch.tensor([advantage]))
    loss.sum().backward()
    assert logprobs.grad is not None
    assert bool(logprobs.grad.item()) == flows


def test_an_extreme_ratio_stays_finite() -> None:
    loss, metrics = loss_of(
        torch.tensor([-1.0, -500.0]), torch.tensor([-500.0, -1.0]), torch.ones(2)
    )
    assert torch.isfinite(loss).all()
    assert metrics["actor/ppo_kl"].mean == 0.0


def test_metrics_carry_no_gradient() -> None:
    _, metrics = loss_of(tokens(0, 4).requires_grad_(), tokens(1, 4), tokens(2, 4))
    assert not any(metric.total.requires_grad for metric in metrics.values())


def test_metric_sums_of_parts_add_up_to_those_of_the_whole() -> None:
    inputs = [tokens(seed, 40) for seed in range(3)]
    _, whole = loss_of(*inputs)
    parts = [loss_of(*(tensor[cut] for tensor in inputs))[1] for cut in (slice(7), slice(7, None))]
    for name, metric in whole.items():
        assert sum(part[name].count for part in parts) == metric.count
        total = sum(part[name].total.item() for part in parts)
        assert total == pytest.approx(metric.total.item(), rel=1e-5)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(MODES),
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.integers(0, 2**31),
    st.integers(1, 4),
)
def test_the_loss_does_not_depend_on_how_rows_are_cut(
    mode: str, lengths: list[int], seed: int, rows_per_micro: int
) -> None:
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    loss = tokens(seed, len(index))

    def share(rows: list[int]) -> float:
        mine = torch.isin(index, torch.tensor(rows))
        return aggregate(
            loss[mine],
            index[mine] - rows[0],
            mode=mode,
            global_tokens=max(sum(lengths), 1),
            global_rows=len(lengths),
            loss_scale_factor=9,
        ).item()

    rows = list(range(len(lengths)))
    cuts = [rows[at : at + rows_per_micro] for at in rows[::rows_per_micro]]
    assert sum(share(cut) for cut in cuts) == pytest.approx(share(rows), rel=1e-4, abs=1e-5)


def test_an_empty_row_counts_among_rows_but_adds_nothing() -> None:
    found = aggregate(
        torch.tensor([4.0, 2.0]),
        torch.tensor([0, 0]),
        mode="seq-mean-token-mean",
        global_tokens=2,
        global_rows=2,
    )
    assert found.item() == 1.5


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_give_a_loss_of_zero_that_still_has_a_gradient(mode: str) -> None:
    empty = torch.zeros(0, requires_grad=True)
    found = aggregate(
        empty * 1.0,
        torch.zeros(0, dtype=torch.int64),
        mode=mode,
        global_tokens=3,
        global_rows=1,
        loss_scale_factor=3,
    )
    found.backward()
    assert found.item() == 0.0


def test_low_precision_losses_are_summed_in_float32() -> None:
    loss = torch.full((1000,), 1.01, dtype=torch.bfloat16)
    found = aggregate(
        loss, torch.zeros(1000, dtype=torch.int64), mode="token-sum", global_tokens=1, global_rows=1
    )
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1000 * loss[0].item(), rel=1e-6)

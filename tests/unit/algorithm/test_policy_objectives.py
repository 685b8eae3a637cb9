"""What holds for every policy objective: layouts, cuts, empty inputs, overrides, settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs, row_means
from sluice.algorithm.losses.objective import LossAggregation, PolicyObjective
from sluice.algorithm.losses.settings import AdpoSettings, PolicyLossSettings
from sluice.algorithm.registry import POLICY_OBJECTIVES, SILENT_AT_ZERO_ADVANTAGE, policy_objective
from sluice.algorithm.rollout_correction.correction import rollout_correction
from sluice.algorithm.rollout_correction.settings import RolloutCorrectionSettings
from sluice.errors import ConfigError
from tests.support.padded_inputs import padded_inputs

ACTOR = r"actor_rollout_ref\.actor"
NAMES = sorted(POLICY_OBJECTIVES)
BY_MICRO_BATCH = {"clip_cov", "kl_cov"}  # verl takes their covariances over a micro-batch
OVERRIDING = {"gspo", "sapo", "geo_mean", "adpo"}
G = 2
SETTINGS = PolicyLossSettings(
    loss_scale_factor=5.0, dro_beta=0.5, clip_cov_lb=0.0, adpo=AdpoSettings(num_generations=G)
)


def rows_of(lengths: Sequence[int], seed: int) -> LossInputs:
    """Packed rows; consecutive pairs share a prompt, all tokens of a row an advantage."""
    generator = torch.Generator().manual_seed(seed)
    number = sum(lengths)
    old, noise, weights, rollout = torch.rand(4, number, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return LossInputs(
        (-3 * old + noise - 1.5).requires_grad_(),
        -3 * old - 1,
        advantages[index],
        index,
        len(lengths),
        rollout_weights=weights + 0.5,
        rollout_logprobs=-3 * rollout - 0.1,
        row_groups=tuple(row // G for row in range(len(lengths))),
        row_advantages=advantages,
    )


def some_rows(inputs: LossInputs, chosen: Sequence[int]) -> LossInputs:
    """Those rows as a micro-batch of their own; groups are numbered as before."""
    parts = [(inputs.row_index == row).nonzero()[:, 0] for row in chosen]
    taken = torch.cat(parts)
    cut = inputs.select_tokens(taken)
    lengths = torch.tensor([part.numel() for part in parts])
    assert inputs.row_groups is not None
    assert inputs.row_advantages is not None
    return replace(
        cut,
        row_index=torch.arange(len(chosen)).repeat_interleave(lengths),
        num_rows=len(chosen),
        row_groups=tuple(inputs.row_groups[row] for row in chosen),
        row_advantages=inputs.row_advantages[torch.tensor(chosen)],
    )


def counts_of(inputs: LossInputs) -> GlobalCounts:
    return GlobalCounts(inputs.num_tokens, inputs.num_rows, inputs.num_rows / G)


def means(found: Iterable[PolicyObjective]) -> dict[str, float]:
    """Metrics of several micro-batches together."""
    totals: dict[str, tuple[float, int]] = {}
    for objective in found:
        for name, metric in objective.metrics.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = total + float(metric.total), count + metric.count
    return {name: total / count for name, (total, count) in totals.items()}


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(loss, inputs.logprobs)[0]


even_lengths = st.lists(st.integers(0, 6), min_size=2, max_size=8).filter(
    lambda lengths: len(lengths) % G == 0 and any(lengths)
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(NAMES), even_lengths, st.integers(0, 2**31))
def test_padded_and_packed_layouts_give_the_same(name: str, lengths: list[int], seed: int) -> None:
    packed = rows_of(lengths, seed)
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    mask = mask[:, torch.randperm(8, generator=torch.Generator().manual_seed(seed))]

    def padded(values: torch.Tensor) -> torch.Tensor:
        return torch.full(mask.shape, math.nan, dtype=values.dtype).masked_scatter(mask, values)

    assert packed.rollout_weights is not None
    assert packed.rollout_logprobs is not None
    assert packed.row_advantages is not None
    logprobs = padded(packed.logprobs.detach()).requires_grad_()
    inputs = padded_inputs(
        logprobs,
        padded(packed.old_logprobs),
        packed.row_advantages if name == "adpo" else padded(packed.advantages),
        mask,
        rollout_weights=padded(packed.rollout_weights),
        rollout_logprobs=padded(packed.rollout_logprobs),
        row_groups=packed.row_groups,
    )
    objective = policy_objective(name)
    one, other = (objective(x, counts_of(x), SETTINGS) for x in (packed, inputs))
    torch.testing.assert_close(one.loss, other.loss)
    torch.testing.assert_close(
        gradient(one.loss, packed), torch.autograd.grad(other.loss, logprobs)[0][mask]
    )
    assert means([one]) == pytest.approx(means([other]), rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from([name for name in NAMES if name not in BY_MICRO_BATCH]),
    st.sampled_from(list(LossAggregation)),
    even_lengths,
    st.integers(0, 2**31),
    st.data(),
)
def test_losses_gradients_and_metrics_do_not_depend_on_the_cut(
    name: str, mode: str, lengths: list[int], seed: int, data: st.DataObject
) -> None:
    whole, number = rows_of(lengths, seed), len(lengths) // G
    ends = data.draw(st.sets(st.integers(1, number)), label="groups before each cut")
    chosen = replace(SETTINGS, loss_agg_mode=mode)
    objective = policy_objective(name)
    expected = objective(whole, counts_of(whole), chosen)
    parts = [
        objective(some_rows(whole, range(G * a, G * b)), counts_of(whole), chosen)
        for a, b in pairwise(sorted({0, number} | ends))
    ]
    total = sum((part.loss for part in parts), torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(total, expected.loss)
    torch.testing.assert_close(gradient(total, whole), gradient(expected.loss, whole))
    kept = {k: v for k, v in means([expected]).items() if not k.endswith("_std")}
    found = means(parts)
    assert {k: found[k] for k in kept} == pytest.approx(kept, rel=1e-9, abs=1e-12)


def test_rows_without_an_advantage_may_be_left_out_of_just_the_losses_that_say_so() -> None:
    whole = rows_of([40, 3, 50, 5], 4)
    silent = whole.row_index >= 2
    assert whole.row_advantages is not None
    whole = replace(
        whole,
        advantages=whole.advantages.masked_fill(silent, 0.0),
        row_advantages=whole.row_advantages * torch.tensor([1, 1, 0, 0]),
    )
    chosen = replace(SETTINGS, clip_cov_ratio=0.2, kl_cov_ratio=0.2, clip_low=0.9, clip_high=9.0)
    unchanged = set()
    for name in NAMES:
        objective = policy_objective(name)
        every = gradient(objective(whole, counts_of(whole), chosen).loss, whole)
        left = objective(some_rows(whole, [0, 1]), counts_of(whole), chosen)
        if torch.allclose(gradient(left.loss, whole), every, atol=1e-12):
            unchanged.add(name)
    assert unchanged == SILENT_AT_ZERO_ADVANTAGE


def test_rows_without_an_advantage_may_be_left_out_of_reinforce_in_bypass_mode() -> None:
    whole = rows_of([4, 3, 5, 5], 4)
    whole = replace(whole, advantages=whole.advantages.masked_fill(whole.row_index >= 2, 0.0))
    chosen = replace(SETTINGS, correction=RolloutCorrectionSettings(loss_type="reinforce"))
    objective = policy_objective("bypass_mode")
    every = objective(whole, counts_of(whole), chosen).loss
    left = objective(some_rows(whole, [0, 1]), counts_of(whole), chosen).loss
    torch.testing.assert_close(gradient(left, whole), gradient(every, whole))


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens_give_zero_with_a_gradient_and_the_same_metric_names(name: str) -> None:
    full = rows_of([3, 2], 0)
    nothing = some_rows(full, [0, 1]).select_tokens(torch.zeros(5, dtype=torch.bool))
    nothing = replace(
        nothing, num_rows=0, row_groups=(), row_advantages=torch.zeros(0, dtype=torch.float64)
    )
    found = policy_objective(name)(nothing, counts_of(full), SETTINGS)
    found.loss.backward()
    assert found.loss.item() == 0.0
    metrics = {key: metric.mean for key, metric in found.metrics.items()}
    assert metrics == dict.fromkeys(
        policy_objective(name)(full, counts_of(full), SETTINGS).metrics, 0
    )


@pytest.mark.parametrize("name", NAMES)
def test_only_sequence_losses_override_the_aggregation_mode(name: str) -> None:
    inputs = rows_of([3, 1, 6, 4], 4)
    losses = {
        policy_objective(name)(
            inputs, counts_of(inputs), replace(SETTINGS, loss_agg_mode=mode)
        ).loss.item()
        for mode in LossAggregation
    }
    assert len(losses) == (1 if name in OVERRIDING else 5)


@pytest.mark.parametrize("name", NAMES)
def test_metrics_carry_no_gradient(name: str) -> None:
    inputs = rows_of([3, 1], 4)
    found = policy_objective(name)(inputs, counts_of(inputs), SETTINGS)
    assert found.loss.requires_grad
    assert not any(metric.total.requires_grad for metric in found.metrics.values())


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_draws_its_share_of_candidates_by_the_seed(seed: int) -> None:
    inputs = replace(rows_of([60, 60], 1), seed=seed)
    chosen = replace(SETTINGS, clip_cov_ratio=0.05, clip_cov_ub=100.0, clip_low=0.9, clip_high=9.0)
    objective = policy_objective("clip_cov")
    slopes = [gradient(objective(x, counts_of(x), chosen).loss, x) for x in (inputs, inputs)]
    dropped = slopes[0] == 0.0
    assert dropped.sum().item() == 6
    assert torch.equal(slopes[0], slopes[1])
    other = objective(replace(inputs, seed=seed + 100), counts_of(inputs), chosen)
    assert not torch.equal(gradient(other.loss, inputs) == 0.0, dropped)


def test_bypass_applies_weights_and_rejections_and_keeps_the_denominators() -> None:
    inputs = rows_of([2, 2], 3)
    assert inputs.rollout_logprobs is not None
    correction = RolloutCorrectionSettings(
        rollout_is="token", rollout_rs="token_k2", rollout_rs_threshold=0.5, loss_type="reinforce"
    )
    corrected = rollout_correction(
        inputs.logprobs, inputs.rollout_logprobs, inputs.row_index, correction
    )
    assert corrected.weights is not None
    keep = corrected.kept
    assert 0 < keep.sum() < 4
    chosen = replace(SETTINGS, correction=correction)
    objective = policy_objective("bypass_mode")
    found = objective(inputs, counts_of(inputs), chosen)
    weights = corrected.weights.double()
    expected = -(weights * inputs.advantages * inputs.logprobs)[keep].sum() / 4
    torch.testing.assert_close(found.loss, expected)
    assert found.metrics["actor/ppo_kl"].count == keep.sum()
    clips = replace(chosen, correction=replace(correction, loss_type="ppo_clip"))
    clipped = objective(inputs, counts_of(inputs), clips)
    plain = replace(inputs, old_logprobs=inputs.rollout_logprobs, rollout_weights=None)
    torch.testing.assert_close(
        clipped.loss,
        policy_objective("vanilla")(plain.select_tokens(keep), counts_of(inputs), SETTINGS).loss,
    )


@pytest.mark.parametrize("groups", [(0, 0, 0, 1), (0, 1, 2, 3)])
def test_adpo_refuses_incomplete_groups(groups: tuple[int, ...]) -> None:
    inputs = replace(rows_of([2, 2, 1, 1], 3), row_groups=groups)
    with pytest.raises(ConfigError, match=r"rows in a micro-batch instead of .*=2; set that to ro"):
        policy_objective("adpo")(inputs, counts_of(inputs), SETTINGS)


def test_an_unknown_objective_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{ACTOR}\.policy_loss\.loss_mode: unknown value 'ppo'; known: adpo",
    ):
        policy_objective("ppo")


def test_a_row_without_tokens_has_mean_zero() -> None:
    found = row_means(torch.tensor([2.0, 4.0]), torch.tensor([1, 1]), 3)
    assert found.tolist() == [0.0, 3.0, 0.0]


def test_rejected_tokens_leave_the_others_in_their_rows() -> None:
    kept = rows_of([2, 3], 3).select_tokens(torch.tensor([False, True, True, False, True]))
    assert kept.row_index.tolist() == [0, 1, 1]
    assert kept.num_rows == 2

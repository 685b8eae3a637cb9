"""A workload by its distributions is sampled by its numbers, and the mixtures are some of them."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from sluice.simulate.workload import (
    MIXTURES,
    NUM_PROMPTS,
    BetaComponent,
    DescribedWorkload,
    ResponseLengths,
    WorkloadDescription,
    mixture_workload,
)

FLAT = ResponseLengths(1000, 3000, sigma_between_prompts=0.0, sigma_within_prompt=0.0)
ALWAYS, NEVER = BetaComponent(1e6, 0.01), BetaComponent(0.01, 1e6)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_mixture_draws_each_kind_of_prompt_by_its_share(mixture: str) -> None:
    kinds = MIXTURES[mixture]
    assert sum(kind.weight for kind in kinds) == pytest.approx(1.0)
    workload = mixture_workload(mixture, 3)
    rates = [workload.prompt(position, 0).pass_rate for position in range(NUM_PROMPTS)]
    expected = sum(kind.weight * kind.alpha / (kind.alpha + kind.beta) for kind in kinds)
    assert fmean(rates) == pytest.approx(expected, abs=0.02)


def test_pass_rates_are_sampled_from_the_components_by_their_weights() -> None:
    kinds = (BetaComponent(1e6, 0.01, 3.0), BetaComponent(0.01, 1e6, 1.0))
    workload = DescribedWorkload(WorkloadDescription(kinds, num_prompts=4000))
    rates = [workload.prompt(position, 0).pass_rate for position in range(4000)]
    assert fmean(rates) == pytest.approx(0.75, abs=0.03)
    assert all(rate < 0.001 or rate > 0.999 for rate in rates)


@pytest.mark.parametrize(("kind", "tokens"), [(ALWAYS, 1000), (NEVER, 3000)])
def test_lengths_have_the_median_of_the_prompts_pass_rate(kind: BetaComponent, tokens: int) -> None:
    workload = DescribedWorkload(WorkloadDescription((kind,), FLAT))
    sampled = workload.samples(workload.prompt(0, 0), 0, 0, 8)
    assert sampled.tokens == [tokens] * 8


def test_lengths_spread_within_a_prompt_and_between_prompts_as_described() -> None:
    spread = ResponseLengths(1000, 1000, sigma_between_prompts=0.0, sigma_within_prompt=0.5)
    workload = DescribedWorkload(WorkloadDescription((ALWAYS,), spread))
    tokens = workload.samples(workload.prompt(0, 0), 0, 0, 4000).tokens
    assert median(tokens) == pytest.approx(1000, rel=0.05)
    assert sorted(tokens)[round(0.8413 * 4000)] == pytest.approx(1000 * 2.71828**0.5, rel=0.07)
    apart = ResponseLengths(1000, 1000, sigma_between_prompts=0.5, sigma_within_prompt=0.0)
    workload = DescribedWorkload(WorkloadDescription((ALWAYS,), apart))
    prompts = [workload.prompt(position, 0) for position in range(500)]
    sampled = [workload.samples(prompt, 0, 0, 2).tokens for prompt in prompts]
    assert all(first == second for first, second in sampled)
    assert len({first for first, _ in sampled}) > 300


def test_a_response_of_the_largest_length_is_cut_off_and_wrong() -> None:
    lengths = ResponseLengths(500, 500, 0.0, 0.0, max_tokens=400)
    workload = DescribedWorkload(WorkloadDescription((ALWAYS,), lengths))
    sampled = workload.samples(workload.prompt(0, 0), 0, 0, 4)
    assert sampled.tokens == [400] * 4
    assert not any(sampled.are_right)


def test_the_drift_moves_pass_rates_with_versions() -> None:
    kinds = (BetaComponent(50.0, 50.0),)
    still = DescribedWorkload(WorkloadDescription(kinds, drift_per_version=0.0))
    learns = DescribedWorkload(WorkloadDescription(kinds, drift_per_version=0.1))
    assert still.prompt(0, 20) == still.prompt(0, 0) == learns.prompt(0, 0)
    assert learns.prompt(0, 20).pass_rate > learns.prompt(0, 0).pass_rate + 0.2


def test_the_data_set_has_as_many_prompts_as_described() -> None:
    workload = DescribedWorkload(WorkloadDescription((ALWAYS,), num_prompts=10))
    keys = [workload.prompt(position, 0).key for position in range(20)]
    assert set(keys[:10]) == set(keys[10:]) == {str(number) for number in range(10)}

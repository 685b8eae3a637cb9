"""Advantages against verl's numbers, adpo's against its authors' code."""

from __future__ import annotations

import pytest
import torch

from sluice.algorithm.advantages.inputs import AdvantageInputs, AdvantageSettings
from sluice.algorithm.registry import batch_estimator


def one_token_rows(
    rewards: list[float], group: list[int] | None = None, lengths: list[int] | None = None
) -> AdvantageInputs:
    """Rewards on the last token of rows of the given lengths, by default 1, of one group."""
    ends = torch.tensor(lengths or [1] * len(rewards))
    width = int(ends.max())
    placed = torch.zeros(len(rewards), width)
    placed[torch.arange(len(rewards)), ends - 1] = torch.tensor(rewards)
    return AdvantageInputs(
        rewards=placed,
        mask=torch.arange(width) < ends.unsqueeze(-1),
        group_index=torch.tensor(group or [0] * len(rewards)),
    )


def scores(name: str, inputs: AdvantageInputs, *, norm_by_std: bool = True) -> list[float]:
    settings = AdvantageSettings(norm_by_std=norm_by_std)
    found = batch_estimator(name)(inputs, settings)
    return [float(value) for value in found.advantages[:, 0]]


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1.0, 1.0, 0.0, 0.0], [0.866024, 0.866024, -0.866024, -0.866024]),
        ([1.0] + [-1.0] * 15, [3.7499925] + [-0.2499995] * 15),
        ([1.0, -1.0, -2.0, 1.0], [0.833333, -0.5, -1.166666, 0.833333]),
    ],
)
def test_grpo_equals_verls(name: str, rewards: list[float], advantages: list[float]) -> None:
    assert scores(name, one_token_rows(rewards)) == pytest.approx(advantages, abs=1e-6)


def test_dr_grpo_equals_verls() -> None:
    found = scores("grpo", one_token_rows([1.0, 0.0, 0.0, 0.0]), norm_by_std=False)
    assert found == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_rloo_equals_verls(name: str) -> None:
    found = scores(name, one_token_rows([1.0, 0.0, 0.0, 0.0]))
    assert found == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_opo_weighs_the_baseline_by_length() -> None:
    found = scores("opo", one_token_rows([1.0, 0.0, 0.0, 0.0], lengths=[2, 4, 4, 6]))
    assert found == pytest.approx([0.875, -0.125, -0.125, -0.125])


def test_pass_at_k_rewards_the_best_alone() -> None:
    found = scores("grpo_passk", one_token_rows([1.0, 0.5, 0.0, 0.0]))
    assert found == pytest.approx([1.044464, 0.0, 0.0, 0.0], abs=2e-6)


def test_pass_at_k_without_std_is_the_lead_over_the_second() -> None:
    found = scores("grpo_passk", one_token_rows([1.0, 0.5, 0.0, 0.0]), norm_by_std=False)
    assert found == [0.5, 0.0, 0.0, 0.0]


def test_gpg_scales_by_the_share_of_rewarded_rows() -> None:
    inputs = one_token_rows([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0] * 4 + [1] * 4)
    third, two_thirds, four_thirds = -2 / 3, -2 / 3, 4 / 3
    expected = [2.0, third, third, two_thirds, four_thirds, four_thirds, -four_thirds, -four_thirds]
    assert scores("gpg", inputs) == pytest.approx(expected)


def test_gae_equals_verls() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([[0.0, 0.0, 1.0]]),
        mask=torch.ones(1, 3, dtype=torch.bool),
        values=torch.tensor([[0.5, 0.6, 0.7]]),
    )
    found = batch_estimator("gae")(inputs, AdvantageSettings(gamma=1.0, lam=0.95))
    assert found.returns[0].tolist() == pytest.approx([0.96575, 0.985, 1.0], abs=1e-6)
    expected = [0.99134, 0.01709, -1.00844]
    assert found.advantages[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("scaled", "advantages"),
    [(True, [1.5, -0.5, -0.5, -0.5]), (False, [0.75, -0.25, -0.25, -0.25])],
)
def test_adpo_equals_the_authors_code(scaled: bool, advantages: list[float]) -> None:
    found = scores("adpo", one_token_rows([1.0, 0.0, 0.0, 0.0]), norm_by_std=scaled)
    assert found == pytest.approx(advantages, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("grpo", 0.8 / (1.0 + 1e-6)),
        ("grpo_vectorized", 0.8 / (1.0 + 1e-6)),
        ("rloo", 0.8),
        ("rloo_vectorized", 0.0),
        ("opo", 0.8),
        ("gpg", 0.8 * 2.0),
        ("adpo", 0.0),
    ],
)
def test_a_group_of_one_follows_verls_rule(name: str, alone: float) -> None:
    # gpg: two of the four rows have a reward.
    found = scores(name, one_token_rows([0.8, 1.0, 0.0, 0.0], [5, 2, 2, 2]))
    assert found[0] == pytest.approx(alone, abs=1e-6)


def test_a_group_of_one_has_no_token_baseline() -> None:
    inputs = AdvantageInputs(
        rewards=torch.tensor([[0.0, 0.8]]),
        mask=torch.ones(1, 2, dtype=torch.bool),
        group_index=torch.tensor([3]),
        old_logprobs=torch.full((1, 2), -1.0),
        sum_pi_squared=torch.full((1, 2), 0.3),
    )
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        found = batch_estimator(name)(inputs, AdvantageSettings())
        assert found.advantages[0].tolist() == pytest.approx([0.8, 0.8])


def test_overlong_rows_shift_the_whole_group() -> None:
    inputs = one_token_rows([1.0, -1.0, -2.0, 1.0], lengths=[3, 2, 5, 1])
    found = batch_estimator("grpo")(inputs, AdvantageSettings()).advantages
    assert found[2].tolist() == pytest.approx([-1.166666] * 5, abs=1e-6)
    assert found[1].tolist() == pytest.approx([-0.5, -0.5, 0.0, 0.0, 0.0], abs=1e-6)

"""ADPO against its formula in float64 and golden numbers."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch

from sluice.algorithm.losses.adpo import adaptive_tau, adpo_objective
from sluice.algorithm.losses.inputs import GlobalCounts, LossInputs
from sluice.algorithm.losses.settings import AdpoSettings, PolicyLossSettings
from tests.parity.adpo_formulas import batch_loss, softmax

G = 4
SCALED, UNSCALED = [1.5, -0.5, -0.5, -0.5], [0.75, -0.25, -0.25, -0.25]
BASE = AdpoSettings(num_generations=G)
CASES = {
    "softmax": BASE,
    "by sums": replace(BASE, length_normalised=False, tau=2.0),
    "sharp": replace(BASE, tau=0.5, beta_reward=0.3),
    "bounded": replace(BASE, clip_log_ratio=0.2, clip_anchored_score=0.15),
    "not centred": replace(BASE, center=False, logit_reg_coef=0.2),
    "scaled": replace(BASE, variant="scaled"),
    "plackett_luce": replace(BASE, variant="plackett_luce"),
    "plain plackett_luce": replace(BASE, variant="plackett_luce", top_k=0, label_smoothing=0.0),
    "best only": replace(BASE, variant="plackett_luce", top_k=1),
    "plackett_luce with regulariser": replace(BASE, variant="plackett_luce", logit_reg_coef=0.3),
}
FLAT = ("softmax", "sharp", "scaled", "plackett_luce")

Rows = list[list[float]]


def one_token_each(
    delta: list[float], advantages: list[float]
) -> tuple[torch.Tensor, LossInputs, GlobalCounts]:
    old = torch.tensor([-1.0, -2.0, -0.5, -1.5], dtype=torch.float64)
    logprobs = (old + torch.tensor(delta, dtype=torch.float64)).requires_grad_()
    inputs = LossInputs(
        logprobs,
        old,
        torch.tensor(advantages, dtype=torch.float64),
        torch.arange(G),
        G,
        row_groups=(0,) * G,
        row_advantages=torch.tensor(advantages, dtype=torch.float64),
    )
    return logprobs, inputs, GlobalCounts(tokens=G, rows=G, groups=1)


def random_prompts(seed: int, spread: float) -> list[tuple[Rows, Rows, list[float]]]:
    """Three prompts; one response is empty, which still counts in its group."""
    rng = np.random.default_rng(seed)
    prompts = []
    for number in range(3):
        lengths = rng.integers(1, 6, G)
        lengths[0] = 0 if number == 1 else lengths[0]
        old = [(-rng.exponential(1.0, n)).tolist() for n in lengths]
        new = [[x + spread * rng.standard_normal() for x in row] for row in old]
        prompts.append((new, old, rng.standard_normal(G).tolist()))
    return prompts


def flat(
    prompts: list[tuple[Rows, Rows, list[float]]], seed: int
) -> tuple[torch.Tensor, LossInputs, GlobalCounts, list[tuple[int, int]]]:
    """Rows of all prompts in a random order; also which prompt and row each row is."""
    places = [(p, g) for p in range(len(prompts)) for g in range(G)]
    places = [places[i] for i in np.random.default_rng(seed).permutation(len(places))]
    new = [x for p, g in places for x in prompts[p][0][g]]
    old = [x for p, g in places for x in prompts[p][1][g]]
    lengths = torch.tensor([len(prompts[p][0][g]) for p, g in places])
    advantages = torch.tensor([prompts[p][2][g] for p, g in places], dtype=torch.float64)
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs,
        torch.tensor(old, dtype=torch.float64),
        advantages.repeat_interleave(lengths),
        torch.arange(len(places)).repeat_interleave(lengths),
        len(places),
        row_groups=tuple(10 + p for p, _ in places),
        row_advantages=advantages,
    )
    counts = GlobalCounts(tokens=len(new), rows=len(places), groups=len(prompts))
    return logprobs, inputs, counts, places


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_equal_the_formula(case: str, seed: int, spread: float) -> None:
    adpo, prompts = CASES[case], random_prompts(seed, spread)
    logprobs, inputs, counts, places = flat(prompts, seed)
    found = adpo_objective(inputs, counts, PolicyLossSettings(adpo=adpo))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(batch_loss(prompts, adpo), rel=1e-9)
    assert logprobs.grad is not None
    slopes = iter(logprobs.grad.tolist())
    for p, g in places:
        for t in range(len(prompts[p][0][g])):
            assert next(slopes) == pytest.approx(
                finite_difference(prompts, (p, g, t), adpo), rel=1e-5, abs=1e-8
            )


def finite_difference(
    prompts: list[tuple[Rows, Rows, list[float]]], place: tuple[int, int, int], adpo: AdpoSettings
) -> float:
    p, g, t = place
    if adpo.center and adpo.logit_reg_coef and adpo.variant != "plackett_luce":
        raise AssertionError("the centre is held in the gradient, not in this difference")
    kept = prompts[p][0][g][t]
    ends = []
    for step in (1e-6, -1e-6):
        prompts[p][0][g][t] = kept + step
        ends.append(batch_loss(prompts, adpo))
    prompts[p][0][g][t] = kept
    return (ends[0] - ends[1]) / 2e-6


@pytest.mark.parametrize("case", FLAT)
def test_values_in_float32_equal_the_formula(case: str) -> None:
    adpo, prompts = CASES[case], random_prompts(8, 0.5)
    _, inputs, counts, _ = flat(prompts, 8)
    single = replace(
        inputs,
        logprobs=inputs.logprobs.float(),
        old_logprobs=inputs.old_logprobs.float(),
        row_advantages=inputs.row_advantages.float(),
    )
    found = adpo_objective(single, counts, PolicyLossSettings(adpo=adpo))
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(batch_loss(prompts, adpo), rel=1e-5)


@pytest.mark.parametrize(
    ("advantages", "beta", "target"),
    [
        (SCALED, 0.3, [0.996197, 0.00126779]),
        (SCALED, 0.5, [0.947915, 0.0173617]),
        (UNSCALED, 0.3, [0.903324, 0.0322252]),
        (UNSCALED, 0.5, [0.711235, 0.0962551]),
    ],
)
def test_at_the_anchor_the_loss_is_ln_g_and_its_gradient_the_golden_one(
    advantages: list[float], beta: float, target: list[float]
) -> None:
    logprobs, inputs, counts = one_token_each([0.0] * G, advantages)
    adpo = replace(BASE, tau=1.0, beta_reward=beta)
    found = adpo_objective(inputs, counts, PolicyLossSettings(adpo=adpo))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(log(G), abs=1e-6)
    expected = [1 / G - target[0]] + [1 / G - target[1]] * 3
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("tau", "beta", "value"), [(0.5, 0.3, 1.112675), (0.8, 0.5, 1.221560)])
def test_off_the_anchor_the_loss_is_the_golden_one(tau: float, beta: float, value: float) -> None:
    _, inputs, counts = one_token_each([0.2, -0.1, 0.0, 0.1], SCALED)
    adpo = replace(BASE, tau=tau, beta_reward=beta)
    found = adpo_objective(inputs, counts, PolicyLossSettings(adpo=adpo))
    assert found.loss.item() == pytest.approx(value, abs=1e-6)


def test_the_gradient_in_the_scores_is_softmax_minus_target() -> None:
    delta, tau = [0.2, -0.1, 0.0, 0.1], 0.5
    logprobs, inputs, counts = one_token_each(delta, SCALED)
    adpo = replace(BASE, tau=tau, beta_reward=0.3)
    adpo_objective(inputs, counts, PolicyLossSettings(adpo=adpo)).loss.backward()
    p, q = softmax([d / tau for d in delta]), softmax([a / 0.3 for a in SCALED])
    expected = [(pi - qi) / tau for pi, qi in zip(p, q, strict=True)]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-9)


def test_equal_rewards_move_nothing_at_the_anchor_and_pull_back_elsewhere() -> None:
    at_anchor, inputs, counts = one_token_each([0.0] * G, [0.0] * G)
    settings = PolicyLossSettings(adpo=BASE)
    adpo_objective(inputs, counts, settings).loss.backward()
    away, inputs, counts = one_token_each([0.5, 0.0, 0.0, 0.0], [0.0] * G)
    adpo_objective(inputs, counts, settings).loss.backward()
    assert at_anchor.grad is not None
    assert away.grad is not None
    assert at_anchor.grad.abs().max().item() == pytest.approx(0.0, abs=1e-12)
    assert away.grad[0].item() > 0.05


def test_metrics_are_verlms() -> None:
    delta = [0.2, -0.1, 0.0, 0.1]
    _, inputs, counts = one_token_each(delta, SCALED)
    adpo = replace(BASE, tau=0.5, beta_reward=0.3, logit_reg_coef=0.01)
    found = adpo_objective(inputs, counts, PolicyLossSettings(adpo=adpo))
    q, u = np.array(softmax([a / 0.3 for a in SCALED])), np.array(delta) / 0.5
    center = float(q @ u)
    partition = float(np.exp(u - center).sum())
    regulariser = 0.01 * log(partition) ** 2
    assert {name: metric.mean for name, metric in found.metrics.items()} == pytest.approx(
        {
            "adpo/loss": 1.112675 + regulariser,
            "adpo/logit_reg_loss": regulariser,
            "adpo/term_alignment": 0.0,
            "adpo/term_logsumexp": partition / G,
            "adpo/u_center": center,
            "adpo/effective_tau": 0.5,
            "adpo/advantage_mean": 0.0,
            "adpo/advantage_std": 1.0,
            "adpo/anchored_score_mean": u.mean(),
            "adpo/anchored_score_std": u.std(ddof=1),
            "adpo/log_ratio_mean": 0.1,
            "actor/ppo_kl": 0.1,
            "actor/pg_clipfrac": 0.0,
        },
        abs=1e-6,
    )


def test_adaptive_temperature_follows_verlms_rule() -> None:
    new, old = torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -20.0])
    found = adaptive_tau(new, old, torch.tensor([0.0, 1.0]), 0.5, 1000)
    scale = log(1000)
    entropy = (2 / scale + 1.0) / 2
    assert found.item() == pytest.approx(0.5 * (1 + 0.2 * entropy), rel=1e-6)
    found = adaptive_tau(new, old, torch.tensor([1.0, 1.0]), 0.5, 1000)
    confidence = 1 - (1 / scale + 3 / scale) / 2
    expected = 0.5 * (1 + 0.2 * entropy + 0.5 * confidence)
    assert found.item() == pytest.approx(expected, rel=1e-6)
    low = adaptive_tau(new, old, torch.tensor([1.0, 1.0]), 0.01, 1000)
    assert low.item() == pytest.approx(0.2)

"""Rules of the estimators for whole batches: fields, groups, masks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sluice.algorithm.advantages.group_relative import gdpo_metrics
from sluice.algorithm.advantages.inputs import AdvantageInputs, AdvantageSettings
from sluice.algorithm.kl import last_token_rewards
from sluice.algorithm.registry import BATCH_ESTIMATORS, batch_estimator
from sluice.errors import ConfigError

PAIRS = [(name, missing) for name, one in BATCH_ESTIMATORS.items() for missing in one.needs]
GROUPED = sorted(name for name, one in BATCH_ESTIMATORS.items() if "group_index" in one.needs)


def fields(rows: int = 4, width: int = 3) -> dict[str, object]:
    generator = torch.Generator().manual_seed(5)

    def numbers() -> torch.Tensor:
        return torch.rand(rows, width, generator=generator)

    return {
        "rewards": numbers(),
        "mask": torch.ones(rows, width, dtype=torch.bool),
        "group_index": torch.arange(rows) // 2,
        "values": numbers(),
        "baselines": numbers()[:, 0],
        "old_logprobs": -numbers(),
        "sum_pi_squared": numbers(),
        "reward_components": {"acc": numbers()[:, 0], "format": numbers()[:, 0]},
    }


def inputs(**changes: object) -> AdvantageInputs:
    return AdvantageInputs(**{**fields(), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "missing"), PAIRS)
def test_a_missing_field_is_named(name: str, missing: str) -> None:
    given_fields = fields()
    given_fields.pop(missing)
    with pytest.raises(ConfigError) as caught:
        batch_estimator(name)(AdvantageInputs(**given_fields), AdvantageSettings())  # type: ignore[arg-type]
    named = "no reward component" if missing == "reward_components" else f"needs {missing},"
    assert named in str(caught.value)


@pytest.mark.parametrize("name", sorted(BATCH_ESTIMATORS))
def test_no_other_field_is_needed(name: str) -> None:
    needed = {"rewards", "mask", *BATCH_ESTIMATORS[name].needs}
    given_fields = {key: fields()[key] for key in needed}
    found = batch_estimator(name)(AdvantageInputs(**given_fields), AdvantageSettings())  # type: ignore[arg-type]
    assert found.advantages.isfinite().all()
    assert found.returns.shape == found.advantages.shape == (4, 3)


RAGGED = torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)


@pytest.mark.parametrize("name", GROUPED)
def test_a_lone_row_has_an_advantage_unless_the_estimator_needs_others(name: str) -> None:
    alone = inputs(group_index=torch.arange(4))
    try:
        has_one = bool((batch_estimator(name)(alone, AdvantageSettings()).advantages != 0).all())
    except ValueError:
        has_one = False
    assert has_one != BATCH_ESTIMATORS[name].needs_others


@pytest.mark.parametrize("name", sorted(BATCH_ESTIMATORS))
def test_a_rejected_token_changes_others_where_the_estimator_reads_the_mask(name: str) -> None:
    rejected = torch.ones(4, 3, dtype=torch.bool)
    rejected[0, 2] = False
    expected = batch_estimator(name)(inputs(), AdvantageSettings()).advantages
    found = batch_estimator(name)(inputs(mask=rejected), AdvantageSettings()).advantages
    changed = not torch.equal(found[rejected], expected[rejected])
    assert changed == BATCH_ESTIMATORS[name].reads_mask


@pytest.mark.parametrize("name", sorted(BATCH_ESTIMATORS))
def test_advantages_have_mean_0_and_variance_1_where_the_estimator_whitens(name: str) -> None:
    found = batch_estimator(name)(inputs(mask=RAGGED), AdvantageSettings()).advantages[RAGGED]
    numbers = (float(found.mean()), float(found.var()))
    assert (numbers == pytest.approx((0.0, 1.0), abs=1e-5)) == BATCH_ESTIMATORS[name].whitens


@pytest.mark.parametrize(
    "name", sorted(name for name, one in BATCH_ESTIMATORS.items() if one.credits_turns)
)
def test_an_estimator_that_credits_turns_tells_them_apart(name: str) -> None:
    turns = torch.tensor([[0.0, 1.0, 0.0], *[[0.0] * 3] * 3])
    batch = inputs(rewards=turns, turn_rewards=turns, values=torch.zeros(4, 3))
    first = batch_estimator(name)(batch, AdvantageSettings()).advantages[0]
    assert first[0] == first[1]
    assert first[1] > first[2], "the reward came before"


@pytest.mark.parametrize("name", GROUPED)
def test_only_the_grouping_counts_not_the_numbers_or_the_order_of_rows(name: str) -> None:
    order = torch.tensor([2, 0, 3, 1])
    renamed = {"group_index": torch.tensor([17, 17, -4, -4])}
    shuffled: dict[str, object] = {}
    for key, value in {**fields(), **renamed}.items():
        if isinstance(value, torch.Tensor):
            shuffled[key] = value[order]
        elif isinstance(value, dict):
            shuffled[key] = {name: component[order] for name, component in value.items()}
    found = batch_estimator(name)(AdvantageInputs(**shuffled), AdvantageSettings())  # type: ignore[arg-type]
    expected = batch_estimator(name)(inputs(), AdvantageSettings()).advantages[order]
    torch.testing.assert_close(found.advantages, expected)


@pytest.mark.parametrize("name", sorted(BATCH_ESTIMATORS))
def test_numbers_outside_of_the_mask_change_nothing_inside(name: str) -> None:
    masked = torch.where(RAGGED, inputs().rewards, 0.0)
    estimate = batch_estimator(name)
    expected = estimate(inputs(mask=RAGGED, rewards=masked), AdvantageSettings()).advantages
    poisoned = {
        key: torch.where(RAGGED, getattr(inputs(), key), 7.0)
        for key in ("values", "old_logprobs", "sum_pi_squared")
    }
    found = estimate(
        inputs(mask=RAGGED, rewards=masked, **poisoned), AdvantageSettings()
    ).advantages
    assert torch.equal(found[RAGGED], expected[RAGGED])
    if name not in {"gae", "remax"}:
        assert (found[~RAGGED] == 0.0).all()


TOKEN_LEVEL = ("gae", "reinforce_plus_plus", "remax", "optimal_token_baseline")


@pytest.mark.parametrize("name", [*TOKEN_LEVEL, "tir_optimal_token_baseline", "adpo", "gdpo"])
def test_rewards_outside_of_the_mask_are_not_read(name: str) -> None:
    together = torch.zeros(4, dtype=torch.int64)  # two rows would have scores of +-0.7 anyway
    estimate = batch_estimator(name)
    expected = estimate(inputs(mask=RAGGED, group_index=together), AdvantageSettings()).advantages
    poisoned = torch.where(RAGGED, inputs().rewards, 7.0)
    found = estimate(
        inputs(mask=RAGGED, group_index=together, rewards=poisoned), AdvantageSettings()
    ).advantages
    assert torch.equal(found[RAGGED], expected[RAGGED])


def test_a_score_outside_of_the_mask_counts_in_verls_outcome_rewards() -> None:
    mask = torch.tensor([[1, 0, 0]] * 4, dtype=torch.bool)
    found = batch_estimator("rloo")(
        inputs(mask=mask, rewards=torch.tensor([[0.0, 0.0, 1.0]] + [[0.0] * 3] * 3)),
        AdvantageSettings(),
    )
    assert found.advantages[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", sorted(set(GROUPED) - {"gdpo", "reinforce_plus_plus_baseline"}))
def test_rows_without_tokens_get_no_advantage(name: str) -> None:
    found = batch_estimator(name)(
        inputs(mask=torch.zeros(4, 3, dtype=torch.bool)), AdvantageSettings()
    )
    assert (found.advantages == 0.0).all()


@pytest.mark.parametrize(
    "name", ["gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_whitening_a_batch_of_one_token_is_refused(name: str) -> None:
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[1, 1] = True
    with pytest.raises(ValueError, match="at least 2 selected positions, the mask has 1"):
        batch_estimator(name)(inputs(mask=mask), AdvantageSettings())


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "gpg", "adpo"])
@pytest.mark.parametrize("reward", [0.1, 1e6 + 0.1, -3.3])
def test_a_group_of_equal_rewards_gets_exactly_zero(name: str, reward: float) -> None:
    rewards = torch.tensor([[reward]] * 3, dtype=torch.float64)
    found = batch_estimator(name)(
        AdvantageInputs(
            rewards=rewards,
            mask=torch.ones(3, 1, dtype=torch.bool),
            group_index=torch.zeros(3, dtype=torch.int64),
        ),
        AdvantageSettings(),
    )
    assert (found.advantages == 0.0).all()


def test_pass_at_k_refuses_a_group_of_one() -> None:
    with pytest.raises(ValueError, match="groups of at least 2 rows"):
        batch_estimator("grpo_passk")(
            inputs(group_index=torch.tensor([0, 0, 0, 1])), AdvantageSettings()
        )


def test_two_best_rows_of_a_group_get_nothing_for_pass_at_k() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3])
    found = batch_estimator("grpo_passk")(
        inputs(rewards=rewards, group_index=torch.zeros(4)), AdvantageSettings()
    )
    assert (found.advantages == 0.0).all()


def test_gdpo_refuses_other_numbers_of_weights_than_components() -> None:
    with pytest.raises(ConfigError, match=r"1 entries for 2 reward components \(acc, format\)"):
        batch_estimator("gdpo")(inputs(), AdvantageSettings(gdpo_reward_weights=(1.0,)))


def test_gdpo_reports_each_component() -> None:
    components = {"acc": torch.tensor([1.0, 0.0, 0.0, 1.0])}
    assert gdpo_metrics(inputs(reward_components=components)) == {
        "gdpo/acc/mean": 0.5,
        "gdpo/acc/std": 0.5,
        "gdpo/acc/max": 1.0,
        "gdpo/acc/min": 0.0,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.ones(4, 3)}, "mask must be bool"),
        ({"mask": torch.ones(4, 2, dtype=torch.bool)}, r"mask must have shape \[4, 3\]"),
        ({"values": torch.ones(4)}, r"values must have shape \[4, 3\], got \[4\]"),
        ({"group_index": torch.ones(3)}, r"group_index must have shape \[4\]"),
        ({"rewards": torch.ones(4)}, r"rewards must have shape \[rows, width\]"),
        ({"reward_components": {"acc": torch.ones(2)}}, r"reward_components\['acc'\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inputs(**changes)


def test_an_unknown_estimator_is_named_with_all_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown value 'gea'; known: adpo, gae, gdpo, gpg"):
        batch_estimator("gea")


def test_a_score_sits_on_the_last_token_of_its_row() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.bool)
    found = last_token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), mask)
    assert found.tolist() == [[0, 1, 0], [0, 0, 2], [0, 0, 3], [4, 0, 0]]


def test_a_row_without_tokens_counts_in_its_group() -> None:
    mask = torch.tensor([[1, 1], [0, 0]], dtype=torch.bool)
    rewards = last_token_rewards(torch.tensor([1.0, 0.0]), mask)
    index = torch.tensor([0, 0])
    batch = AdvantageInputs(rewards=rewards, mask=mask, group_index=index)
    found = batch_estimator("rloo")(batch, AdvantageSettings())
    assert found.advantages.tolist() == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_returns_of_different_turns_give_0_whatever_their_sums_round_to(
    norm_by_std: bool,
) -> None:
    turns = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0], [0.1, 0.2, 0.0], [0.0, 0.3, 0.0]])
    mask = torch.ones(4, 3, dtype=torch.bool)
    rewards = last_token_rewards(torch.full((4,), 0.7), mask) + turns
    assert len(set(rewards.sum(-1, dtype=torch.float64).tolist())) > 1
    group = torch.zeros(4, dtype=torch.int64)
    batch = AdvantageInputs(rewards=rewards, mask=mask, group_index=group, turn_rewards=turns)
    found = batch_estimator("grpo")(batch, AdvantageSettings(norm_by_std=norm_by_std))
    assert found.advantages.tolist() == [[0.0] * 3] * 4


@pytest.mark.parametrize(
    ("rewards", "turns", "group"),
    [
        ([[0.0, 2e8]], [[0.0, 0.0]], [0]),
        ([[0.0, 1e7], [0.0, 1e7 + 8]], [[0.0, 0.0]] * 2, [0, 0]),
        ([[1e4, 0.01 - 1e4], [1e4, -1e4]], [[0.0, 0.0]] * 2, [0, 0]),
    ],
    ids=["a group of one", "large rewards", "large turns"],
)
def test_returns_that_float32_tells_apart_are_different(
    rewards: list[list[float]], turns: list[list[float]], group: list[int]
) -> None:
    given = torch.tensor(rewards)
    batch = AdvantageInputs(
        rewards=given,
        mask=torch.ones_like(given, dtype=torch.bool),
        group_index=torch.tensor(group),
        turn_rewards=torch.tensor(turns),
    )
    found = batch_estimator("grpo")(batch, AdvantageSettings()).advantages
    without = replace(batch, turn_rewards=None)
    assert torch.equal(found, batch_estimator("grpo")(without, AdvantageSettings()).advantages)
    assert bool((found != 0).all())

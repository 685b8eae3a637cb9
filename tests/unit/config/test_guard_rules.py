"""Rules of guards that contradict themselves, or that no run can follow, are refused by name."""

from __future__ import annotations

import pytest

from sluice.config.loading.loader import load_config
from sluice.config.rules.guards import guard_problems
from sluice.errors import ConfigError

VALIDATES = ("data.val_files=v.parquet", "trainer.test_freq=5", "trainer.save_freq=5")


def found(rule: str, *overrides: str) -> list[str]:
    config = load_config(None, [f"sluice.guards.rules=[{{{rule}}}]", *overrides])
    return [one.text for one in guard_problems(config)]


@pytest.mark.parametrize(
    "rule",
    [
        "action: stop, target: 0.9",
        "action: rollback, deviations: 4",
        "action: hold, metric: actor/entropy, limit: 0.05, window: 5, times: 2",
        "action: hold, metric: actor/entropy, deviations: 4, window: 10",
    ],
)
def test_a_rule_with_one_condition_is_accepted(rule: str) -> None:
    assert found(rule, *VALIDATES) == []


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("action: hold", "has no condition; set exactly one of target, limit, deviations"),
        ("action: hold, limit: 1, deviations: 1", "has limit and deviations"),
        ("action: rollback, target: 0.9", "a good value is a reason to stop a run only"),
        ("action: hold, limit: 1, window: 5", "leave window out"),
        ("action: hold, metric: actor/entropy, deviations: 4", "set window to some steps"),
        ("action: hold, metric: actor/entrpy, limit: 0.1", "such as actor/entropy"),
        ("action: hold, limit: .nan", "rules[0].limit = nan can never"),
        ("action: stop, target: .inf", "rules[0].target = inf can never"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(rule: str, said: str) -> None:
    (problem,) = found(rule, *VALIDATES)
    assert "sluice.guards.rules[0]" in problem
    assert said in problem


def test_a_metric_of_validations_needs_validations_and_a_rollback_checkpoints() -> None:
    (problem,) = found("action: hold, limit: 0.5")
    assert "set data.val_files and trainer.test_freq" in problem
    (problem,) = found("action: rollback, deviations: 4", *VALIDATES[:2], "trainer.save_freq=-1")
    assert "needs checkpoints that were validated" in problem


@pytest.mark.parametrize(("save", "meet"), [(5, True), (10, True), (1, True), (7, False)])
def test_a_rollback_needs_saves_and_validations_of_the_same_steps(save: int, meet: bool) -> None:
    problems = found("action: rollback, deviations: 4", *VALIDATES, f"trainer.save_freq={save}")
    assert ["needs checkpoints that were validated" in one for one in problems] == [True] * (
        not meet
    )


def test_a_rollback_needs_a_best_checkpoint_that_stays() -> None:
    top = "sluice.guards.keep.top=0"
    (problem,) = found("action: rollback, deviations: 4", *VALIDATES, top)
    assert "sluice.guards.keep.top = 0" in problem


def test_checkpoints_are_compared_by_a_metric_of_validations() -> None:
    config = load_config(None, ["sluice.guards.keep.metric=actor/entropy"])
    (problem,) = guard_problems(config)
    assert "begins with val-" in problem.text


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("action: rollbak", r"rules\[0\].*'rollbak'.*`action`"),
        ("action: hold, bound: 0.5", r"rules\[0\].*unknown field `bound`.*its keys are action, "),
        ("action: hold, times: 0", r"rules\[0\].*>= 1.*`times`"),
    ],
)
def test_a_wrong_key_of_a_rule_is_named_with_the_known_ones(rule: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        found(rule)

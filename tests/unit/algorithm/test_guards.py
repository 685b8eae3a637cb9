"""Which values of a metric break a rule of the guards, and what follows."""

from __future__ import annotations

import math

import pytest

from sluice.algorithm.guards import (
    ACCURACY,
    GuardAction,
    GuardRecord,
    GuardRule,
    Rollback,
    RuleState,
    Signal,
    best_signal,
    best_steps,
    decide,
    judge,
    moving_means,
    signal_of,
)

HOLD = GuardRule(GuardAction.HOLD, deviations=3.0)
BACK = GuardRule(GuardAction.ROLLBACK, deviations=3.0)


def record(*values: float | None, counts_after: int = -1, error: float = 0.01) -> GuardRecord:
    """Validations of steps 0, 10, 20, ...; ``None``: one that failed."""
    signals = tuple(
        Signal(10 * i, absence="it failed") if value is None else Signal(10 * i, value, error)
        for i, value in enumerate(values)
    )
    return GuardRecord({ACCURACY: signals}, resumed_after={ACCURACY: counts_after})


def test_a_value_is_worse_beyond_the_standard_errors_of_both_it_and_the_best() -> None:
    limit = 3.0 * math.hypot(0.01, 0.01)
    assert judge(HOLD, record(0.9, 0.9 - limit + 1e-9)).state is RuleState.WATCHING
    assert judge(HOLD, record(0.9, 0.9 - limit - 1e-9)).state is RuleState.BROKEN


def test_a_rule_for_several_times_needs_them_in_a_row() -> None:
    twice = GuardRule(GuardAction.HOLD, deviations=3.0, times=2)
    assert judge(twice, record(0.9, 0.1)).state is RuleState.WATCHING
    assert judge(twice, record(0.9, 0.1, 0.9, 0.1)).state is RuleState.WATCHING
    assert judge(twice, record(0.9, 0.1, 0.1)).state is RuleState.BROKEN


def test_a_failed_validation_breaks_no_rule_and_ends_no_row() -> None:
    twice = GuardRule(GuardAction.HOLD, deviations=3.0, times=2)
    assert judge(HOLD, record(0.9, None)) == judge(HOLD, record(0.9, 0.9, None))
    assert judge(twice, record(0.9, 0.1, None)).state is RuleState.NO_SIGNAL
    assert judge(twice, record(0.9, 0.1, None, 0.1)).state is RuleState.BROKEN
    assert decide([HOLD, BACK], record(0.9, 0.1, None), [0]) is None


@pytest.mark.parametrize("given", [GuardRecord(), record(None, None)])
def test_without_any_value_a_rule_shows_that_it_has_no_signal(given: GuardRecord) -> None:
    found = judge(HOLD, given)
    assert found.state is RuleState.NO_SIGNAL
    assert found.detail


def test_without_standard_errors_nothing_is_worse_than_the_best() -> None:
    signals = (Signal(0, 0.9), Signal(10, 0.1))
    found = judge(HOLD, GuardRecord({ACCURACY: signals}))
    assert found.state is RuleState.NO_SIGNAL
    assert "no standard error" in found.detail


def test_a_target_stops_and_a_limit_holds_in_the_direction_of_better() -> None:
    target = GuardRule(GuardAction.STOP, target=0.9)
    assert judge(target, record(0.89)).state is RuleState.WATCHING
    assert judge(target, record(0.9)).state is RuleState.BROKEN
    above = GuardRule(GuardAction.HOLD, limit=0.5, better="min")
    assert judge(above, record(0.5)).state is RuleState.WATCHING
    assert judge(above, record(0.51)).state is RuleState.BROKEN


def test_values_before_a_resume_break_no_rule_again_but_count_as_the_best() -> None:
    assert judge(HOLD, record(0.9, 0.1, counts_after=10)).state is RuleState.NO_SIGNAL
    assert judge(HOLD, record(0.9, 0.1, 0.2, counts_after=10)).state is RuleState.BROKEN
    assert judge(HOLD, record(0.9, 0.1, 0.9, counts_after=10)).state is RuleState.WATCHING


def test_a_window_compares_means_with_the_standard_error_of_the_mean() -> None:
    found = moving_means([Signal(i, float(v)) for i, v in enumerate([1, 3, 5])], 2)
    assert [(one.step, one.value, one.standard_error) for one in found] == [
        (1, 2.0, pytest.approx(1.0)),
        (2, 4.0, pytest.approx(1.0)),
    ]


def test_a_window_begins_again_after_a_rollback() -> None:
    rule = GuardRule(GuardAction.ROLLBACK, "actor/entropy", limit=0.5, window=2)
    signals = tuple(Signal(step, 0.0) for step in range(4))
    fresh = (*signals, Signal(5, 0.0))
    assert judge(rule, GuardRecord({"actor/entropy": fresh}, (Rollback(5, 0, 0.5),))).state is (
        RuleState.NO_SIGNAL
    )


def test_the_first_broken_rule_decides() -> None:
    stop = GuardRule(GuardAction.STOP, deviations=3.0)
    verdict = decide([HOLD, stop], record(0.9, 0.1), [0])
    assert verdict is not None
    assert verdict.action is GuardAction.HOLD
    assert decide([stop, HOLD], record(0.9, 0.9), [0]) is None


def test_a_rollback_restores_the_best_checkpoint_and_lowers_the_rate() -> None:
    verdict = decide([BACK], record(0.9, 0.1), [0])
    assert verdict is not None
    assert (verdict.action, verdict.restores) == (GuardAction.ROLLBACK, 0)
    assert verdict.learning_rate_factor == 0.5


@pytest.mark.parametrize(
    ("rollbacks", "restorable", "why"),
    [
        (0, [], "no checkpoint"),
        (0, [10], "no checkpoint with a good validation"),
        (2, [0], "rolled back 2 times already"),
    ],
)
def test_a_rollback_that_cannot_be_becomes_a_hold(
    rollbacks: int, restorable: list[int], why: str
) -> None:
    done = tuple(Rollback(1 + i, 0, 0.5) for i in range(rollbacks))
    given = record(0.9, 0.1)
    verdict = decide([BACK], GuardRecord(given.signals, done), restorable)
    assert verdict is not None
    assert verdict.action is GuardAction.HOLD
    assert why in verdict.reason


def test_the_best_checkpoints_are_chosen_among_those_on_disk_the_newest_of_equals_first() -> None:
    signals = record(0.5, 0.9, 0.7, 0.9).signals[ACCURACY]
    assert best_steps(signals, "max", {0, 10, 20, 30}, 2) == (30, 10)
    assert best_steps(signals, "max", {0, 20}, 2) == (20, 0)
    assert best_steps(signals, "min", {0, 20, 30}, 1) == (0,)


def test_held_out_accuracy_is_the_mean_over_sources_of_acc_or_else_of_reward() -> None:
    row = {"val-core/a/acc/mean@4": 0.2, "val-core/b/acc/mean@4": 0.4, "val-aux/a/x/mean@4": 9.0}
    errors = {"val-core/a/acc/mean@4": 0.03, "val-core/b/acc/mean@4": 0.04}
    found = signal_of(None, 5, row, errors)
    assert (found.value, found.standard_error) == (pytest.approx(0.3), pytest.approx(0.025))
    assert signal_of(None, 5, {"val-core/a/reward/mean@1": 0.2}, {}).value == 0.2


def test_a_missing_metric_and_one_that_is_not_finite_are_no_values() -> None:
    assert signal_of("actor/entropy", 5, {}, {}).absence
    assert signal_of("actor/entropy", 5, {"actor/entropy": math.nan}, {}).value is None
    assert signal_of(None, 5, {}, {}).absence


def test_a_resumed_run_knows_what_was_before_its_checkpoint() -> None:
    full = GuardRecord(
        record(0.9, 0.1).signals, (Rollback(11, 0, 0.5),), {ACCURACY: 10}, (0, 10, 11)
    )
    assert full.until_step(11) == full
    assert full.until_step(5) == GuardRecord(record(0.9).signals, (), {ACCURACY: 5}, (0,))


def test_a_step_that_is_validated_again_counts_once_with_its_newest_value() -> None:
    twice = GuardRule(GuardAction.HOLD, deviations=3.0, times=2)
    given = record(0.9, 0.2).with_signals({ACCURACY: Signal(10, 0.1, 0.01)})
    assert judge(twice, given).state is RuleState.WATCHING
    assert [one.value for one in given.signals[ACCURACY]] == [0.9, 0.1]
    failed = given.with_signals({ACCURACY: Signal(10, absence="it failed")})
    assert [one.value for one in failed.signals[ACCURACY]] == [0.9, 0.1, None]


def test_a_rollback_restores_no_step_that_is_beyond_under_its_rule() -> None:
    verdict = decide([BACK], record(0.89, 0.9, 0.2, 0.1), [20, 0])
    assert verdict is not None
    assert verdict.restores == 0


def test_an_infinite_value_is_a_value_and_as_bad_as_can_be() -> None:
    row = {"actor/grad_norm": math.inf}
    infinite = signal_of("actor/grad_norm", 5, row, {})
    for fields in ({"limit": 10.0}, {"deviations": 4.0, "window": 2}):
        rule = GuardRule(GuardAction.HOLD, "actor/grad_norm", better="min", **fields)  # type: ignore[arg-type]
        given = GuardRecord({"actor/grad_norm": (Signal(3, 1.0), Signal(4, 2.0), infinite)})
        assert judge(rule, given).state is RuleState.BROKEN


def test_a_rule_over_a_window_reads_the_last_values_and_compares_with_the_best_mean() -> None:
    values = [1.0, 2.0, 5.0, 6.0, 3.0, 1.0, 1.5]
    signals = tuple(Signal(step, value) for step, value in enumerate(values))
    best = best_signal(signals, "max", 2)
    assert best == moving_means(signals, 2)[2]
    low = best_signal(signals, "min", 2)
    assert low == moving_means(signals, 2)[-1]
    rule = GuardRule(GuardAction.HOLD, "actor/entropy", deviations=3.0, window=2, times=2)
    found = judge(rule, GuardRecord({"actor/entropy": signals}))
    assert found.detail == f"actor/entropy = {moving_means(signals, 2)[-1].text}, best {best.text}"


def test_steps_in_the_weights_leave_out_rolled_back_batches_and_the_rollbacks() -> None:
    given = GuardRecord(rollbacks=(Rollback(14, 10, 0.5), Rollback(20, 16, 0.5)))
    assert [given.steps_in_weights(v) for v in (10, 13, 14, 16, 20, 22)] == [10, 13, 10, 12, 12, 14]
    assert given.learning_rate_factor == 0.25

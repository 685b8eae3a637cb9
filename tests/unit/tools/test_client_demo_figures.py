"""Figures of the client demo: percentiles, fairness, and whether each prompt has one answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.client_demo.__main__ import exit_code
from tools.client_demo.figures import (
    Answered,
    ClientRecord,
    Judgement,
    fairness,
    jain,
    judge,
    percentiles,
)

RATES = st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20)


def record(
    name: str, *answers: tuple[int, float, int], vanished: bool = False, language: str = "python"
) -> ClientRecord:
    """Answers are prompt, time and tokens."""
    reported = [Answered(prompt, 1.0, 0.5, tokens, 0, at_s) for prompt, at_s, tokens in answers]
    return ClientRecord(name, language, reported, {}, vanished=vanished)


def test_percentiles_are_values_by_their_nearest_rank() -> None:
    assert percentiles(range(1, 201)) == {"p50": 100, "p90": 180, "p99": 198, "max": 200}
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert percentiles([]) == {}


def test_jains_index_is_one_for_equals_and_least_if_one_has_everything() -> None:
    assert jain([5.0] * 4) == pytest.approx(1.0)
    assert jain([7.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 0.0


@given(RATES, st.floats(0.01, 100))
def test_jains_index_knows_no_unit_and_lies_between_its_bounds(
    rates: list[float], factor: float
) -> None:
    found = jain(rates)
    assert 1 / len(rates) - 1e-9 <= found <= 1 + 1e-9
    assert jain([factor * rate for rate in rates]) == pytest.approx(found)


def test_fairness_looks_at_the_time_in_which_all_had_prompts() -> None:
    found = fairness(
        [
            record("a", (0, 1.0, 10), (1, 2.0, 10)),
            record("b", (2, 1.5, 10), (3, 9.0, 500), language="node"),
            record("gone", (4, 0.1, 900), vanished=True),
        ]
    )
    assert found == {
        "jain": 0.9,
        "min_over_max": 0.5,
        "share_node": 0.667,
        "share_python": 1.333,
    }


def test_every_prompt_is_looked_for() -> None:
    failing = ClientRecord("c", "node", [], {2: "DeadlineError", 0: "told again by another"})
    records = [record("a", (0, 1.0, 1), (1, 1.0, 1)), record("b", (1, 2.0, 1)), failing]
    assert judge(5, records) == Judgement(lost=2, failed=1, twice=1)
    assert judge(2, [record("a", (0, 1.0, 1), (1, 1.0, 1))]) == Judgement(0, 0, 0)


GOOD = {
    "lost": 0,
    "failed": 0,
    "answered_twice": 0,
    "slots_left": 0,
    "run_exit_code": 0,
    "training_steps_per_minute": {"before": 3.0, "during": 1.0, "after": 3.0},
}


@pytest.mark.parametrize(
    "finding",
    [{name: 1} for name in GOOD if name != "training_steps_per_minute"]
    + [{"training_steps_per_minute": {"before": 3.0, "during": 0.0, "after": 3.0}}],
)
def test_the_demo_fails_with_each_thing_that_must_not_be(finding: dict[str, object]) -> None:
    assert exit_code(GOOD) == 0
    assert exit_code(GOOD | finding) == 1

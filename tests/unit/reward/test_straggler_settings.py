"""From a run's configuration to the rules about stragglers, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.reward.groups.settings import straggler_rules
from sluice.algorithm.groups.stragglers import StragglerRules
from sluice.config.rules.sampling import straggler_problems
from sluice.config.run import RunConfig


def config(*, max_staleness: int = 1, **reward: Any) -> RunConfig:
    tree = {
        "data": {"max_response_length": 50},
        "sluice": {"asynchrony": {"max_staleness": max_staleness}, "reward": reward},
    }
    return msgspec.convert(tree, RunConfig)


def test_by_default_stalled_and_slow_streams_are_moved_and_no_group_is_cut_short() -> None:
    assert straggler_rules(config()) == StragglerRules(stall_timeout_s=30.0, slow_factor=4.0)
    assert list(straggler_problems(config())) == []


def test_a_run_that_must_repeat_itself_moves_no_stream_for_being_slow() -> None:
    assert straggler_rules(config(max_staleness=0)) == StragglerRules(stall_timeout_s=30.0)


def test_without_partial_tokens_a_long_sample_is_not_taken_for_a_stuck_one() -> None:
    rules = straggler_rules(config(partial_interval_ms=0, group_deadline_s=9.0))
    assert rules == StragglerRules(group_deadline_s=9.0)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"partial_interval_ms": 2000, "stall_timeout_s": 7.9},
            r"stall_timeout_s = 7\.9 .*partial_interval_ms = 2000.* at least 8,",
        ),
        ({"group_token_budget": 49}, r"group_token_budget = 49 is below .* 50 tokens"),
    ],
)
def test_limits_that_would_end_what_is_well_are_refused_with_the_remedy(
    settings: dict[str, Any], complaint: str
) -> None:
    (problem,) = straggler_problems(config(**settings))
    with pytest.raises(ValueError, match=complaint):
        raise ValueError(problem.text)

"""When a recipe's small run has learned."""

from __future__ import annotations

import pytest

from benchmarks.recipes.__main__ import has_learned


@pytest.mark.parametrize(
    ("figures", "learned"),
    [
        ({"before": 0.2, "after": 0.6, "prompts_lost": 0}, True),
        ({"before": 0.2, "after": 0.3, "prompts_lost": 0}, False),
        ({"before": 0.2, "after": 0.6, "prompts_lost": 1}, False),
        ({"failed": "exit code 1"}, False),
    ],
)
def test_a_small_run_reaches_its_end_gains_and_loses_no_prompt(
    figures: dict[str, object], learned: bool
) -> None:
    assert has_learned(figures) is learned

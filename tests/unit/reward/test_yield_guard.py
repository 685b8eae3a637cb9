"""What a batch that cannot be filled says: the end of the data, or a yield without hope."""

from __future__ import annotations

import pytest

from services.reward.records.yield_guard import YieldGuard
from sluice.errors import BatchUnfillableError, DataExhaustedError
from sluice.types import PromptEnd


def test_the_end_of_the_data_is_told_from_a_hopeless_yield() -> None:
    guard = YieldGuard(0.5, 1)
    assert isinstance(guard.exhausted(1, 4), DataExhaustedError)
    guard.ended(PromptEnd.FILTERED_ALL_WRONG, "")
    with pytest.raises(BatchUnfillableError) as caught:
        guard.check_yield()
    assert not isinstance(caught.value, DataExhaustedError)


def test_a_hopeless_yield_says_it_in_verls_words_and_names_both_bounds() -> None:
    guard = YieldGuard(0.5, 1)
    guard.ended(PromptEnd.FILTERED_ALL_WRONG, "")
    with pytest.raises(BatchUnfillableError, match="Generated too many") as caught:
        guard.check_yield()
    assert "algorithm.filter_groups.min_yield = 0.5" in str(caught.value)
    assert "max_num_gen_batches" in str(caught.value)


def test_prompts_that_are_left_out_are_counted() -> None:
    guard = YieldGuard(0.0, 4)
    guard.ended(None, "")
    guard.left_out("row 3: 70 tokens")
    guard.left_out("row 9: 80 tokens")
    reported = str(guard.exhausted(1, 4))
    assert "1 kept; 2 left out as too long, last: row 9: 80 tokens" in reported
    assert "raise trainer.total_epochs" in reported


def test_a_data_set_of_prompts_that_are_all_too_long_names_their_limit() -> None:
    guard = YieldGuard(0.0, 4)
    guard.left_out("row 3: 70 tokens")
    assert "raise data.max_prompt_length" in str(guard.exhausted(0, 4))
    assert "left out" not in str(YieldGuard(0.0, 4).exhausted(0, 4))

"""What a batch that cannot be filled says: the end of the data, or a yield without hope."""

from __future__ import annotations

import pytest

from services.reward.records.failures import ALIKE_GROUPS, YieldGuard
from sluice.errors import BatchUnfillableError, DataExhaustedError
from sluice.types import PromptEnd


def test_the_end_of_the_data_is_distinguished_from_a_hopeless_yield() -> None:
    guard = YieldGuard(0.5, 1)
    assert isinstance(guard.exhausted_error(1, 4), DataExhaustedError)
    guard.note_end(PromptEnd.FILTERED_ALL_WRONG, "")
    with pytest.raises(BatchUnfillableError) as caught:
        guard.check_yield()
    assert not isinstance(caught.value, DataExhaustedError)


def test_a_hopeless_yield_says_it_in_verls_words_and_names_both_bounds() -> None:
    guard = YieldGuard(0.5, 1)
    guard.note_end(PromptEnd.FILTERED_ALL_WRONG, "")
    with pytest.raises(BatchUnfillableError, match="Generated too many") as caught:
        guard.check_yield()
    assert "algorithm.filter_groups.min_yield = 0.5" in str(caught.value)
    assert "max_num_gen_batches" in str(caught.value)


def test_a_hopeless_yield_of_a_source_proposes_a_run_without_it() -> None:
    guard = YieldGuard(0.5, 1, "sums")
    guard.note_end(PromptEnd.FILTERED_ALL_RIGHT, "")
    with pytest.raises(BatchUnfillableError, match="leave the source 'sums' out"):
        guard.check_yield()


def test_prompts_that_are_left_out_are_counted() -> None:
    guard = YieldGuard(0.0, 4)
    guard.note_end(None, "")
    guard.note_left_out("row 3: 70 tokens")
    guard.note_left_out("row 9: 80 tokens")
    reported = str(guard.exhausted_error(1, 4))
    assert "1 kept; 2 left out as too long, last: row 9: 80 tokens" in reported
    assert "raise trainer.total_epochs" in reported


def test_a_data_set_of_prompts_that_are_all_too_long_names_their_limit() -> None:
    guard = YieldGuard(0.0, 4)
    guard.note_left_out("row 3: 70 tokens")
    assert "raise data.max_prompt_length" in str(guard.exhausted_error(0, 4))
    assert "left out" not in str(YieldGuard(0.0, 4).exhausted_error(0, 4))


DETAIL = "4 of 4 samples failed, the first: unscorable: KeyError: '{}' in compute_score (mine.py:2)"


def test_a_run_whose_first_groups_all_fail_for_one_reason_ends_with_that_reason() -> None:
    guard = YieldGuard(0.0, 4)
    for number in range(ALIKE_GROUPS):
        guard.check_yield()
        guard.note_end(PromptEnd.DROPPED_FAILED, DETAIL.format(f"row{number}"))
    with pytest.raises(BatchUnfillableError, match=r"first 64 groups .* in compute_score") as error:
        guard.check_yield()
    assert "repair what grades responses" in str(error.value)


@pytest.mark.parametrize("other", [None, PromptEnd.FILTERED_ALL_WRONG, PromptEnd.DROPPED_FAILED])
def test_one_group_that_ends_in_another_way_keeps_the_run_going(other: PromptEnd | None) -> None:
    guard = YieldGuard(0.0, 4)
    guard.note_end(other, "scorer_timeout: no answer")
    for number in range(2 * ALIKE_GROUPS):
        guard.note_end(PromptEnd.DROPPED_FAILED, DETAIL.format(number))
    guard.check_yield()


def test_groups_that_were_lost_with_their_replicas_end_no_run() -> None:
    guard = YieldGuard(0.0, 4)
    for _ in range(2 * ALIKE_GROUPS):
        guard.note_end(
            PromptEnd.DROPPED_FAILED, "engine_error: connection refused", counts_alike=False
        )
    guard.check_yield()

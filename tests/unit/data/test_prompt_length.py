"""Prompts over the limit are cut as verl 0.6 cuts them, or refused with their numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.data.prompt_length import PromptLimit, Truncation, check_context, fit_prompt
from sluice.errors import InvalidRequestError, PromptTooLongError

CUTS: tuple[Truncation, ...] = ("left", "right", "middle")


@pytest.mark.parametrize(
    ("truncation", "limit", "kept"),
    [
        ("left", 4, [5, 6, 7, 8]),
        ("right", 4, [0, 1, 2, 3]),
        ("middle", 4, [0, 1, 7, 8]),
        ("middle", 5, [0, 1, 6, 7, 8]),
        ("middle", 1, [8]),
    ],
)
def test_each_mode_keeps_its_side(truncation: Truncation, limit: int, kept: list[int]) -> None:
    assert fit_prompt(np.arange(9, dtype=np.uint32), limit, truncation).tolist() == kept


@given(
    size=st.integers(1, 50), limit=st.integers(1, 50), truncation=st.sampled_from(("error", *CUTS))
)
def test_a_prompt_within_the_limit_is_never_touched_and_no_other_is_longer(
    size: int, limit: int, truncation: Truncation
) -> None:
    ids = np.arange(size, dtype=np.uint32)
    if size > limit and truncation == "error":
        with pytest.raises(PromptTooLongError):
            fit_prompt(ids, limit, truncation)
        return
    kept = fit_prompt(ids, limit, truncation)
    assert kept.size == min(size, limit)
    assert kept.dtype == ids.dtype
    assert (np.diff(kept.astype(np.int64)) > 0).all()
    if size <= limit:
        assert kept.tolist() == ids.tolist()


def test_a_refusal_names_both_lengths_and_the_keys_that_help() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fit_prompt(np.arange(9, dtype=np.uint32), 4, "error")
    text = str(caught.value)
    assert "9 tokens exceed data.max_prompt_length=4" in text
    assert "data.truncation" in text
    assert "data.filter_overlong_prompts" in text


NINE = np.arange(9, dtype=np.uint32)


def test_the_training_rules_cut_a_prompt_or_leave_it_out_as_the_data_set_has_it() -> None:
    assert PromptLimit(4, "left").fit(NINE).tolist() == [5, 6, 7, 8]
    with pytest.raises(PromptTooLongError):
        PromptLimit(4, "left", filter_overlong=True).fit(NINE)


@pytest.mark.parametrize("truncation", ["error", *CUTS])
def test_a_prompt_with_images_is_never_cut(truncation: Truncation) -> None:
    limit = PromptLimit(8, truncation)
    assert limit.fit(NINE[:8], has_images=True).size == 8
    with pytest.raises(PromptTooLongError, match=r"data\.max_prompt_length=8"):
        limit.fit(NINE, has_images=True)


def test_a_prompt_that_leaves_no_space_for_a_token_is_refused_with_length_bound_and_remedy() -> (
    None
):
    check_context(7, 8)
    for size in (8, 9):
        with pytest.raises(InvalidRequestError) as caught:
            check_context(size, 8)
        assert not isinstance(caught.value, PromptTooLongError)  # no matter of training data
        assert str(caught.value) == (
            f"prompt: {size} tokens; the model's context of 8 takes 7 and one of the response: "
            "shorten the prompt, or have the run started with a greater "
            "actor_rollout_ref.rollout.max_model_len"
        )

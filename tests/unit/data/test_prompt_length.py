"""Prompts over the limit are cut as verl 0.6 cuts them, or refused with their numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.data.prompt_length import Truncation, fit_prompt
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

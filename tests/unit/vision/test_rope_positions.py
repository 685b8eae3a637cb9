"""Positions of prompts with images are those of transformers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import InvalidRequestError
from sluice.vision.image_prompts import Grid, expand_placeholders, find_images, rope_positions
from tests.support.tiny_vision import FAMILIES, IMAGE, save_model

WORD = 40


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return save_model(request.param, tmp_path_factory.mktemp("model")).base_model


PARTS = st.lists(
    st.tuples(st.integers(1, 5), st.builds(Grid, st.integers(1, 4), st.integers(1, 4))),
    max_size=4,
)


@given(parts=PARTS, behind=st.integers(1, 6), more=st.integers(0, 4))
def test_positions_equal_the_models_own(
    model: Any, parts: list[tuple[int, Grid]], behind: int, more: int
) -> None:
    ids: list[int] = []
    for words, grid in parts:
        ids += [WORD] * words + [IMAGE] * grid.num_tokens
    ids += [WORD] * behind
    whole = torch.tensor([ids + [WORD] * more])
    grids = [grid for _, grid in parts]
    expected, delta = model.get_rope_index(
        whole,
        (whole == IMAGE).int(),
        image_grid_thw=torch.tensor([[1, 2 * g.rows, 2 * g.columns] for g in grids]),
    )
    found = rope_positions(len(ids), find_images(np.array(ids), IMAGE, grids))
    np.testing.assert_array_equal(found.prompt, expected[:, 0, : len(ids)])
    np.testing.assert_array_equal(found.extend(len(ids) + more), expected[:, 0])
    np.testing.assert_array_equal(found.extend(behind), expected[:, 0, :behind])
    assert found.shift == int(delta)


@given(parts=PARTS)
def test_expanded_placeholders_are_found_again(parts: list[tuple[int, Grid]]) -> None:
    short = np.array([WORD, *([IMAGE, WORD] * len(parts))], np.uint32)
    grids = [grid for _, grid in parts]
    expanded = expand_placeholders(short, IMAGE, [grid.num_tokens for grid in grids])
    assert [place.grid for place in find_images(expanded, IMAGE, grids)] == grids
    assert (expanded != IMAGE).sum() == (short != IMAGE).sum()


def test_images_that_touch_each_other_are_distinguished() -> None:
    grids = [Grid(1, 2), Grid(2, 2)]
    places = find_images(np.array([WORD] + [IMAGE] * 6), IMAGE, grids)
    assert [place.start for place in places] == [1, 3]


@pytest.mark.parametrize("tokens", [[IMAGE] * 3, [IMAGE] * 5, [WORD]])
def test_tokens_of_other_images_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="image tokens, but its 1 images take 4"):
        find_images(np.array(tokens), IMAGE, [Grid(2, 2)])


def test_scattered_tokens_of_an_image_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="image 0 do not lie together"):
        find_images(np.array([IMAGE, WORD, IMAGE]), IMAGE, [Grid(1, 2)])


def test_more_or_fewer_places_than_images_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="2 images, but 1 places"):
        expand_placeholders(np.array([IMAGE], np.uint32), IMAGE, [1, 1])

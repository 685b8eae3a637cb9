"""The paths of an episode: each sampled token is trained once, after what the policy had read."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.algorithm.episodes import (
    PathTokens,
    TurnPath,
    path_length,
    path_tokens,
    training_paths,
)
from sluice.types import Turn
from tests.support.episodes import COMPACTED, LINEAR, TREE, Shape, make_turns, sequence_before

PROMPT = np.array([7, 8, 9], np.uint32)


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Turn, ...]:
    shapes: list[Shape] = []
    for number in range(draw(st.integers(1, 8))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        is_new_root = parent is None and draw(st.booleans())
        context = draw(st.integers(1 if is_new_root else 0, 3))
        shapes.append(Shape(context, draw(st.integers(0, 3)), parent, is_new_root))
    return make_turns(np.random.default_rng(0), shapes)


def turn_of(turns: tuple[Turn, ...], column: int) -> tuple[int, int]:
    sizes = [turn.token_ids.size for turn in turns]
    owner = int(np.searchsorted(np.cumsum(sizes), column, side="right"))
    return owner, column - sum(sizes[:owner])


@given(turns=episodes())
def test_every_sampled_token_is_a_label_once(turns: tuple[Turn, ...]) -> None:
    paths = [path_tokens(turns, path) for path in training_paths(turns)]
    counts = Counter(column for path in paths for column in path.columns.tolist())
    assert set(counts.values()) <= {1}
    assert sorted(counts) == list(range(sum(turn.token_ids.size for turn in turns)))


@given(turns=episodes())
def test_a_label_follows_what_the_policy_had_read(turns: tuple[Turn, ...]) -> None:
    sampled = np.concatenate([turn.token_ids for turn in turns])
    for path in training_paths(turns):
        found = path_tokens(turns, path)
        whole = np.concatenate([PROMPT if found.follows_prompt else PROMPT[:0], found.token_ids])
        skipped = whole.size - found.token_ids.size
        assert path_length(turns, path) == found.token_ids.size
        assert found.labels[-1] == found.token_ids.size - 1  # nothing is computed in vain
        for label, column in zip(found.labels, found.columns, strict=True):
            turn, place = turn_of(turns, int(column))
            before = sequence_before(PROMPT, turns, turn)
            read = np.concatenate([before, turns[turn].token_ids[:place]])
            np.testing.assert_array_equal(whole[: skipped + label], read)
            assert whole[skipped + label] == sampled[column]


def test_turns_in_a_row_are_one_path() -> None:
    turns = make_turns(np.random.default_rng(0), LINEAR)
    assert training_paths(turns) == (TurnPath((0, 1, 2), frozenset({0, 1, 2})),)


def test_a_shared_turn_is_trained_in_the_first_path_that_holds_it() -> None:
    turns = make_turns(np.random.default_rng(0), TREE)
    assert training_paths(turns) == (
        TurnPath((0, 1, 2), frozenset({0, 1, 2})),
        TurnPath((0, 1, 3), frozenset({3})),
        TurnPath((0, 4), frozenset({4})),
        TurnPath((5,), frozenset({5})),
    )


def test_a_turn_without_tokens_has_no_path() -> None:
    turns = make_turns(np.random.default_rng(0), COMPACTED)
    assert training_paths(turns) == (
        TurnPath((0, 1, 3), frozenset({0, 1, 3})),
        TurnPath((4,), frozenset({4})),
    )


def test_an_answer_is_one_path_of_all_its_tokens() -> None:
    (turn,) = make_turns(np.random.default_rng(0), (Shape(0, 4),))
    (path,) = training_paths((turn,))
    found, expected = path_tokens((turn,), path), PathTokens.of_response(turn.token_ids)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.columns, expected.columns)
    assert found.follows_prompt

"""The training sequences of an episode: paths through its turns, and the tokens that each trains.

A path leads from a root to a leaf. Every sampled token is trained in the first path that holds it;
later paths only read it, as they read context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice.types import TokenIds, Turn


@dataclass(frozen=True, slots=True)
class TurnPath:
    """Turns of one training sequence, by their indices in the sample.

    Args:
        turns: turns from a root on; each continues the one before.
        trained: the turns whose tokens this path trains, ascending.
    """

    turns: tuple[int, ...]
    trained: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class PathTokens:
    """The tokens of a path, and which of them it trains.

    Args:
        token_ids: [tokens]; without the group's prompt.
        labels: int64 [trained tokens], their places in `token_ids`, ascending.
        columns: int64 [trained tokens], their places among the sample's sampled tokens.
        follows_prompt: whether the group's prompt precedes it; otherwise the first token is no
            label.
    """

    token_ids: TokenIds
    labels: npt.NDArray[np.int64]
    columns: npt.NDArray[np.int64]
    follows_prompt: bool

    @classmethod
    def of_response(cls, token_ids: TokenIds) -> PathTokens:
        """Return the path of an answer to the group's prompt."""
        positions = np.arange(token_ids.size)
        return cls(token_ids, positions, positions, follows_prompt=True)


def training_paths(turns: Sequence[Turn]) -> tuple[TurnPath, ...]:
    """Return the paths that train every token once, in the order of their leaves.

    A path ends with a turn that has tokens; text read after it is left out. Only lengths matter, so
    tokens may be absent.
    """
    continued: set[int] = set()
    leaves: list[int] = []
    for number in reversed(range(len(turns))):  # a turn comes before those that continue it
        if number not in continued and not turns[number].token_ids.size:
            continue
        if number not in continued:
            leaves.append(number)
        parent = turns[number].parent
        if parent is not None:
            continued.add(parent)
    paths: list[TurnPath] = []
    trained: set[int] = set()
    for leaf in reversed(leaves):
        path = _to_root(turns, leaf)
        own_turns = frozenset(n for n in path if n not in trained and turns[n].token_ids.size)
        trained.update(path)
        paths.append(TurnPath(path, own_turns))
    return tuple(paths)


def path_length(turns: Sequence[Turn], path: TurnPath) -> int:
    """Return the tokens of a path, without the group's prompt."""
    return sum(turns[n].context.size + turns[n].token_ids.size for n in path.turns)


def response_length(turns: Sequence[Turn]) -> int:
    """Return the tokens of the longest path beyond its prompt, read ones included; turns that a
    path reads again as the prompt of a new root do not count."""
    lengths: list[int] = []
    for turn in turns:
        length_before = 0 if turn.parent is None else lengths[turn.parent]
        num_read = 0 if turn.is_new_root else turn.context.size
        lengths.append(length_before + num_read + turn.token_ids.size)
    return max(lengths)


def follows_prompt(turns: Sequence[Turn], path: TurnPath) -> bool:
    """Return whether a path begins with the group's prompt."""
    return not turns[path.turns[0]].is_new_root


def path_tokens(turns: Sequence[Turn], path: TurnPath) -> PathTokens:
    """Return the tokens of a path; they must be present."""
    starts = np.cumsum([0, *(turn.token_ids.size for turn in turns)])
    parts, labels, columns = list[TokenIds](), [np.arange(0)], [np.arange(0)]
    cursor = 0
    for number in path.turns:
        turn = turns[number]
        cursor += turn.context.size
        if number in path.trained:
            token_places = np.arange(turn.token_ids.size)
            labels.append(cursor + token_places)
            columns.append(starts[number] + token_places)
        cursor += turn.token_ids.size
        parts += [turn.context, turn.token_ids]
    return PathTokens(
        np.concatenate(parts),
        np.concatenate(labels),
        np.concatenate(columns),
        follows_prompt(turns, path),
    )


def _to_root(turns: Sequence[Turn], leaf: int) -> tuple[int, ...]:
    path = [leaf]
    while (parent := turns[path[-1]].parent) is not None:
        path.append(parent)
    return tuple(reversed(path))

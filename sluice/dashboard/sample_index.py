"""Where each group's bytes are, with what is filtered by: no text is held in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice.dashboard.sample_lines import GroupLines, ShownOutcome

__all__ = ["Cursor", "Entry", "SampleFilter", "SampleIndex"]

MOST_GROUPS = 2_000_000
_OUTCOMES = tuple(ShownOutcome)
_CODE = {outcome: code for code, outcome in enumerate(_OUTCOMES)}
_ROW = np.dtype(
    [
        ("ordinal", "i8"),
        ("offset", "i8"),
        ("length", "i4"),
        ("file", "i4"),
        ("step", "i4"),
        ("num", "i2"),
        ("outcome", "i1"),
        ("score", "f4"),
    ]
)
_FIRST_CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the list, newest step first: what follows comes after it."""

    step: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """Which groups are listed; ``None`` and empty: all.

    Args:
        outcomes: any of these.
        first_step, last_step: both included.
        least_score, most_score: of the mean over scored responses, both included.
    """

    outcomes: frozenset[ShownOutcome] = frozenset()
    first_step: int | None = None
    last_step: int | None = None
    least_score: float | None = None
    most_score: float | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One group of the list. `file` is a number of `SampleFiles`."""

    ordinal: int
    file: int
    offset: int
    length: int
    step: int
    num_responses: int
    outcome: ShownOutcome
    mean_score: float

    @property
    def cursor(self) -> Cursor:
        """The place behind it."""
        return Cursor(self.step, self.ordinal)


class SampleIndex:
    """Groups in the order they were found; 40 bytes a group, the oldest half goes when it is full.

    Args:
        most_groups: held at once.
    """

    def __init__(self, most_groups: int = MOST_GROUPS) -> None:
        self._most_groups = most_groups
        self._rows = np.zeros(_FIRST_CAPACITY, dtype=_ROW)
        self._size = 0
        self._next_ordinal = 0

    def __len__(self) -> int:
        return self._size

    def add(self, file: int, group: GroupLines) -> None:
        """A group of a file."""
        if self._size >= self._most_groups:
            self._keep(np.arange(self._size) >= self._size - self._most_groups // 2)
        if self._size == self._rows.size:
            self._rows = np.concatenate([self._rows, np.zeros(self._size, dtype=_ROW)])
        self._rows[self._size] = (
            self._next_ordinal,
            group.offset,
            group.length,
            file,
            group.step,
            min(group.num_responses, np.iinfo(np.int16).max),
            _CODE[group.outcome],
            group.mean_score,
        )
        self._size += 1
        self._next_ordinal += 1

    def drop_file(self, file: int) -> None:
        """Forgets the groups of a file."""
        self._keep(self._rows["file"][: self._size] != file)

    def get(self, ordinal: int) -> Entry | None:
        """A group by its number; ``None``: it is forgotten."""
        rows = self._rows[: self._size]
        place = int(np.searchsorted(rows["ordinal"], ordinal))
        if place == rows.size or rows["ordinal"][place] != ordinal:
            return None
        return _entry(rows[place])

    def counts(self) -> dict[str, int]:
        """Groups by outcome."""
        numbers = np.bincount(self._rows["outcome"][: self._size], minlength=len(_OUTCOMES))
        return {outcome.value: int(numbers[code]) for outcome, code in _CODE.items()}

    def matching(self, wanted: SampleFilter) -> npt.NDArray[np.int64]:
        """Places of the groups that match, the highest step first and in it the newest.

        Returns:
            [matches] for `entry` of the same state.
        """
        rows = self._rows[: self._size]
        keep = np.ones(rows.size, dtype=bool)
        if wanted.outcomes:
            keep &= np.isin(rows["outcome"], [_CODE[outcome] for outcome in wanted.outcomes])
        if wanted.first_step is not None:
            keep &= rows["step"] >= wanted.first_step
        if wanted.last_step is not None:
            keep &= rows["step"] <= wanted.last_step
        if wanted.least_score is not None:
            keep &= rows["score"] >= np.float32(wanted.least_score)
        if wanted.most_score is not None:
            keep &= rows["score"] <= np.float32(wanted.most_score)
        places = np.flatnonzero(keep)
        order = np.argsort(rows["step"][places], kind="stable")[::-1]
        ordered: npt.NDArray[np.int64] = places[order]
        return ordered

    def after(self, places: npt.NDArray[np.int64], cursor: Cursor) -> npt.NDArray[np.int64]:
        """Those of `places` that come behind a place in the list."""
        rows = self._rows
        step, ordinal = rows["step"][places], rows["ordinal"][places]
        later = (step < cursor.step) | ((step == cursor.step) & (ordinal < cursor.ordinal))
        behind: npt.NDArray[np.int64] = places[later]
        return behind

    def entry(self, place: int) -> Entry:
        """The group at one of `matching`'s places."""
        return _entry(self._rows[place])

    def _keep(self, keep: npt.NDArray[np.bool_]) -> None:
        left = self._rows[: self._size][keep]
        self._size = left.size
        capacity = max(_FIRST_CAPACITY, 1 << math.ceil(math.log2(max(left.size, 1) + 1)))
        self._rows = np.zeros(capacity, dtype=_ROW)
        self._rows[: left.size] = left


def _entry(row: np.void) -> Entry:
    return Entry(
        ordinal=int(row["ordinal"]),
        file=int(row["file"]),
        offset=int(row["offset"]),
        length=int(row["length"]),
        step=int(row["step"]),
        num_responses=int(row["num"]),
        outcome=_OUTCOMES[int(row["outcome"])],
        mean_score=float(row["score"]),
    )

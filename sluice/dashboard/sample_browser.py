"""The run's samples as the page browses them: an index of positions in files, a list, a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sluice.dashboard.sample_files import FileNews, SampleFiles, SampleFolders
from sluice.dashboard.sample_lines import GroupLines, GroupReader, ShownOutcome, shown_group
from sluice.telemetry.samples import SampledGroup

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
SEARCH_S = 1.0
READ_S = 0.5
_LOOK_EVERY = 16


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position in the list (highest step first); the next page begins after it."""

    step: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """The groups that are listed; ``None`` and empty exclude none.

    Args:
        outcomes: their outcome is one of these.
        first_step, last_step: bounds of their step, both included.
        least_score, most_score: bounds of the mean over scored responses, both included.
    """

    outcomes: frozenset[ShownOutcome] = frozenset()
    first_step: int | None = None
    last_step: int | None = None
    least_score: float | None = None
    most_score: float | None = None


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One group of the list. `file` is a number from `SampleFiles`."""

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
        """The position after which the next group follows."""
        return Cursor(self.step, self.ordinal)


class SampleIndex:
    """Groups in the order in which they were found, 40 bytes each.

    A full index drops its oldest half.

    Args:
        most_groups: the maximum of groups.
    """

    def __init__(self, most_groups: int = MOST_GROUPS) -> None:
        self._most_groups = most_groups
        self._rows = np.zeros(_FIRST_CAPACITY, dtype=_ROW)
        self._size = 0
        self._next_ordinal = 0

    def __len__(self) -> int:
        return self._size

    def add(self, file: int, group: GroupLines) -> None:
        """Add a group of a file."""
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
        """Drop the groups of a file."""
        self._keep(self._rows["file"][: self._size] != file)

    def get(self, ordinal: int) -> IndexEntry | None:
        """Return a group by its number; ``None``: it was dropped."""
        rows = self._rows[: self._size]
        place = int(np.searchsorted(rows["ordinal"], ordinal))
        if place == rows.size or rows["ordinal"][place] != ordinal:
            return None
        return _entry(rows[place])

    def counts(self) -> dict[str, int]:
        """Return the number of groups by outcome."""
        numbers = np.bincount(self._rows["outcome"][: self._size], minlength=len(_OUTCOMES))
        return {outcome.value: int(numbers[code]) for outcome, code in _CODE.items()}

    def matching(self, wanted: SampleFilter) -> npt.NDArray[np.int64]:
        """Return [matches] positions for `entry`: highest step first, then newest first.

        They are valid until the index changes.
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
        """Return those of `places` that come after a position in the list."""
        rows = self._rows
        step, ordinal = rows["step"][places], rows["ordinal"][places]
        later = (step < cursor.step) | ((step == cursor.step) & (ordinal < cursor.ordinal))
        behind: npt.NDArray[np.int64] = places[later]
        return behind

    def entry(self, place: int) -> IndexEntry:
        """Return the group at a position that `matching` returned."""
        return _entry(self._rows[place])

    def _keep(self, keep: npt.NDArray[np.bool_]) -> None:
        left = self._rows[: self._size][keep]
        self._size = left.size
        capacity = max(_FIRST_CAPACITY, 1 << math.ceil(math.log2(max(left.size, 1) + 1)))
        self._rows = np.zeros(capacity, dtype=_ROW)
        self._rows[: left.size] = left


def _entry(row: np.void) -> IndexEntry:
    return IndexEntry(
        ordinal=int(row["ordinal"]),
        file=int(row["file"]),
        offset=int(row["offset"]),
        length=int(row["length"]),
        step=int(row["step"]),
        num_responses=int(row["num"]),
        outcome=_OUTCOMES[int(row["outcome"])],
        mean_score=float(row["score"]),
    )


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A listed group with its texts."""

    entry: IndexEntry
    group: SampledGroup


@dataclass(frozen=True, slots=True)
class Page:
    """Some groups of a list.

    Attributes:
        groups: in the list's order.
        next: where the list continues; ``None``: it ends here.
        num_matching: groups that pass the filter, whatever their text.
        num_searched: groups whose text was searched for this page.
    """

    groups: list[FoundGroup]
    next: Cursor | None
    num_matching: int
    num_searched: int


class SampleBrowser:
    """The list of a run's groups. Only one thread at a time may call its methods.

    Args:
        folders: the folders with the samples.
        clock: seconds, monotonic.
    """

    def __init__(self, folders: SampleFolders, clock: Callable[[], float] = time.monotonic) -> None:
        self._files = SampleFiles(folders, clock)
        self._index = SampleIndex()
        self._clock = clock
        self._readers: dict[int, GroupReader] = {}
        self._num_unread_of_gone = 0

    @property
    def num_unread(self) -> int:
        """Lines that are not groups, or are too long."""
        undecoded = sum(reader.num_unread for reader in self._readers.values())
        return self._num_unread_of_gone + undecoded + self._files.num_left_out

    @property
    def counts(self) -> dict[str, int]:
        """Indexed groups by outcome."""
        return self._index.counts()

    def read(self) -> bool:
        """Index new groups for a bounded time; return whether more are there already.

        Raises:
            OSError: a folder or file cannot be read.
        """
        ends_s = self._clock() + READ_S
        for news in self._files.news():
            self._take(news)
            if self._clock() > ends_s:
                return True
        return False

    def _take(self, news: FileNews) -> None:
        if news.is_gone:
            self._index.drop_file(news.number)
            if (reader := self._readers.pop(news.number, None)) is not None:
                self._num_unread_of_gone += reader.num_unread
        if not news.lines and news.number not in self._readers:
            return
        reader = self._readers.setdefault(news.number, GroupReader(news.kind))
        for group in reader.take(news.lines):
            self._index.add(news.number, group)
        if news.is_whole:
            for group in reader.end():
                self._index.add(news.number, group)

    def page(
        self, wanted: SampleFilter, text: str = "", *, after: Cursor | None = None, most: int = 25
    ) -> Page:
        """Return some groups of the list, highest step first.

        Args:
            wanted: the groups to list.
            text: only groups with this text in the prompt or in a response, in any case.
            after: the end of the previous page.
            most: the maximum of groups. A search ends earlier after `SEARCH_S`; then the page
                may be empty and still have a next one.
        """
        places = self._index.matching(wanted)
        num_matching = places.size
        if after is not None:
            places = self._index.after(places, after)
        found: list[FoundGroup] = []
        needle, ends_s = text.casefold(), self._clock() + SEARCH_S
        last: IndexEntry | None = None
        num_searched = 0
        for place in places.tolist():
            is_late = num_searched % _LOOK_EVERY == 0 and self._clock() > ends_s
            if len(found) == most or (is_late and num_searched):
                return Page(found, last.cursor if last else None, num_matching, num_searched)
            last = self._index.entry(place)
            num_searched += 1
            group = self._load(last)
            if group is not None and (not needle or _holds(group, needle)):
                found.append(FoundGroup(last, group))
        return Page(found, None, num_matching, num_searched)

    def group(self, ordinal: int) -> FoundGroup | None:
        """Return one group by its number; ``None``: it does not exist, or was deleted."""
        entry = self._index.get(ordinal)
        group = None if entry is None else self._load(entry)
        return None if entry is None or group is None else FoundGroup(entry, group)

    def _load(self, entry: IndexEntry) -> SampledGroup | None:
        place = self._files.place(entry.file)
        if place is None:
            return None
        kind, path = place
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                return shown_group(kind, file.read(entry.length))
        except OSError:  # deleted since
            return None


def _holds(group: SampledGroup, needle: str) -> bool:
    return needle in group.prompt.casefold() or any(
        needle in response.text.casefold() for response in group.responses
    )

"""The run's samples as the page browses them: indexed as they come, listed, searched, opened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sluice.dashboard.sample_files import FileNews, SampleFiles, SampleFolders
from sluice.dashboard.sample_index import Cursor, Entry, SampleFilter, SampleIndex
from sluice.dashboard.sample_lines import GroupReader, shown_group
from sluice.telemetry.sampled_group import SampledGroup

__all__ = ["FoundGroup", "Page", "SampleBrowser"]

SEARCH_S = 1.0
READ_S = 0.5
_LOOK_EVERY = 16


@dataclass(frozen=True, slots=True)
class FoundGroup:
    """A listed group with its texts."""

    entry: Entry
    group: SampledGroup


@dataclass(frozen=True, slots=True)
class Page:
    """Some groups of a list.

    Attributes:
        groups: in the list's order.
        next: where the list goes on; ``None``: it ends here.
        num_matching: groups that the filter lets through, the text not considered.
        num_searched: of these how many were looked at for this page.
    """

    groups: list[FoundGroup]
    next: Cursor | None
    num_matching: int
    num_searched: int


class SampleBrowser:
    """All methods are to be called by one thread at a time.

    Args:
        folders: where the samples are.
        clock: seconds, monotonic.
    """

    def __init__(self, folders: SampleFolders, clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._index = SampleFiles(folders, clock), SampleIndex()
        self._clock = clock
        self._readers: dict[int, GroupReader] = {}
        self._num_unread_of_gone = 0

    @property
    def num_unread(self) -> int:
        """Lines that are no groups, or too long."""
        undecoded = sum(reader.num_unread for reader in self._readers.values())
        return self._num_unread_of_gone + undecoded + self._files.num_left_out

    @property
    def counts(self) -> dict[str, int]:
        """Indexed groups by outcome."""
        return self._index.counts()

    def read(self) -> bool:
        """Indexes what came, for a bounded time; whether there is more at once.

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
        """Some groups of the list, the highest step first.

        Args:
            wanted: which groups.
            text: has to be in the prompt or in a response, whatever the case of its letters.
            after: the end of the page before.
            most: groups of this page. A search ends earlier when it has taken `SEARCH_S`; then
                the page may be empty and still have a next one.
        """
        places = self._index.matching(wanted)
        num_matching = places.size
        if after is not None:
            places = self._index.after(places, after)
        found: list[FoundGroup] = []
        needle, ends_s = text.casefold(), self._clock() + SEARCH_S
        last: Entry | None = None
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
        """One group by its number; ``None``: it is not there, or not any more."""
        entry = self._index.get(ordinal)
        group = None if entry is None else self._load(entry)
        return None if entry is None or group is None else FoundGroup(entry, group)

    def _load(self, entry: Entry) -> SampledGroup | None:
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

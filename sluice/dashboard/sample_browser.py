"""The run's samples as the page browses them: files, an index of their groups, a search."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sluice.dashboard.line_tail import LineTail
from sluice.dashboard.sample_lines import (
    GroupLines,
    GroupReader,
    SampleSource,
    ShownOutcome,
    read_group,
)
from sluice.telemetry.samples import FOLDER_NAME, SampledGroup, SampledResponse

MAX_GROUPS = 200_000
_EXAMPLES = "validation"
SEARCH_S = 1.0
READ_S = 0.5
_LOOK_EVERY = 16


@dataclass(frozen=True, slots=True)
class PageCursor:
    """A position in the list (highest step first); the next page begins after it."""

    step: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class SampleFilter:
    """The groups that are listed; ``None`` and empty exclude none.

    Args:
        outcomes: their outcome is one of these.
        first_step, last_step: bounds of their step, both included.
        min_score, max_score: bounds of the mean over scored responses, both included.
    """

    outcomes: frozenset[ShownOutcome] = frozenset()
    first_step: int | None = None
    last_step: int | None = None
    min_score: float | None = None
    max_score: float | None = None

    def admits(self, lines: GroupLines) -> bool:
        """Return whether a group is listed; a bound of the score excludes groups without one."""
        score = lines.mean_score
        return (
            (not self.outcomes or lines.outcome in self.outcomes)
            and (self.first_step is None or lines.step >= self.first_step)
            and (self.last_step is None or lines.step <= self.last_step)
            and (self.min_score is None or score >= self.min_score)
            and (self.max_score is None or score <= self.max_score)
        )


@dataclass(slots=True)
class SampleFile:
    """A file with groups; `stamp` is its inode and size when it was last read to its end."""

    kind: SampleSource
    path: Path
    tail: LineTail
    reader: GroupReader
    stamp: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A group of the list, without its texts."""

    ordinal: int
    file: SampleFile
    lines: GroupLines

    @property
    def cursor(self) -> PageCursor:
        """The position before the next group."""
        return PageCursor(self.lines.step, self.ordinal)


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A listed group with its texts."""

    entry: IndexEntry
    group: SampledGroup


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Some groups of a list.

    Attributes:
        groups: in the list's order.
        next: where the list continues; ``None``: it ends here.
        num_matching: groups that pass the filter, whatever their text.
        num_searched: groups whose text was searched for this page.
    """

    groups: list[ListedGroup]
    next: PageCursor | None
    num_matching: int
    num_searched: int


@dataclass(slots=True)
class SampleBrowser:
    """The list of a run's groups. Only one thread at a time may call its methods.

    Args:
        folders: where the samples are; one that does not exist has none.
        clock: seconds, monotonic.
        max_groups: a full index drops its oldest half.
    """

    folders: dict[SampleSource, Path]
    clock: Callable[[], float] = time.monotonic
    max_groups: int = MAX_GROUPS
    _files: dict[Path, SampleFile] = field(default_factory=dict)
    _index: dict[int, IndexEntry] = field(default_factory=dict)
    _next_ordinal: int = 0
    _num_unread_of_gone: int = 0

    @property
    def num_unread(self) -> int:
        """Lines that are not groups, or are too long."""
        files = self._files.values()
        of_files = (file.reader.num_unread + file.tail.num_left_out for file in files)
        return self._num_unread_of_gone + sum(of_files)

    @property
    def counts(self) -> dict[str, int]:
        """Indexed groups by outcome."""
        by_outcome = Counter(entry.lines.outcome for entry in self._index.values())
        return {outcome.value: by_outcome[outcome] for outcome in ShownOutcome}

    def read(self) -> bool:
        """Index new groups for `READ_S`; return whether more are there already.

        Raises:
            OSError: a folder or file cannot be read.
        """
        ends_s = self.clock() + READ_S
        for kind, folder in self.folders.items():
            present = _numbered_files(folder)
            for file in [f for f in self._files.values() if f.kind is kind]:
                if file.path not in present:
                    self._drop_file(file)
                    self._num_unread_of_gone += file.tail.num_left_out
                    del self._files[file.path]
            for path, stamp in present.items():
                if not self._read_file(kind, path, stamp, ends_s):
                    return True
        return False

    def _read_file(
        self, kind: SampleSource, path: Path, stamp: tuple[int, int], ends_s: float
    ) -> bool:
        """Index the new groups of a file; return whether the time sufficed."""
        file = self._files.get(path)
        if file is None:
            file = SampleFile(kind, path, LineTail(path), GroupReader(kind))
            self._files[path] = file
        has_more = file.stamp != stamp
        while has_more:
            new_lines = file.tail.read_new_lines()
            if new_lines.is_reset:
                self._drop_file(file)
                file.reader = GroupReader(kind)
            self._add(file, file.reader.take(new_lines.lines))
            has_more = new_lines.has_more
            if has_more and self.clock() > ends_s:
                return False
        if file.stamp != stamp:
            self._add(file, file.reader.end())
            file.stamp = stamp
        return True

    def _add(self, file: SampleFile, groups: Iterable[GroupLines]) -> None:
        for lines in groups:
            if len(self._index) >= self.max_groups:
                newest = list(self._index.values())[-self.max_groups // 2 :]
                self._index = {entry.ordinal: entry for entry in newest}
            entry = IndexEntry(self._next_ordinal, file, lines)
            self._index[entry.ordinal] = entry
            self._next_ordinal += 1

    def _drop_file(self, file: SampleFile) -> None:
        """Drop the groups of a file that was deleted or replaced."""
        self._num_unread_of_gone += file.reader.num_unread
        self._index = {n: entry for n, entry in self._index.items() if entry.file is not file}

    def page(
        self,
        sample_filter: SampleFilter,
        text: str = "",
        *,
        after: PageCursor | None = None,
        limit: int = 25,
    ) -> GroupPage:
        """Return some groups of the list, highest step first, then newest first.

        Args:
            sample_filter: the groups to list.
            text: only groups with this text in the prompt or in a response, in any case.
            after: the end of the previous page.
            limit: the maximum of groups. A search ends earlier after `SEARCH_S`; then the page
                may be empty and still have a next one.
        """
        matching = [entry for entry in self._index.values() if sample_filter.admits(entry.lines)]
        num_matching = len(matching)
        if after is not None:
            end = (after.step, after.ordinal)
            matching = [entry for entry in matching if (entry.lines.step, entry.ordinal) < end]
        matching.sort(key=lambda entry: (entry.lines.step, entry.ordinal), reverse=True)
        groups: list[ListedGroup] = []
        needle, ends_s = text.casefold(), self.clock() + SEARCH_S
        for num_searched, entry in enumerate(matching):
            is_late = num_searched % _LOOK_EVERY == 0 and self.clock() > ends_s
            if len(groups) == limit or (is_late and num_searched):
                last_searched = matching[num_searched - 1]
                return GroupPage(groups, last_searched.cursor, num_matching, num_searched)
            group = _load(entry)
            if group is not None and (not needle or _contains(group, needle)):
                groups.append(ListedGroup(entry, group))
        return GroupPage(groups, None, num_matching, len(matching))

    def group(self, ordinal: int) -> ListedGroup | None:
        """Return one group by its number; ``None``: it does not exist, or was deleted."""
        entry = self._index.get(ordinal)
        group = None if entry is None else _load(entry)
        return None if entry is None or group is None else ListedGroup(entry, group)


def folders_of_run(run_dir: Path, validation_data_dir: str | None) -> dict[SampleSource, Path]:
    """Return the folders with samples, from the run's folder and its configuration.

    Without a folder for all validation samples the trainer writes examples of each validation.
    """
    return {
        SampleSource.ARCHIVE: run_dir / FOLDER_NAME,
        SampleSource.VALIDATION: Path(validation_data_dir or run_dir / _EXAMPLES),
    }


def _numbered_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return ``<number>.jsonl`` by number, with inode and size; none without a folder."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return {}
    files = {}
    with entries as inside:
        for entry in inside:
            stem, suffix = os.path.splitext(entry.name)
            if suffix == ".jsonl" and stem.isascii() and stem.isdigit():
                try:
                    status = entry.stat()
                except FileNotFoundError:  # deleted meanwhile, like the oldest of the archive
                    continue
                files[int(stem)] = Path(entry.path), (status.st_ino, status.st_size)
    return dict(files[number] for number in sorted(files))


def _load(entry: IndexEntry) -> SampledGroup | None:
    try:
        with entry.file.path.open("rb") as file:
            file.seek(entry.lines.offset)
            return read_group(entry.file.kind, file.read(entry.lines.length))
    except OSError:  # deleted since
        return None


def _response_texts(response: SampledResponse) -> Iterator[str]:
    yield response.text
    for turn in response.turns:
        yield from (turn.read, turn.text)


def _contains(group: SampledGroup, needle: str) -> bool:
    return needle in group.prompt.casefold() or any(
        needle in text.casefold()
        for response in group.responses
        for text in _response_texts(response)
    )

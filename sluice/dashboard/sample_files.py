"""Which files of a run hold samples, and what is new in them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sluice.dashboard.line_tail import Line, LineTail
from sluice.dashboard.sample_lines import SampleSource
from sluice.telemetry.samples import FOLDER_NAME

__all__ = ["FileNews", "SampleFiles", "SampleFolders", "folders_of_run"]

_EXAMPLES = "validation"
# Within one tick of a file system's clock, a second at the coarsest, a folder changes unseen.
_SETTLED_S = 2.0


@dataclass(frozen=True, slots=True)
class SampleFolders:
    """Where a run's samples are; ``None``: not written.

    `trained` is read only where there is no archive, which holds the same groups and more.
    """

    archive: Path
    trained: Path | None
    validation: Path | None


@dataclass(frozen=True, slots=True)
class FileNews:
    """What became of one file.

    Attributes:
        number: names the file, the same for as long as it is there.
        is_gone: what was told of it before counts no more.
        lines: that came; nothing of a file that is gone for good.
        is_whole: the file was read to its end.
    """

    number: int
    kind: SampleSource
    is_gone: bool = False
    lines: list[Line] = field(default_factory=list)
    is_whole: bool = False


@dataclass(slots=True)
class _FolderStamp:
    changed_ns: int
    seen_s: float
    is_settled: bool = False


@dataclass(slots=True)
class _Known:
    number: int
    tail: LineTail
    stamp: tuple[int, int] | None = None  # inode and size when it was last read to its end


class SampleFiles:
    """Looks at the folders of a run.

    Files of the archive grow; those of dumps are replaced whole, and are looked at only while
    their folder changes, and until it has not for `_SETTLED_S`.

    Args:
        folders: where the files are.
        clock: seconds, monotonic.
    """

    def __init__(self, folders: SampleFolders, clock: Callable[[], float] = time.monotonic) -> None:
        self._folders, self._clock = folders, clock
        self._num_left_out_of_gone = 0
        self._known: dict[tuple[SampleSource, Path], _Known] = {}
        self._paths: dict[int, tuple[SampleSource, Path]] = {}
        self._folder_stamps: dict[Path, _FolderStamp] = {}
        self._next = 0

    def news(self) -> Iterator[FileNews]:
        """What came since the last call, file by file, oldest first.

        A caller may stop before the end; what it did not take comes the next time.

        Raises:
            OSError: a folder or file is there and cannot be read.
        """
        has_archive = self._folders.archive.is_dir()
        yield from self._folder(SampleSource.ARCHIVE, self._folders.archive, grows=True)
        if self._folders.trained is not None:
            if has_archive:
                yield from self._forget_folder(SampleSource.TRAINED, set())
            else:
                yield from self._folder(SampleSource.TRAINED, self._folders.trained, grows=False)
        if self._folders.validation is not None:
            yield from self._folder(SampleSource.VALIDATION, self._folders.validation, grows=False)

    @property
    def num_left_out(self) -> int:
        """Lines that were too long to be read."""
        present = (known.tail.num_left_out for known in self._known.values())
        return self._num_left_out_of_gone + sum(present)

    def place(self, number: int) -> tuple[SampleSource, Path] | None:
        """Kind and path of a file by its number; ``None``: it is gone."""
        return self._paths.get(number)

    def _folder(self, kind: SampleSource, folder: Path, *, grows: bool) -> Iterator[FileNews]:
        seen = None if grows else self._seen(folder)
        if seen is not None and seen.is_settled:
            return
        began_s, found = self._clock(), _numbered(folder)
        yield from self._forget_folder(kind, {path for path, _ in found})
        for path, file_stamp in found:
            yield from self._file(kind, path, file_stamp)
        if seen is not None:
            seen.is_settled = began_s - seen.seen_s >= _SETTLED_S

    def _seen(self, folder: Path) -> _FolderStamp | None:
        """Since when the folder has its stamp, by our clock: a server's may be another."""
        changed_ns, seen = _changed_at(folder), self._folder_stamps.get(folder)
        if changed_ns is None:
            self._folder_stamps.pop(folder, None)
            return None
        if seen is None or seen.changed_ns != changed_ns:
            seen = self._folder_stamps[folder] = _FolderStamp(changed_ns, self._clock())
        return seen

    def _file(self, kind: SampleSource, path: Path, stamp: tuple[int, int]) -> Iterator[FileNews]:
        known = self._known.get((kind, path))
        if known is None:
            known = self._known[kind, path] = _Known(self._next, LineTail(path))
            self._paths[known.number] = (kind, path)
            self._next += 1
        if known.stamp == stamp:
            return
        has_more = True
        while has_more:
            taken = known.tail.take()
            has_more = taken.has_more
            if taken.is_reset or taken.lines:
                yield FileNews(known.number, kind, taken.is_reset, taken.lines)
        known.stamp = stamp
        yield FileNews(known.number, kind, is_whole=True)

    def _forget_folder(self, kind: SampleSource, present: set[Path]) -> Iterator[FileNews]:
        gone = [(k, path) for k, path in self._known if k is kind and path not in present]
        for key in gone:
            known = self._known.pop(key)
            self._paths.pop(known.number, None)
            self._num_left_out_of_gone += known.tail.num_left_out
            yield FileNews(known.number, kind, is_gone=True)


def folders_of_run(
    run_dir: Path, rollout_data_dir: str | None, validation_data_dir: str | None
) -> SampleFolders:
    """The folders, from the run's folder and its configuration.

    Without a folder for all validation samples there are the trainer's examples of each.
    """
    return SampleFolders(
        run_dir / FOLDER_NAME,
        None if rollout_data_dir is None else Path(rollout_data_dir),
        run_dir / _EXAMPLES if validation_data_dir is None else Path(validation_data_dir),
    )


def _changed_at(folder: Path) -> int | None:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _numbered(folder: Path) -> list[tuple[Path, tuple[int, int]]]:
    """``<number>.jsonl`` by number, with inode and size; none without a folder."""
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return []
    found = []
    with entries as inside:
        for entry in inside:
            stem, suffix = os.path.splitext(entry.name)
            if suffix == ".jsonl" and stem.isascii() and stem.isdigit():
                try:
                    seen = entry.stat()
                except FileNotFoundError:  # deleted since, as the oldest of the archive are
                    continue
                found.append((int(stem), Path(entry.path), (seen.st_ino, seen.st_size)))
    return [(path, stamp) for _, path, stamp in sorted(found, key=lambda one: one[0])]

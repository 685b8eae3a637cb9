"""Groups that ended, as lines in files of a folder whose size is bounded.

``<folder>/<number>.jsonl``: the highest number is written to; when it has its share of the bytes
the next one begins, and the lowest are deleted. A process that starts anew begins a file of its
own, so that a line torn by a kill never runs into another.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

FOLDER_NAME = "samples"
_NUM_FILES = 8
_FLUSH_BYTES = 1 << 20
_MIB = 1 << 20


class SampleArchive:
    """Appends lines and deletes the oldest.

    Args:
        folder: made when the first line is written.
        most_bytes: of all files together; what one line is longer than an eighth of it comes on
            top.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._file_bytes = max(most_bytes // _NUM_FILES, 1)
        self._number: int | None = None
        self._size = 0

    def append(self, lines: Iterable[bytes]) -> None:
        """Writes lines, each without its newline; holds few of them at a time.

        Raises:
            OSError: the folder cannot be written.
        """
        pending = bytearray()
        for line in lines:
            if self._number is None or self._size + len(pending) >= self._file_bytes:
                self._write(pending)
                self._begin_file()
            pending += line + b"\n"
            if len(pending) >= _FLUSH_BYTES:
                self._write(pending)
        self._write(pending)

    def _write(self, pending: bytearray) -> None:
        if pending:
            with self._path(self._number or 0).open("ab") as file:
                file.write(pending)
            self._size += len(pending)
            pending.clear()

    def _begin_file(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        present = archive_files(self._folder)
        newest = max((int(path.stem) for path in present), default=0)
        self._number, self._size = max(newest, self._number or 0) + 1, 0
        held = sum(path.stat().st_size for path in present)
        for path in present:
            if held + self._file_bytes <= self._most_bytes:
                break
            held -= path.stat().st_size
            path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.jsonl"


def archive_files(folder: Path) -> list[Path]:
    """The files of an archive, oldest first; none if there is no such folder."""
    found = [path for path in folder.glob("*.jsonl") if path.stem.isascii() and path.stem.isdigit()]
    return sorted(found, key=lambda path: int(path.stem))


def mib(number: int) -> int:
    """Bytes of so many MiB."""
    return number * _MIB

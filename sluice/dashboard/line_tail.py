"""New whole lines of a file that grows, is replaced, or is cut short."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

__all__ = ["UNREADABLE", "Line", "LineTail", "Taken"]

# What decoding a line may raise: no JSON, text that is no UTF-8, numbers and nesting too large.
UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)

CHUNK_BYTES = 4 << 20
MOST_LINE_BYTES = 64 << 20
_NEWLINE = b"\n"


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its newline, and where it begins in the file, bytes."""

    offset: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """What one look at the file gave.

    Attributes:
        lines: whole lines that were not given before; a last one without newline waits.
        is_anew: the file was replaced, cut short or deleted: what was given before counts no more.
        has_more: there are further whole or unfinished lines to look at, at once.
    """

    lines: list[Line] = field(default_factory=list)
    is_reset: bool = False
    has_more: bool = False


class LineTail:
    """Gives each line of a file once, in bounded pieces.

    Args:
        path: it may not exist yet.
        chunk_bytes: read at a time; a longer line is read whole.
        most_line_bytes: a line beyond it is left out and counted in `num_left_out`.
    """

    def __init__(
        self,
        path: Path,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        most_line_bytes: int = MOST_LINE_BYTES,
    ) -> None:
        self._path, self._chunk_bytes, self._most = path, chunk_bytes, most_line_bytes
        self._offset = 0
        self._inode: int | None = None
        self._is_within_long_line = False
        self.num_left_out = 0

    def take(self) -> Taken:
        """Lines that came since the last call.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return Taken(is_reset=self._forget())
        with file:
            is_reset = self._is_other(file) and self._forget()
            self._inode = _inode(file)
            before = self._offset
            lines = self._lines(file)
            return Taken(lines, is_reset, has_more=self._offset > before)

    def _forget(self) -> bool:
        """Begins at the start; whether anything had been given."""
        was_read = self._offset > 0
        self._offset, self._inode, self._is_within_long_line = 0, None, False
        return was_read

    def _is_other(self, file: BinaryIO) -> bool:
        """Whether it is not the file that was read, grown longer."""
        if self._offset == 0:
            return False
        if _inode(file) != self._inode:
            return True
        file.seek(self._offset - 1)
        last = file.read(1)
        return not last or (last != _NEWLINE and not self._is_within_long_line)

    def _lines(self, file: BinaryIO) -> list[Line]:
        file.seek(self._offset)
        if self._is_within_long_line and not self._pass_long_line(file):
            return []
        chunk = file.read(self._chunk_bytes)
        while _NEWLINE not in chunk and len(chunk) < self._most:
            further = file.read(self._chunk_bytes)
            if not further:
                return []  # the last line is being written
            chunk += further
        whole, newline, _ = chunk.rpartition(_NEWLINE)
        if not newline:
            self._is_within_long_line = True
            self.num_left_out += 1
            self._offset += len(chunk)
            return []
        found, begin = [], self._offset
        for text in whole.split(_NEWLINE):
            found.append(Line(begin, text))
            begin += len(text) + 1
        self._offset = begin
        return found

    def _pass_long_line(self, file: BinaryIO) -> bool:
        """Reads on to the end of a line that is left out; whether it came."""
        while chunk := file.read(self._chunk_bytes):
            end = chunk.find(_NEWLINE)
            if end >= 0:
                self._offset += end + 1
                self._is_within_long_line = False
                file.seek(self._offset)
                return True
            self._offset += len(chunk)
        return False


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino

"""New whole lines of a file that grows, is replaced, or is truncated."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec

# The errors of decoding a line: no JSON, no UTF-8, too large a number, too deep a nesting.
UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError)

CHUNK_BYTES = 4 << 20
_NEWLINE = b"\n"


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its newline, and its position in the file in bytes."""

    offset: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of one look at the file.

    Attributes:
        lines: whole lines that no earlier look returned; a last one without newline waits.
        is_reset: the file was replaced, truncated or deleted: earlier lines are void.
        has_more: the file may have further lines already.
    """

    lines: list[Line] = field(default_factory=list)
    is_reset: bool = False
    has_more: bool = False


class LineTail:
    """The new lines of a file, each once, in bounded pieces.

    Args:
        path: the file; it may not exist yet.
        chunk_bytes: about as many are read at a time; a longer line is read whole.
    """

    def __init__(self, path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._offset = 0
        self._inode: int | None = None

    def take(self) -> Taken:
        """Return the lines since the last call.

        Raises:
            OSError: the file exists and cannot be read.
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
        """Restart at the beginning; return whether anything had been read."""
        was_read = self._offset > 0
        self._offset = 0
        self._inode = None
        return was_read

    def _is_other(self, file: BinaryIO) -> bool:
        """Return whether `file` is another one than before, not the same with more lines."""
        if self._offset == 0:
            return False
        if _inode(file) != self._inode:
            return True
        file.seek(self._offset - 1)
        return file.read(1) != _NEWLINE

    def _lines(self, file: BinaryIO) -> list[Line]:
        file.seek(self._offset)
        found = []
        for text in file.readlines(self._chunk_bytes):
            if not text.endswith(_NEWLINE):
                break  # it is being written
            found.append(Line(self._offset, text[:-1]))
            self._offset += len(text)
        return found


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino

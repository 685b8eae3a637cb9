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
MAX_LINE_BYTES = 64 << 20
_NEWLINE = b"\n"


@dataclass(frozen=True, slots=True)
class TailLine:
    """One line without its newline, and its position in the file in bytes."""

    offset: int
    text: bytes


@dataclass(frozen=True, slots=True)
class NewLines:
    """The result of one look at the file.

    Attributes:
        lines: whole lines that no earlier look returned; a last one without newline waits.
        is_reset: the file was replaced, truncated or deleted: earlier lines are void.
        has_more: the file may have further lines already.
    """

    lines: list[TailLine] = field(default_factory=list)
    is_reset: bool = False
    has_more: bool = False


class LineTail:
    """The new lines of a file, each once, in bounded pieces.

    Args:
        path: the file; it may not exist yet.
        chunk_bytes: about as many are read at a time; a longer line is read whole.
        max_line_bytes: a longer line is left out and counted in `num_left_out`.
    """

    def __init__(
        self,
        path: Path,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._max_line_bytes = max_line_bytes
        self._is_within_long_line = False
        self.num_left_out = 0
        self._offset = 0
        self._inode: int | None = None

    def read_new_lines(self) -> NewLines:
        """Return the lines since the last call.

        Raises:
            OSError: the file exists and cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return NewLines(is_reset=self._reset())
        with file:
            is_reset = self._is_replaced(file) and self._reset()
            self._inode = _inode(file)
            before = self._offset
            lines = self._read_lines(file)
            return NewLines(lines, is_reset, has_more=self._offset > before)

    def _reset(self) -> bool:
        """Restart at the beginning; return whether anything had been read."""
        was_read = self._offset > 0
        self._offset = 0
        self._inode = None
        self._is_within_long_line = False
        return was_read

    def _is_replaced(self, file: BinaryIO) -> bool:
        """Return whether `file` is another one than before, not the same with more lines."""
        if self._offset == 0:
            return False
        if _inode(file) != self._inode:
            return True
        file.seek(self._offset - 1)
        last_byte = file.read(1)
        return not last_byte or (last_byte != _NEWLINE and not self._is_within_long_line)

    def _read_lines(self, file: BinaryIO) -> list[TailLine]:
        file.seek(self._offset)
        lines, end = [], self._offset + self._chunk_bytes
        while self._offset < end and (text := file.readline(self._max_line_bytes)):
            is_end = text.endswith(_NEWLINE)
            if not is_end and len(text) < self._max_line_bytes:
                break  # it is being written
            if is_end and not self._is_within_long_line:
                lines.append(TailLine(self._offset, text[:-1]))
            self.num_left_out += not (is_end or self._is_within_long_line)
            self._is_within_long_line = not is_end
            self._offset += len(text)
        return lines


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino

"""Files with one JSON object a line: an index of every thousandth line, rows parsed when drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec

from sluice.data.image_sources import usable_images
from sluice.data.prompt_rows import GROUND_TRUTH, PromptColumns, check_column_names
from sluice.data.row_blocks import ROWS_PER_READ, PromptAndTruth, RowBlock, RowIndexes
from sluice.errors import DataError

LONGEST_LINE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class LineRows:
    """Rows as lines of text, each with its path and number for messages."""

    path: str
    first: int
    lines: tuple[bytes, ...]
    numbers: tuple[int, ...] | None = None  # of the rows in the file, where they have gaps

    def __len__(self) -> int:
        return len(self.lines)

    def slice(self, start: int, stop: int) -> LineRows:
        """Rows ``[start, stop)``."""
        numbers = None if self.numbers is None else self.numbers[start:stop]
        return LineRows(self.path, self.first + start, self.lines[start:stop], numbers)

    def take(self, indexes: RowIndexes) -> LineRows:
        """These rows."""
        chosen = [int(index) for index in indexes]
        numbers = tuple(self._number(index) for index in chosen)
        return LineRows(self.path, 0, tuple(self.lines[i] for i in chosen), numbers)

    def values(self, index: int) -> Mapping[str, object]:
        """Columns of one row; `DataError` if the line is no JSON object."""
        return parse_line(self.path, self._number(index), self.lines[index])

    def prompts_and_truths(self, columns: PromptColumns) -> Iterator[PromptAndTruth]:
        """Of each row what tells it from others."""
        for index in range(len(self)):
            values = self.values(index)
            turns = values.get(columns.prompt)
            turns = turns if isinstance(turns, list) else []
            truth = _text(values.get(columns.reward_model), GROUND_TRUTH)
            roles = tuple(_text(turn, "role") for turn in turns)
            contents = tuple(_text(turn, "content") for turn in turns)
            images = usable_images(values.get(columns.images)) if columns.images else ()
            yield PromptAndTruth(roles, contents, truth, images)

    def _number(self, index: int) -> int:
        return self.first + index if self.numbers is None else self.numbers[index]


def json_line_blocks(path: str, columns: PromptColumns, start: int) -> Iterator[RowBlock]:
    """Blocks of lines of a file whose first row is number `start` of all; reads the file once.

    Blank lines are no rows.

    Raises:
        DataError: a line is too long, or the first is no JSON object with the columns needed.
    """
    names: tuple[str, ...] = ()
    file_start, offset, first_byte, num_rows = start, 0, 0, 0
    for line in lines_of(path):
        if line.strip():
            if not names:
                row = parse_line(path, 0, line)
                names = check_column_names(path, list(row), columns)
            num_rows += 1
        offset += len(line)
        if num_rows == ROWS_PER_READ:
            yield RowBlock(path, first_byte, names, file_start, start, num_rows)
            start, first_byte, num_rows = start + num_rows, offset, 0
    if num_rows:
        yield RowBlock(path, first_byte, names, file_start, start, num_rows)


def read_lines(block: RowBlock) -> Iterator[LineRows]:
    """The rows of a block; `DataError` if the file has changed since it was indexed."""
    rows = (line for line in lines_of(block.path, block.index) if line.strip())
    lines = tuple(islice(rows, block.num_rows))
    if len(lines) < block.num_rows:
        raise DataError(f"{block.path}: is shorter than at the start; restore the file")
    yield LineRows(block.path, block.start - block.file_start, lines)


def parse_line(path: str, row: int, line: bytes) -> dict[str, object]:
    """The object on a line; `DataError` naming file and row otherwise."""
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if row == 0 and line.lstrip().startswith(b"["):
            problem = "the file is one JSON array; write one object a line (jq -c '.[]')"
        else:
            problem = f"no JSON object ({error}); write one object a line"
        raise DataError(f"{path}, row {row}: {problem}") from error


def lines_of(path: str, first_byte: int = 0) -> Iterator[bytes]:
    """Lines from a byte on, with their ends; `DataError` if one is too long to be a row."""
    try:
        with open(path, "rb") as file:
            file.seek(first_byte)
            while line := file.readline(LONGEST_LINE_BYTES + 1):
                if len(line) > LONGEST_LINE_BYTES:
                    raise DataError(
                        f"{path}: a line of more than {LONGEST_LINE_BYTES} bytes; "
                        "write one object a line"
                    )
                yield line
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}; restore the file") from error


def _text(found: object, key: str) -> str | None:
    value = found.get(key) if isinstance(found, Mapping) else None
    return value if isinstance(value, str) else None

"""Pieces of data files: what is read at once, and rows in the form their file keeps them in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from sluice.data.image_sources import ImageSource
from sluice.data.prompt_rows import PromptColumns, PromptRow, decode_row

ROWS_PER_READ = 1024

RowIndexes = npt.NDArray[np.int64]


class PromptAndTruth(NamedTuple):
    """What tells a row from others; ``None`` where it holds no text, which no usable row does."""

    roles: Sequence[str | None]
    contents: Sequence[str | None]
    truth: str | None
    images: Sequence[ImageSource] = ()


class Rows(Protocol):
    """Some rows of a file, not converted yet."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def slice(self, start: int, stop: int) -> Self:
        """Rows ``[start, stop)`` without copying them."""
        ...

    def take(self, indexes: RowIndexes) -> Self:
        """These rows."""
        ...

    def values(self, index: int) -> Mapping[str, object]:
        """Columns of one row; `DataError` if the row cannot be read."""
        ...

    def prompts_and_truths(self, columns: PromptColumns) -> Iterator[PromptAndTruth]:
        """Of each row its messages, its ground truth, and its images where they are read."""
        ...


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Rows of a file that are found without reading those before them.

    A row group of a Parquet file, or some lines of JSON. Rows are ``[start, start + num_rows)`` of
    all files counted together, and the file's first row is `file_start`.
    """

    path: str
    index: int  # of the row group; for lines their first byte
    columns: tuple[str, ...]
    file_start: int
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Slab:
    """Some rows of one block."""

    path: str
    numbers: RowIndexes  # [rows], index within the file
    rows: Rows

    def __len__(self) -> int:
        return int(self.numbers.size)

    def slice(self, start: int, stop: int) -> Slab:
        """Rows ``[start, stop)`` without copying them."""
        return Slab(self.path, self.numbers[start:stop], self.rows.slice(start, stop))

    def decode(self, index: int, columns: PromptColumns) -> PromptRow:
        """Row `index` of this slab; `DataError` if it is malformed."""
        number = int(self.numbers[index])
        return decode_row(self.rows.values(index), columns, path=self.path, row=number)

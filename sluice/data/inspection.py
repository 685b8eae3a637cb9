"""The content of prompt files: sources, lengths, copies, and rows that cannot be used."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sluice.data.prompt_files import ChunkReader, PromptFiles
from sluice.data.prompt_rows import PromptRow
from sluice.data.row_files import digest_of
from sluice.data.scoring import refuses_truth, scorer_name
from sluice.errors import SluiceError
from sluice.types import ChatMessage

MAX_PROBLEMS_KEPT = 20
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)

MeasureTokens = Callable[[Sequence[ChatMessage]], int]
CheckRow = Callable[[PromptRow, str], object]
Lengths = npt.NDArray[np.int64]


@dataclass(slots=True)
class Inspection:
    """Findings. Memory: 16 bytes a row, and the rows of `head`.

    Attributes:
        num_rows: rows of the file.
        sources: usable rows by data source.
        characters: of each usable row, over all its messages.
        tokens: of each usable row without images, the chat template included; empty without a
            tokenizer.
        num_duplicates: usable rows that repeat the messages and ground truth of an earlier one.
        unread_truths: usable rows by data source whose ground truth the built-in scorer refuses.
        num_images: images of usable rows.
        num_bad: rows that cannot be used.
        problems: errors of the first of them, with file and row.
        head: the first rows.
    """

    num_rows: int
    sources: Counter[str] = field(default_factory=Counter)
    characters: Lengths = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: Lengths = field(default_factory=lambda: np.empty(0, np.int64))
    num_duplicates: int = 0
    unread_truths: Counter[str] = field(default_factory=Counter)
    num_images: int = 0
    num_bad: int = 0
    problems: list[str] = field(default_factory=list)
    head: list[PromptRow] = field(default_factory=list)

    def num_longer(self, limit: int) -> int:
        """Return the usable rows without images of more than `limit` tokens."""
        return int((self.tokens > limit).sum())


@dataclass(slots=True)
class _Columns:
    """One number for each usable row; of tokens only for those without images."""

    digests: array[int] = field(default_factory=lambda: array("Q"))
    characters: array[int] = field(default_factory=lambda: array("I"))
    tokens: array[int] = field(default_factory=lambda: array("I"))


def inspect_files(
    files: PromptFiles,
    *,
    measure_tokens: MeasureTokens | None = None,
    check_row: CheckRow | None = None,
    num_head: int = 0,
    on_rows: Callable[[int], None] | None = None,
) -> Inspection:
    """Read every row once.

    Args:
        files: files whose columns were checked.
        measure_tokens: returns the tokens of a prompt; a row that it refuses is a bad one.
        check_row: checks a row further, with the path of its file; likewise.
        num_head: usable rows to keep.
        on_rows: called with the number of rows read since the last call.

    Raises:
        DataError: a file is damaged.
    """
    inspection, columns, reader = Inspection(files.num_rows), _Columns(), ChunkReader()
    for block in files.blocks:
        for chunk in reader.read(block):
            for index in range(len(chunk)):
                try:
                    row = chunk.decode(index, files.columns)
                    if check_row is not None:
                        check_row(row, chunk.path)
                    num_tokens = measure_tokens(row.messages) if measure_tokens else 0
                except SluiceError as error:
                    inspection.num_bad += 1
                    if inspection.num_bad <= MAX_PROBLEMS_KEPT:
                        inspection.problems.append(str(error))
                    continue
                if not row.images:  # these count patches, too
                    columns.tokens.append(num_tokens)
                _add_row(inspection, columns, row)
                if len(inspection.head) < num_head:
                    inspection.head.append(row)
            if on_rows is not None:
                on_rows(len(chunk))
    inspection.characters = np.asarray(columns.characters, np.int64)
    inspection.tokens = np.asarray(columns.tokens if measure_tokens else [], np.int64)
    inspection.num_duplicates = len(columns.digests) - int(np.unique(columns.digests).size)
    return inspection


def _add_row(inspection: Inspection, columns: _Columns, row: PromptRow) -> None:
    inspection.sources[row.data_source] += 1
    scorer = scorer_name(row.data_source)
    if refuses_truth(scorer, row.ground_truth, is_json=row.truth_is_json):
        inspection.unread_truths[row.data_source] += 1
    inspection.num_images += len(row.images)
    roles = [message.role for message in row.messages]
    contents = [message.content for message in row.messages]
    columns.digests.append(digest_of(roles, contents, row.ground_truth, row.images))
    columns.characters.append(sum(map(len, contents)))


def quantiles(lengths: Lengths) -> tuple[int, ...]:
    """Return the `QUANTILES`, each a length that occurs; empty without lengths."""
    if lengths.size == 0:
        return ()
    return tuple(
        int(quantile) for quantile in np.quantile(lengths, QUANTILES, method="inverted_cdf")
    )

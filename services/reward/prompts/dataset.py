"""Stream the rows of the data set, epoch after epoch, shuffled, resumable at any row.

A *position* counts rows over all epochs: position p is row ``p % N`` of epoch ``p // N`` in that
epoch's order. The order depends on (seed, epoch) alone: blocks (row groups of Parquet, a thousand
lines of JSON) come in random order, are cut into windows of `shuffle_buffer_rows` rows, and each
window is permuted. Memory holds one window. A stream can start at any position without reading the
rows before it, because the block sizes show which blocks to skip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from sluice.config.schema.data import DataConfig, FileList, file_list
from sluice.data.prompt_files import (
    ChunkReader,
    PromptFiles,
    open_prompt_files,
    without_duplicates,
)
from sluice.data.prompt_rows import PromptColumns, PromptRow
from sluice.data.row_files import RowBlock, RowChunk, RowIndexes
from sluice.errors import DataError
from sluice.types import DataProgress, Prompt, PromptOrigin
from sluice.vision.image_files import images_of_row
from sluice.vision.image_limits import ImageLimits

UNSHUFFLED_WINDOW_ROWS = 1024

DataSourceCheck = Callable[[str, str], object]
"""(data source, ground truth if it is JSON, or else "") -> raises `DataError` if no scorer knows
the source, or the one that does cannot compare with the truth."""


@dataclass(frozen=True, slots=True)
class IssuedRow:
    """The row at one position of the stream; `images` are its encoded files, in order."""

    position: int
    row: PromptRow
    images: tuple[bytes, ...] = ()

    def prompt(self, prompt_id: str, sequence: int) -> Prompt:
        """Return the row as a prompt."""
        return Prompt(
            prompt_id=prompt_id,
            sequence=sequence,
            messages=self.row.messages,
            data_source=self.row.data_source,
            ground_truth=self.row.ground_truth,
            origin=PromptOrigin.DATASET,
            position=self.position,
            extra_info=self.row.extra_info,
            place=self.row.place,
            images=self.images,
            truth_is_json=self.row.truth_is_json,
        )


@dataclass(frozen=True, slots=True)
class RowOrder:
    """The settings that map positions to rows.

    Every epoch uses the same `max_samples` rows: a random choice if `choose_at_random`, else the
    first ones. ``None`` uses all rows.
    """

    shuffle: bool
    seed: int
    window_rows: int
    max_samples: int | None
    choose_at_random: bool


class PromptStream:
    """The rows from `progress` to the end of the last epoch. Reads block; not thread-safe.

    Args:
        files: checked files.
        order: settings of the shuffling.
        total_epochs: number of epochs.
        progress: positions that ended earlier; the stream skips them.
        images: limits of the rows' images; ``None`` reads none.
        check_data_source: refuses rows that cannot be graded; ``None``: none is refused.
    """

    def __init__(
        self,
        files: PromptFiles,
        order: RowOrder,
        *,
        total_epochs: int,
        progress: DataProgress,
        images: ImageLimits | None = None,
        check_data_source: DataSourceCheck | None = None,
    ) -> None:
        self._files, self._order, self._total_epochs = files, order, total_epochs
        self._images, self._check_data_source = images, check_data_source
        self._reader = ChunkReader()
        self._selected = _selection(files, order)
        self.rows_per_epoch = files.num_rows if self._selected is None else self._selected.size
        self._skipped = frozenset(progress.ended_above)
        self._rows = self._rows_from(progress.low_water)

    def take(self, count: int) -> list[IssuedRow]:
        """Return the next `count` rows; fewer only at the end of the stream.

        Raises:
            DataError: a row is malformed or no scorer can grade it, one of its images cannot be
                used, or a file is damaged.
        """
        return list(islice(self._rows, count))

    def _rows_from(self, position: int) -> Iterator[IssuedRow]:
        first_epoch, offset = divmod(position, self.rows_per_epoch)
        for epoch in range(first_epoch, self._total_epochs):
            yield from self._epoch_rows(epoch, offset if epoch == first_epoch else 0)

    def _epoch_rows(self, epoch: int, offset: int) -> Iterator[IssuedRow]:
        window_rows = self._order.window_rows
        first_window = offset // window_rows
        chunks = self._chunks(epoch, skip_rows=first_window * window_rows)
        position = epoch * self.rows_per_epoch + first_window * window_rows
        first_position = epoch * self.rows_per_epoch + offset
        for window, rows in enumerate(_windows(chunks, window_rows), first_window):
            for chunk, index in self._shuffled_rows(rows, epoch, window):
                if position >= first_position and position not in self._skipped:
                    row = self._check_row(chunk.decode(index, self._files.columns))
                    yield IssuedRow(position, row, images_of_row(row, chunk.path, self._images))
                position += 1

    def _check_row(self, row: PromptRow) -> PromptRow:
        try:
            if self._check_data_source is not None:
                truth = row.ground_truth if row.truth_is_json else ""
                self._check_data_source(row.data_source, truth)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
        return row

    def _shuffled_rows(
        self, chunks: list[RowChunk], epoch: int, window: int
    ) -> Iterator[tuple[RowChunk, int]]:
        rows = [(chunk, index) for chunk in chunks for index in range(len(chunk))]
        if not self._order.shuffle:
            return iter(rows)
        generator = np.random.default_rng([self._order.seed, epoch, window + 1])
        return (rows[i] for i in generator.permutation(len(rows)))

    def _chunks(self, epoch: int, skip_rows: int) -> Iterator[RowChunk]:
        """Yield chunks of the epoch's blocks in their order, without the first `skip_rows` rows."""
        for group in self._block_order(epoch):
            num_rows = self._num_selected(group)
            if num_rows <= skip_rows:
                skip_rows -= num_rows
                continue
            for chunk in self._reader.read(group, self._selected):
                if len(chunk) > skip_rows:
                    yield chunk.slice(skip_rows, len(chunk))
                skip_rows = max(0, skip_rows - len(chunk))

    def _block_order(self, epoch: int) -> Iterator[RowBlock]:
        groups = self._files.blocks
        if not self._order.shuffle:
            return iter(groups)
        generator = np.random.default_rng([self._order.seed, epoch, 0])
        return (groups[i] for i in generator.permutation(len(groups)))

    def _num_selected(self, group: RowBlock) -> int:
        if self._selected is None:
            return group.num_rows
        low, high = np.searchsorted(self._selected, (group.start, group.start + group.num_rows))
        return int(high - low)


def _windows(chunks: Iterator[RowChunk], num_rows: int) -> Iterator[list[RowChunk]]:
    """Cut the chunks into windows of `num_rows` rows; the last may have fewer."""
    window: list[RowChunk] = []
    num_missing = num_rows
    for chunk in chunks:
        start = 0
        while start < len(chunk):
            piece = chunk.slice(start, min(start + num_missing, len(chunk)))
            window.append(piece)
            start, num_missing = start + len(piece), num_missing - len(piece)
            if not num_missing:
                yield window
                window, num_missing = [], num_rows
    if window:
        yield window


def training_files(
    data: DataConfig, images: ImageLimits | None = None, key: str = "data.train_files"
) -> PromptFiles | None:
    """Return the checked training files; ``None`` if all prompts come from clients.

    `key` is where they are configured. Without `images`, rows with images are refused. With
    ``data.deduplicate``, read all rows once and leave out those whose messages and ground truth
    came before.
    """
    files = _files(data, data.train_files, key, images)
    return without_duplicates(files) if files is not None and data.deduplicate else files


def validation_files(data: DataConfig, images: ImageLimits | None = None) -> PromptFiles | None:
    """Return the checked validation files, as `training_files`; ``None`` without validation."""
    return _files(data, data.val_files, "data.val_files", images)


def training_stream(
    files: PromptFiles,
    data: DataConfig,
    progress: DataProgress,
    *,
    total_epochs: int,
    images: ImageLimits | None = None,
    check_data_source: DataSourceCheck | None,
) -> PromptStream:
    """Return the stream of training rows as configured."""
    return PromptStream(
        files,
        _order(data, shuffle=data.shuffle, max_samples=data.train_max_samples),
        total_epochs=total_epochs,
        progress=progress,
        images=images,
        check_data_source=check_data_source,
    )


def validation_stream(
    files: PromptFiles,
    data: DataConfig,
    images: ImageLimits | None,
    check_data_source: DataSourceCheck | None,
) -> PromptStream:
    """Return the validation set once, in the same order every time.

    ``data.shuffle`` decides which rows ``data.val_max_samples`` leaves, as in training (verl's
    rule); ``data.validation_shuffle`` decides their order alone.
    """
    return PromptStream(
        files,
        _order(data, shuffle=data.validation_shuffle, max_samples=data.val_max_samples),
        total_epochs=1,
        progress=DataProgress(0),
        images=images,
        check_data_source=check_data_source,
    )


def _order(data: DataConfig, *, shuffle: bool, max_samples: int) -> RowOrder:
    return RowOrder(
        shuffle=shuffle,
        seed=abs(data.seed or 0),
        window_rows=max(data.shuffle_buffer_rows, 1) if shuffle else UNSHUFFLED_WINDOW_ROWS,
        max_samples=max_samples if max_samples > 0 else None,
        choose_at_random=data.shuffle,
    )


def _files(
    data: DataConfig, paths: FileList | None, key: str, images: ImageLimits | None
) -> PromptFiles | None:
    if not paths:
        return None
    columns = PromptColumns.of(
        data.prompt_key, data.reward_fn_key, data.image_key, with_images=images is not None
    )
    return open_prompt_files(file_list(paths), columns, config_key=key)


def _selection(files: PromptFiles, order: RowOrder) -> RowIndexes | None:
    num_rows = files.num_rows if files.kept is None else int(files.kept.size)
    if order.max_samples is None or order.max_samples >= num_rows:
        return files.kept
    if order.choose_at_random:
        chosen = np.random.default_rng(order.seed).choice(
            num_rows, order.max_samples, replace=False
        )
        chosen = np.sort(chosen).astype(np.int64)
    else:
        chosen = np.arange(order.max_samples, dtype=np.int64)
    return chosen if files.kept is None else files.kept[chosen]

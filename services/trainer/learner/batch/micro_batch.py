"""The tensors of one forward and backward pass, packed without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch

from services.trainer.learner.batch.packing import (
    PackedImages,
    PackedLayout,
    PackedPiece,
    PackedRow,
    build_layout,
    pack_images,
)
from sluice.algorithm.packing import GroupPiece, MicroBatchPlan, RowSize
from sluice.types import Logprobs, TokenIds, TrainGroup
from sluice.vision.image_prompts import ImagePrompt


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One response to train on.

    `number` is the row's index in the train batch, `group` the prompt's index in the mini-batch.
    """

    number: int
    group: int
    prompt_token_ids: TokenIds  # [prompt tokens]
    token_ids: TokenIds  # [tokens]
    behavior_logprobs: Logprobs  # [tokens]

    @property
    def size(self) -> RowSize:
        """Return the row's size for packing."""
        return RowSize(self.group, int(self.prompt_token_ids.size), int(self.token_ids.size))


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """T input tokens and N response tokens (labels) of R rows, in the order of `row_indices`.

    The last token of a row is only a label: nothing is predicted after it, so it is not an input.
    Logits are needed at `predecessors`: for a row's first token at the prompt's last position. An
    empty response is a row without tokens. `batch_rows` and `columns` locate each token in a table
    [rows of the train batch, longest response].
    """

    row_indices: tuple[int, ...]  # [R] into the mini-batch's rows
    row_groups: tuple[int, ...]  # [R] equal for rows of one prompt
    layout: PackedLayout
    input_ids: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]; with images [3, 1, T]
    predecessors: torch.Tensor  # int64 [N], packed positions
    labels: torch.Tensor  # int64 [N]
    rows: torch.Tensor  # int64 [N], index into row_indices
    batch_rows: torch.Tensor  # int64 [N]
    columns: torch.Tensor  # int64 [N]
    behavior_logprobs: torch.Tensor  # float32 [N]
    images: PackedImages | None = None

    @property
    def num_rows(self) -> int:
        """Return R."""
        return len(self.row_indices)


def training_rows(
    groups: Sequence[TrainGroup], numbers: Sequence[Sequence[int]]
) -> list[TrainingRow]:
    """Return all rows of the groups, in order; `numbers` are their indices in the train batch."""
    return [
        TrainingRow(
            number, index, group.prompt_token_ids, rollout.token_ids, rollout.behavior_logprobs
        )
        for index, (group, own) in enumerate(zip(groups, numbers, strict=True))
        for rollout, number in zip(group.rollouts, own, strict=True)
    ]


def build_micro_batch(
    rows: Sequence[TrainingRow],
    plan: MicroBatchPlan,
    device: torch.device,
    images: Mapping[int, ImagePrompt] = MappingProxyType({}),
) -> MicroBatch | None:
    """Pack the plan's rows; ``None`` if none of them holds a token.

    Args:
        rows: all rows of the mini-batch.
        plan: the rows of this micro-batch.
        device: gets the tensors.
        images: images of prompts, by `TrainingRow.group`.
    """
    # Empty responses count as rows, but have no tokens to pack.
    pieces = [piece for piece in map(_without_empty(rows), plan.pieces) if piece.row_indices]
    if not pieces:
        return None
    packed = list(_place(rows, pieces))
    members = [rows[index] for index in plan.row_indices]
    lengths = [row.token_ids.size for row in members]
    input_ids, position_ids = _inputs(rows, pieces, images)
    # Rows of a prompt share its images, which are packed once like its tokens.
    prompt_images = [
        (piece.start, images.get(rows[own.row_indices[0]].group))
        for piece, own in zip(packed, pieces, strict=True)
    ]
    return MicroBatch(
        row_indices=plan.row_indices,
        row_groups=tuple(row.group for row in members),
        layout=build_layout(packed, input_ids.size, device),
        input_ids=_tensor(input_ids[None], device),
        position_ids=_tensor(position_ids[..., None, :], device),
        predecessors=_tensor(_predecessors(packed), device),
        # One entry per response token: its id, its row here and in the batch, its index in the row.
        labels=_tensor(np.concatenate([row.token_ids for row in members]), device),
        rows=_tensor(np.repeat(np.arange(len(members)), lengths), device),
        batch_rows=_tensor(np.repeat([row.number for row in members], lengths), device),
        columns=_tensor(np.concatenate([np.arange(length) for length in lengths]), device),
        behavior_logprobs=torch.from_numpy(
            np.concatenate([row.behavior_logprobs for row in members])
        ).to(device),
        images=pack_images(prompt_images, input_ids.size, device),
    )


def _without_empty(rows: Sequence[TrainingRow]) -> Callable[[GroupPiece], GroupPiece]:
    def strip(piece: GroupPiece) -> GroupPiece:
        filled = tuple(index for index in piece.row_indices if rows[index].token_ids.size)
        return GroupPiece(piece.group, filled)

    return strip


def _place(rows: Sequence[TrainingRow], pieces: Sequence[GroupPiece]) -> Iterator[PackedPiece]:
    """Yield packed positions: each prompt once, then its rows without their last tokens."""
    cursor = 0
    for piece in pieces:
        start = cursor
        prompt_length = int(rows[piece.row_indices[0]].prompt_token_ids.size)
        cursor += prompt_length
        packed_rows = []
        for index in piece.row_indices:
            length = int(rows[index].token_ids.size) - 1  # the last token is only a label
            packed_rows.append(PackedRow(cursor, length))
            cursor += length
        yield PackedPiece(start, prompt_length, tuple(packed_rows))


def _inputs(
    rows: Sequence[TrainingRow],
    pieces: Sequence[GroupPiece],
    images: Mapping[int, ImagePrompt],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return token ids [T] and positions [T] in packed order, int64; [3, T] with images.

    Every row of a prompt counts its positions from the prompt's end.
    """
    tokens: list[TokenIds] = []
    positions: list[npt.NDArray[np.int64]] = []
    for piece in pieces:
        first = rows[piece.row_indices[0]]
        prompt = first.prompt_token_ids
        responses = [rows[i].token_ids for i in piece.row_indices]
        tokens += [prompt, *(response[:-1] for response in responses)]
        longest = prompt.size + max(response.size for response in responses) - 1
        own = np.arange(longest)
        if images:  # three positions per token: time, height and width
            image = images.get(first.group)
            own = np.tile(own, (3, 1)) if image is None else image.positions.extended(longest)
        positions.append(own[..., : prompt.size])
        positions += [own[..., prompt.size : prompt.size + r.size - 1] for r in responses]
    return np.concatenate(tokens).astype(np.int64), np.concatenate(positions, axis=-1)


def _predecessors(packed: Sequence[PackedPiece]) -> npt.NDArray[np.int64]:
    """Return the packed positions whose logits predict the response tokens, int64 [N]."""
    parts: list[npt.NDArray[np.int64]] = []
    for piece in packed:
        last_of_prompt = np.array([piece.start + piece.length - 1])
        for row in piece.rows:
            # The prompt's last token predicts a row's first one; each later token follows its own
            # predecessor.
            parts += [last_of_prompt, np.arange(row.start, row.start + row.length)]
    return np.concatenate(parts)


def _tensor(values: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)

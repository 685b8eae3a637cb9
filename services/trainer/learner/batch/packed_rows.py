"""The rows of a mini-batch, and the places of their tokens in a packed sequence.

A row is a sample: an answer to the group's prompt, or an episode of one or more paths. Each of the
ranks that share a sequence encodes some of its images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.learner.rank_shares import ImageRanks, SequenceShare
from sluice.algorithm.episodes import (
    PathTokens,
    follows_prompt,
    path_length,
    path_tokens,
    training_paths,
)
from sluice.algorithm.packing import GroupPiece, RowSize
from sluice.types import Logprobs, RoutedExperts, TokenIds, TrainGroup, Turn
from sluice.vision.image_prompts import ImagePrompt

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One sample to train on.

    `number` is the row's index in the train batch, `group` the prompt's index in the mini-batch.
    """

    number: int
    group: int
    prompt_token_ids: TokenIds  # [prompt tokens]
    token_ids: TokenIds  # [tokens], sampled
    behavior_logprobs: Logprobs  # [tokens]
    prompt_routing: RoutedExperts | None = None  # the engine's experts of the prompt
    routing: RoutedExperts | None = None  # and of the response without its last token
    turns: tuple[Turn, ...] = ()  # of an episode; empty if the tokens are an answer to the prompt

    @property
    def size(self) -> RowSize:
        """Return the row's size for packing, even if its tokens are absent."""
        prompt = int(self.prompt_token_ids.size)
        if not self.turns:
            return RowSize(self.group, prompt, int(self.token_ids.size))
        lengths: dict[bool, list[int]] = {True: [], False: []}
        for path in training_paths(self.turns):
            lengths[follows_prompt(self.turns, path)].append(path_length(self.turns, path))
        paths, alone = tuple(lengths[True]), tuple(lengths[False])
        return RowSize(self.group, prompt, sum(paths) + sum(alone), paths, alone)

    @property
    def num_trained(self) -> int:
        """Return the number of tokens in the loss."""
        return int(self.token_ids.size)

    def paths(self) -> list[PathTokens]:
        """Return the sequences to compute; empty if no token is trained."""
        if not self.turns:
            return [PathTokens.of_response(self.token_ids)] if self.token_ids.size else []
        return [path_tokens(self.turns, path) for path in training_paths(self.turns)]


@dataclass(frozen=True, slots=True)
class AttendedSequence:
    """Packed positions ``[start, start + length)``. They see a prompt, and themselves causally.

    The prompt has `prompt_length` positions from `prompt_start` on; 0 for no prompt.
    """

    prompt_start: int
    prompt_length: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedPath:
    """A path of a row, and the packed positions of all of its tokens but the last.

    The last one is only a label: nothing is predicted after it.
    """

    row: TrainingRow
    tokens: PathTokens
    at: AttendedSequence

    @property
    def labels(self) -> TokenIds:
        """Return the tokens to predict, [labels]."""
        return self.tokens.token_ids[self.tokens.labels]

    @property
    def behavior_logprobs(self) -> Logprobs:
        """Return the behavior logprobs of the labels, [labels]."""
        return self.row.behavior_logprobs[self.tokens.columns]

    @property
    def predecessors(self) -> Positions:
        """Return the packed positions whose logits predict its labels, int64 [labels]."""
        labels, prompt_end = self.tokens.labels, self.at.prompt_start + self.at.prompt_length - 1
        return np.where(labels == 0, prompt_end, self.at.start + labels - 1)


@dataclass(frozen=True, slots=True, eq=False)
class PackedPiece:
    """The prompt of a group at packed positions ``[start, start + length)``, and its rows' paths.

    The prompt has length 0 if no path follows it.
    """

    start: int
    length: int
    rows: Mapping[int, tuple[PackedPath, ...]]  # by index in the mini-batch, in packed order

    @property
    def paths(self) -> list[PackedPath]:
        """Return all paths, in packed order."""
        return [path for paths in self.rows.values() for path in paths]

    @property
    def first(self) -> TrainingRow:
        """Return the first row; all have the same prompt."""
        return self.paths[0].row

    @property
    def sequences(self) -> Iterator[AttendedSequence]:
        """Yield the prompt, if a path follows it, and the paths."""
        if self.length:
            yield AttendedSequence(self.start, 0, self.start, self.length)
        # A response of one token is only a label.
        yield from (path.at for path in self.paths if path.at.length)


def training_rows(
    groups: Sequence[TrainGroup],
    numbers: Sequence[Sequence[int]],
    routed_layers: slice | None = None,
) -> list[TrainingRow]:
    """Return all rows of the groups, in order; `numbers` are their indices in the train batch.

    They have the engine's experts of `routed_layers`, counted among the layers with experts;
    ``None`` for no layer. A prompt has the experts of the group's first sample that has any: other
    samples may have other choices, but rows share one packed prompt.
    """
    rows: list[TrainingRow] = []
    for index, (group, row_numbers) in enumerate(zip(groups, numbers, strict=True)):
        prompt = group.prompt_token_ids.size
        in_prompt, in_response = slice(prompt), slice(prompt, None)
        sources = [group.prompt_routing, *(rollout.routing for rollout in group.rollouts)]
        of_prompt = [_select_experts(source, in_prompt, routed_layers) for source in sources]
        rows += [
            TrainingRow(
                number,
                index,
                group.prompt_token_ids,
                rollout.token_ids,
                rollout.behavior_logprobs,
                next((experts for experts in of_prompt if experts is not None), None),
                _select_experts(rollout.routing, in_response, routed_layers),
                () if rollout.is_plain else rollout.turns,
            )
            for rollout, number in zip(group.rollouts, row_numbers, strict=True)
        ]
    return rows


def _select_experts(
    experts: RoutedExperts | None, tokens: slice, layers: slice | None
) -> RoutedExperts | None:
    return None if experts is None or layers is None else experts[tokens, layers]


def place_pieces(rows: Sequence[TrainingRow], pieces: Sequence[GroupPiece]) -> list[PackedPiece]:
    """Place each prompt once, then its rows' paths; leave out pieces and rows without paths."""
    packed_pieces: list[PackedPiece] = []
    cursor = 0
    for piece in pieces:
        paths = {
            index: row_paths for index in piece.row_indices if (row_paths := rows[index].paths())
        }
        if not paths:
            continue
        start = cursor
        if any(path.follows_prompt for row_paths in paths.values() for path in row_paths):
            cursor += int(rows[piece.row_indices[0]].prompt_token_ids.size)
        length = cursor - start
        of_rows: dict[int, tuple[PackedPath, ...]] = {}
        for index, row_paths in paths.items():
            packed = []
            for path in row_paths:
                shared = length if path.follows_prompt else 0
                at = AttendedSequence(start, shared, cursor, int(path.token_ids.size) - 1)
                packed.append(PackedPath(rows[index], path, at))
                cursor += at.length
            of_rows[index] = tuple(packed)
        packed_pieces.append(PackedPiece(start, length, of_rows))
    return packed_pieces


def packed_inputs(
    pieces: Sequence[PackedPiece], images: Mapping[int, ImagePrompt]
) -> tuple[Positions, Positions]:
    """Return token ids [T] and positions [T] in packed order, int64; [3, T] with images.

    Every path counts its positions from the prompt's end, or from 0 without the prompt.
    """
    tokens: list[TokenIds] = []
    positions: list[Positions] = []
    for piece in pieces:
        prompt = piece.first.prompt_token_ids[: piece.length]
        longest = prompt.size + max(path.at.length for path in piece.paths)
        plain = with_images = np.arange(longest)
        if images:  # three positions per token: time, height and width
            image = images.get(piece.first.group)
            plain = with_images = np.tile(with_images, (3, 1))
            with_images = plain if image is None else image.positions.extend(longest)
        tokens.append(prompt)
        positions.append(with_images[..., : prompt.size])
        for path in piece.paths:
            tokens.append(path.tokens.token_ids[:-1])
            of_path = with_images[..., prompt.size :] if path.tokens.follows_prompt else plain
            positions.append(of_path[..., : path.at.length])
    return np.concatenate(tokens).astype(np.int64), np.concatenate(positions, axis=-1)


@dataclass(frozen=True, slots=True, eq=False)
class PackedImages:
    """Images in the order of their tokens.

    Pixels stay in host memory until the pass, since they take far more memory than their tokens.
    Ranks that train the same rows divide the images; a rank may encode images whose tokens belong
    to another rank.

    Attributes:
        pixel_values: [patches, numbers per patch] float32, on the CPU; ``None`` if this rank
            encodes no image.
        grid_thw: [images, 3] int64, on the CPU.
        is_image: [1, T] bool, on the device.
        sent: number of image tokens that this rank encodes for each rank of the share; ``None``
            without a share.
        received: number of this rank's image tokens that each rank encodes.
        share: the ranks that divide the images.
    """

    pixel_values: Tensor | None
    grid_thw: Tensor
    is_image: Tensor
    sent: list[int] | None = None
    received: list[int] | None = None
    share: SequenceShare | None = None


def pack_images(
    prompts: Sequence[tuple[int, ImagePrompt | None]],
    num_tokens: int,
    device: torch.device,
    ranks: ImageRanks,
) -> PackedImages | None:
    """Pack the images of all prompts; ``None`` if there are none, or another stage encodes them.

    Args:
        prompts: packed position of each prompt's first token, and its images.
    """
    prompt_images = [(start, image) for start, image in prompts if image is not None]
    if not prompt_images or not ranks.encodes:
        return None
    # `image.places` count from the prompt's start; packed positions count from the first prompt's.
    is_image = np.zeros((1, num_tokens), dtype=np.bool_)
    for start, image in prompt_images:
        is_image[0, start + image.places] = True
    patches = [patch for _, image in prompt_images for patch in image.patches]
    grid_thw = np.concatenate([image.grid_thw for _, image in prompt_images])
    sent: list[int] | None = None
    received: list[int] | None = None
    if (share := ranks.share) is not None:
        sizes = np.concatenate([image.num_tokens for _, image in prompt_images])
        owners = _encoding_ranks(sizes, share.size)
        # Both sides count the images' tokens in packed order.
        encoded = np.searchsorted(owners, np.arange(share.size + 1))
        encoded = np.concatenate([[0], np.cumsum(sizes)])[encoded]
        starts = np.arange(share.size + 1) * -(-num_tokens // share.size)
        needed = np.searchsorted(np.flatnonzero(is_image[0]), starts)
        sent = _overlaps(encoded, needed, share.rank)
        received = _overlaps(needed, encoded, share.rank)
        is_image = share.cut(is_image)
        grid_thw = grid_thw[owners == share.rank]
        patches = [p for p, owner in zip(patches, owners, strict=True) if owner == share.rank]
    pixels = [patch() for patch in patches]
    return PackedImages(
        torch.from_numpy(np.concatenate(pixels)) if pixels else None,
        torch.from_numpy(grid_thw),
        torch.from_numpy(is_image).to(device),
        sent,
        received,
        share,
    )


def _encoding_ranks(sizes: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int64]:
    """Return the rank that encodes each image: consecutive images, with about equal numbers of
    tokens."""
    middles = 2 * np.cumsum(sizes) - sizes
    ranks_of_images: npt.NDArray[np.int64] = middles * ranks // (2 * sizes.sum())
    return ranks_of_images


def _overlaps(ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], rank: int) -> list[int]:
    """Return for each rank how many numbers of this rank's interval in `ours` lie in that rank's
    in `theirs`."""
    first, end = np.maximum(theirs[:-1], ours[rank]), np.minimum(theirs[1:], ours[rank + 1])
    shared: list[int] = np.maximum(end - first, 0).tolist()
    return shared

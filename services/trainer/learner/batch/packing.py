"""The layout of a packed micro-batch: positions of sequences and images, and attention blocks.

A prompt is packed once, followed by its rows. Attention runs over two kinds of blocks: prompts,
each seeing itself, and rows, each seeing its prompt and itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sluice.vision.image_prompts import ImagePrompt

Positions = npt.NDArray[np.int64]

LENGTH_RATIO = 0.85
"""A block's shortest sequence is at least this share of its longest."""

MIN_BLOCK_TOKENS = 1024
"""Blocks up to this many padded tokens mix any lengths: more calls would cost more than padding."""

MAX_MASK_ELEMENTS = 1 << 24
"""Above this size a block of rows includes its prompts' queries, which makes it plainly causal."""


@dataclass(frozen=True, slots=True)
class PackedRow:
    """Packed positions ``[start, start + length)`` of a row's tokens after the prompt."""

    start: int
    length: int


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """A prompt at packed positions ``[start, start + length)`` and the rows that share it."""

    start: int
    length: int
    rows: tuple[PackedRow, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Sequences attended together; padding repeats packed position 0 and is never read back.

    `mask` is True where a query sees a key, bool [1 or B, 1, queries, keys]; ``None`` means causal,
    with keys and queries at the same positions.
    """

    query_index: torch.Tensor  # int64 [B, queries], packed positions
    key_index: torch.Tensor  # int64 [B, keys], packed positions
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """All blocks, and for each packed token its index in the concatenated outputs of the blocks."""

    blocks: tuple[AttentionBlock, ...]
    output_index: torch.Tensor  # int64 [T]
    longest: int  # tokens of the longest sequence, prompt and row


@dataclass(frozen=True, slots=True)
class _Sequence:
    prompt_start: int
    prompt_length: int
    start: int
    length: int


def build_layout(
    pieces: Sequence[PackedPiece], num_tokens: int, device: torch.device
) -> PackedLayout:
    """Lay out attention for `num_tokens` packed tokens; each belongs to a prompt or a row."""
    output = np.zeros(num_tokens, dtype=np.int64)
    blocks: list[AttentionBlock] = []
    offset = 0
    prompts = [_Sequence(piece.start, 0, piece.start, piece.length) for piece in pieces]
    rows = [
        _Sequence(piece.start, piece.length, row.start, row.length)
        for piece in pieces
        for row in piece.rows
        if row.length  # a response of one token is only a label
    ]
    # The blocks' outputs are concatenated. `output` records where each packed token's is.
    for members in (*_similar_lengths(prompts), *_similar_lengths(rows)):
        block, places = _block(members, device)
        for sequence, place in zip(members, places, strict=True):
            stop = sequence.start + sequence.length
            output[sequence.start : stop] = offset + place + np.arange(sequence.length)
        blocks.append(block)
        offset += block.query_index.numel()
    longest = max(member.prompt_length + member.length for member in (*prompts, *rows))
    return PackedLayout(tuple(blocks), torch.from_numpy(output).to(device), longest)


def _similar_lengths(sequences: Sequence[_Sequence]) -> Iterator[list[_Sequence]]:
    """Cut into blocks of similar lengths, longest first."""
    block: list[_Sequence] = []
    for sequence in sorted(sequences, key=lambda s: (-s.length, s.start)):
        longest = block[0].length if block else 0
        # A much shorter sequence would be mostly padding: it starts a new block, unless this block
        # is so small that another call would cost more.
        mixed = sequence.length < LENGTH_RATIO * longest
        if mixed and longest * len(block) >= MIN_BLOCK_TOKENS:
            yield block
            block = []
        block.append(sequence)
    if block:
        yield block


def _block(
    members: Sequence[_Sequence], device: torch.device
) -> tuple[AttentionBlock, Sequence[int]]:
    """Return the block, and each member's first index in its flattened output."""
    longest = members[0].length
    prompt_longest = max(member.prompt_length for member in members)
    own = _right_padded([member.start for member in members], [m.length for m in members], longest)
    if prompt_longest == 0:  # prompts: plainly causal
        index = torch.from_numpy(own).to(device)
        return AttentionBlock(index, index, None), range(0, own.size, longest)
    # The mask has an element per query and key, so its size is quadratic in the length.
    if len(members) * longest * (prompt_longest + longest) > MAX_MASK_ELEMENTS:
        return _causal_block(members, device)
    # Prompts are padded on the left, rows on the right, so that real tokens stay adjacent.
    pads = prompt_longest - np.array([member.prompt_length for member in members])
    starts = np.array([member.prompt_start for member in members])
    columns = np.arange(prompt_longest)
    visible = columns >= pads[:, None]
    prompts = np.where(visible, starts[:, None] + columns - pads[:, None], 0)
    block = AttentionBlock(
        torch.from_numpy(own).to(device),
        torch.from_numpy(np.concatenate([prompts, own], axis=1)).to(device),
        _row_mask(torch.from_numpy(visible).to(device), longest),
    )
    return block, range(0, own.size, longest)


def _causal_block(
    members: Sequence[_Sequence], device: torch.device
) -> tuple[AttentionBlock, Sequence[int]]:
    """Return a block of prompt plus row: it needs no mask, but runs prompts' queries per row."""
    width = max(member.prompt_length + member.length for member in members)
    index = np.zeros((len(members), width), dtype=np.int64)
    for line, member in zip(index, members, strict=True):
        prompt = member.prompt_length
        line[:prompt] = member.prompt_start + np.arange(prompt)
        line[prompt : prompt + member.length] = member.start + np.arange(member.length)
    positions = torch.from_numpy(index).to(device)
    # Only the rows' outputs are read; the prompts' own block has computed the prompts'.
    places = [number * width + member.prompt_length for number, member in enumerate(members)]
    return AttentionBlock(positions, positions, None), places


def _right_padded(starts: Sequence[int], lengths: Sequence[int], width: int) -> Positions:
    columns = np.arange(width)
    valid = columns < np.array(lengths)[:, None]
    return np.where(valid, np.array(starts)[:, None] + columns, 0)


def _row_mask(prompt_visible: torch.Tensor, longest: int) -> torch.Tensor:
    """Return the mask [B, 1, L, P + L]: a row sees its prompt, and its own tokens causally."""
    num_rows, prompt_longest = prompt_visible.shape
    causal = torch.ones(longest, longest, dtype=torch.bool, device=prompt_visible.device).tril()
    # Both parts are views until `cat` writes the mask once.
    return torch.cat(
        [
            prompt_visible[:, None, None, :].expand(num_rows, 1, longest, prompt_longest),
            causal.expand(num_rows, 1, longest, longest),
        ],
        dim=-1,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedImages:
    """Images in the order of their tokens.

    Pixels stay in host memory until the pass: they take far more memory than their tokens.

    Attributes:
        pixel_values: [patches, numbers per patch] float32, on the CPU.
        grid_thw: [images, 3] int64, on the CPU.
        is_image: [1, T] bool, on the device.
    """

    pixel_values: Tensor
    grid_thw: Tensor
    is_image: Tensor


def pack_images(
    prompts: Sequence[tuple[int, ImagePrompt | None]], num_tokens: int, device: torch.device
) -> PackedImages | None:
    """Pack the images of all prompts; ``None`` if there are none.

    Args:
        prompts: packed position of each prompt's first token, and its images.
        num_tokens: T.
        device: gets `PackedImages.is_image`.
    """
    seen = [(start, image) for start, image in prompts if image is not None]
    if not seen:
        return None
    # `image.places` count from the prompt's start; packed positions count from the first prompt's.
    is_image = np.zeros((1, num_tokens), dtype=np.bool_)
    for start, image in seen:
        is_image[0, start + image.places] = True
    return PackedImages(
        torch.from_numpy(np.concatenate([image.pixel_values for _, image in seen])),
        torch.from_numpy(np.concatenate([image.grid_thw for _, image in seen])),
        torch.from_numpy(is_image).to(device),
    )

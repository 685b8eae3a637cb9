"""Where each sequence and image of a packed micro-batch lies, and the blocks in which attention
runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from sluice.vision.image_prompts import ImagePrompt
from sluice.vision.torch_inputs import encode_images, forward_with_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Positions = npt.NDArray[np.int64]

LENGTH_RATIO = 0.85
"""A block's shortest sequence is at least this share of its longest."""

MIN_BLOCK_TOKENS = 1024
"""Up to so many padded tokens a block may mix any lengths: small blocks cost more in calls."""

MAX_MASK_ELEMENTS = 1 << 24
"""Above this size a row block repeats its prompts' queries, which makes it plainly causal."""


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

    `mask` is True where a query may look, bool [1 or B, 1, queries, keys]; ``None`` means causal,
    with keys and queries at the same positions.
    """

    query_index: torch.Tensor  # int64 [B, queries], packed positions
    key_index: torch.Tensor  # int64 [B, keys], packed positions
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """All blocks, and for each packed token its place in their outputs, one after the other."""

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
    """Lay out attention for `num_tokens` packed tokens; every one is in a prompt or a row."""
    output = np.zeros(num_tokens, dtype=np.int64)
    blocks: list[AttentionBlock] = []
    offset = 0
    prompts = [_Sequence(piece.start, 0, piece.start, piece.length) for piece in pieces]
    rows = [
        _Sequence(piece.start, piece.length, row.start, row.length)
        for piece in pieces
        for row in piece.rows
        if row.length
    ]
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
    """Cut into blocks, longest first."""
    block: list[_Sequence] = []
    for sequence in sorted(sequences, key=lambda s: (-s.length, s.start)):
        longest = block[0].length if block else 0
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
    """The block, and where each member's first token lies in its flattened output."""
    longest = members[0].length
    prompt_longest = max(member.prompt_length for member in members)
    own = _right_padded([member.start for member in members], [m.length for m in members], longest)
    if prompt_longest == 0:
        index = torch.from_numpy(own).to(device)
        return AttentionBlock(index, index, None), range(0, own.size, longest)
    if len(members) * longest * (prompt_longest + longest) > MAX_MASK_ELEMENTS:
        return _causal_block(members, device)
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
    """Prompt and row in one sequence: no mask in memory, the prompts' queries run once a row."""
    width = max(member.prompt_length + member.length for member in members)
    index = np.zeros((len(members), width), dtype=np.int64)
    for line, member in zip(index, members, strict=True):
        prompt = member.prompt_length
        line[:prompt] = member.prompt_start + np.arange(prompt)
        line[prompt : prompt + member.length] = member.start + np.arange(member.length)
    positions = torch.from_numpy(index).to(device)
    places = [number * width + member.prompt_length for number, member in enumerate(members)]
    return AttentionBlock(positions, positions, None), places


def _right_padded(starts: Sequence[int], lengths: Sequence[int], width: int) -> Positions:
    columns = np.arange(width)
    valid = columns < np.array(lengths)[:, None]
    return np.where(valid, np.array(starts)[:, None] + columns, 0)


def _row_mask(prompt_visible: torch.Tensor, longest: int) -> torch.Tensor:
    """Own tokens causally, prompt tokens but for padding; bool [B, 1, L, P + L]."""
    num_rows, prompt_longest = prompt_visible.shape
    causal = torch.ones(longest, longest, dtype=torch.bool, device=prompt_visible.device).tril()
    return torch.cat(
        [
            prompt_visible[:, None, None, :].expand(num_rows, 1, longest, prompt_longest),
            causal.expand(num_rows, 1, longest, longest),
        ],
        dim=-1,
    )


_GATHERING_PASS = "sluice_logits_with_images"


@dataclass(frozen=True, slots=True, eq=False)
class PackedImages:
    """Images in the order of their tokens.

    Pixels wait in the host's memory: they take far more of it than the tokens they become.

    Attributes:
        pixel_values: [patches, numbers a patch] float32, on the CPU.
        grid_thw: [images, 3] int64, on the CPU.
        is_image: [1, T] bool, on the device.
    """

    pixel_values: Tensor
    grid_thw: Tensor
    is_image: Tensor


def pack_images(
    prompts: Sequence[tuple[int, ImagePrompt | None]], num_tokens: int, device: torch.device
) -> PackedImages | None:
    """``None`` if no prompt has images.

    Args:
        prompts: packed position of each prompt's first token, and its images.
        num_tokens: T.
        device: of `PackedImages.is_image`.
    """
    seen = [(start, image) for start, image in prompts if image is not None]
    if not seen:
        return None
    is_image = np.zeros((1, num_tokens), dtype=np.bool_)
    for start, image in seen:
        is_image[0, start + image.places] = True
    return PackedImages(
        torch.from_numpy(np.concatenate([image.pixel_values for _, image in seen])),
        torch.from_numpy(np.concatenate([image.grid_thw for _, image in seen])),
        torch.from_numpy(is_image).to(device),
    )


def logits_with_images(
    model: PreTrainedModel,
    images: PackedImages,
    token_ids: Tensor,
    position_ids: Tensor,
    kept: Tensor,
    **arguments: object,
) -> Tensor:
    """Logits [1, N, vocab] at the packed positions `kept`, int64 [N].

    Args:
        model: a vision-language model; if it is sharded, by `gathers_for_images`.
        images: of the micro-batch.
        token_ids: [1, T] int64.
        position_ids: [3, 1, T] int64; [1, T] if no token is an image's.
        kept: packed positions.
        arguments: handed down to the attention.
    """
    compute: Any = getattr(model, _GATHERING_PASS, None) or partial(_logits, model)
    logits: Tensor = compute(images, token_ids, position_ids, kept, **arguments)
    return logits


def _logits(
    model: PreTrainedModel,
    images: PackedImages,
    token_ids: Tensor,
    position_ids: Tensor,
    kept: Tensor,
    **arguments: object,
) -> Tensor:
    device = token_ids.device
    features = encode_images(model, images.pixel_values.to(device), images.grid_thw.to(device))
    hidden = forward_with_images(
        model, token_ids, position_ids, images.is_image, features, **arguments
    )
    head: Any = model.get_output_embeddings()
    logits: Tensor = head(hidden.index_select(1, kept))
    return logits


def gathers_for_images(model: PreTrainedModel) -> None:
    """Has `logits_with_images` gather the shards of a sharded model, as its own forward does.

    From then on every pass must have images: what one rank gathers, all do.
    """
    setattr(model, _GATHERING_PASS, MethodType(_logits, model))
    register_fsdp_forward_method(model, _GATHERING_PASS)


def image_for_all_ranks(model: PreTrainedModel, token_ids: Tensor) -> PackedImages | None:
    """For a pass without images: one that no token shows, if the model is sharded.

    The vision tower then runs on every rank, and its gradients are 0 and not missing.
    """
    if not hasattr(model, _GATHERING_PASS):
        return None
    tower: Any = model.base_model.visual
    side = int(tower.spatial_merge_size)
    numbers = math.prod(tower.patch_embed.proj.weight.shape[1:])
    return PackedImages(
        torch.zeros(side * side, numbers),
        torch.tensor([[1, side, side]]),
        torch.zeros_like(token_ids, dtype=torch.bool),
    )

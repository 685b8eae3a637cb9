"""The tensors of one forward and backward pass, packed without padding, and the layout of
attention.

A prompt is packed once, followed by its rows. A prompt sees itself, a row its prompt and itself.
Attention runs over blocks of padded sequences, or over all sequences end to end where the device
has a kernel for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.trainer.learner.batch.packed_rows import (
    AttendedSequence,
    PackedImages,
    PackedPiece,
    Positions,
    TrainingRow,
    pack_images,
    packed_inputs,
    place_pieces,
)
from services.trainer.learner.rank_shares import ImageRanks, SequenceShare
from sluice.algorithm.packing import MicroBatchPlan, plan_micro_batches
from sluice.types import RoutedExperts
from sluice.vision.image_prompts import ImagePrompt

LENGTH_RATIO = 0.85
"""A block's shortest sequence is at least this share of its longest."""

MIN_BLOCK_TOKENS = 1024
"""Blocks up to this many padded tokens mix any lengths: more calls would cost more than padding."""

MAX_MASK_ELEMENTS = 1 << 24
"""Above this size a block of rows includes its prompts' queries, which makes it plainly causal."""

_AMPERE = (8, 0)
"""The first NVIDIA GPUs that FlashAttention runs on."""


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """B sequences that are attended together, padded to one length.

    A row's keys are those of its prompt, padded on the left, then its own. `prompt_visible` is True
    at keys that are no padding, bool [B, prompt keys]; ``None`` means causal attention with keys
    and queries at the same positions.
    """

    query_shape: tuple[int, int]  # [B, queries]
    key_shape: tuple[int, int]  # [B, keys]
    prompt_visible: torch.Tensor | None = None

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """True where a query sees a key, bool [B, 1, queries, keys]; ``None``: causal."""
        return None if self.prompt_visible is None else _mask(self, self.prompt_visible)


@dataclass(frozen=True, slots=True, eq=False)
class Gathering:
    """Indices that gather T values into P places, and those that return the gradients.

    Places that only repeat a value as a filler have no gradient.
    """

    index: torch.Tensor  # int64 [P], the value in each place
    places: torch.Tensor  # int64 [T], a place of each value
    unused: torch.Tensor  # int64 [U], values without a place that has a gradient
    extra: torch.Tensor  # int64 [M], further places with a gradient
    of_extra: torch.Tensor  # int64 [M], the values in those places

    @classmethod
    def of(
        cls,
        positions: Positions,
        last_places: Positions,
        device: torch.device,
        extra: Positions | None = None,
    ) -> Gathering:
        """Return the gathering of the values at `positions`; -1 marks an empty place.

        Args:
            positions: int64 [P].
            last_places: int64 [T], -1 for a value without one.
            extra: int64 [M], further places.
        """
        extra = positions[:0] if extra is None else extra
        unused = np.flatnonzero(last_places < 0)
        index, places = np.maximum(positions, 0), np.maximum(last_places, 0)
        parts = [index, places, unused, extra, positions[extra]]
        tensors = [torch.from_numpy(part).to(device) for part in parts]
        return cls(tensors[0], tensors[1], tensors[2], tensors[3], tensors[4])

    @classmethod
    def of_all(cls, positions: Positions, number: int, device: torch.device) -> Gathering:
        """Return the gathering in which all places but -1 have gradients; T is `number`."""
        places = np.arange(positions.size)
        last_places = np.full(number + 1, -1)  # the last one is for padding
        last_places[positions[::-1]] = places[::-1]  # of several values for one, the last stays
        extra = np.flatnonzero((positions >= 0) & (last_places[positions] != places))
        return cls.of(positions, last_places[:-1], device, extra)


@dataclass(frozen=True, slots=True, eq=False)
class RaggedSequences:
    """All sequences end to end, in packed order; every packed token is a query.

    A row's keys are its prompt's and then its own. Attention is causal, with the last query at the
    last key.
    """

    keys: Gathering
    query_ends: torch.Tensor  # int32 [sequences + 1], from 0
    key_ends: torch.Tensor  # int32 [sequences + 1], from 0
    longest_query: int
    longest_key: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """All blocks, and the gathering into their places, which are numbered across all blocks.

    `queries` and `keys` are gathered from the T packed tokens, `outputs` from the queries' places.
    `ragged` is set on devices with a kernel for it, unless every block is causal: then kernels for
    sequences of equal length are faster. With a `share`, this rank has only a part of the tokens
    outside attention.
    """

    blocks: tuple[AttentionBlock, ...]
    queries: Gathering
    keys: Gathering
    outputs: Gathering
    longest: int  # tokens of the longest sequence, prompt and row
    ragged: RaggedSequences | None = None
    share: SequenceShare | None = None

    def for_one_pass(self) -> PackedLayout:
        """Return a copy whose masks live only for a pass, since they are quadratic in the
        length."""
        return replace(self, blocks=tuple(replace(block) for block in self.blocks))


@dataclass(frozen=True, slots=True)
class _Padded:
    """The packed positions of a block, -1 for padding.

    Outputs are read from the queries' places from `first` on, as many as each member has tokens.
    """

    queries: Positions  # [B, queries]
    keys: Positions  # [B, keys]
    visible: npt.NDArray[np.bool_] | None
    first: Sequence[int]


def build_layout(
    sequences: Sequence[AttendedSequence], num_tokens: int, device: torch.device
) -> PackedLayout:
    """Lay out attention for `num_tokens` packed tokens: sequences and padding at the end."""
    output = np.full(num_tokens, -1)
    blocks: list[_Padded] = []
    offset = 0
    prompts = [sequence for sequence in sequences if not sequence.prompt_length]
    rows = [sequence for sequence in sequences if sequence.prompt_length]
    # `output` records the place of each packed token's output.
    for members in (*_similar_lengths(prompts), *_similar_lengths(rows)):
        block = _block(members)
        for sequence, start in zip(members, block.first, strict=True):
            stop = sequence.start + sequence.length
            output[sequence.start : stop] = offset + start + np.arange(sequence.length)
        blocks.append(block)
        offset += block.queries.size
    longest = max(member.prompt_length + member.length for member in sequences)
    ragged = None
    if has_ragged_kernel(device) and any(block.visible is not None for block in blocks):
        ends = sorted(sequences, key=lambda s: s.start)
        used = ends[-1].start + ends[-1].length
        if used < num_tokens:  # the kernel leaves tokens outside all sequences undefined
            ends.append(AttendedSequence(used, 0, used, num_tokens - used))
        ragged = _ragged_sequences(ends, num_tokens, device)
    # Nothing reads the outputs of padding, or of prompts that a block of rows computes again.
    read = np.full(offset, -1)
    tokens = np.flatnonzero(output >= 0)
    read[output[tokens]] = tokens
    queries = np.concatenate([block.queries.ravel() for block in blocks])
    keys = np.concatenate([block.keys.ravel() for block in blocks])
    return PackedLayout(
        tuple(_on_device(block, device) for block in blocks),
        Gathering.of(queries, output, device),
        Gathering.of_all(keys, num_tokens, device),
        Gathering.of(output, read, device),
        longest,
        ragged,
    )


def _on_device(block: _Padded, device: torch.device) -> AttentionBlock:
    visible = None if block.visible is None else torch.from_numpy(block.visible).to(device)
    (number, queries), (_, keys) = block.queries.shape, block.keys.shape
    return AttentionBlock((number, queries), (number, keys), visible)


def has_ragged_kernel(device: torch.device) -> bool:
    """Return whether the device has a kernel for sequences end to end."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _AMPERE


def _ragged_sequences(
    sequences: Sequence[AttendedSequence], num_tokens: int, device: torch.device
) -> RaggedSequences:
    keys = [
        np.concatenate(
            [
                s.prompt_start + np.arange(s.prompt_length),
                s.start + np.arange(s.length),
            ]
        )
        for s in sequences
    ]
    num_queries, num_keys = [s.length for s in sequences], [len(positions) for positions in keys]

    def ends(lengths: list[int]) -> torch.Tensor:
        return torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device)

    return RaggedSequences(
        Gathering.of_all(np.concatenate(keys), num_tokens, device),
        ends(num_queries),
        ends(num_keys),
        max(num_queries),
        max(num_keys),
    )


def _similar_lengths(sequences: Sequence[AttendedSequence]) -> Iterator[list[AttendedSequence]]:
    """Cut into blocks of similar lengths, longest first."""
    block: list[AttendedSequence] = []
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


def _block(members: Sequence[AttendedSequence]) -> _Padded:
    longest = members[0].length
    prompt_longest = max(member.prompt_length for member in members)
    rows = _right_pad([member.start for member in members], [m.length for m in members], longest)
    if prompt_longest == 0:  # prompts: plainly causal
        return _Padded(rows, rows, None, range(0, rows.size, longest))
    # The mask has an element per query and key, so its size is quadratic in the length.
    if len(members) * longest * (prompt_longest + longest) > MAX_MASK_ELEMENTS:
        return _causal_block(members)
    # Prompts are padded on the left, rows on the right, so that real tokens stay adjacent.
    pads = prompt_longest - np.array([member.prompt_length for member in members])
    starts = np.array([member.prompt_start for member in members])
    columns = np.arange(prompt_longest)
    visible = columns >= pads[:, None]
    prompts = np.where(visible, starts[:, None] + columns - pads[:, None], -1)
    keys = np.concatenate([prompts, rows], axis=1)
    return _Padded(rows, keys, visible, range(0, rows.size, longest))


def _causal_block(members: Sequence[AttendedSequence]) -> _Padded:
    """Return a block of prompt plus row: it needs no mask, but computes the prompt's queries for
    each row."""
    width = max(member.prompt_length + member.length for member in members)
    index = np.full((len(members), width), -1)
    for line, member in zip(index, members, strict=True):
        prompt = member.prompt_length
        line[:prompt] = member.prompt_start + np.arange(prompt)
        line[prompt : prompt + member.length] = member.start + np.arange(member.length)
    # Only the rows' outputs are read; the prompts' own block has computed the prompts'.
    starts = [number * width + member.prompt_length for number, member in enumerate(members)]
    return _Padded(index, index, None, starts)


def _right_pad(starts: Sequence[int], lengths: Sequence[int], width: int) -> Positions:
    columns = np.arange(width)
    valid = columns < np.array(lengths)[:, None]
    return np.where(valid, np.array(starts)[:, None] + columns, -1)


def _mask(block: AttentionBlock, prompt_visible: Tensor) -> Tensor:
    """Return a mask [B, 1, L, P + L]: a row sees its prompt, and its own tokens causally."""
    longest = block.query_shape[1]
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
class PackedRouting:
    """The engine's experts of packed tokens, on the CPU; a pass copies them to its device.

    In a pipeline they are those of this stage's layers.

    Attributes:
        experts: [layers, T, experts per token], uint8 or int16.
        known: bool [T]; where false, `experts` is meaningless.
    """

    experts: torch.Tensor
    known: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """T input tokens and N trained tokens (labels) of R rows, in the order of `row_indices`.

    The last token of a row's path is only a label: nothing is predicted after it, so it is not an
    input. Logits are needed at `predecessors`: for a row's first token at the prompt's last
    position. A row may have no tokens. `batch_rows` and `columns` locate each token in a table
    [rows of the train batch, most sampled tokens of a row].

    Ranks that share the sequence have the same N labels, but each has a part of the input tokens (T
    is the size of that part) and only the `predecessors` of the labels `local_labels`.
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
    local_labels: torch.Tensor | None = None  # int64 [n], indices of labels; None: all
    routing: PackedRouting | None = None  # None: no row came with experts
    source: str = ""  # the source of all rows, if a run has several

    @property
    def num_rows(self) -> int:
        """Return R."""
        return len(self.row_indices)


def build_micro_batch(
    rows: Sequence[TrainingRow],
    plan: MicroBatchPlan,
    device: torch.device,
    images: Mapping[int, ImagePrompt] = MappingProxyType({}),
    share: SequenceShare | None = None,
    pad_to: int = 1,
    source: str = "",
    image_ranks: ImageRanks | None = None,
) -> MicroBatch | None:
    """Pack the plan's rows; ``None`` if none of them holds a token.

    Args:
        images: images of prompts, by `TrainingRow.group`.
        share: this rank's part of the sequence; None for all of it.
        pad_to: pad T to a multiple of this with tokens 0, whose results nothing reads.
        image_ranks: the ranks that divide the images; ``None`` for those of `share`.
    """
    # Rows without trained tokens count as rows, but have no tokens to pack.
    pieces = place_pieces(rows, plan.pieces)
    if not pieces:
        return None
    paths = [path for piece in pieces for path in piece.paths]
    sizes = [path.labels.size for path in paths]
    of_row = {index: number for number, index in enumerate(plan.row_indices)}
    owners = [of_row[i] for piece in pieces for i, group in piece.rows.items() for _ in group]
    input_ids, position_ids = (_pad(values, pad_to) for values in packed_inputs(pieces, images))
    predecessors, local_labels = np.concatenate([path.predecessors for path in paths]), None
    behavior = np.concatenate([path.behavior_logprobs for path in paths])
    num_tokens = input_ids.size
    if share is not None:
        input_ids, position_ids = share.cut(input_ids), share.cut(position_ids)
        indices = share.local_indices(predecessors, num_tokens)
        predecessors = share.local_positions(predecessors[indices], num_tokens)
        local_labels = _tensor(indices, device)
    sequences = [sequence for piece in pieces for sequence in piece.sequences]
    # Rows of a prompt share its images, which are packed once like its tokens.
    prompt_images = [(piece.start, images.get(piece.first.group)) for piece in pieces]
    return MicroBatch(
        row_indices=plan.row_indices,
        row_groups=tuple(rows[index].group for index in plan.row_indices),
        layout=replace(build_layout(sequences, num_tokens, device), share=share),
        input_ids=_tensor(input_ids[None], device),
        position_ids=_tensor(position_ids[..., None, :], device),
        predecessors=_tensor(predecessors, device),
        # One entry per trained token: its id, its row here and in the batch, its place in the row.
        labels=_tensor(np.concatenate([path.labels for path in paths]), device),
        rows=_tensor(np.repeat(owners, sizes), device),
        batch_rows=_tensor(np.repeat([path.row.number for path in paths], sizes), device),
        columns=_tensor(np.concatenate([path.tokens.columns for path in paths]), device),
        behavior_logprobs=torch.from_numpy(behavior).to(device),
        images=pack_images(prompt_images, num_tokens, device, image_ranks or ImageRanks(share)),
        local_labels=local_labels,
        routing=_pack_routing(pieces, num_tokens, share),
        source=source,
    )


def pack_rows(
    rows: Sequence[TrainingRow],
    device: torch.device,
    share: SequenceShare | None = None,
    pad_to: int = 1,
) -> MicroBatch:
    """Pack all rows, given by group; at least one holds a token."""
    sizes = [row.size for row in rows]
    (plan,) = plan_micro_batches(sizes, range(len(rows)), rows_per_micro=len(rows))
    micro_batch = build_micro_batch(rows, plan, device, share=share, pad_to=pad_to)
    assert micro_batch is not None
    return micro_batch


def _pack_routing(
    pieces: Sequence[PackedPiece], num_tokens: int, share: SequenceShare | None
) -> PackedRouting | None:
    """Pack the rows' experts like their tokens."""
    placed: list[tuple[int, RoutedExperts]] = []
    for piece in pieces:
        # The prompt's experts are the same in all rows. An episode has none.
        places = [(piece.start, piece.first.prompt_routing)]
        places += [(paths[0].at.start, paths[0].row.routing) for paths in piece.rows.values()]
        placed += [(start, routing) for start, routing in places if routing is not None]
    if not placed:
        return None
    template = placed[0][1]
    experts = np.zeros((num_tokens, *template.shape[1:]), template.dtype)
    is_known = np.zeros(num_tokens, np.bool_)
    for start, routing in placed:
        experts[start : start + len(routing)] = routing
        is_known[start : start + len(routing)] = True
    by_layer = experts.transpose(1, 2, 0)
    if share is not None:
        by_layer, is_known = share.cut(by_layer), share.cut(is_known)
    # torch gathers only a few dtypes; expert numbers fit into 15 bits.
    small = np.uint8 if template.dtype == np.uint8 else np.int16
    ordered = np.ascontiguousarray(by_layer.transpose(0, 2, 1), dtype=small)
    return PackedRouting(torch.from_numpy(ordered), torch.from_numpy(is_known))


def _pad(values: npt.NDArray[np.int64], pad_to: int) -> npt.NDArray[np.int64]:
    """Return values [..., T] with zeros up to a multiple of `pad_to`."""
    end = [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % pad_to)]
    return np.pad(values, end)


def _tensor(values: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)

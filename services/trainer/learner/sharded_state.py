"""Save a state, each rank its pieces, so that any other layout of ranks can read it back.

torch.distributed.checkpoint is not used: its ``.metadata`` is a pickle, and its ranks plan by
pickled messages. Here a file of safetensors holds a rank's pieces by the names of their tensors,
and an index in JSON says where each piece lies. One rank writes one file of whole tensors and no
index.

    optimizer.index.json                  {"files": [...], "tensors": {name: {"shape": [...],
                                          "pieces": [[number of the file, offset...], ...]}}}
    optimizer-00002-of-00004.safetensors  the pieces of rank 1
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.tensor_layouts import Sizes, TensorLayouts, TensorShard, region
from services.trainer.learner.weight_stream import BUCKET_BYTES
from sluice.concurrency.waits import advance

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_HEADER_ALIGNMENT = 8
_DONE, _MORE, _FAILED = 0.0, 1.0, 2.0


class TensorFile:
    """A file of safetensors, written in the order of its header and never held in memory."""

    def __init__(self, file: Path, tensors: Mapping[str, tuple[Sizes, torch.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (shape, dtype) in tensors.items():
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": [start, end]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
        self._file = file.open("wb")
        self._file.write(len(encoded).to_bytes(8, "little") + encoded)

    def append(self, tensor: Tensor) -> None:
        """Write the next tensor, or the next rows of one."""
        flat = tensor.detach().contiguous().flatten().cpu()
        self._file.write(flat.view(torch.uint8).numpy().data)
        advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def file_name(stem: str, number: int, count: int) -> str:
    """Return the name of one of `count` files, as Hugging Face names them; `number` from 0."""
    if count == 1:
        return f"{stem}.safetensors"
    return f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors"


def keep_step(work: Iterable[object], parallel: ParallelContext, phase: str) -> None:
    """Run each rank's work, with all ranks in step part by part. Collective.

    So no rank waits long for another, and a failure on one ends the work on all.

    Args:
        work: this rank's parts; those that exchange rows come first, the same number on every rank.

    Raises:
        OSError: this or another rank cannot write.
        DeadlineError, PeerError: a rank did not take part.
    """
    parts = iter(work)
    states = [[_MORE]]
    while any(state == [_MORE] for state in states):
        failure: OSError | None = None
        state = _DONE
        try:
            if next(parts, parts) is not parts:
                state = _MORE
        except OSError as error:
            failure, state = error, _FAILED
        states = parallel.all_gather([state], phase)
        if failure is not None:
            raise failure
        if [_FAILED] in states:
            rank = states.index([_FAILED])
            raise OSError(f"trainer rank {rank} could not write its part; see its log")


@dataclass(frozen=True, slots=True)
class _WrittenPiece:
    """A piece in a state's files and the rank that writes it."""

    name: str
    piece: TensorShard
    writer: int


def write_state(
    folder: Path,
    stem: str,
    parts: Mapping[str, Tensor],
    layouts: TensorLayouts,
    parallel: ParallelContext,
) -> Iterator[None]:
    """Write this rank's pieces, bucket by bucket, and on rank 0 the index.

    Args:
        parts: this rank's `local_part` of every tensor.
        parallel: all ranks; nothing is sent.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    count = parallel.world_size
    pieces = ((name, piece) for name, layout in layouts.items() for piece in layout.pieces)
    # The holders of pieces take turns, so that ranks write equal amounts.
    placed = [
        _WrittenPiece(name, piece, piece.holders[turn % len(piece.holders)])
        for turn, (name, piece) in enumerate(pieces)
    ]
    own_pieces = [written for written in placed if written.writer == parallel.rank]
    header = {
        written.name: (
            () if layouts[written.name].is_scalar else written.piece.shape,
            layouts[written.name].dtype,
        )
        for written in own_pieces
    }
    with TensorFile(folder / file_name(stem, parallel.rank, count), header) as file:
        for written in own_pieces:
            part = parts[written.name]
            step = max(1, BUCKET_BYTES // max(1, part[:1].nbytes))
            for start in range(0, part.shape[0], step):
                file.append(part[start : start + step])
                yield
    if parallel.rank == 0 and count > 1:
        _write_index(folder / f"{stem}.index.json", stem, count, placed, layouts)


def _write_index(
    file: Path, stem: str, count: int, placed: Sequence[_WrittenPiece], layouts: TensorLayouts
) -> None:
    tensors: dict[str, Any] = {
        name: {"shape": layout.own_shape, "pieces": []} for name, layout in layouts.items()
    }
    for part in placed:
        tensors[part.name]["pieces"].append([part.writer, *part.piece.offset])
    files = [file_name(stem, number, count) for number in range(count)]
    text = json.dumps({"files": files, "tensors": tensors}, separators=(",", ":"))
    file.write_text(text, encoding="utf-8")


class StateFiles:
    """Reads parts of the files that `write_state` wrote on any number of ranks.

    Raises (all methods):
        OSError, SafetensorError, ValueError, KeyError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, stem: str) -> None:
        self._pieces: dict[str, list[tuple[Path, Sizes]]] = {}
        self._shapes: dict[str, Sizes] = {}
        self._opened: dict[Path, Any] = {}
        index = folder / f"{stem}.index.json"
        if not index.is_file():
            file = folder / file_name(stem, 0, 1)
            for name in self._open(file).keys():  # noqa: SIM118 - safetensors' handle is no mapping
                self._shapes[name] = self._shape(file, name)
                self._pieces[name] = [(file, (0,) * max(1, len(self._shapes[name])))]
            return
        content = json.loads(index.read_text(encoding="utf-8"))
        try:
            files = [folder / name for name in content["files"]]
            for name, entry in content["tensors"].items():
                self._shapes[name] = tuple(entry["shape"])
                self._pieces[name] = [(files[number], tuple(o)) for number, *o in entry["pieces"]]
        except (TypeError, AttributeError) as error:
            raise ValueError(f"{index.name}: not the index of a state: {error}") from error

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._pieces)

    def spec(self, name: str) -> tuple[Sizes, torch.dtype]:
        """Return a tensor's shape and dtype."""
        file, _ = self._pieces[name][0]
        return self._shapes[name], _DTYPES[self._open(file).get_slice(name).get_dtype()]

    def fill(self, target: Tensor, name: str, offset: Sequence[int]) -> None:
        """Copy a part of a tensor into `target`; read nothing else.

        Args:
            offset: where the part begins, by dimension.
        """
        num_left = target.numel()
        for file, begin in self._pieces[name]:
            shape = self._shape(file, name) or (1,)
            start = [max(a, b) for a, b in zip(offset, begin, strict=True)]
            size = [
                min(a + n, b + m) - s
                for a, n, b, m, s in zip(offset, target.shape, begin, shape, start, strict=True)
            ]
            if min(size) > 0:
                into = target[region(_subtract(start, offset), size)]
                self._copy(into, file, name, _subtract(start, begin))
                num_left -= into.numel()
        if num_left:
            raise ValueError(f"{name}: the pieces do not make the whole tensor")

    def _copy(self, into: Tensor, file: Path, name: str, offset: Sizes) -> None:
        opened = self._open(file)
        if not self._shape(file, name):
            into.copy_(opened.get_tensor(name).reshape(1))
            return
        stored = opened.get_slice(name)
        step = max(1, BUCKET_BYTES // max(1, into[:1].nbytes))
        for row in range(0, into.shape[0], step):
            rows = into[row : row + step]
            rows.copy_(stored[region((offset[0] + row, *offset[1:]), rows.shape)])

    def _shape(self, file: Path, name: str) -> Sizes:
        return tuple(self._open(file).get_slice(name).get_shape())

    def _open(self, file: Path) -> Any:  # noqa: ANN401 - safetensors has no types
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]


def _subtract(minuend: Sequence[int], subtrahend: Sequence[int]) -> Sizes:
    return tuple(a - b for a, b in zip(minuend, subtrahend, strict=True))

"""Write a model as a Hugging Face folder, all ranks together, in any layout.

Each rank writes one file with a share of the tensors, whole and by their published names, and
receives their rows bucket by bucket. So no rank holds more than two buckets beside its own parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from services.trainer.learner.model.forward import plain_class
from services.trainer.learner.model.weight_files import expert_names
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sharded_state import TensorFile, file_name
from services.trainer.learner.tensor_layouts import Sizes, TensorLayouts
from services.trainer.learner.weight_stream import (
    BUCKET_BYTES,
    TensorRows,
    cut_buckets,
    exchange_rows,
)
from sluice.checkpoint.safetensors_files import write_index
from sluice.concurrency.waits import advance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STEM = "model"
_PHASE = "writing the model's files"

Published = Sequence[tuple[str, Sizes]]
"""The published tensors that make a parameter, in the order of its bytes."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model: its parameters, and the tensors that it stores."""

    parameters: tuple[str, ...]
    tensors: Mapping[str, tuple[Sizes, torch.dtype]]


def write_model(
    folder: Path,
    model: PreTrainedModel,
    parts: Mapping[str, Tensor],
    layouts: TensorLayouts,
    parallel: ParallelContext,
    *,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[None]:
    """Write configuration and weights, bucket by bucket, with the same number of parts on all
    ranks.

    If transformers publishes tensors in a form other than its parameters (except experts, one
    tensor each), rank 0 makes them and then holds the whole model.

    Args:
        model: its own weights are not read.
        parts: this rank's `local_part` of every tensor of the files.
        layouts: the folder, the same on all ranks.

    Raises:
        OSError: the disk is full or cannot be written.
        DeadlineError, PeerError: a rank did not take part.
    """
    transformers_logging.disable_progress_bar()
    if parallel.rank == 0:
        model.save_pretrained(folder, state_dict={})  # configuration, generation, custom code
    yield
    names = published_names(model, layouts)
    if names is None:
        yield from _write_converted(folder, model, parts, layouts, parallel)
        return
    files = share_files(layouts, names, parallel.world_size)
    if parallel.rank == 0 and len(files) > 1:
        _write_index(folder, files)
    yield from write_files(folder, _STEM, files, parts, layouts, parallel, bucket_bytes)


def write_files(
    folder: Path,
    stem: str,
    files: Sequence[ModelFile],
    parts: Mapping[str, Tensor],
    layouts: TensorLayouts,
    parallel: ParallelContext,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[None]:
    """Write a file on each of the first ranks; arguments and errors as in `write_model`."""
    buckets = [list(cut_buckets(layouts, file.parameters, bucket_bytes)) for file in files]
    # Opening is a part of its own, so that a rank that fails leaves no other in an exchange.
    if parallel.rank >= len(files):
        yield
        yield from _exchange(buckets, parts, layouts, parallel, None)
        return
    name = file_name(stem, parallel.rank, len(files))
    with TensorFile(folder / name, files[parallel.rank].tensors) as file:
        yield
        yield from _exchange(buckets, parts, layouts, parallel, file)


def published_names(
    model: PreTrainedModel, layouts: TensorLayouts
) -> Mapping[str, Published] | None:
    """Return the tensors of a model's files by parameter; None if they are made in another way.

    Use empty tensors as weights while transformers names them.
    """
    meta = _empty_tensors(layouts)
    storages = {tensor.untyped_storage()._cdata: name for name, tensor in meta.items()}
    written = _in_published_form(model, dict(meta))
    renamed = {
        storages[tensor.untyped_storage()._cdata]: (name, tuple(tensor.shape))
        for name, tensor in written.items()
        if tensor.untyped_storage()._cdata in storages
        and tensor.is_contiguous()
        and tensor.numel() == tensor.untyped_storage().nbytes() // tensor.itemsize
    }
    names: dict[str, Published] = {}
    for name, layout in layouts.items():
        experts = [part for parts in expert_names(name, layout.shape[0]) for part in parts]
        if experts and all(part in written for part in experts):
            names[name] = [(part, tuple(written[part].shape)) for part in experts]
        elif name in renamed:
            names[name] = [renamed[name]]
        else:
            return None
    return names if sum(map(len, names.values())) == len(written) else None


def _in_published_form(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors of a model, which may lack memory, in the form of transformers' files."""
    whole_model = model
    model_names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    if not tensors.keys() <= model_names or not hasattr(model, "_weight_conversions"):
        # transformers looks for modules and shapes that may be on other stages, and, of a model
        # that it has not read itself, for the name of the class, which sharding replaces.
        with torch.device("meta"):
            whole_model = plain_class(model)(model.config)
    published: dict[str, Tensor] = revert_weight_conversion(whole_model, tensors)
    return published


def _empty_tensors(layouts: TensorLayouts) -> dict[str, Tensor]:
    return {
        name: torch.empty(layout.own_shape, dtype=layout.dtype, device="meta")
        for name, layout in layouts.items()
    }


def share_files(
    layouts: TensorLayouts, names: Mapping[str, Published], count: int
) -> list[ModelFile]:
    """Share parameters among at most `count` files of about equal sizes, in order."""
    total = sum(layout.num_bytes for layout in layouts.values())
    shares: dict[int, list[str]] = {}
    start = 0
    for name, layout in layouts.items():
        shares.setdefault(start * count // max(1, total), []).append(name)
        start += layout.num_bytes
    return [
        ModelFile(
            tuple(parameters),
            {t: (shape, layouts[n].dtype) for n in parameters for t, shape in names[n]},
        )
        for parameters in shares.values()
    ]


def _exchange(
    buckets: Sequence[Sequence[Sequence[TensorRows]]],
    parts: Mapping[str, Tensor],
    layouts: TensorLayouts,
    parallel: ParallelContext,
    file: TensorFile | None,
) -> Iterator[None]:
    for number in range(max(map(len, buckets), default=0)):
        wanted = [
            (rank, rows)
            for rank, rank_buckets in enumerate(buckets)
            for rows in (rank_buckets[number] if number < len(rank_buckets) else ())
        ]
        tensors = exchange_rows(wanted, parts, layouts, parallel, _PHASE)
        while tensors:
            assert file is not None
            file.append(tensors.pop(0))
        yield


def _write_index(folder: Path, files: Sequence[ModelFile]) -> None:
    weight_map = {
        name: file_name(_STEM, number, len(files))
        for number, file in enumerate(files)
        for name in file.tensors
    }
    sizes = [t for file in files for t in file.tensors.values()]
    total = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in sizes)
    write_index(folder, weight_map, total)


def _write_converted(
    folder: Path,
    model: PreTrainedModel,
    parts: Mapping[str, Tensor],
    layouts: TensorLayouts,
    parallel: ParallelContext,
) -> Iterator[None]:
    blocks: dict[str, list[Tensor]] = {}
    for bucket in cut_buckets(layouts, layouts, BUCKET_BYTES):
        tensors = exchange_rows([(0, rows) for rows in bucket], parts, layouts, parallel, _PHASE)
        advance()
        for rows in bucket[: len(tensors)]:  # only rank 0 has found any
            # The next bucket must not find this one in the device's memory.
            blocks.setdefault(rows.name, []).append(tensors.pop(0).cpu())
        yield
    if parallel.rank:
        # As many parts as on rank 0, so that the ranks' next exchanges coincide.
        yield from (None for _ in _in_published_form(model, _empty_tensors(layouts)))
        return
    state = {name: torch.cat(rows).view(layouts[name].own_shape) for name, rows in blocks.items()}
    written = _in_published_form(model, state)
    specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in written.items()}
    with TensorFile(folder / file_name(_STEM, 0, 1), specs) as file:
        for tensor in written.values():
            file.append(tensor)
            yield

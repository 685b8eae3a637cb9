"""Safetensors weights: copy them file by file, in another dtype on request, and compare them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sluice.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
_READABLE = 0o644
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")

_FORMER_NAMES = {"model.language_model.": "model.", "model.visual.": "visual."}  # Qwen2(.5)-VL

_REMEDY = "copy it again, or take another checkpoint"

TOLERANCE = 1e-6  # verl's, absolute and relative


def is_weight_file(file: Path) -> bool:
    """Return whether `file` holds weights, in any of the formats of model directories."""
    return file.suffix in {".safetensors", ".bin", ".pt", ".pth"} or file.name.endswith(
        ".index.json"
    )


def former_name(name: str) -> str:
    """Return the name that a layer or a parameter has in files of older transformers.

    It is another name in vision-language models only.
    """
    for prefix, former in _FORMER_NAMES.items():
        if name.startswith(prefix):
            return former + name.removeprefix(prefix)
    return name


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read ({error!r}); copy it again, or choose another checkpoint"
        ) from error


def tensor_names(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor in `folder`.

    Raises:
        CheckpointError: a file is damaged, or a file or tensor that the index names is missing.
    """
    files = {file.name for file in folder.glob("*.safetensors")}
    index = folder / INDEX_FILE
    mapped: dict[str, str] = {}
    if index.is_file():
        mapped = _weight_map(index)
        named = set(mapped.values())
        if named - files:
            raise CheckpointError(
                f"{folder} lacks {min(named - files)}, which {INDEX_FILE} names; {_REMEDY}"
            )
        files = named
    file_of: dict[str, Path] = {}
    for name in sorted(files):
        try:
            with safe_open(folder / name, framework="pt") as opened:
                file_of.update(dict.fromkeys(opened.keys(), folder / name))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / name} is damaged ({error}); {_REMEDY}") from error
    for tensor, name in sorted(mapped.items()):
        if tensor not in file_of:
            raise CheckpointError(
                f"{folder / name} lacks {tensor}, which {INDEX_FILE} places there; {_REMEDY}"
            )
    return file_of


def copy_weights(
    source: Path,
    target: Path,
    dtype: torch.dtype | None,
    dropped: Collection[str],
    on_tensor: Callable[[int, int], None],
    change: Callable[[str, Tensor], Tensor] = lambda _name, tensor: tensor,
) -> None:
    """Copy all weights, with an index if they lie in several files.

    Args:
        source: with ``*.safetensors``.
        dtype: what floating-point weights become; ``None`` leaves them.
        dropped: tied outputs to leave out; each must equal the input embedding.
        on_tensor: called with (tensors done, tensors in all).
        change: returns what to write of a tensor, before its dtype changes.

    Raises:
        CheckpointError: a file is damaged, or the tensor to drop differs from the embedding.
    """
    files = tensor_names(source)
    if dropped & files.keys():
        _check_tied(files, sorted(dropped & files.keys()))
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for file in sorted(set(files.values())):
        tensors: dict[str, Tensor] = {}
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - safetensors' handle is no mapping
                if name not in dropped:
                    tensor = change(name, opened.get_tensor(name))
                    is_cast = dtype is not None and tensor.is_floating_point()
                    tensors[name] = tensor.to(dtype) if is_cast else tensor
                    weight_map[name] = file.name
                    num_bytes += tensors[name].nbytes
                    on_tensor(len(weight_map), len(files))
        save_file(tensors, target / file.name, metadata={"format": "pt"})
        (target / file.name).chmod(_READABLE)  # safetensors lets only the owner read it
    if (source / INDEX_FILE).is_file():
        write_index(target, weight_map, num_bytes)


def write_index(folder: Path, weight_map: Mapping[str, str], num_bytes: int) -> None:
    """Write the index of a model in several files, from the file's name of each tensor."""
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_tensor(file: Path, name: str) -> Tensor:
    """Return one tensor of a file, on the CPU."""
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(name)
    return tensor


def check_equal_embeddings(output: Tensor, embedding: Tensor | None, name: str) -> None:
    """Refuse to drop an output matrix that is trained separately.

    Raises:
        CheckpointError: they differ, or there is no embedding.
    """
    if embedding is None or not torch.equal(output, embedding):
        raise CheckpointError(
            f"{name} differs from the input embedding, so leaving it out would change the model; "
            "merge without --tie-word-embedding"
        )


def embedding_name(names: Collection[str]) -> str | None:
    """Return the input embedding among a causal language model's tensor names."""
    return next((name for name in sorted(names) if name.endswith(_EMBEDDINGS)), None)


def _check_tied(files: dict[str, Path], dropped: list[str]) -> None:
    embedding = embedding_name(files)
    for name in dropped:
        tied = read_tensor(files[embedding], embedding) if embedding else None
        check_equal_embeddings(read_tensor(files[name], name), tied, name)


def compare_weights(found: Path, wanted: Path, on_tensor: Callable[[int, int], None]) -> list[str]:
    """Return a sentence for every tensor that differs in presence, shape, dtype or value.

    Values are close if ``|found - wanted| <= TOLERANCE * (1 + |wanted|)``, in float64; two
    not-a-numbers are equal.

    Raises:
        CheckpointError: a file of either directory is damaged.
    """
    ours, theirs = tensor_names(found), tensor_names(wanted)
    differences = [f"{name}: only in {found}" for name in sorted(ours.keys() - theirs.keys())]
    differences += [f"{name}: only in {wanted}" for name in sorted(theirs.keys() - ours.keys())]
    shared = sorted(ours.keys() & theirs.keys())
    for number, name in enumerate(shared, 1):
        our_tensor, their_tensor = read_tensor(ours[name], name), read_tensor(theirs[name], name)
        difference = _describe_difference(our_tensor, their_tensor)
        if difference is not None:
            differences.append(f"{name}: {difference}")
        on_tensor(number, len(shared))
    return differences


def _describe_difference(found: Tensor, wanted: Tensor) -> str | None:
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)} instead of {tuple(wanted.shape)}"
    if found.dtype != wanted.dtype:
        return f"dtype {_dtype_name(found)} instead of {_dtype_name(wanted)}"
    close = torch.isclose(
        found.double(), wanted.double(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    )
    if bool(close.all()):
        return None
    gap = (found.double() - wanted.double()).abs().max()
    return f"{int((~close).sum())} of {close.numel()} values differ, by up to {float(gap):.3g}"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

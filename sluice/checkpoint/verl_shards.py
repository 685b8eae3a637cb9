"""verl's FSDP checkpoints: one torch file a rank, joined into whole tensors and written as a model.

``model_world_size_W_rank_R.pt`` maps parameter names to DTensors (or to tensors, where they are not
sharded). Under hybrid sharding every group of ranks holds all shards; the first group is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)
from transformers.utils import logging as transformers_logging

from sluice.checkpoint.safetensors_files import check_equal_embeddings, embedding_name
from sluice.checkpoint.source import SHARD_NAME
from sluice.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedModel


_MESH_NAMES = (("fsdp",), ("ddp", "fsdp"))
# torch itself allows the classes of a DTensor under their present names; before 2.5 they had these.
_FORMER_PACKAGE = "torch.distributed._tensor"
_FORMER_NAMES: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (DTensor, f"{_FORMER_PACKAGE}.api.DTensor"),
    *((kind, f"{_FORMER_PACKAGE}.placement_types.{kind.__name__}") for kind in (Shard, Replicate)),
    *(
        (kind, f"{_FORMER_PACKAGE}.{module}.{kind.__name__}")
        for kind in (DTensorSpec, TensorMeta)
        for module in ("placement_types", "_dtensor_spec")
    ),
]

_READABLE = 0o644
_GENERATION_FILE = "generation_config.json"
_FAMILIES: Mapping[str, Callable[..., object]] = {
    "ForTokenClassification": AutoModelForTokenClassification.from_config,
    "ForCausalLM": AutoModelForCausalLM.from_config,
    "LMHeadModel": AutoModelForCausalLM.from_config,
    "ForConditionalGeneration": AutoModelForImageTextToText.from_config,
    "ForVision2Seq": AutoModelForImageTextToText.from_config,
}

Shape = tuple[int, ...]


def read_world_size(folder: Path) -> int:
    """Return the ranks of the run that saved `folder`, by the file names.

    Raises:
        CheckpointError: the file names disagree.
    """
    names = (file.name for file in folder.iterdir())
    sizes = {int(m[1]) for m in map(SHARD_NAME.fullmatch, names) if m is not None}
    if len(sizes) != 1:
        raise CheckpointError(
            f"{folder}: files of runs with {sorted(sizes)} ranks; leave those of one run there"
        )
    return sizes.pop()


def read_shards(
    folder: Path,
    dtype: torch.dtype | None,
    shapes: Mapping[str, Shape],
    on_tensor: Callable[[int, int], None],
) -> dict[str, Tensor]:
    """Return all weights, whole, on the CPU.

    The files are opened with ``weights_only``: they can hold tensors and the classes of a DTensor,
    and cannot run code.

    Args:
        folder: with ``model_world_size_W_rank_R.pt`` of all ranks.
        dtype: what floating-point weights become; ``None`` leaves them.
        shapes: of the model by name, to tell a copied tensor from a cut one; may lack names.
        on_tensor: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: a rank's file is missing or damaged, or the sharding is another one.
    """
    world_size = read_world_size(folder)
    first_state = _load(_shard_file(folder, world_size, 0))
    num_shards = _num_shards(folder, first_state, world_size)
    files = [_shard_file(folder, world_size, rank) for rank in range(num_shards)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {num_shards} shards, first {missing[0]}; collect "
            "the files of all machines in one folder"
        )
    states = [first_state, *(_load(file) for file in files[1:])]
    merged: dict[str, Tensor] = {}
    for number, name in enumerate(first_state, 1):
        for state, file in zip(states, files, strict=True):
            if name not in state:
                raise CheckpointError(
                    f"{file} lacks {name}, which rank 0 has; files of runs are mixed"
                )
        tensor = join_parts(name, [state[name] for state in states], shapes.get(name))
        merged[name] = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor.clone()
        on_tensor(number, len(first_state))
    return merged


def join_parts(name: str, parts: Sequence[Tensor], shape: Shape | None = None) -> Tensor:
    """Join the tensors of all shards, given in order of rank.

    Sharded DTensors are joined on their dimension and replicated ones taken once. Tensors that are
    no DTensors are joined on dimension 0, unless each has the model's `shape` already.

    Raises:
        CheckpointError: ranks differ, it is not weights, or the result is not of the saved shape.
    """
    first_part, expected = parts[0], shape
    if isinstance(first_part, DTensor):
        tensor, expected = _join_shards(name, first_part.placements, parts), tuple(first_part.shape)
    else:
        is_whole = not first_part.dim() or tuple(first_part.shape) == shape or len(parts) == 1
        if is_whole and not all(torch.equal(first_part, part) for part in parts[1:]):
            raise CheckpointError(
                f"{name}: each rank holds it whole, and they differ; save the checkpoint again"
            )
        tensor = first_part if is_whole else torch.cat([*parts], dim=0)
    if expected is not None and tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{name}: the shards give shape {tuple(tensor.shape)} instead of {expected}; files of "
            "different runs are mixed, or some are missing"
        )
    return tensor


def _join_shards(name: str, placements: Sequence[object], parts: Sequence[Tensor]) -> Tensor:
    local: list[Tensor] = []
    for part in parts:
        if not isinstance(part, DTensor) or list(part.placements) != list(placements):
            raise CheckpointError(f"{name}: ranks shard it differently; save the checkpoint again")
        local.append(part._local_tensor)  # to_local() would require the process group of the run
    placement = placements[-1]
    if isinstance(placement, Replicate):
        return local[0]
    if not isinstance(placement, Shard):
        raise CheckpointError(f"{name}: {placement} is no shard and no copy; merge it with verl")
    return torch.cat(local, dim=placement.dim)


def _num_shards(folder: Path, state: Mapping[str, Tensor], world_size: int) -> int:
    """Return how many ranks hold different shards: all, or one group of hybrid sharding."""
    sharded = next((tensor for tensor in state.values() if isinstance(tensor, DTensor)), None)
    if sharded is None:
        return world_size
    # Attributes by name: files of older versions of torch fill others than the present class reads.
    mesh = vars(sharded._spec.mesh)
    names = tuple(mesh.get("_mesh_dim_names") or mesh.get("mesh_dim_names") or ("fsdp",))
    if names not in _MESH_NAMES or len(sharded.placements) != len(names):
        raise CheckpointError(
            f"{folder} is sharded over {names}, and only {_MESH_NAMES} are joined here; merge it "
            "with `python -m verl.model_merger merge --backend fsdp`"
        )
    if len(names) == 1:
        return world_size
    ranks = mesh.get("mesh")
    return int(ranks.shape[-1]) if ranks is not None else int(sharded._spec.mesh.shape[-1])


def _load(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; collect the files of all machines in one folder")
    try:
        with torch.serialization.safe_globals(_FORMER_NAMES), _no_process_group_warnings():
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)  # noqa: TID251 - other people's files; weights_only runs no code
    except Exception as error:  # whatever is wrong with other people's file
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{file} cannot be read ({reason}); copy it again, or take another checkpoint"
        ) from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise CheckpointError(f"{file} does not map names to tensors; it is no model state of verl")
    return state


@contextmanager
def _no_process_group_warnings() -> Iterator[None]:
    """Silence torch, which warns for every DTensor outside of the run that wrote it."""
    loud = logging.getLogger("torch.distributed.device_mesh")
    level = loud.level
    loud.setLevel(logging.ERROR)
    try:
        yield
    finally:
        loud.setLevel(level)


def _shard_file(folder: Path, world_size: int, rank: int) -> Path:
    return folder / f"model_world_size_{world_size}_rank_{rank}.pt"


def assemble_model(
    shards: Path,
    target: Path,
    dtype: torch.dtype | None,
    dropped: Collection[str],
    *,
    trust_remote_code: bool,
    on_tensor: Callable[[int, int], None],
) -> None:
    """Join `shards` and write weights and ``config.json`` into `target`.

    Args:
        shards: folder with ``model_world_size_W_rank_R.pt``.
        target: holds the model's configuration and gets the rest.
        dtype: what floating-point weights become; ``None`` leaves them.
        dropped: tied outputs to leave out; each must equal the input embedding.
        trust_remote_code: run model code that ships with the checkpoint.
        on_tensor: called with (tensors done, tensors in all).

    Raises:
        CheckpointError: a shard is missing or damaged, or the weights do not fit the model that the
            configuration describes.
    """
    transformers_logging.disable_progress_bar()
    model = _empty_model(target, trust_remote_code=trust_remote_code)
    shapes: dict[str, Shape] = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    weights = read_shards(shards, dtype, shapes, on_tensor)
    refuse_adapters(shards, weights)
    for name in sorted(dropped & weights.keys()):
        embedding = embedding_name(weights)
        tied = weights[embedding] if embedding else None
        check_equal_embeddings(weights.pop(name), tied, name)
    if _fits(model, weights):
        _save(model, weights, target)
    else:
        _save_by_saved_names(model, weights, target, trust_remote_code=trust_remote_code)
    for file in target.glob("*.safetensors"):
        file.chmod(_READABLE)  # safetensors lets only the owner read it


def _empty_model(target: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(
            target, local_files_only=True, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            built = _builder(config)(config, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"config.json of the checkpoint describes no model that transformers builds ({error}); "
            "copy the base model's configuration into its huggingface folder"
        ) from error
    return cast("PreTrainedModel", built)


def _builder(config: PreTrainedConfig) -> Callable[..., object]:
    names = config.architectures or []
    for ending, build in _FAMILIES.items():
        if any(name.endswith(ending) for name in names):
            return build
    raise CheckpointError(
        f"config.json names the architectures {names}, and none of them can be merged; known "
        f"endings: {', '.join(_FAMILIES)}"
    )


def refuse_adapters(folder: Path, names: Collection[str]) -> None:
    """Raise CheckpointError if weights have peft's names: the adapters are not in them yet."""
    adapters = [name for name in names if ".lora_" in name or name.startswith("base_model.model.")]
    if adapters:
        raise CheckpointError(
            f"{folder} holds LoRA weights (first {min(adapters)}), which are not merged here; use "
            "`python -m verl.model_merger merge --backend fsdp`, then `sluice merge` on its output"
        )


def _fits(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> bool:
    wanted = model.state_dict().keys()
    tied = set(model.all_tied_weights_keys)
    return not (wanted - weights.keys() - tied) and not (weights.keys() - wanted)


def _save(model: PreTrainedModel, weights: Mapping[str, Tensor], target: Path) -> None:
    model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = model.dtype
    config_file = target / _GENERATION_FILE
    content = config_file.read_bytes() if config_file.is_file() else None
    model.save_pretrained(target)
    if content is not None:  # what was written is derived from config.json
        config_file.write_bytes(content)


def _save_by_saved_names(
    model: PreTrainedModel, weights: Mapping[str, Tensor], target: Path, *, trust_remote_code: bool
) -> None:
    """Save weights of another version of transformers, which converts their names at loading."""
    save_torch_state_dict(dict(weights), target)
    loading: object = type(model).from_pretrained(
        target, local_files_only=True, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    _, report = cast("tuple[object, Mapping[str, Collection[str]]]", loading)
    wrong = sorted({*report["missing_keys"], *map(str, report["unexpected_keys"])})
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} weights of the shards do not fit {type(model).__name__}, first "
            f"{wrong[0]}; give the configuration of the model that was trained, or "
            "--is-value-model for a critic"
        )

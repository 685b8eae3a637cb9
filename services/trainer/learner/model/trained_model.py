"""One model of this rank with its optimizer, whole or in shards, and its files in a checkpoint.

A checkpoint's ``actor`` or ``critic`` folder holds:

    huggingface/           config, weights and tokenizer; any Hugging Face tool loads it
    optimizer.safetensors  AdamW's moments and counts by parameter name
    extra_state.json       random generators, number of skipped optimizer steps
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from services.trainer.learner.checkpoint import resume_remedy
from services.trainer.learner.model.forward import DTYPES, plain_class
from services.trainer.learner.model.loading import LoadedModel
from services.trainer.learner.model.optimizer import PolicyOptimizer, ShardedGradients
from services.trainer.learner.model.sharding import (
    Shards,
    assign,
    fill_shards,
    shard_model,
    shard_size,
)
from services.trainer.learner.model.weight_files import WeightFiles
from services.trainer.learner.ranks import DataParallel
from sluice.concurrency.waits import advance
from sluice.config.derived import is_whole
from sluice.config.schema.actor import FsdpConfig, OptimConfig
from sluice.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_CPU = "cpu"
ACTOR_SHARDING = "actor_rollout_ref.actor.fsdp_config"
CRITIC_SHARDING = "critic.fsdp"

WholeTensors: TypeAlias = Callable[[], AbstractContextManager[Iterator[tuple[str, Tensor]]]]
"""Opens a stream of named whole tensors, even if this rank holds only shards of them."""

HUGGINGFACE_FOLDER = "huggingface"
OPTIMIZER_FILE = "optimizer.safetensors"
EXTRA_STATE_FILE = "extra_state.json"
_READABLE = 0o644
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*processor_config.json",
    "*.model",
    "*.tiktoken",
)


def random_state(device: torch.device) -> dict[str, str]:
    """Return the states of the CPU's and the device's random generators as hex, by device type."""
    states = {_CPU: torch.get_rng_state()}
    if device.type != _CPU:
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {kind: state.numpy().tobytes().hex() for kind, state in states.items()}


def restore_random_state(states: Mapping[str, str], device: torch.device) -> None:
    """Restore what `random_state` returned; ignore states of other device types.

    Raises:
        ValueError: a state is not hex.
        RuntimeError: a state has another length than the generator's.
    """
    for kind, state in states.items():
        if kind == _CPU:
            torch.set_rng_state(_from_hex(state))
        elif kind == device.type:
            torch.get_device_module(device).set_rng_state(_from_hex(state), device)


def _from_hex(state: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytes.fromhex(state), dtype=np.uint8).copy())


@dataclass(frozen=True, slots=True, eq=False)
class TrainedModel:
    """A model of this rank and its optimizer.

    `parameters` are all of the model's, whole or sharded, tied ones once; the optimizer has those
    that are trained. `shards` is ``None`` for a whole model. `initial_sum` is `weight_sum` of the
    loaded weights.
    """

    model: PreTrainedModel
    parameters: Mapping[str, nn.Parameter]
    optimizer: PolicyOptimizer
    shards: Shards | None
    initial_sum: float


def save_policy_state(
    directory: Path,
    trained: TrainedModel,
    model_path: str,
    *,
    weights: WholeTensors | None,
    moments: WholeTensors,
) -> None:
    """Write model, optimizer and random state into `directory`; create it.

    Args:
        directory: new or empty.
        trained: its weights are written in their dtype.
        model_path: the folder that the run's model came from; its tokenizer files are copied.
        weights: all parameters by the model's names, tied ones once; ``None``: the model is whole.
        moments: the tensors of `PolicyOptimizer.state_tensors`, whole.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    huggingface = directory / HUGGINGFACE_FOLDER
    try:
        _save_model(huggingface, trained.model, weights)
        advance()
        save_file(_on_host(moments), directory / OPTIMIZER_FILE)
        advance()
    except SafetensorError as error:  # safetensors reports a full disk like this
        raise OSError(f"{directory}: {error}") from error
    # Copied, not saved again: transformers might write them in another form.
    for pattern in TOKENIZER_FILES:
        for file in Path(model_path).glob(pattern):
            shutil.copyfile(file, huggingface / file.name)
    for file in directory.rglob("*.safetensors"):
        file.chmod(_READABLE)  # safetensors lets only the owner read them
    extra = {
        "random_state": random_state(_device(trained.model)),
        "skipped_updates": trained.optimizer.skipped_updates,
    }
    (directory / EXTRA_STATE_FILE).write_text(json.dumps(extra), encoding="utf-8")


def load_policy_state(directory: Path, trained: TrainedModel) -> float:
    """Replace weights, optimizer state and random state in place; in shards this rank's part.

    Args:
        directory: written by `save_policy_state`, with any sharding.
        trained: sharded or whole.

    Returns:
        `weight_sum` of the loaded weights.

    Raises:
        CheckpointError: a file is missing or unreadable, or belongs to another model.
    """
    total = _load_weights(directory / HUGGINGFACE_FOLDER, trained.model, trained.parameters)
    trained.optimizer.load_state_tensors(_read_tensors(directory / OPTIMIZER_FILE))
    try:
        extra = json.loads((directory / EXTRA_STATE_FILE).read_text(encoding="utf-8"))
        trained.optimizer.skipped_updates = int(extra["skipped_updates"])
        restore_random_state(extra["random_state"], _device(trained.model))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"{directory / EXTRA_STATE_FILE} cannot be read ({error}); "
            f"{resume_remedy(directory.parent)}"
        ) from error
    return total


def weight_sum(model: nn.Module) -> float:
    """Return the sum of all weights of a whole model, to compare ranks by one number."""
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _save_model(folder: Path, model: PreTrainedModel, weights: WholeTensors | None) -> None:
    """Write the weights. They are released on return: the moments, twice their size, come next."""
    state = None if weights is None else {**_on_host(weights), **_buffers(model)}
    model.save_pretrained(folder, state_dict=state)


def _on_host(tensors: WholeTensors) -> dict[str, Tensor]:
    """Copy the tensors to the host one by one, without keeping whole buckets alive."""
    with tensors() as stream:
        return {name: _own_copy(tensor.detach().cpu()) for name, tensor in stream}


def _own_copy(tensor: Tensor) -> Tensor:
    # A view of a larger storage would keep all of that storage alive.
    own = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if own and tensor.is_contiguous() else tensor.contiguous().clone()


def _buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the model's files that are not parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {n: t.detach().cpu() for n, t in model.state_dict().items() if n not in parameters}


def _load_weights(
    folder: Path, model: PreTrainedModel, trained: Mapping[str, nn.Parameter]
) -> float:
    """Read this rank's rows, or load through transformers, which handles renamed weights."""
    _refuse_another_family(folder, model)
    try:
        if any(isinstance(one, DTensor) for one in trained.values()):
            files = WeightFiles(folder)
            if files.are(trained):
                fill_shards(trained, files)
                return files.probe()
        loading: object = plain_class(model).from_pretrained(
            folder,
            dtype=model.dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{_damaged_file(folder) or folder} cannot be read ({error}); "
            f"{resume_remedy(folder.parents[1])}"
        ) from error
    saved, report = cast("tuple[PreTrainedModel, Mapping[str, Collection[str]]]", loading)
    loaded = dict(saved.named_parameters())
    differing = sorted(set(trained).symmetric_difference(loaded) | set(report["missing_keys"]))
    # The folder has its own config.json: a model of another size has the same names.
    differing += [n for n in trained if n in loaded and trained[n].shape != loaded[n].shape]
    if differing:
        raise CheckpointError(
            f"{folder}: {len(differing)} weights do not fit the model at "
            f"actor_rollout_ref.model.path, first {differing[0]}; resume with the model that was "
            "trained"
        )
    for name, parameter in trained.items():
        assign(parameter, loaded[name])
    return weight_sum(saved)


def _refuse_another_family(folder: Path, model: PreTrainedModel) -> None:
    """Refuse weights of another model family, which transformers would try to fit in."""
    file = folder / "config.json"
    try:
        family = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); {resume_remedy(folder.parents[1])}"
        ) from error
    if family != model.config.model_type:
        raise CheckpointError(
            f"{folder} holds a {family} model and actor_rollout_ref.model.path a "
            f"{model.config.model_type}; resume with the model that was trained, or restart "
            "from step 0 with trainer.resume_mode=disable"
        )


def _damaged_file(folder: Path) -> Path | None:
    """Return the first weights file with a wrong header or length."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError):
            return file
    return None


class _TensorFile(Mapping[str, Tensor]):
    """A safetensors file that reads each tensor on access."""

    def __init__(self, file: Path) -> None:
        self._opened = safe_open(file, framework="pt")
        self._names = frozenset(self._opened.keys())  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._opened.get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _read_tensors(file: Path) -> Mapping[str, Tensor]:
    try:
        return _TensorFile(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); {resume_remedy(file.parents[1])}"
        ) from error


def trained_model(
    loaded: LoadedModel,
    sharding: FsdpConfig,
    optim: OptimConfig,
    parallel: DataParallel,
    total_steps: int,
    *,
    key: str,
    device: torch.device,
) -> TrainedModel:
    """Shard a whole model over the ranks, if configured, and make its optimizer. Collective.

    Args:
        loaded: the same on every rank.
        sharding: how many ranks share one copy.
        optim: AdamW and schedule.
        parallel: all ranks.
        total_steps: train batches of the run.
        key: the section of `sharding` in the configuration.
        device: gets a model that stays whole.

    Raises:
        ConfigError: the number of ranks is not divisible by the shard size.
    """
    model = loaded.model
    # Before sharding, which leaves a part of each weight.
    total = weight_sum(model) if loaded.files is None else loaded.files.probe()
    shards = share_model(loaded, sharding, parallel, key=key, device=device)
    parameters = dict(model.named_parameters()) if shards is None else shards.parameters
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    gradients = None
    if shards is not None:
        gradients = ShardedGradients(list(trained.values()), parallel, shards.num_copies)
    optimizer = PolicyOptimizer(trained, optim, total_steps, gradients)
    return TrainedModel(model, parameters, optimizer, shards, total)


def share_model(
    loaded: LoadedModel,
    sharding: FsdpConfig,
    parallel: DataParallel,
    *,
    key: str,
    device: torch.device,
) -> Shards | None:
    """Shard a model over the ranks; ``None``: it stays whole, on `device`. Collective.

    A model that computes in another dtype than that of its weights is sharded on one rank too: FSDP
    casts a layer's weights for as long as it needs them.

    Raises:
        ConfigError: the number of ranks is not divisible by the shard size.
    """
    size = shard_size(sharding.fsdp_size, parallel.world_size, f"{key}.fsdp_size")
    mesh = None if is_whole(sharding, size) else parallel.shard_mesh(size)
    if mesh is None:
        if loaded.files is not None:
            fill_shards(dict(loaded.model.named_parameters()), loaded.files)
        loaded.model.to(device)  # type: ignore[arg-type]  # transformers narrows torch's overloads
        return None
    return shard_model(
        loaded.model,
        mesh,
        loaded.files,
        dtype=DTYPES[sharding.dtype],
        reshard_after_forward=sharding.reshard_after_forward,
        sums_once=sharding.use_no_sync_for_gradient_accumulation,
        prefetches=sharding.forward_prefetch,
    )

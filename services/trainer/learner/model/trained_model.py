"""A model on this rank with its optimizer, whole or sharded, and its checkpoint files.

A checkpoint's ``actor`` or ``critic`` folder holds:

    huggingface/            config, weights and tokenizer; any Hugging Face tool loads it
    lora_adapter/           instead of the weights: the adapters, if the run trains only these
    optimizer*.safetensors  AdamW's moments and counts by parameter name, of several ranks' in
                            pieces that optimizer.index.json lists
    extra_state.json        random generators, number of skipped optimizer steps
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from services.trainer.learner.checkpoint import resume_remedy
from services.trainer.learner.model.experts import check_dividable
from services.trainer.learner.model.export import share_files, write_files, write_model
from services.trainer.learner.model.forward import DTYPES, plain_class
from services.trainer.learner.model.host_memory import HostMemory
from services.trainer.learner.model.loading import LoadedModel, Stage, weight_sum
from services.trainer.learner.model.lora import (
    adapted_layers,
    adapter_parameters,
    adapter_tensors,
    init_expert_adapters,
    load_adapters,
    select_adapters,
    write_config,
)
from services.trainer.learner.model.optimizer import MOMENTS, ModelOptimizer, ShardedGradients
from services.trainer.learner.model.sharding import Meshes, Shards, assign, fill_shards, shard_model
from services.trainer.learner.model.stages import tied_weight
from services.trainer.learner.model.tensor_cut import cut_modules
from services.trainer.learner.model.weight_files import WeightFiles
from services.trainer.learner.ranks import ParallelContext
from services.trainer.learner.sharded_state import StateFiles, file_name, write_state
from services.trainer.learner.tensor_layouts import (
    TensorLayouts,
    exchange_layouts,
    local_part,
    moment_layout,
    replicated_layout,
)
from sluice.checkpoint.adapter_files import ADAPTER_FOLDER, ADAPTER_STEM
from sluice.checkpoint.source import HUGGINGFACE_FOLDER
from sluice.config.derived import holds_whole_model
from sluice.config.parallel_layout import shard_size
from sluice.config.schema.actor import FsdpConfig, OptimConfig
from sluice.errors import CheckpointError
from sluice.vision.vision_shape import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_CPU = "cpu"
ACTOR_SHARDING = "actor_rollout_ref.actor.fsdp_config"
CRITIC_SHARDING = "critic.fsdp"

OPTIMIZER_STEM = "optimizer"
OPTIMIZER_INDEX = "optimizer.index.json"
EXTRA_STATE_FILE = "extra_state.json"
# Errors that reading a damaged or hostile file may raise.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
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
    """A model on this rank and its optimizer.

    `parameters` are those of the model, or of this rank's `stage`, whole or sharded, tied ones
    once; the optimizer has the trained ones. `shards` is ``None`` for a whole model. `initial_sum`
    is `LoadedModel.sum`. `layouts` says which rank holds which part of each parameter. `outline`
    has the parameters of all stages; those of other stages have no memory. `host` holds the
    values of offloaded parameters.
    """

    model: PreTrainedModel
    parameters: Mapping[str, nn.Parameter]
    optimizer: ModelOptimizer
    shards: Shards | None
    initial_sum: float
    layouts: TensorLayouts
    outline: Mapping[str, nn.Parameter]
    stage: Stage | None = None
    host: HostMemory = field(default_factory=HostMemory)


class PolicyState:
    """A model's state, ready to be written to a checkpoint; with `copies` training may continue.

    Collective, as is all its work but `check_files`.

    Args:
        directory: a new or empty folder.
        trained: the model; its weights are written in their dtype.
        model_path: the folder that the run's model came from; its tokenizer files are copied.
        copies: copy this rank's parts to the host now; otherwise read them in place.
    """

    def __init__(
        self, directory: Path, trained: TrainedModel, model_path: str, ranks: int, *, copies: bool
    ) -> None:
        self._directory = directory
        self._ranks = ranks
        self._model = trained.model
        self._model_path = model_path
        ignored = trained.model._keys_to_ignore_on_save or ()
        buffers = {n: t for n, t in _buffers(trained.model).items() if n not in ignored}
        self._layouts = {**trained.layouts} | {
            n: replicated_layout(t, ranks) for n, t in buffers.items()
        }
        moments = trained.optimizer.state_tensors()
        self._moment_layouts = _moment_layouts(trained, moments)
        adapters = adapter_parameters(trained.model)
        self._adapters = select_adapters(trained.outline)
        weights: Mapping[str, Tensor] = adapters or {**trained.parameters, **buffers}
        self._weights = _parts(weights, trained.host, copies=copies)
        self._moments = _parts(moments, trained.host, copies=copies)
        self._extra = {
            "random_state": random_state(_device(trained.model)),
            "skipped_updates": trained.optimizer.skipped_updates,
        }

    def write_weights(self, parallel: ParallelContext) -> Iterator[None]:
        """Write the Hugging Face folder; see `write_model`."""
        folder = self._directory / HUGGINGFACE_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if self._adapters:
            yield from self._write_adapters(folder, parallel)
            return
        yield from write_model(folder, self._model, self._weights, self._layouts, parallel)

    def _write_adapters(self, folder: Path, parallel: ParallelContext) -> Iterator[None]:
        target = self._directory / ADAPTER_FOLDER
        if not parallel.rank:
            self._model.save_pretrained(folder, state_dict={})  # configuration, custom code
            target.mkdir()
            write_config(target, self._model, self._adapters, self._model_path)
        yield
        layouts = {name: self._layouts[name] for name in self._adapters}
        files = share_files(layouts, adapter_tensors(layouts), 1)
        yield from write_files(target, ADAPTER_STEM, files, self._weights, layouts, parallel)

    def write_rest(self, parallel: ParallelContext) -> Iterator[None]:
        """Write the optimizer's state and, on rank 0, everything else, without communication."""
        yield from write_state(
            self._directory, OPTIMIZER_STEM, self._moments, self._moment_layouts, parallel
        )
        if parallel.rank:
            return
        # Copy them: transformers might save them in another form.
        for pattern in TOKENIZER_FILES:
            for file in Path(self._model_path).glob(pattern):
                if file.is_file():  # neither a folder nor the broken link of a partial download
                    shutil.copyfile(file, self._directory / HUGGINGFACE_FOLDER / file.name)
        text = json.dumps(self._extra)
        (self._directory / EXTRA_STATE_FILE).write_text(text, encoding="utf-8")

    def check_files(self) -> None:
        """Check on rank 0 that it sees the files of all ranks.

        Raises:
            OSError: a file is missing.
        """
        for rank in range(self._ranks):
            file = self._directory / file_name(OPTIMIZER_STEM, rank, self._ranks)
            if not file.is_file():
                raise OSError(
                    f"{file}, which trainer rank {rank} wrote, is not here: "
                    "trainer.default_local_dir must be a folder that all trainer ranks share"
                )


def load_model_state(directory: Path, trained: TrainedModel) -> float:
    """Restore weights, optimizer state and random state in place, or this rank's part of them.

    Args:
        directory: written by `PolicyState`, in any layout of ranks.

    Returns:
        the sum of the loaded weights, as `LoadedModel.sum`.

    Raises:
        CheckpointError: a file is missing or unreadable, or belongs to another model.
    """
    if adapted_layers(trained.model):
        if not (directory / ADAPTER_FOLDER).is_dir():
            raise CheckpointError(
                f"{directory} holds all weights and the run trains adapters "
                "(actor_rollout_ref.model.lora_rank); resume without it, or start from the folder "
                f"{directory / HUGGINGFACE_FOLDER} as actor_rollout_ref.model.path"
            )
        total = load_adapters(directory / ADAPTER_FOLDER, trained.model, trained.outline)
    elif (directory / ADAPTER_FOLDER).is_dir():
        raise CheckpointError(
            f"{directory} holds adapters and the run trains all weights; resume with the "
            "actor_rollout_ref.model.lora_rank of before, or start from `sluice merge`'s folder"
        )
    else:
        with trained.host.on_device(list(trained.parameters.values())):
            total = _load_weights(directory / HUGGINGFACE_FOLDER, trained)
    with _name_bad_file(directory / OPTIMIZER_INDEX, directory.parent, weights=directory):
        elsewhere = {name for name, p in trained.outline.items() if p.requires_grad}
        trained.optimizer.load_state(StateFiles(directory, OPTIMIZER_STEM), elsewhere)
    file = directory / EXTRA_STATE_FILE
    with _name_bad_file(file, directory.parent):
        extra = json.loads(file.read_text(encoding="utf-8"))
        trained.optimizer.skipped_updates = int(extra["skipped_updates"])
        restore_random_state(extra["random_state"], _device(trained.model))
    return total


@contextmanager
def _name_bad_file(file: Path, checkpoint: Path, weights: Path | None = None) -> Iterator[None]:
    """Make errors of the block name the file that it cannot read, or the first damaged one in the
    folder `weights`. With that folder, errors of the code are raised as they are."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # no file is at fault
        raise
    except (*_UNREADABLE, SafetensorError) as error:
        damaged = None if weights is None else _damaged_file(weights)
        if weights and not damaged and isinstance(error, TypeError | AttributeError):
            raise
        raise CheckpointError(
            f"{damaged or file} cannot be read ({error}); {resume_remedy(checkpoint)}"
        ) from error


def _moment_layouts(trained: TrainedModel, moments: Mapping[str, Tensor]) -> TensorLayouts:
    """Return the layouts of all ranks' moments; none before the first step."""
    if not moments:
        return {}
    # Every parameter was in the same steps, so one of this rank represents all.
    kinds = {name.rpartition(".")[2]: moment for name, moment in moments.items()}
    return {
        key: moment_layout(trained.layouts[name], moments.get(key, kinds[moment]))
        for name, parameter in trained.outline.items()
        if parameter.requires_grad
        for moment in MOMENTS
        for key in (f"{name}.{moment}",)
    }


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _parts(tensors: Mapping[str, Tensor], host: HostMemory, *, copies: bool) -> dict[str, Tensor]:
    parts = {name: local_part(host.read(tensor)) for name, tensor in tensors.items()}
    return {n: t.to(_CPU, copy=True) for n, t in parts.items()} if copies else parts


def _buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the model's files that are not parameters."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {n: t.detach().cpu() for n, t in model.state_dict().items() if n not in parameters}


def _load_weights(folder: Path, trained: TrainedModel) -> float:
    """Read this rank's rows, or load through transformers, which renames weights."""
    model, parameters, outline = trained.model, trained.parameters, trained.outline
    _refuse_another_family(folder, model)
    with _name_bad_file(folder, folder.parents[1], weights=folder):
        if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            files = WeightFiles(folder)
            if files.match(outline):
                fill_shards(parameters, files)
                return files.probe()
        loading: object = plain_class(model).from_pretrained(
            folder,
            dtype=model.dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    saved, report = cast("tuple[PreTrainedModel, Mapping[str, Collection[str]]]", loading)
    loaded = dict(saved.named_parameters())
    differing = sorted(set(outline).symmetric_difference(loaded) | set(report["missing_keys"]))
    # `saved` follows the folder's config.json: a model of another size has the same names.
    differing += [n for n in outline if n in loaded and outline[n].shape != loaded[n].shape]
    if differing:
        raise CheckpointError(
            f"{folder}: {len(differing)} weights do not fit the model at "
            f"actor_rollout_ref.model.path, first {differing[0]}; resume with the model that was "
            "trained"
        )
    for name, parameter in parameters.items():
        assign(parameter, loaded[name])
    return weight_sum(saved)


def _refuse_another_family(folder: Path, model: PreTrainedModel) -> None:
    """Refuse weights of another model family, which transformers would try to load."""
    file = folder / "config.json"
    with _name_bad_file(file, folder.parents[1]):
        family = json.loads(file.read_text(encoding="utf-8"))["model_type"]
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


def trained_model(
    loaded: LoadedModel,
    sharding: FsdpConfig,
    optim: OptimConfig,
    parallel: ParallelContext,
    total_steps: int,
    *,
    key: str,
    device: torch.device,
) -> TrainedModel:
    """Shard a whole model over the ranks, if configured, and make its optimizer. Collective.

    Args:
        loaded: the same on every rank.
        device: device of a model that stays whole.

    Raises:
        ConfigError: the number of ranks is not divisible by the shard size.
    """
    model = loaded.model
    total = loaded.sum()  # before sharding, which keeps only a part of each weight
    shards = share_model(loaded, sharding, parallel, key=key, device=device)
    init_expert_adapters(model)
    parameters = dict(model.named_parameters()) if shards is None else shards.parameters
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients = None
    if shards is not None:
        tied = tied_weight(model, trained, loaded.stage)
        gradients = ShardedGradients(list(trained.values()), parallel, tied)
    share = sharding.optimizer_offload_fraction if sharding.optimizer_offload else 0.0
    optimizer = ModelOptimizer(trained, optim, total_steps, gradients, host_share=share)
    outline = loaded.outline or parameters
    layouts = exchange_layouts(parameters, parallel, outline)
    return TrainedModel(model, parameters, optimizer, shards, total, layouts, outline, loaded.stage)


def share_model(
    loaded: LoadedModel,
    sharding: FsdpConfig,
    parallel: ParallelContext,
    *,
    key: str,
    device: torch.device,
) -> Shards | None:
    """Shard a model over the ranks; return ``None`` if it stays whole, on `device`. Collective.

    A model that computes in another dtype than that of its weights is sharded on one rank too: FSDP
    casts a layer's weights for as long as it needs them.

    Raises:
        ConfigError: the number of ranks is not divisible by the shard size.
    """
    peers = parallel.layout.peers
    size = shard_size(sharding.fsdp_size, peers, parallel.world_size, f"{key}.fsdp_size")
    check_dividable(loaded.model, parallel.layout.experts)
    expert_mesh = parallel.expert_mesh(size)
    # Gradients of a part are not summed over all ranks, unlike those of a whole model.
    is_cut = parallel.tensor is not None or loaded.stage is not None
    mesh = None if holds_whole_model(sharding, size) and not is_cut else parallel.shard_mesh(size)
    if mesh is None:
        if loaded.files is not None:
            fill_shards(dict(loaded.model.named_parameters()), loaded.files)
        loaded.model.to(device)  # type: ignore[arg-type]  # transformers narrows torch's overloads
        return None
    tower_mesh = None
    if parallel.tensor is not None:
        cut_modules(loaded.model, parallel.tensor)
        if loaded.model.config.model_type in FAMILIES:
            tower_mesh = parallel.whole_mesh(size)  # even on stages without the tower
    return shard_model(
        loaded.model,
        Meshes(mesh, expert_mesh, tower_mesh),
        loaded.files,
        dtype=DTYPES[sharding.dtype],
        reshard_after_forward=sharding.reshard_after_forward,
        # Otherwise the ranks of a stage would wait for each other after each micro-batch, and all
        # stages for them.
        sums_once=sharding.use_no_sync_for_gradient_accumulation or loaded.stage is not None,
        prefetches=sharding.forward_prefetch,
    )

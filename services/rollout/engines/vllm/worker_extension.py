"""What sluice adds to each of vLLM's worker processes, and what it uses of them.

vLLM imports this module by name. See `vendor_engines.weight_worker` for how weights come. Read in
the sources of vLLM 0.23 to 0.33, run with 0.32 on the CPU. vLLM has two model runners. V1 keeps its
samples in `requests`; V2, the default of newer versions wherever Triton works, keeps them in
`req_states`. A worker reports what it lacks when it begins, not at its first update. What differs
between vLLM's clients is looked up in `client`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from services.rollout.engines.vendor_engines.owner_watch import end_with_owner
from services.rollout.engines.vendor_engines.share_recorder import (
    AsInFiles,
    meta_copy,
    record_share,
)
from services.rollout.engines.vendor_engines.weight_worker import WeightWorker
from sluice.errors import ConfigError
from sluice.types import TensorSpec
from sluice.weight_share import WeightShare

# Types are checked without vLLM: its values have none here.
# ruff: noqa: ANN401


_V1_REMEDY = "set VLLM_USE_V2_MODEL_RUNNER=0, so that vLLM uses its model runner V1"
_VERSION_REMEDY = (
    "install vLLM 0.32 (this adapter was run with it) or another version from 0.23 to 0.33 (it was "
    "written for these)"
)
_RELOAD = "vllm.model_executor.model_loader.reload"
_LOADER = "vllm.model_executor.model_loader.dummy_loader"
_LOADER_ARGUMENTS = ["self", "model", "model_config"]
_PATCHED = "sluice_keeps_buffers"


class WorkerFeatures:
    """What one worker of this version can do.

    Args:
        worker: vLLM's, with its model loaded.

    Raises:
        ConfigError: it lacks something; the message names all that it lacks, and the remedy.
    """

    def __init__(self, worker: Any) -> None:
        runner: Any = getattr(worker, "model_runner", None)
        count_held = _held_counter(runner)
        missing_names = list(_missing_names(runner))
        if not missing_names:
            missing_names = list(_missing_methods(runner.get_model()))
        if missing_names or count_held is None:
            raise ConfigError(_refusal(worker, runner, missing_names))
        self._worker = worker
        self._runner = runner
        self._count_held = count_held

    def num_samples(self) -> int:
        """Return the number of samples that the worker holds since its last step."""
        return self._count_held()

    def load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by vLLM's layerwise reload, which processes each of them again.

        On the CPU a linear layer computes with a packed copy of its weight. The reload renews the
        copies of layers that got tensors, but an output layer tied to the embedding gets none.
        Experts compute with packed weights too, but vLLM packs them only when it builds their
        kernel.
        """
        model: torch.nn.Module = self._runner.get_model()
        with torch.inference_mode(), _current_config(self._worker):
            for method in _expert_methods(model):
                method.moe_kernel = None  # on the CPU no graph holds its address
            self._runner.reload_weights(weights_iterator=weights)
            for module in _packed_layers(self._runner.get_model()):
                if _is_matrix(getattr(module, "weight", None)):
                    module.quant_method.process_weights_after_loading(module)

    def share(self, tensors: Sequence[TensorSpec], as_in_files: AsInFiles) -> WeightShare:
        """Return which part of the weights this worker's model reads; see `record_share`."""
        return record_share(self.load_without_memory, tensors, as_in_files)

    def load_without_memory(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Give weights without memory to the model's loader; the model itself stays as it is.

        The loader sees the parameters as they were before vLLM processed them, which vLLM keeps
        for its reload.
        """
        model: Any = meta_copy(self._runner.get_model(), _loadable)
        with _current_config(self._worker):
            model.load_weights(weights)


def _loadable(
    module: torch.nn.Module, copy: torch.nn.Module
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a module's parameters and buffers as vLLM's reload gives them to a loader."""
    # vLLM's own; what of it is missing in another version ends the recording, see `record_share`.
    reload: Any = importlib.import_module(f"{_RELOAD}.layerwise")
    meta: Any = importlib.import_module(f"{_RELOAD}.meta")
    parameters, buffers = reload.get_layerwise_info(module).restore_metadata

    def without_memory(
        present: Mapping[str, Any], kept_tensors: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            name: None
            if tensor is None
            else meta.restore_layer_refs(meta.to_meta_tensor(tensor), copy)
            for name, tensor in {**present, **kept_tensors}.items()
        }

    return (
        without_memory(module._parameters, parameters),
        without_memory(module._buffers, buffers),
    )


def dummy_loader() -> Any:
    """Return vLLM's loader of dummy weights; ``None`` if no such name and signature exist."""
    try:
        loader: Any = importlib.import_module(_LOADER).DummyModelLoader
        arguments = list(inspect.signature(loader.load_weights).parameters)
    except (ImportError, AttributeError):
        return None
    return loader if arguments == _LOADER_ARGUMENTS else None


def _held_counter(runner: Any) -> Callable[[], int] | None:
    """Return a function that counts a runner's samples: V1 in `requests`, V2 in `req_states`."""
    if isinstance(getattr(runner, "requests", None), Mapping):
        return lambda: len(runner.requests)
    if isinstance(getattr(_states(runner), "req_id_to_index", None), Mapping):
        return lambda: len(runner.req_states.req_id_to_index)
    return None


def _states(runner: Any) -> Any:
    return getattr(runner, "req_states", None)


def _missing_names(runner: Any) -> Iterator[str]:
    """Yield names of what a runner and vLLM's modules lack."""
    if runner is None:
        yield "model_runner"
        return
    if _held_counter(runner) is None:
        missing_name = "requests" if _states(runner) is None else "req_states.req_id_to_index"
        yield f"model_runner.{missing_name}"
    if not callable(getattr(runner, "get_model", None)):
        yield "model_runner.get_model"
    reload = getattr(runner, "reload_weights", None)
    if not callable(reload):
        yield "model_runner.reload_weights"
    elif not _accepts_argument(reload, "weights_iterator"):
        yield "model_runner.reload_weights(weights_iterator)"
    if _module("vllm") is not None and dummy_loader() is None:
        yield f"{_LOADER}.DummyModelLoader.load_weights(model, model_config)"


def _missing_methods(model: torch.nn.Module) -> Iterator[str]:
    """Yield names of methods without which packed copies of old weights would stay, on the CPU."""
    packed = [_method(layer) for layer in _packed_layers(model)]
    for method in {type(layer_method): layer_method for layer_method in packed}.values():
        if not callable(getattr(method, "process_weights_after_loading", None)):
            yield f"{type(method).__name__}.process_weights_after_loading"
    for method in {
        type(layer_method): layer_method for layer_method in _expert_methods(model)
    }.values():
        if not hasattr(method, "moe_kernel"):
            yield f"{type(method).__name__}.moe_kernel"


def _packed_layers(model: torch.nn.Module) -> Iterator[Any]:
    """Yield linear layers that compute with a packed copy of their weight."""
    return (module for module in model.modules() if hasattr(module, "cpu_linear"))


def _expert_methods(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the methods that compute layers of experts on the CPU."""
    return (
        _method(module)
        for module in model.modules()
        if _method(module) is not None and _is_on_cpu(getattr(module, "w13_weight", None))
    )


def _method(module: torch.nn.Module) -> Any:
    return getattr(module, "quant_method", None)


def _is_on_cpu(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.device.type == "cpu"


def _is_matrix(weight: torch.Tensor | None) -> bool:
    """Return whether a weight is still there: packing leaves an empty tensor, unless it is tied."""
    return weight is not None and weight.ndim == 2 and weight.numel() > 0


def _accepts_argument(function: Callable[..., object], name: str) -> bool:
    """Return whether a function takes an argument; up to 0.31, V2 passes all of them on to V1."""
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _current_config(worker: Any) -> AbstractContextManager[object]:
    """Enter vLLM's configuration: some layers need it when their weights are processed.

    The runner's own method does not; the worker's does, from 0.27 on.
    """
    config = getattr(worker, "vllm_config", None)
    enter = getattr(_module("vllm.config"), "set_current_vllm_config", None)
    if config is None or enter is None:
        return nullcontext()
    context: AbstractContextManager[object] = enter(config)
    return context


def _refusal(worker: Any, runner: Any, missing_names: Sequence[str]) -> str:
    is_v2 = getattr(worker, "use_v2_model_runner", _states(runner) is not None)
    kind = type(runner)
    return (
        f"vLLM {_version()}: its worker ({kind.__module__}.{kind.__qualname__}, model runner "
        f"{'V2' if is_v2 else 'V1'}) has no {', '.join(missing_names)}, which weight updates need; "
        + (f"{_V1_REMEDY}, or {_VERSION_REMEDY}" if is_v2 else _VERSION_REMEDY)
    )


def _version() -> str:
    return str(getattr(_module("vllm"), "__version__", "of unknown version"))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def keep_buffers() -> None:
    """Make vLLM's dummy loader leave buffers as they were; call it before a model is loaded.

    A second call changes nothing. Neither does one without that loader, for `WorkerFeatures`
    refuses such a vLLM.
    """
    loader = dummy_loader()
    if loader is None or hasattr(loader, _PATCHED):
        return
    original = loader.load_weights

    @functools.wraps(original)
    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        saved = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        original(self, model, model_config)
        for name, buffer in model.named_buffers():
            buffer_copy = saved.get(name)
            if (
                buffer_copy is not None
                and buffer_copy.shape == buffer.shape
                and buffer_copy.device == buffer.device
            ):
                buffer.data.copy_(buffer_copy)

    loader.load_weights = load_weights
    setattr(loader, _PATCHED, True)


# vLLM imports this file before it loads the model, and calls nothing before that.
keep_buffers()
end_with_owner(with_parent=True)  # vLLM's engine process may not have imported anything of ours


class VllmWorker(WeightWorker):
    """Methods for vLLM's ``worker_extension_cls``."""

    sluice_model: WorkerFeatures | None = None

    def sluice_find_model(self) -> WorkerFeatures:
        return WorkerFeatures(self)

    def sluice_forming(self) -> AbstractContextManager[object]:
        """Enter NCCL's own settings: with those of `batch_invariant`, which vLLM has for its own
        groups, the first collective of a group with the trainer would never end.
        """
        unpinned = getattr(_module("vllm.utils.nccl"), "unpinned_nccl_env", nullcontext)
        context: AbstractContextManager[object] = unpinned()
        return context

    def sluice_check_alive(self) -> int:
        """Return the samples held since the last step; answered in the engine's loop."""
        if self.sluice_model is None:
            raise RuntimeError("sluice_begin was not called")
        return self.sluice_model.num_samples()

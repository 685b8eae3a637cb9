"""Read a Hugging Face model with its weights, and name what its folder lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from sluice.checkpoint.safetensors_files import tensor_names
from sluice.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_REMEDY = "give the directory of a Hugging Face causal language model (config.json, *.safetensors)"


def read_pretrained(
    family: Any,  # noqa: ANN401 - transformers' classes of models have no common type
    folder: str,
    *,
    may_lack: Callable[[str], bool] = lambda _: False,
    **options: Any,  # noqa: ANN401 - of each family
) -> PreTrainedModel:
    """Read a model from disk, never from a network, onto the CPU.

    Args:
        folder: ``actor_rollout_ref.model.path``.
        may_lack: returns whether the files may lack a weight, which is then initialized.

    Raises:
        CheckpointError: a file of weights is missing or damaged; names it.
        ConfigError: the folder holds no such model, or not all of its weights.
    """
    key = f"actor_rollout_ref.model.path={folder!r}"
    # Otherwise every process shows a progress bar on the console.
    transformers_logging.disable_progress_bar()
    try:
        loading: object = family.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        tensor_names(Path(folder))  # names the file, if one is missing or damaged
        raise ConfigError(f"{key} cannot be loaded ({error}); {_REMEDY}") from error
    model, report = cast("tuple[PreTrainedModel, Mapping[str, Collection[object]]]", loading)
    missing = [name for name in map(str, report["missing_keys"]) if not may_lack(name)]
    if missing or report["mismatched_keys"]:
        tensor_names(Path(folder))
        lacking = sorted([*missing, *map(str, report["mismatched_keys"])])
        raise ConfigError(
            f"{key}: {len(lacking)} weights are missing or of another shape, first {lacking[0]}; "
            "copy the complete checkpoint"
        )
    return model

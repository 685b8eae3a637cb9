"""Build a Hugging Face language model, with or without a vision tower, and read its checkpoint
layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from sluice.algorithm.token_statistics import wide_product, widens
from sluice.checkpoint.pretrained import read_pretrained
from sluice.errors import ConfigError
from sluice.types import TensorSpec
from sluice.vision.image_prompts import ImagePromptReader, load_image_prompts
from sluice.vision.vision_shape import FAMILIES
from sluice.weights.plan import dtype_name

_Dtype = Literal["float32", "bfloat16"]
_ROUTERS = frozenset({"Qwen3MoeTopKRouter", "Qwen3VLMoeTextTopKRouter"})
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class CheckpointLayout:
    """The content of a checkpoint of the model.

    Attributes:
        vocab_size: width of the logits.
        eos_token_ids: tokens that end a response.
        tensors: the tensors in the model's order; only the first of tied ones.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True, eq=False)
class CausalLM:
    """A model in inference mode, with its properties that the engine needs.

    Attributes:
        layout: the layout of its checkpoint.
        image_prompts: prepares images for it; ``None`` for a text-only model.
    """

    model: PreTrainedModel
    layout: CheckpointLayout
    image_prompts: ImagePromptReader | None = None

    def refuse_row_dependence(self) -> None:
        """Raise ConfigError for a mixture of experts.

        The number of tokens per expert, and so the shapes of matrix products, depends on the other
        rows. No choice of batch shapes makes that invariant.
        """
        config = self.model.config.get_text_config(decoder=True).to_dict()
        if any((config.get(key) or 0) > 1 for key in _EXPERT_COUNTS):
            raise ConfigError(
                f"sluice.rollout.batch_invariant is on, but {self.model.config.model_type} is a "
                "mixture of experts, whose results depend on the rest of the batch; set "
                "sluice.rollout.batch_invariant=false"
            )


class _Float32Head(nn.Linear):
    """A head in the dtype of the layers that computes logits in float32."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias  # nn.Linear declares one
        bias = None if bias is None else bias.float()
        if not widens(weight):
            return nn.functional.linear(hidden.float(), weight.float(), bias)
        product = wide_product(hidden.flatten(0, -2), weight.t())
        logits = product.view(*hidden.shape[:-1], -1)
        return logits if bias is None else logits.add_(bias)


def use_float32_head(model: PreTrainedModel) -> None:
    """Compute a model's logits in float32; the head's weight stays as it is."""
    head: Any = model.get_output_embeddings()
    float32_head = _Float32Head(
        head.in_features, head.out_features, bias=head.bias is not None, device="meta"
    )
    float32_head.weight, float32_head.bias = head.weight, head.bias
    model.set_output_embeddings(float32_head)


def build_causal_lm(
    path: str,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    dtype: _Dtype = "float32",
) -> CausalLM:
    """Build the model with arbitrary weights.

    Args:
        path: directory with a Hugging Face configuration; weight files are not needed.
        device: device of the weights; ``meta`` builds only the layout, without memory for weights.
        trust_remote_code: run model code from the directory.
        dtype: dtype of the weights.

    Raises:
        ConfigError: the path holds no causal language model that transformers knows.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"actor_rollout_ref.model.path is {path!r}, which holds no config.json; give the "
            "directory of a Hugging Face model"
        )
    try:
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )
        with device:
            model: PreTrainedModel = _family(config.model_type).from_config(
                config,
                dtype=getattr(torch, dtype),
                trust_remote_code=trust_remote_code,
            )
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"actor_rollout_ref.model.path is {path!r}, whose config.json makes no causal language "
            f"model ({error}); give another model"
        ) from error
    model.eval().requires_grad_(False)
    text_config = config.get_text_config(decoder=True)
    layout = CheckpointLayout(
        text_config.vocab_size, _eos_token_ids(path, text_config), _tensors(model)
    )
    return CausalLM(model, layout, load_image_prompts(path, trust_remote_code=trust_remote_code))


def read_weights(
    path: str, names: Iterable[str], *, trust_remote_code: bool = False, dtype: _Dtype = "float32"
) -> dict[str, torch.Tensor]:
    """Read the weights in a directory's files, to the CPU.

    Args:
        path: directory of a Hugging Face model.
        names: names of the weights, as in `CheckpointLayout`.
        trust_remote_code: run model code from the directory.
        dtype: dtype of floating-point weights.

    Raises:
        CheckpointError: a file is missing or damaged; names it.
        ConfigError: weights are missing.
    """
    config = AutoConfig.from_pretrained(
        path, trust_remote_code=trust_remote_code, local_files_only=True
    )
    state = read_pretrained(
        _family(config.model_type),
        path,
        config=config,
        dtype=getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
    ).state_dict()
    # Copy them: files may change, and products of unaligned tensors in mapped files are rounded
    # differently.
    return {name: state[name].clone() for name in names}


def _family(model_type: str) -> Any:  # noqa: ANN401 - transformers' classes have no common type
    return AutoModelForImageTextToText if model_type in FAMILIES else AutoModelForCausalLM


def expert_routers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the routers of a model's decoder layers, by layer number.

    Each returns (logits, scores, chosen experts [tokens, k]), as in transformers.

    Raises:
        ConfigError: the model's family has no routers whose choices the trainer can replay.
    """
    routers = {
        int(name.split(".layers.")[1].split(".")[0]): module
        for name, module in model.named_modules()
        if type(module).__name__ in _ROUTERS
    }
    if not routers:
        raise ConfigError(
            "actor_rollout_ref.actor.router_replay.mode=R3: replicas note the experts of qwen3_moe "
            f"and qwen3_vl_moe, and none of a {model.config.model_type} model; set it to disabled"
        )
    return routers


def _eos_token_ids(path: str, config: object) -> tuple[int, ...]:
    """Read generation_config.json if there is one, as transformers' generation does."""
    eos = None
    if (Path(path) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(path, local_files_only=True).eos_token_id
    if eos is None:
        eos = getattr(config, "eos_token_id", None)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _tensors(model: PreTrainedModel) -> tuple[TensorSpec, ...]:
    # By identity of parameters, since tensors on the meta device have no address.
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    state, tied = model.state_dict(), model.all_tied_weights_keys
    seen_ids: set[int] = set()
    kept_names: set[str] = set()
    # Sources of ties come first, which leaves out the target's name.
    for name in sorted(state, key=lambda name: name in tied):
        if id(tensors[name]) not in seen_ids:
            kept_names.add(name)
        seen_ids.add(id(tensors[name]))
    return tuple(
        TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
        for name, tensor in state.items()
        if name in kept_names
    )

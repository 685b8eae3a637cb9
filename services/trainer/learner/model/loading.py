"""Load a Hugging Face model for training on packed tokens, and prepare it for its run.

In a vision-language model, the language model attends to packed tokens; the vision tower keeps the
attention of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    GenerationConfig,
)
from transformers.initialization import no_init_weights
from transformers.utils import GENERATION_CONFIG_NAME

from services.trainer.learner.model.attention import PACKED_ATTENTION
from services.trainer.learner.model.decoder import VALUE_HEADS, use_native_layers, value_head
from services.trainer.learner.model.experts import use_native_experts
from services.trainer.learner.model.forward import DTYPES, set_head
from services.trainer.learner.model.lora import add_adapters
from services.trainer.learner.model.recompute import (
    keep_inputs_on_host,
    recompute_as_configured,
    recompute_layers,
)
from services.trainer.learner.model.weight_files import WeightFiles
from services.trainer.learner.rank_shares import rotation_by_length
from services.trainer.learner.ranks import StageRanks
from sluice.checkpoint.pretrained import read_pretrained
from sluice.config.derived import uses_adapters
from sluice.config.schema.actor import FsdpConfig
from sluice.config.schema.actor_rollout_ref import ActorRolloutRefConfig, ModelConfig
from sluice.errors import ConfigError
from sluice.vision.torch_inputs import text_attention, vision_tower
from sluice.vision.vision_shape import FAMILIES, read_vision_shape
from sluice.weights.adapters import is_adapter

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


_LANGUAGE_HEAD = ("lm_head.weight",)


@dataclass(frozen=True, slots=True, eq=False)
class Stage(StageRanks):
    """This rank's stage of a pipeline.

    Attributes:
        layers: numbers of the model's layers that it holds.
        twin: the rank of another stage that holds the same part of the embedding.
        width: the width of hidden states.
        dtype: the dtype of hidden states.
    """

    layers: range
    twin: int | None
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on the CPU.

    With `files` its weights are not read yet: their memory is reserved but unused, and sharding
    reads what a rank keeps. With a `stage` it has only that stage's layers; then `outline` has the
    parameters of the whole model, without memory, and `total` is their `sum`.
    """

    model: PreTrainedModel
    files: WeightFiles | None = None
    stage: Stage | None = None
    outline: Mapping[str, torch.nn.Parameter] | None = None
    total: float | None = None

    def sum(self) -> float:
        """Return a sum over the weights, read already or not, by which ranks compare their
        weights."""
        if self.total is not None:
            return self.total
        return weight_sum(self.model) if self.files is None else self.files.probe()


def load_policy(
    model: ModelConfig, precision: FsdpConfig, max_tokens: int, *, is_sharded: bool = False
) -> LoadedModel:
    """Load the policy from disk, never from a network, with master weights on the CPU.

    A sharded model is read and moves to its device layer by layer, so it never has to fit in host
    memory or on the device as a whole; if its files have other names than its parameters, it is
    read as a whole first. The model stays in evaluation mode: with dropout, logprobs in the update
    would differ from those of the same weights elsewhere.

    Args:
        precision: the master dtype and the dtype of passes.
        max_tokens: longest prompt plus response, to check sliding windows.
        is_sharded: ranks may shard it; then sharding reads the weights.

    Raises:
        ConfigError: the path holds no complete causal language model, or the trainer does not
            compute its attention; names the key and the remedy.
    """
    if precision.model_dtype == "bfloat16" and precision.dtype == "float32":
        raise ConfigError(
            "actor_rollout_ref.actor.fsdp_config: dtype=float32 with model_dtype=bfloat16 computes "
            "more precisely than the weights are stored; set model_dtype=float32 or dtype=bfloat16"
        )
    loaded = _load(model, _dtype(model, precision), is_sharded=is_sharded)
    _set_up_passes(loaded.model, model, precision, max_tokens)
    return loaded


def load_critic(
    model: ModelConfig, precision: FsdpConfig, max_tokens: int, *, is_sharded: bool = False
) -> LoadedModel:
    """Load a critic like a policy, with a value head of one output instead of the language-model
    head.

    If the files hold no such head, torch's global generator initializes it.

    Raises:
        ConfigError: `value_head` finds no head in the model; also as in `load_policy`.
    """
    dtype = DTYPES[precision.model_dtype]
    loaded = _load(model, dtype, is_sharded=is_sharded, is_critic=True)
    if value_head(loaded.model) is None:
        raise ConfigError(
            f"the head of a {loaded.model.config.model_type} model for token classification is "
            f"none of {', '.join(VALUE_HEADS)}; choose another critic"
        )
    _set_up_passes(loaded.model, model, precision, max_tokens)
    return loaded


def build_policy(
    config: PreTrainedConfig, model: ModelConfig, precision: FsdpConfig, max_tokens: int
) -> PreTrainedModel:
    """Build the policy that `load_policy` would load, without reading weights."""
    built = _build(config, model, _dtype(model, precision))
    _set_up_passes(built, model, precision, max_tokens)
    return built


def _dtype(model: ModelConfig, precision: FsdpConfig) -> torch.dtype:
    # Frozen weights need no more precision than the passes use.
    return DTYPES[precision.dtype if uses_adapters(model) else precision.model_dtype]


def _model_class(model_type: str, *, is_critic: bool) -> Any:  # noqa: ANN401 - they have no common type
    """Return the class of transformers that builds and reads such models."""
    if is_critic:
        return AutoModelForTokenClassification
    return AutoModelForImageTextToText if model_type in FAMILIES else AutoModelForCausalLM


def _build(
    config: PreTrainedConfig, model: ModelConfig, dtype: torch.dtype, *, is_critic: bool = False
) -> PreTrainedModel:
    family = _model_class(config.model_type, is_critic=is_critic)
    with no_init_weights():  # initialization would touch all of the memory
        built: PreTrainedModel = family.from_config(
            config,
            dtype=dtype,
            attn_implementation=text_attention(config.model_type, FAMILIES, PACKED_ATTENTION),
            trust_remote_code=model.trust_remote_code,
        )
    built.tie_weights()
    return built


def _set_up_passes(
    loaded: PreTrainedModel, model: ModelConfig, precision: FsdpConfig, max_tokens: int
) -> None:
    check_attention(loaded.config, max_tokens)
    use_native_layers(loaded, compiled=precision.use_torch_compile)
    use_native_experts(loaded, compiled=precision.use_torch_compile)
    set_head(loaded, in_float32=model.float32_head, is_compiled=precision.use_torch_compile)
    loaded.eval()
    if model.enable_gradient_checkpointing:
        recompute_layers(loaded)


def prepare_policy(
    model: PreTrainedModel, config: ActorRolloutRefConfig, first_layer: int = 0
) -> None:
    """Add adapters, freeze untrained weights, and choose what backward passes recompute.

    Args:
        model: not cut into stages yet.
        first_layer: number of the first layer of this rank's stage.

    Raises:
        ConfigError: a setting names something that the model lacks.
    """
    actor = config.actor
    recompute_as_configured(model, actor.megatron.override_transformer_config, first_layer)
    if config.model.enable_activation_offload:
        keep_inputs_on_host(model)
    if uses_adapters(config.model):
        add_adapters(model, config.model, DTYPES[actor.fsdp_config.model_dtype])
    if actor.freeze_vision_tower:
        _freeze_vision_tower(model)


def _freeze_vision_tower(model: PreTrainedModel) -> None:
    """Freeze the weights that encode images, including their merger into the language model.

    Raises:
        ConfigError: the model has no vision tower.
    """
    tower = vision_tower(model)
    if tower is None:
        raise ConfigError(
            "actor_rollout_ref.actor.freeze_vision_tower: a "
            f"{model.config.model_type} model reads no images; leave the key out"
        )
    tower.requires_grad_(requires_grad=False)


def check_attention(config: PreTrainedConfig, max_tokens: int) -> None:
    """Refuse attention that is not plainly causal over `max_tokens` tokens.

    A sliding window of at least that length hides nothing and is accepted. So is a rotation of
    positions that changes only beyond it: a pass rotates all its rows by the longest one.

    Raises:
        ConfigError: names the unsupported settings of the model's configuration.
    """
    text = config.get_text_config()
    settings = text.to_dict()
    kinds = set(settings.get("layer_types") or ())
    window = settings.get("sliding_window")
    slides = "sliding_attention" in kinds or (
        not kinds and settings.get("use_sliding_window", True)
    )
    problems = sorted(kinds - {"full_attention", "sliding_attention"})
    if slides and window is not None and window < max_tokens:
        problems.append(
            f"sliding_window={window}, shorter than data.max_prompt_length + "
            f"data.max_response_length = {max_tokens}"
        )
    rotation = rotation_by_length(config)
    if rotation is not None and rotation.limit is not None and rotation.limit < max_tokens:
        problems.append(
            f"rope_type={rotation.kind}, which rotates all rows of a pass in another way "
            f"if one is longer than {rotation.limit_key}={rotation.limit}, while "
            f"data.max_prompt_length + data.max_response_length = {max_tokens}"
        )
    problems += [
        f"{key}={settings[key]}"
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
        if settings.get(key)
    ]
    if problems:
        raise ConfigError(
            f"actor_rollout_ref.model.path: the {text.model_type} model uses "
            f"{', '.join(problems)}, which sluice's trainer does not compute; choose a "
            "model with plain causal attention (or, for a sliding window or such a rotation, "
            "shorten prompts and responses)"
        )


def check_engine_length(config: PreTrainedConfig, max_model_len: int) -> None:
    """Refuse an engine's length for which it may rotate positions in another way than the trainer.

    vLLM rotates every row as a longest one of `max_model_len` tokens.

    Raises:
        ConfigError: names the largest possible value.
    """
    rotation = rotation_by_length(config)
    if rotation is not None and rotation.limit is not None and rotation.limit < max_model_len:
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={max_model_len}: the model's rotation of "
            f"positions, {rotation.kind}, changes beyond {rotation.limit_key}={rotation.limit}, "
            "and the engine would rotate the trainer's shorter rows in another way; set the key to "
            "at most this number"
        )


def _load(
    model: ModelConfig, dtype: torch.dtype, *, is_sharded: bool, is_critic: bool = False
) -> LoadedModel:
    head = {"num_labels": 1} if is_critic else {}
    unread = _build_without_weights(model, dtype, head, is_critic=is_critic) if is_sharded else None
    return unread or LoadedModel(_read_weights(model, dtype, head, is_critic=is_critic))


def _build_without_weights(
    model: ModelConfig, dtype: torch.dtype, head: Mapping[str, int], *, is_critic: bool
) -> LoadedModel | None:
    """Return the model without reading weights; None if its files do not match its parameters."""
    try:
        files = WeightFiles(Path(model.path))
        config = AutoConfig.from_pretrained(
            model.path, **head, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
        if hasattr(config, "quantization_config"):  # the files hold quantized weights
            return None
        loaded = _build(config, model, dtype, is_critic=is_critic)
        if (Path(model.path) / GENERATION_CONFIG_NAME).is_file():
            loaded.generation_config = GenerationConfig.from_pretrained(
                model.path, local_files_only=True
            )
        parameters = dict(loaded.named_parameters(remove_duplicate=False))
        # Saved buffers are not parameters, so they would keep their initial values.
        if loaded.state_dict().keys() != parameters.keys():
            return None
        heads = {n for n in parameters if is_critic and _is_value_head(n) and n not in files}
        read = {n: p for n, p in loaded.named_parameters() if n not in heads}
        if not files.match(read, _LANGUAGE_HEAD if heads else ()):
            return None
        for module in sorted({name.rpartition(".")[0] for name in heads}):
            loaded._init_weights(loaded.get_submodule(module))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError):
        return None  # reading it as a whole reports what is wrong
    except SafetensorError:
        return None
    return LoadedModel(loaded, files)


def _read_weights(
    model: ModelConfig, dtype: torch.dtype, head: Mapping[str, int], *, is_critic: bool
) -> PreTrainedModel:
    if not (Path(model.path) / "config.json").is_file():
        raise ConfigError(
            f"actor_rollout_ref.model.path={model.path!r}: no config.json there; give the "
            "directory of a Hugging Face causal language model (config.json, *.safetensors)"
        )
    shape = read_vision_shape(model.path)
    kind = "" if shape is None else shape.model_type
    return read_pretrained(
        _model_class(kind, is_critic=is_critic),
        model.path,
        may_lack=_is_value_head,
        **head,
        dtype=dtype,
        attn_implementation=text_attention(kind, FAMILIES, PACKED_ATTENTION),
        trust_remote_code=model.trust_remote_code,
    )


def weight_sum(model: torch.nn.Module) -> float:
    """Return the sum of a whole model's weights without adapters, by which ranks compare their
    weights."""
    weights = [p.detach() for name, p in model.named_parameters() if not is_adapter(name)]
    return sum(float(weight.double().sum()) for weight in weights)


def _is_value_head(name: str) -> bool:
    """Return whether a weight belongs to a value head, which a language model's files lack."""
    return name.split(".", 1)[0] in VALUE_HEADS

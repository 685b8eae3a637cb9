"""The part of a model that one stage of a pipeline holds (docs/architecture.md, "Stages").

``model.layers.7`` is the model's layer 7 on any stage. If embedding and head are one weight, the
first and last stage hold it and sum its gradient (`ShardedGradients`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from services.trainer.learner.model.decoder import VALUE_HEADS, DecoderLayer
from services.trainer.learner.model.forward import DTYPES
from services.trainer.learner.model.loading import LoadedModel, Stage
from services.trainer.learner.ranks import ParallelContext
from sluice.config.parallel_layout import PIPELINE_KEY, check_image_layers, stage_layers
from sluice.config.schema.actor import FsdpConfig, TransformerOverrides
from sluice.errors import ConfigError
from sluice.vision.torch_inputs import vision_tower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEADS = ("lm_head", *VALUE_HEADS)


def own_stage(
    model: PreTrainedModel,
    precision: FsdpConfig,
    cut: TransformerOverrides | None,
    parallel: ParallelContext,
) -> Stage | None:
    """Return the stage that this rank holds; ``None`` without a pipeline.

    Args:
        model: the whole model, with weights read or not.
        cut: which layers form a stage; ``None`` if the model has only this stage's layers.

    Raises:
        ConfigError: the model cannot be cut, or its layers do not divide.
    """
    ranks = parallel.stages
    if ranks is None:
        return None
    count, number = ranks.count, ranks.number
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not all(
        isinstance(layer, DecoderLayer) for layer in layers
    ):
        raise ConfigError(
            f"{PIPELINE_KEY}={count}: the trainer cuts its own layers into stages, those of llama, "
            "qwen2, qwen3, qwen3_moe and Qwen-VL models, and not those of a "
            f"{model.config.model_type} model; leave the key at 1"
        )
    layer_numbers = range(len(layers))
    if cut is not None:
        of_stages = stage_layers(len(layers), count, cut)
        check_image_layers(of_stages, _layers_with_images(model))
        layer_numbers = of_stages[number]
    twins = {0: ranks.ranks[-1], count - 1: ranks.ranks[0]}
    return Stage(
        ranks.ranks,
        number,
        layer_numbers,
        twins.get(number) if _is_tied(model) else None,
        model.config.get_text_config().hidden_size,
        DTYPES[precision.dtype],
    )


def check_stages_train(model: PreTrainedModel, stages: int, cut: TransformerOverrides) -> None:
    """Refuse a pipeline with a stage that has nothing to train, on every rank.

    Args:
        model: the whole model with adapters, and weights frozen as configured.

    Raises:
        ConfigError: names the stage and the remedy.
    """
    if stages == 1:
        return
    decoder: Any = model.get_decoder()
    tower = getattr(model.base_model, "visual", None)
    for number, numbers in enumerate(stage_layers(len(decoder.layers), stages, cut)):
        parts: list[nn.Module] = [decoder.layers[layer] for layer in numbers]
        if number == 0:
            parts += [model.get_input_embeddings(), *([] if tower is None else [tower])]
        if number == stages - 1:
            parts += [decoder.norm, model.get_output_embeddings()]
        if not any(p.requires_grad for part in parts for p in part.parameters()):
            raise ConfigError(
                f"{PIPELINE_KEY}={stages}: stage {number + 1} has nothing to train; adapt some of "
                "its layers too (actor_rollout_ref.model.target_modules), or use fewer stages"
            )


def keep_stage(loaded: LoadedModel, stage: Stage | None) -> LoadedModel:
    """Drop what other stages hold, in place.

    Args:
        loaded: the model with adapters, and weights frozen as configured, not sharded yet.
        stage: this rank's stage; ``None`` drops nothing.
    """
    if stage is None:
        return loaded
    model = loaded.model
    outline, total = _outline(model), loaded.sum()
    base, decoder = cast("Any", model.base_model), cast("Any", model.get_decoder())
    for number in range(len(decoder.layers)):
        if number not in stage.layers:
            delattr(decoder.layers, str(number))
    if stage.before is not None and vision_tower(model) is not None:
        base.visual = None
    # On the last stage the embedding is only the head's weight.
    if stage.before is not None and stage.twin is None:
        model.set_input_embeddings(nn.Identity())
    if stage.after is not None:
        decoder.norm = nn.Identity()
        for name in (head for head in _HEADS if hasattr(model, head)):
            setattr(model, name, nn.Identity())
    return replace(loaded, stage=stage, outline=outline, total=total)


def _outline(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return the parameters by name, tied ones once, without memory."""
    return {
        name: nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for name, p in model.named_parameters()
    }


def _layers_with_images(model: PreTrainedModel) -> int:
    """Return the number of first layers that Qwen3-VL's vision tower adds to (DeepStack)."""
    vision = getattr(model.config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _is_tied(model: PreTrainedModel) -> bool:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return head is not None and embedding.weight is head.weight


def tied_weight(
    model: PreTrainedModel, trained: Mapping[str, nn.Parameter], stage: Stage | None
) -> tuple[nn.Parameter, int] | None:
    """Return the embedding, if another stage also trains it, and the rank with the same part."""
    if stage is None or stage.twin is None:
        return None
    embedding: Any = model.get_input_embeddings()
    return next(((p, stage.twin) for p in trained.values() if p is embedding.weight), None)

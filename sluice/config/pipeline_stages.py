"""Which decoder layers each stage of a pipeline holds, by Megatron's keys.

All stages have equally many layers, where the embedding and the loss may count as a layer each; or
the first and the last stage have given numbers, and those between share the rest evenly.
"""

from __future__ import annotations

from collections.abc import Sequence

from sluice.config.parallel_layout import PIPELINE_KEY, nearest_divisors
from sluice.config.schema.actor import TransformerOverrides
from sluice.errors import ConfigError

_CUTS = "actor_rollout_ref.actor.megatron.override_transformer_config"
FIRST_KEY = f"{_CUTS}.num_layers_in_first_pipeline_stage"
LAST_KEY = f"{_CUTS}.num_layers_in_last_pipeline_stage"
EMBEDDING_KEY = f"{_CUTS}.account_for_embedding_in_pipeline_split"
LOSS_KEY = f"{_CUTS}.account_for_loss_in_pipeline_split"


def stage_layers(num_layers: int, stages: int, cut: TransformerOverrides) -> list[range]:
    """Return the numbers of each stage's layers, at least one each.

    Raises:
        ConfigError: the layers do not divide; names the numbers and the nearest that work.
    """
    if num_layers < stages:
        raise ConfigError(
            f"{PIPELINE_KEY}={stages}: the model has {num_layers} layers, and a stage needs at "
            f"least one; give at most {num_layers}"
        )
    first, last = cut.num_layers_in_first_pipeline_stage, cut.num_layers_in_last_pipeline_stage
    embedding = bool(cut.account_for_embedding_in_pipeline_split)
    loss = bool(cut.account_for_loss_in_pipeline_split)
    if stages == 1:
        sizes = [num_layers]
    elif (first, last) != (None, None):
        if embedding or loss:
            raise ConfigError(
                f"{FIRST_KEY} and {LAST_KEY} set the layers of a stage, which account_for_embedding"
                "_in_pipeline_split and account_for_loss_in_pipeline_split derive; give one of both"
            )
        sizes = _with_given(num_layers, stages, first, last)
    else:
        sizes = _even(num_layers, stages, embedding=embedding, loss=loss)
    ends = [sum(sizes[: stage + 1]) for stage in range(stages)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def different_stages(stages: int) -> list[int]:
    """Return the numbers of the stages whose ranks hold different bytes: first, second and last.

    Those between have equally many layers; the second has the most micro-batches in flight.
    """
    return sorted({0, min(1, stages - 1), stages - 1})


def check_image_layers(stages: Sequence[range], added: int) -> None:
    """Refuse a first stage without all layers that the image encoder adds to: it holds that too.

    Args:
        stages: of a pipeline, from `stage_layers`.
        added: how many of the first layers (Qwen3-VL's DeepStack); 0 for other models.

    Raises:
        ConfigError: names the numbers.
    """
    first = len(stages[0])
    if first < added and len(stages) > 1:
        raise ConfigError(
            f"{PIPELINE_KEY}={len(stages)}: the first stage has {first} of the model's "
            f"{stages[-1].stop} layers, and the image encoder, which it holds too, adds to the "
            f"first {added}; set {FIRST_KEY}={added} or more, or use fewer stages"
        )


def _even(num_layers: int, stages: int, *, embedding: bool, loss: bool) -> list[int]:
    number = num_layers + embedding + loss
    # Given layers and these keys exclude each other.
    not_counted = f" and {EMBEDDING_KEY}=false" * embedding + f" and {LOSS_KEY}=false" * loss
    if number % stages:
        counted = " and ".join(["layers", *["embedding"] * embedding, *["loss"] * loss])
        raise ConfigError(
            f"{PIPELINE_KEY}={stages} does not divide {number} {counted} of the model; give "
            f"{nearest_divisors(stages, number, most=num_layers)}, or "
            f"{_given_cut(num_layers, stages)}{not_counted}"
        )
    sizes = [number // stages] * stages  # 2 at least with embedding or loss among them
    sizes[0] -= embedding
    sizes[-1] -= loss
    return sizes


def _with_given(num_layers: int, stages: int, first: int | None, last: int | None) -> list[int]:
    left = num_layers - (first or 0) - (last or 0)
    between = stages - (first is not None) - (last is not None)
    fits = left == 0 if between == 0 else left >= between and left % between == 0
    if not fits:
        given = [f"{FIRST_KEY}={first}"] * (first is not None)
        given += [f"{LAST_KEY}={last}"] * (last is not None)
        fault = (
            f"this leaves {left} of {num_layers} layers for the other {between} stages, which they "
            "cannot share evenly"
            if between
            else f"their sum is not the model's {num_layers} layers"
        )
        raise ConfigError(
            f"{' and '.join(given)} with {PIPELINE_KEY}={stages}: {fault}; "
            f"give {_given_cut(num_layers, stages)}"
        )
    sizes = [left // max(between, 1)] * stages
    sizes[0] = first or sizes[0]
    sizes[-1] = last or sizes[-1]
    return sizes


def _given_cut(num_layers: int, stages: int) -> str:
    """Return values of the keys that cut so many layers almost evenly."""
    each = -(-num_layers // stages)
    if num_layers - each * (stages - 2) < 2:
        each -= 1
    ends = num_layers - each * (stages - 2)
    return f"{FIRST_KEY}={-(-ends // 2)} with {LAST_KEY}={ends // 2}"

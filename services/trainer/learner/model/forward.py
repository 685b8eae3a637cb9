"""Forward passes over a packed micro-batch: attention, images, logprobs, entropy and values, and
the check that packing changes none of them.

Linear layers, norms and embeddings of the model run on the packed tokens. Only attention gathers
them into the blocks of a `PackedLayout` and brings the results back into packed order.

FSDP gathers a model's shards only around its own ``forward``. Passes with images call the model's
parts, so a sharded model gets them as a method that FSDP treats like ``forward``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from services.trainer.learner.batch.micro_batch import (
    AttentionBlock,
    MicroBatch,
    PackedImages,
    PackedLayout,
    TrainingRow,
    build_micro_batch,
)
from sluice.algorithm.entropy import (
    entropy_from_logits,
    logprobs_and_entropy,
    logprobs_from_logits,
)
from sluice.algorithm.packing import plan_micro_batches
from sluice.concurrency.waits import advance
from sluice.config.schema.actor import FsdpConfig
from sluice.errors import ConfigError
from sluice.vision.torch_inputs import encode_images, forward_with_images

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PACKED_ATTENTION = "sluice_packed"
_UNSUPPORTED_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias")
_GATHERING_PASS = "sluice_logits_with_images"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_PROMPT_TOKENS = (5, 8)
_ROW_TOKENS = (6, 9)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend within each packed sequence and, from a row, to its prompt.

    Args:
        module: the model's attention layer.
        query: [1, heads, T, head dim].
        key: [1, kv heads, T, head dim]; heads are a multiple of kv heads.
        value: [1, kv heads, T, value dim].
        attention_mask: must be ``None``; the layout defines which token sees which.
        scaling: factor on the scores; ``None``: 1 / sqrt(head dim).
        dropout: attention dropout, 0 in this trainer.
        packed_layout: passed to the model's forward, which passes it on.

    Returns:
        [1, T, heads, value dim], and no weights.

    Raises:
        ConfigError: the model does not pass the layout on, or its attention needs a feature that
            is missing here (sliding window, soft capping, sinks, position bias).
    """
    if packed_layout is None:
        raise ConfigError(
            f"model.path: {type(module).__name__} does not pass keyword arguments of the model's "
            "forward on to its attention, which packing needs; choose another model family"
        )
    window = kwargs.get("sliding_window")
    if isinstance(window, int) and window >= packed_layout.longest:
        del kwargs["sliding_window"]  # longer than every sequence: it hides nothing
    _refuse(module, attention_mask, kwargs)
    heads, kv_heads = query.shape[1], key.shape[1]
    blocks = packed_layout.blocks
    query_index = [block.query_index for block in blocks]
    key_index = [block.key_index for block in blocks]
    queries = _gather(query.to(value.dtype), query_index, heads)
    keys = _gather(key.to(value.dtype), key_index, kv_heads)
    values = _gather(value, key_index, kv_heads)
    outputs = []
    for block, q, k, v in zip(blocks, queries, keys, values, strict=True):
        attended = _attend(q, k, v, block, scaling, dropout)
        outputs.append(attended.transpose(1, 2).flatten(2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    packed = joined.index_select(0, packed_layout.output_index)
    return packed.view(1, packed.shape[0], heads, -1), None


def register_packed_attention() -> None:
    """Register `PACKED_ATTENTION` with transformers.

    It registers no mask function under that name, so transformers builds no mask at all.
    """
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _refuse(
    module: nn.Module, attention_mask: Tensor | None, arguments: Mapping[str, object]
) -> None:
    where = type(module).__name__
    if attention_mask is not None:
        raise ConfigError(
            f"model.path: {where} builds its own attention mask, which packing would ignore; "
            "choose another model family"
        )
    for name in _UNSUPPORTED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"model.path: {where} uses {name}, which sluice's trainer does "
                "not compute; choose a model with plain causal attention"
            )


def _gather(states: Tensor, indexes: Sequence[Tensor], heads: int) -> list[Tensor]:
    """Gather states [1, heads, T, dim] into blocks with indexes [B, L]: [B, heads, L, dim] each.

    One call gathers all blocks, and one scatters their gradients. In a pass without gradients this
    holds more memory than block after block would: all blocks of a layer at once.
    """
    packed = states.squeeze(0).transpose(0, 1).flatten(1)  # a view of what a projection made
    rows = packed.index_select(0, torch.cat([index.flatten() for index in indexes]))
    parts = rows.split([index.numel() for index in indexes])
    return [
        part.view(*index.shape, heads, -1).transpose(1, 2)
        for part, index in zip(parts, indexes, strict=True)
    ]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: AttentionBlock,
    scaling: float | None,
    dropout: float,
) -> Tensor:
    if block.mask is not None and query.device.type != "cpu":
        # With a mask, accelerators use fused kernels only for equal numbers of heads.
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=block.mask,
        dropout_p=dropout,
        is_causal=block.mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def logits_with_images(
    model: PreTrainedModel,
    images: PackedImages,
    token_ids: Tensor,
    position_ids: Tensor,
    kept: Tensor,
    **arguments: object,
) -> Tensor:
    """Return logits [1, N, vocab] at the packed positions `kept`, int64 [N].

    Args:
        model: a vision-language model; if it is sharded, prepared by `gather_for_images`.
        images: of the micro-batch.
        token_ids: [1, T] int64.
        position_ids: [3, 1, T] int64; [1, T] if no token is an image's.
        kept: packed positions.
        arguments: passed on to the attention.
    """
    compute: Any = getattr(model, _GATHERING_PASS, None) or partial(_logits, model)
    logits: Tensor = compute(images, token_ids, position_ids, kept, **arguments)
    return logits


def _logits(
    model: PreTrainedModel,
    images: PackedImages,
    token_ids: Tensor,
    position_ids: Tensor,
    kept: Tensor,
    **arguments: object,
) -> Tensor:
    device = token_ids.device
    features = encode_images(model, images.pixel_values.to(device), images.grid_thw.to(device))
    hidden = forward_with_images(
        model, token_ids, position_ids, images.is_image, features, **arguments
    )
    head: Any = model.get_output_embeddings()
    logits: Tensor = head(hidden.index_select(1, kept))
    return logits


def gather_for_images(model: PreTrainedModel) -> None:
    """Make `logits_with_images` gather the shards of a sharded model, as its own forward does.

    From now on every pass must have images: gathering is collective, so all ranks must run the
    vision tower if one does (`image_for_all_ranks`).
    """
    setattr(model, _GATHERING_PASS, MethodType(_logits, model))
    register_fsdp_forward_method(model, _GATHERING_PASS)


def image_for_all_ranks(model: PreTrainedModel, token_ids: Tensor) -> PackedImages | None:
    """Return an image that no token refers to, for a pass without images of a sharded model.

    The vision tower then runs on every rank, and its gradients are 0 instead of missing. ``None``:
    the model is not sharded.
    """
    if not hasattr(model, _GATHERING_PASS):
        return None
    tower: Any = model.base_model.visual
    side = int(tower.spatial_merge_size)
    numbers = math.prod(tower.patch_embed.proj.weight.shape[1:])
    return PackedImages(
        torch.zeros(side * side, numbers),
        torch.tensor([[1, side, side]]),
        torch.zeros_like(token_ids, dtype=torch.bool),
    )


class EntropyUse(StrEnum):
    """The use of a pass's entropy; a bonus costs another pass over the logits."""

    NONE = "none"
    METRIC = "metric"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """Results of one pass per response token, float32 [N].

    `entropy` has a gradient if it is a bonus. `sum_pi_squared` is the sum of all squared
    probabilities. Both are ``None`` unless requested.
    """

    logprobs: Tensor
    entropy: Tensor | None
    sum_pi_squared: Tensor | None = None


def token_outputs(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    *,
    temperature: float,
    entropy: EntropyUse = EntropyUse.NONE,
    with_sum_pi_squared: bool = False,
) -> TokenOutputs:
    """Run the model once over the packed tokens; compute logits at predecessors only.

    Args:
        model: loaded by `load_policy`.
        micro_batch: on the model's device.
        temperature: sampling temperature; logits are divided by it.
        entropy: whether to compute entropies, and whether with a gradient.
        with_sum_pi_squared: whether to compute squared probabilities, without a gradient.
    """
    advance()
    logits = response_logits(model, micro_batch)
    labels, entropies = micro_batch.labels, None
    # For a metric, one pass over the logits gives both; its entropy has no gradient.
    if entropy is EntropyUse.METRIC:
        logprobs, entropies = logprobs_and_entropy(logits, labels, temperature)
    else:
        logprobs = logprobs_from_logits(logits, labels, temperature)
    if entropy is EntropyUse.BONUS:
        entropies = entropy_from_logits(logits, temperature)
    squares = sum_pi_squared(logits, temperature) if with_sum_pi_squared else None
    return TokenOutputs(logprobs, entropies, squares)


@torch.no_grad()
def sum_pi_squared(logits: Tensor, temperature: float) -> Tensor:
    """Return the sum over the vocabulary of ``softmax(logits / temperature)`` squared, [N].

    Computed as ``exp(logsumexp(2 z) - 2 logsumexp(z))`` for scaled logits z, in float32, so that no
    probabilities [N, vocab] are stored.
    """
    scaled = logits.float() / temperature
    return torch.exp(torch.logsumexp(2 * scaled, -1) - 2 * torch.logsumexp(scaled, -1))


def response_values(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Return a critic's values [N], float32, of the state before each response token."""
    advance()
    outputs = model(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        packed_layout=micro_batch.layout,
    )
    values: Tensor = outputs.logits[0, :, 0].float()
    return values.index_select(0, micro_batch.predecessors)


def response_logits(model: PreTrainedModel, micro_batch: MicroBatch) -> Tensor:
    """Return logits [N, vocab] that predict each response token, in the pass's dtype."""
    images = micro_batch.images or image_for_all_ranks(model, micro_batch.input_ids)
    if images is not None:
        return logits_with_images(
            model,
            images,
            micro_batch.input_ids,
            micro_batch.position_ids,
            micro_batch.predecessors,
            packed_layout=micro_batch.layout,
        ).squeeze(0)
    outputs = model(
        input_ids=micro_batch.input_ids,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        logits_to_keep=micro_batch.predecessors,
        packed_layout=micro_batch.layout,
    )
    logits: Tensor = outputs.logits
    return logits.squeeze(0)  # logits[0] would make a second gradient tensor of this size


def check_packing(
    model: PreTrainedModel, naming_failures: AbstractContextManager[object] | None = None
) -> None:
    """Compare logprobs of a few made-up rows, packed together and each alone.

    Some model families use their own attention, or carry state from token to token. They would run
    on packed tokens without any error and learn nonsense. Collective if the model is sharded.

    Args:
        model: the model that will be trained.
        naming_failures: names errors of other ranks, as opposed to errors of the model.

    Raises:
        ConfigError: they differ by more than rounding.
        DeadlineError, PeerError: from `naming_failures`.
    """
    rows = _made_up_rows(model.config.get_text_config().vocab_size)
    try:
        with torch.no_grad(), naming_failures or nullcontext():
            together = _logprobs(model, rows)
            alone = torch.cat([_logprobs(model, [row]) for row in rows])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise _refusal(model, repr(error)) from error
    # `not <=` also refuses NaN.
    gap = float((together - alone).abs().mean())
    if not gap <= _TOLERANCE[model.dtype]:
        raise _refusal(model, f"logprobs of packed and single rows differ by {gap:.2g} on average")


def _refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"actor_rollout_ref.model.path: {plain_class(model).__name__} cannot be trained on packed "
        f"tokens ({reason}); choose a model family whose attention can be replaced in transformers"
    )


def _made_up_rows(vocabulary: int) -> list[TrainingRow]:
    generator = np.random.default_rng(0)
    rows: list[TrainingRow] = []
    for group, prompt_tokens in enumerate(_PROMPT_TOKENS):
        prompt = generator.integers(vocabulary, size=prompt_tokens).astype(np.uint32)
        for tokens in _ROW_TOKENS:
            response = generator.integers(vocabulary, size=tokens).astype(np.uint32)
            logprobs = np.zeros(tokens, np.float32)
            rows.append(TrainingRow(len(rows), group, prompt, response, logprobs))
    return rows


def _logprobs(model: PreTrainedModel, rows: list[TrainingRow]) -> torch.Tensor:
    """Return logprobs in the order of the rows: they are given by group, so packing keeps it."""
    (plan,) = plan_micro_batches(
        [row.size for row in rows], range(len(rows)), rows_per_micro=len(rows)
    )
    micro_batch = build_micro_batch(rows, plan, model.device)
    assert micro_batch is not None
    return token_outputs(model, micro_batch, temperature=1.0).logprobs


def compute_context(precision: FsdpConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return autocast if compute and master dtype differ; make one for each use."""
    if precision.dtype == precision.model_dtype:
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision.dtype])


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the model's class in transformers; sharding replaces it by a derived class."""
    family: type[PreTrainedModel] = type(model)
    return family.__mro__[2] if isinstance(model, FSDPModule) else family

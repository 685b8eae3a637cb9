"""Forward passes over a packed micro-batch: compute logprobs, entropies and values of response
tokens, and check that packing does not change them.

FSDP gathers a model's shards only around its own ``forward``. A pass for logprobs calls the model's
parts, so a sharded model gets that pass as a method that FSDP treats like ``forward``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from services.trainer.learner.batch.micro_batch import MicroBatch, pack_rows
from services.trainer.learner.batch.packed_rows import PackedImages, TrainingRow
from services.trainer.learner.model.decoder import own_part, value_head
from services.trainer.learner.model.experts import Routing, routing_tape
from services.trainer.learner.model.tensor_cut import CutHead, tensor_share
from services.trainer.learner.rank_shares import SequenceShare, all_to_all
from sluice.algorithm import token_statistics as head_statistics
from sluice.algorithm.token_statistics import LinearHead, TokenStatistics, token_statistics
from sluice.concurrency.waits import advance
from sluice.errors import ConfigError
from sluice.vision.torch_inputs import ImageFeatures, encode_images, forward_with_images
from sluice.vision.vision_shape import FAMILIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GATHERING_PASS = "sluice_token_pass"
_HEAD = "sluice_head"
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
_PROMPT_TOKENS = (5, 8)
_ROW_TOKENS = (6, 9)


class EntropyUse(StrEnum):
    """How a pass uses its entropy; only a bonus has a gradient."""

    NONE = "none"
    METRIC = "metric"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True, eq=False)
class TokenPass:
    """A pass over a micro-batch on the model's device; a critic's pass reads only the micro-batch.

    Logits are divided by the sampling `temperature`. Sums of squared probabilities have no
    gradient. The pass follows a complete `routing` and completes an incomplete one.
    """

    micro_batch: MicroBatch
    temperature: float = 1.0
    entropy: EntropyUse = EntropyUse.NONE
    with_sum_pi_squared: bool = False
    routing: Routing | None = None


def token_outputs(
    model: PreTrainedModel, token_pass: TokenPass, entering: Tensor | None = None
) -> TokenStatistics:
    """Run the model once over the packed tokens; return statistics of the response tokens, [N].

    Args:
        model: loaded by `load_policy`; if it is sharded, prepared by `gather_in_passes`.
        entering: for a pipeline's last stage: the hidden states of the stage before.
    """
    outputs: tuple[Tensor | None, ...] = _prepare_pass(model, token_pass.routing)(
        token_pass.micro_batch,
        entering,
        temperature=token_pass.temperature,
        with_entropy=token_pass.entropy is not EntropyUse.NONE,
        entropy_gradient=token_pass.entropy is EntropyUse.BONUS,
        with_sum_pi_squared=token_pass.with_sum_pi_squared,
    )
    return _gather_outputs(outputs, token_pass.micro_batch)


def hidden_states(model: PreTrainedModel, token_pass: TokenPass, entering: Tensor | None) -> Tensor:
    """Run a pipeline stage other than the last; return the hidden states of this rank's tokens.

    Args:
        entering: hidden states [1, t, width]; ``None`` for the first stage.
    """
    run = _prepare_pass(model, token_pass.routing)
    (output,) = run(token_pass.micro_batch, entering, is_last=False)
    hidden: Tensor = output
    return hidden


def _prepare_pass(model: PreTrainedModel, routing: Routing | None) -> Any:  # noqa: ANN401 - as FSDP's
    """Return `_token_pass` of a model, ready for a pass."""
    advance()
    if (tape := routing_tape(model)) is not None:
        tape.follow(routing)
    return getattr(model, _GATHERING_PASS, None) or partial(_token_pass, model)


def gather_in_passes(model: PreTrainedModel) -> None:
    """Make `token_outputs` gather the shards of a sharded model, as the model's forward does."""
    setattr(model, _GATHERING_PASS, MethodType(_token_pass, model))
    register_fsdp_forward_method(model, _GATHERING_PASS)


def set_head(model: PreTrainedModel, *, in_float32: bool, is_compiled: bool) -> None:
    """Make `token_outputs` compute logits in float32, and compile its arithmetic on them.

    If the device multiplies 16-bit floats into float32, only gradients of the logits are rounded to
    the weight's dtype; otherwise a pass holds a float32 copy of the head, with float32 gradients.
    MiniMax-M1 (2025, arXiv:2506.13585) found the head the main cause of differences between engine
    and trainer.
    """
    setattr(model, _HEAD, (in_float32, is_compiled))


def _token_pass(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    entering: Tensor | None = None,
    *,
    is_last: bool = True,
    temperature: float = 1.0,
    **wanted: bool,
) -> tuple[Tensor | None, ...]:
    """Return the fields of `TokenStatistics` as a tuple, in which every FSDP release finds tensors.

    For a critic return values; on a stage before the last return hidden states.
    """
    hidden = _last_hidden(model, micro_batch, entering)
    if not is_last:
        return (hidden,)
    tensor = tensor_share(model)
    if (of_critic := value_head(model)) is not None:
        values: Tensor = of_critic(hidden)[0, :, 0].float()
        if tensor is not None:
            values = tensor.gather_values(values)
        return (values.index_select(0, micro_batch.predecessors),)
    if tensor is not None:
        hidden = tensor.gather(hidden)
    local_labels, labels = micro_batch.local_labels, micro_batch.labels
    head = _head(model)
    statistics = token_statistics(
        hidden.squeeze(0).index_select(0, micro_batch.predecessors).to(head.weight.dtype),
        head,
        labels if local_labels is None else labels.index_select(0, local_labels),
        temperature,
        **wanted,
    )
    return statistics.logprobs, statistics.entropy, statistics.sum_pi_squared


def _gather_outputs(outputs: Sequence[Tensor | None], micro_batch: MicroBatch) -> TokenStatistics:
    """Return the statistics of all tokens [N] from those of this rank's part of the sequence."""
    share, local_labels = micro_batch.layout.share, micro_batch.local_labels
    names = [field.name for field in fields(TokenStatistics)]
    present = {name: x for name, x in zip(names, outputs, strict=True) if x is not None}
    if share is not None and local_labels is not None:
        stacked = torch.stack(list(present.values()))
        gathered = share.whole_tokens(stacked, local_labels, micro_batch.labels.numel())
        present = dict(zip(present, gathered.unbind(), strict=True))
    return TokenStatistics(**present)


def _last_hidden(
    model: PreTrainedModel, micro_batch: MicroBatch, entering: Tensor | None
) -> Tensor:
    """Return the hidden states [1, T, hidden] that the head reads, or the next stage."""
    images = None
    if entering is None:  # the first stage has the vision tower
        images = micro_batch.images or _image_for_all_ranks(model, micro_batch.input_ids)
    if images is not None:
        return forward_with_images(
            model,
            micro_batch.input_ids,
            micro_batch.position_ids,
            images.is_image,
            _image_features(model, images),
            packed_layout=micro_batch.layout.for_one_pass(),
        )
    base: Any = model.base_model if entering is None else model.get_decoder()
    outputs = base(
        input_ids=micro_batch.input_ids if entering is None else None,
        inputs_embeds=entering,
        position_ids=micro_batch.position_ids,
        use_cache=False,
        packed_layout=micro_batch.layout.for_one_pass(),
    )
    hidden: Tensor = outputs.last_hidden_state
    return hidden


def _image_features(model: PreTrainedModel, images: PackedImages) -> Sequence[ImageFeatures]:
    """Return the embeddings of this rank's image tokens, encoded here or by another rank."""
    device, pixels, grid = images.is_image.device, images.pixel_values, images.grid_thw
    if pixels is None:
        # Gathering weights and reducing their gradients are collective.
        pixels, grid = _blank_image(model)
    features = encode_images(model, pixels.to(device), grid.to(device))
    if images.share is None or images.sent is None:
        return features
    # One exchange for all: a layer adds features as wide as an embedding.
    rows = torch.cat([torch.cat([image.embeddings, *image.added], dim=-1) for image in features])
    local = all_to_all(rows[: sum(images.sent)], images.share.group, images.sent, images.received)
    embeddings, *added = local.chunk(1 + len(features[0].added), dim=-1)
    return [ImageFeatures(embeddings, tuple(added))]


def _head(model: PreTrainedModel) -> LinearHead:
    linear: Any = model.get_output_embeddings()
    settings = model.config.get_text_config()
    # Names in Cohere and Granite. `check_packing` finds what other families do.
    scale = getattr(settings, "logit_scale", None) or 1.0
    scale /= getattr(settings, "logits_scaling", None) or 1.0
    bias = getattr(linear, "bias", None)
    weight, bias = own_part(linear.weight), None if bias is None else own_part(bias)
    part = linear.part() if isinstance(linear, CutHead) else None
    in_float32, is_compiled = getattr(model, _HEAD, (False, False))
    is_wide = in_float32 and head_statistics.widens(weight)
    if in_float32 and not is_wide:
        weight, bias = weight.float(), None if bias is None else bias.float()
    return LinearHead(weight, bias, scale, is_wide, is_compiled, part)


def _image_for_all_ranks(model: PreTrainedModel, token_ids: Tensor) -> PackedImages | None:
    """Return an image that no token refers to, for passes of a sharded model without images.

    Gathering is collective: if one rank runs the vision tower, all must. Here its gradients are 0
    instead of missing, which FSDP2 does not accept in a step's first pass. ``None`` if the model is
    whole or reads no images.
    """
    if not hasattr(model, _GATHERING_PASS) or model.config.model_type not in FAMILIES:
        return None
    local_ids = token_ids
    if (tensor := tensor_share(model)) is not None:
        local_ids = token_ids[:, tensor.local_slice(token_ids.shape[1])]
    return PackedImages(*_blank_image(model), torch.zeros_like(local_ids, dtype=torch.bool))


def _blank_image(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return the pixels and the grid of an image of one token."""
    tower: Any = model.base_model.visual
    side = int(tower.spatial_merge_size)
    numbers = math.prod(tower.patch_embed.proj.weight.shape[1:])
    return torch.zeros(side * side, numbers), torch.tensor([[1, side, side]])


def response_values(
    model: PreTrainedModel, micro_batch: MicroBatch, entering: Tensor | None = None
) -> Tensor:
    """Return a critic's values [N], float32, of the state before each response token."""
    outputs: tuple[Tensor, ...] = _prepare_pass(model, None)(micro_batch, entering)
    (values,) = outputs
    share, local_labels = micro_batch.layout.share, micro_batch.local_labels
    if share is None or local_labels is None:
        return values
    return share.whole_tokens(values[None], local_labels, micro_batch.labels.numel())[0]


def check_packing(
    model: PreTrainedModel,
    dtype: torch.dtype = torch.float32,
    naming_failures: AbstractContextManager[object] | None = None,
    share: SequenceShare | None = None,
) -> None:
    """Compare logprobs of a few synthetic rows, packed together and computed from the model's
    logits one by one.

    Some model families use their own attention, carry state from token to token, or change logits
    after the head. They would run on packed tokens without any error and learn nonsense. Collective
    if the model is sharded.

    Args:
        naming_failures: context that turns failures of other ranks into errors that name them.

    Raises:
        ConfigError: the logprobs differ by more than rounding.
        DeadlineError, PeerError: from `naming_failures`.
    """
    rows = _synthetic_rows(model.config.get_text_config().vocab_size)
    try:
        with torch.no_grad(), naming_failures or nullcontext():
            packed = _pack(model, rows, share)
            together = token_outputs(model, TokenPass(packed)).logprobs
            alone = torch.cat([_logprobs_by_logits(model, row) for row in rows])
    except (AttributeError, KeyError, RuntimeError, TypeError) as error:
        raise _refusal(model, repr(error)) from error
    # `not <=` also refuses NaN.
    gap = float((together - alone).abs().mean())
    if not gap <= _TOLERANCE[dtype]:
        raise _refusal(model, f"logprobs of packed and single rows differ by {gap:.2g} on average")


def _refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"actor_rollout_ref.model.path: {plain_class(model).__name__} cannot be trained on packed "
        f"tokens ({reason}); choose a model family whose attention can be replaced in transformers"
    )


def _synthetic_rows(vocabulary: int) -> list[TrainingRow]:
    generator = np.random.default_rng(0)
    rows: list[TrainingRow] = []
    for group, prompt_tokens in enumerate(_PROMPT_TOKENS):
        prompt = generator.integers(vocabulary, size=prompt_tokens).astype(np.uint32)
        for tokens in _ROW_TOKENS:
            response = generator.integers(vocabulary, size=tokens).astype(np.uint32)
            logprobs = np.zeros(tokens, np.float32)
            rows.append(TrainingRow(len(rows), group, prompt, response, logprobs))
    return rows


def _pack(
    model: PreTrainedModel, rows: list[TrainingRow], share: SequenceShare | None = None
) -> MicroBatch:
    multiple = 1
    if (tensor := tensor_share(model)) is not None:
        multiple = tensor.size * (share.size if share else 1)
    return pack_rows(rows, model.device, share, multiple)


def _logprobs_by_logits(model: PreTrainedModel, row: TrainingRow) -> Tensor:
    """Return logprobs [N] from the model's own forward."""
    alone = _pack(model, [row])
    outputs = model(
        input_ids=alone.input_ids,
        position_ids=alone.position_ids,
        use_cache=False,
        packed_layout=alone.layout.for_one_pass(),
    )
    logprobs: Tensor = outputs.logits[0].float().log_softmax(-1)
    return logprobs[alone.predecessors].gather(-1, alone.labels[:, None])[:, 0]


def plain_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the model's class in transformers; sharding replaces it by a derived class."""
    family: type[PreTrainedModel] = type(model)
    return family.__mro__[2] if isinstance(model, FSDPModule) else family

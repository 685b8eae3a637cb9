"""`actor_rollout_ref.rollout`: the inference engine and how responses are sampled."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.config.schema.actor import FloatDtype
from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

ENGINES = ("torch", "vllm", "sglang")
"""Engines that replicas can run (`rollout.name`)."""


class ValKwargs(Section, frozen=True):
    """Sampling during validation."""

    n: Annotated[PositiveInt, Meta(description="Responses per validation prompt.")] = 1
    temperature: Annotated[NonNegativeFloat, Meta(description="0 is greedy.")] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus mass.")] = 1.0
    top_k: Annotated[int, Meta(description="-1 is off.")] = -1


class RolloutConfig(Section, frozen=True):
    """The inference engine and how training responses are sampled."""

    name: Annotated[str, Meta(description="Inference engine of the replicas.")] = "torch"
    n: Annotated[PositiveInt, Meta(description="Responses per prompt (group size).")] = 1
    temperature: Annotated[
        PositiveFloat,
        Meta(description="Sampling temperature; logprob recomputation divides by it as well."),
    ] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus mass; 1 is off.")] = 1.0
    top_k: Annotated[int, Meta(description="Highest-probability tokens kept; -1 is off.")] = -1
    max_num_seqs: Annotated[
        PositiveInt, Meta(description="Sequences one replica generates at once (slots).")
    ] = 256
    max_model_len: Annotated[
        PositiveInt | None,
        Meta(description="Context length, tokens; none: prompt plus response length."),
    ] = None
    dtype: Annotated[
        FloatDtype,
        Meta(description="Dtype of the engine's weights and of the weights on the wire."),
    ] = "bfloat16"
    seed: Annotated[NonNegativeInt, Meta(description="Base of all sampling seeds.")] = 0
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of the device's memory that the engine takes.")
    ] = 0.5
    tensor_model_parallel_size: Annotated[
        PositiveInt, Meta(description="Devices that hold one copy of the weights.")
    ] = 1
    data_parallel_size: Annotated[
        PositiveInt, Meta(description="Copies within one replica, for mixtures of experts.")
    ] = 1
    expert_parallel_size: Annotated[
        PositiveInt,
        Meta(description="Devices that share the experts; 1, or tensor times data parallel size."),
    ] = 1
    max_num_batched_tokens: Annotated[
        PositiveInt, Meta(description="Tokens the scheduler takes into one engine step.")
    ] = 8192
    enable_chunked_prefill: Annotated[
        bool, Meta(description="Read long prompts in pieces between decoding steps.")
    ] = True
    enable_prefix_caching: Annotated[
        bool, Meta(description="Keep the cache of prompts: a group's samples share theirs.")
    ] = True
    enforce_eager: Annotated[
        bool, Meta(description="Capture no graphs: less memory, slower decoding.")
    ] = False
    cudagraph_capture_sizes: Annotated[
        list[PositiveInt] | None, Meta(description="Batch sizes graphs are captured for.")
    ] = None
    ignore_eos: Annotated[
        bool,
        Meta(
            description="Training and validation samples continue past the model's end of text, to "
            "the length limit; for measurements only."
        ),
    ] = False
    quantization: Annotated[
        str | None, Meta(description="fp8: quantise the engine's weights as they arrive.")
    ] = None
    engine_kwargs: Annotated[
        dict[str, object],
        Meta(description="Arguments for the engine itself, below its name (vllm, sglang)."),
    ] = msgspec.field(default_factory=dict)
    val_kwargs: ValKwargs = msgspec.field(default_factory=ValKwargs)

"""`actor_rollout_ref.rollout`: the inference engine and how responses are sampled."""

from __future__ import annotations

import msgspec

from sluice.config.schema.actor import FloatDtype
from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
)

ENGINES = ("torch", "vllm", "sglang")
"""Engines that replicas can run (`rollout.name`)."""


class ValKwargs(Section, frozen=True):
    """Sampling during validation."""

    n: PositiveInt = 1
    """Responses per validation prompt."""

    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""

    top_p: PositiveShare = 1.0
    """Nucleus mass."""

    top_k: int = -1
    """-1 is off."""


class RolloutConfig(Section, frozen=True):
    """The inference engine and how training responses are sampled."""

    name: str = "torch"
    """Inference engine of the replicas."""

    n: PositiveInt = 1
    """Responses per prompt (group size)."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; logprob recomputation divides by it as well."""

    top_p: PositiveShare = 1.0
    """Nucleus mass; 1 is off."""

    top_k: int = -1
    """Highest-probability tokens kept; -1 is off."""

    max_num_seqs: PositiveInt = 256
    """Sequences one replica generates at once (slots)."""

    max_model_len: PositiveInt | None = None
    """Context length, tokens; none: prompt plus response length."""

    dtype: FloatDtype = "bfloat16"
    """Dtype of the engine's weights and of the weights on the wire."""

    seed: NonNegativeInt = 0
    """Base of all sampling seeds."""

    gpu_memory_utilization: PositiveShare = 0.5
    """Share of the device's memory that the engine takes."""

    tensor_model_parallel_size: PositiveInt = 1
    """Devices that hold one copy of the weights."""

    data_parallel_size: PositiveInt = 1
    """Copies within one replica, for mixtures of experts."""

    expert_parallel_size: PositiveInt = 1
    """Devices that share the experts; 1, or tensor times data parallel size."""

    max_num_batched_tokens: PositiveInt = 8192
    """Tokens the scheduler takes into one engine step."""

    enable_chunked_prefill: bool = True
    """Read long prompts in pieces between decoding steps."""

    enable_prefix_caching: bool = True
    """Keep the cache of prompts: a group's samples share theirs."""

    enforce_eager: bool = False
    """Capture no graphs: less memory, slower decoding."""

    cudagraph_capture_sizes: list[PositiveInt] | None = None
    """Batch sizes graphs are captured for."""

    ignore_eos: bool = False
    """Training and validation samples continue past the model's end of text, to the length limit;
    for measurements only.
    """

    quantization: str | None = None
    """fp8: quantise the engine's weights as they arrive."""

    engine_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    """Arguments for the engine itself, below its name (vllm, sglang)."""

    val_kwargs: ValKwargs = ValKwargs()

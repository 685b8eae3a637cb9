"""`actor_rollout_ref.*`: the policy model, its update, its reference, and how it is sampled."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from sluice.config.schema.actor import ActorConfig, FloatDtype
from sluice.config.schema.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
)
from sluice.types import ToolFormat

EngineName = Literal["torch", "vllm", "sglang"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
"""Engines that replicas can run (`rollout.name`); torch is the embedded one."""

VENDOR_ENGINES = ENGINES[1:]
"""All but ``torch``: engines with a package, and an extra, of their name. verl runs them too; they
compile and record graphs before they serve.
"""


class ValKwargs(Section, frozen=True):
    """Sampling during validation."""

    n: PositiveInt = 1
    """Responses per validation prompt."""

    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0: greedy."""

    top_p: PositiveShare = 1.0
    """Nucleus sampling: share of the probability that is kept; 1: off."""

    top_k: int = -1
    """Number of the most probable tokens that are kept; -1: off."""


class MultiTurnConfig(Section, frozen=True):
    """Conversations with tools."""

    format: ToolFormat | None = None
    """How the policy writes calls of tools; none: as the model's chat template does."""

    enable: bool = False
    """Let rows without agent_name have episodes with the tools of function_tool_path or
    tool_config_path, or the environment of sluice.environment, which implies it.
    """

    max_assistant_turns: PositiveInt | None = None
    """Maximum answers of the policy in an episode; none: no limit."""

    max_user_turns: PositiveInt | None = None
    """Maximum observations after answers in an episode, including tools'; none: no limit."""

    max_parallel_calls: PositiveInt = 1
    """Calls of one answer that are made; further ones are left out."""

    max_tool_response_length: PositiveInt = 256
    """Longest text of a tool's response, in characters; the rest is cut."""

    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Where a long text is cut: left keeps its end, right its beginning, middle both."""

    function_tool_path: str | None = None
    """Python file with functions marked as tools, as in verl."""

    tool_config_path: str | None = None
    """YAML file that lists tools and their classes, as in verl."""


class AgentConfig(Section, frozen=True):
    """How rows without the column `agent_name` are played."""

    default_agent_loop: str = "single_turn_agent"
    """single_turn_agent: with one answer, unless multi_turn.enable or sluice.environment says
    otherwise; tool_agent: with the run's environment.
    """


class RolloutConfig(Section, frozen=True):
    """The inference engine and how training responses are sampled."""

    name: EngineName = "torch"
    """Inference engine of the replicas: torch, vllm or sglang."""

    n: PositiveInt = 1
    """Responses per prompt (group size)."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""

    top_p: PositiveShare = 1.0
    """Nucleus sampling: share of the probability that is kept; 1: off."""

    top_k: int = -1
    """Number of the most probable tokens that are kept; -1: off."""

    max_num_seqs: PositiveInt = 256
    """Sequences that one replica generates at the same time (its slots)."""

    max_model_len: PositiveInt | None = None
    """Context length of the engine, in tokens; none: max_prompt_length + max_response_length."""

    dtype: FloatDtype = "bfloat16"
    """Dtype of the engine's weights, and of weights in transfer."""

    seed: NonNegativeInt = 0
    """Base of all sampling seeds."""

    gpu_memory_utilization: PositiveShare = 0.5
    """Share of the device memory that the engine may use."""

    free_cache_engine: bool = True
    """Let an engine that shares the trainer's device in synchronous mode sleep while it trains."""

    tensor_model_parallel_size: PositiveInt = 1
    """Devices that share one copy of the weights."""

    data_parallel_size: PositiveInt = 1
    """Copies of the weights within one replica, for mixture-of-experts models."""

    expert_parallel_size: PositiveInt = 1
    """Devices that share the experts: 1, or tensor times data parallel size."""

    max_num_batched_tokens: PositiveInt = 8192
    """Maximum tokens that the scheduler puts into one engine step."""

    enable_chunked_prefill: bool = True
    """Process long prompts in chunks between decode steps."""

    enable_prefix_caching: bool = True
    """Keep the KV cache of prompts and turns for the samples and turns that begin with them."""

    enforce_eager: bool = False
    """Capture no CUDA graphs: less memory, slower decoding."""

    cudagraph_capture_sizes: list[PositiveInt] | None = None
    """Batch sizes for which CUDA graphs are captured; none: the engine's choice."""

    ignore_eos: bool = False
    """Generate past the end-of-text token, up to the length limit; for measurements only."""

    quantization: str | None = None
    """fp8: quantize the engine's weights when they arrive; none: no quantization."""

    engine_kwargs: dict[str, object] = msgspec.field(default_factory=dict)
    """Arguments that are passed to the engine, below its name (vllm, sglang)."""

    val_kwargs: ValKwargs = ValKwargs()

    multi_turn: MultiTurnConfig = MultiTurnConfig()
    agent: AgentConfig = AgentConfig()


class ModelConfig(Section, frozen=True):
    """The model to train."""

    path: str = ""
    """Folder of a Hugging Face causal language model with its tokenizer."""

    trust_remote_code: bool = False
    """Run Python code that ships with the model."""

    enable_gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""

    enable_activation_offload: bool = False
    """Let the inputs of recomputed layers wait in host memory for the backward pass."""

    float32_head: bool = False
    """Compute logits in float32, in trainer and engines, whatever the dtype of the layers."""

    lora_rank: NonNegativeInt = 0
    """Rank of low-rank adapters; the model's own weights stay frozen. 0: train all weights."""

    lora_alpha: PositiveFloat = 16.0
    """An adapter's product counts lora_alpha / lora_rank times."""

    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: all-linear (all but the head), ends of names, or a regular
    expression for whole names.
    """

    exclude_modules: str | list[str] | None = None
    """Layers that get none, in the same words."""

    lora_adapter_path: str | None = None
    """Folder of an adapter to start from, as peft saves it: its layers, rank and scale apply."""


class ActorRolloutRefConfig(Section, frozen=True):
    """Policy, optimizer and sampling. verl's `ref` has no field: the reference follows them."""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()

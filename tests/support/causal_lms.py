"""Tiny causal language models on disk, their weights, and an independent sampling distribution."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.rollout.engines.embedded.engine import EmbeddedEngine
from services.rollout.engines.embedded.loop import EmbeddedEngineSettings
from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from sluice.types import FinishReason, Rollout, SamplingParams, TokenIds, VersionSpan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VOCABULARY = 101
EOS = 7

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "eos_token_id": EOS,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
_GROUPED = _COMMON | {"num_key_value_heads": 2}
_HEAD = {"head_dim": 8}
_SHAPES = {"vocab_size": VOCABULARY, "eos_token_id": EOS, "bos_token_id": 0, "pad_token_id": 0}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": _GROUPED | _HEAD | {"tie_word_embeddings": True},
    "llama": _GROUPED | {"tie_word_embeddings": False},
    "qwen2": _GROUPED | {"tie_word_embeddings": True},
    "llama_biased": _GROUPED | {"attention_bias": True, "mlp_bias": True},
    "mistral": _GROUPED | {"sliding_window": 6},
    "gpt_neox": _COMMON,
    "gemma2": _GROUPED | _HEAD | {"sliding_window": 5},
    "gpt_oss": _GROUPED
    | _HEAD
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    "bloom": _SHAPES | {"hidden_size": 32, "n_layer": 2, "n_head": 4},
}


def save_config(family: str, directory: Path) -> Path:
    """Writes the family's configuration, and nothing else."""
    config = AutoConfig.for_model(family.removesuffix("_biased"), **FAMILIES[family])
    config.save_pretrained(directory)
    return directory


def reference_model(directory: Path, seed: int = 0) -> PreTrainedModel:
    """A model in float32 whose outputs are far from uniform; `seed` makes its weights."""
    config = AutoConfig.from_pretrained(directory)
    with torch.random.fork_rng():
        # Some models draw vectors, which are only shifted below. A router that is near a tie in one
        # draw of them takes other experts for a rounding error.
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.requires_grad_(False)


def weights_of(model: PreTrainedModel, engine: EmbeddedEngine) -> dict[str, torch.Tensor]:
    """The tensors that the engine's layout names."""
    state = model.state_dict()
    return {spec.name: state[spec.name] for spec in engine.weight_layout}


async def load_weights(
    engine: EmbeddedEngine, tensors: Mapping[str, torch.Tensor], version: int, digest: str
) -> float:
    """Swap a copy of given weights in between two steps; return the seconds without a token."""
    thread, core = engine._in_thread()
    device = core.loop.device
    copies = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
    return await engine._await_swap(thread.begin(core.swap(copies, version, digest)))


def engine_settings(directory: Path, **changes: Any) -> EmbeddedEngineSettings:
    """A small engine on the CPU."""
    return EmbeddedEngineSettings(
        **({"model_path": str(directory), "slots": 8, "max_model_len": 48} | changes)
    )


@asynccontextmanager
async def running_engine(
    directory: Path, model: PreTrainedModel | None = None, **changes: Any
) -> AsyncIterator[EmbeddedEngine]:
    """A started engine, serving `model` as version 1 if one is given; stopped at the end."""
    engine = EmbeddedEngine(engine_settings(directory, **changes))
    await engine.start()
    try:
        if model is not None:
            await load_weights(engine, weights_of(model, engine), 1, "one")
        yield engine
    finally:
        await engine.stop()


def partial_sample(index: int, token_ids: Sequence[int] | TokenIds) -> Rollout:
    """The earlier part of a sample, as version 0 sampled it."""
    tokens = np.asarray(token_ids, np.uint32)
    spans = (VersionSpan(0, 0, tokens.size),) if tokens.size else ()
    zeros = np.zeros(tokens.size, np.float32)
    return Rollout.of_one_turn(index, tokens, zeros, spans, FinishReason.ABORTED, "")


def request(
    prompt: Sequence[int] = (5, 9, 23, 54),
    samples: int | Sequence[int] = 1,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    max_tokens: int = 12,
    seed: int = 3,
    stop: tuple[int, ...] = (),
    ignore_eos: bool = True,
    partials: tuple[Rollout, ...] = (),
) -> GenerationRequest:
    """A request; `samples` is how many, or which."""
    indexes = tuple(range(samples)) if isinstance(samples, int) else tuple(samples)
    sampling = SamplingParams(temperature, top_p, top_k, max_tokens, seed, stop, ignore_eos)
    return GenerationRequest("test", np.array(prompt, np.uint32), indexes, sampling, partials)


async def chunks_of(
    engine: EmbeddedEngine, wanted: GenerationRequest, *, every_token: bool = False
) -> list[SampleChunk]:
    """All chunks of a request, in order."""
    async with asyncio.timeout(30), aclosing(engine.generate(wanted, every_token=every_token)) as s:
        return [chunk async for chunks in s for chunk in chunks]


Samples = dict[int, tuple[list[int], list[float]]]


def samples_of(chunks: Sequence[SampleChunk]) -> Samples:
    """Token ids and behaviour logprobs by sample index."""
    samples: Samples = {}
    for chunk in chunks:
        tokens, logprobs = samples.setdefault(chunk.sample_index, ([], []))
        tokens.extend(chunk.token_ids.tolist())
        logprobs.extend(chunk.behavior_logprobs.tolist())
    return samples


async def generate(engine: EmbeddedEngine, wanted: GenerationRequest) -> Samples:
    """Runs a request to its end."""
    return samples_of(await chunks_of(engine, wanted))


def expected_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], sampling: SamplingParams
) -> list[float]:
    """Logprobs of `tokens` by a full forward pass and a plain top-k, top-p loop."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    found = []
    for row, token in zip(logits / (sampling.temperature or 1.0), tokens, strict=True):
        order = row.argsort(descending=True)
        if sampling.temperature > 0 and sampling.top_k > 0:
            order = order[: sampling.top_k]
        probs = row[order].softmax(-1)
        if sampling.temperature > 0:
            keep = int((probs.cumsum(-1) - probs < sampling.top_p).sum())
            order = order[:keep]
        place = (order == token).nonzero()
        assert place.numel() == 1, f"token {token} is outside the distribution"
        found.append(float(row[order].log_softmax(-1)[place[0, 0]]))
    return found

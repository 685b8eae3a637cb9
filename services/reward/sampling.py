"""How training, greedy and validation responses are drawn, and from which seed."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from sluice.config.actor_rollout_ref import RolloutConfig
from sluice.types import Prompt, SamplingParams

_SEED_BYTES = 8
_SEED_MASK = 2**63 - 1


def training_sampling(rollout: RolloutConfig, max_tokens: int) -> SamplingParams:
    """Training parameters; the seed is filled in per prompt."""
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=max_tokens,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
    )


def greedy_sampling(training: SamplingParams) -> SamplingParams:
    """The most probable token at every place, with the limits of the training samples."""
    return replace(training, temperature=0.0, top_p=1.0, top_k=-1)


def validation_sampling(
    rollout: RolloutConfig, max_tokens: int, temperature: float | None
) -> SamplingParams:
    """Validation parameters; `temperature` overrides the configured one."""
    wanted = rollout.val_kwargs
    return SamplingParams(
        temperature=wanted.temperature if temperature is None else temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        max_tokens=max_tokens,
        seed=rollout.seed,
        ignore_eos=rollout.ignore_eos,
    )


def for_prompt(sampling: SamplingParams, prompt: Prompt, *, stage: str) -> SamplingParams:
    """The same parameters with a seed of the prompt's own.

    It depends on the base seed and on where the prompt stands: a data-set row on its position in
    the stream (so a resumed run draws what the unbroken one would have drawn), a client's prompt
    on its number in the order of issue.
    """
    place = prompt.sequence if prompt.position is None else prompt.position
    text = f"{sampling.seed}/{stage}/{prompt.origin}/{place}"
    digest = blake2b(text.encode(), digest_size=_SEED_BYTES).digest()
    return replace(sampling, seed=int.from_bytes(digest, "little") & _SEED_MASK)

"""Samples of a prompt as a reward service has received them so far, whole ones and parts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from hashlib import blake2b

from services.reward.prompt_key import prompt_key
from sluice.types import Prompt, Rollout, SamplingParams, TokenIds

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedSamples:
    """What is known of the samples of one prompt.

    `digest` names what was asked for (`request_digest`); unfinished samples are ``ABORTED``.
    """

    digest: bytes
    prompt_token_ids: TokenIds  # [prompt tokens]
    rollouts: tuple[Rollout, ...]

    def of(self, sample_indexes: Collection[int]) -> tuple[Rollout, ...]:
        """Those of the samples with these indexes."""
        return tuple(r for r in self.rollouts if r.sample_index in sample_indexes)

    def up_to(self, version: int) -> ReceivedSamples:
        """Without samples that hold a token of a version after `version`; the same if none does."""
        kept = tuple(
            rollout
            for rollout in self.rollouts
            if all(span.version <= version for span in rollout.version_spans)
        )
        return self if len(kept) == len(self.rollouts) else replace(self, rollouts=kept)


def request_digest(prompt: Prompt, sampling: SamplingParams) -> bytes:
    """BLAKE2b of a prompt's words and of how its samples are drawn, 16 bytes.

    A place in the data may hold another prompt after a restart, and a run other limits: samples
    are gone on with only where both are what they were.
    """
    admitted_as = (
        f"{sampling.temperature!r}/{sampling.top_p!r}/{sampling.top_k}/{sampling.max_tokens}/"
        f"{sampling.seed}/{sampling.stop_token_ids}/{sampling.ignore_eos}/{sampling.stop}"
    )
    identity = f"{prompt_key(prompt)}/{admitted_as}".encode()
    return blake2b(identity, digest_size=_DIGEST_BYTES).digest()

"""A sample as every vendor's engine draws it: what is asked for, and what each output adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Delta", "SamplingChoice"]


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """How one sample is drawn; `top_k` -1 is off, `temperature` 0 is greedy."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What has come of one sample since the last one.

    Attributes:
        token_ids: drawn, in order.
        logprobs: of each under the distribution it was drawn from.
        finish_reason: ``stop``, ``length`` or ``abort`` on the last one.
        cached_tokens: of the prompt, taken from the prefix cache; ``None`` if not told.
        version_spans: (version, first token, token after the last), on the last one.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    cached_tokens: int | None
    version_spans: tuple[tuple[str, int, int], ...] = ()

"""A sample that arrives in pieces: tokens with their logprobs and policy versions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sluice.types import (
    Answer,
    FinishReason,
    Logprobs,
    Rollout,
    RoutedExperts,
    TokenIds,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """Tokens that continue sample `sample_index`, all sampled by one version."""

    sample_index: int
    token_ids: TokenIds  # [new tokens]
    behavior_logprobs: Logprobs  # [new tokens], natural log
    version: int


@dataclass(slots=True, eq=False)
class GrowingSample:
    """The tokens of one unfinished sample so far.

    The pieces always add up to the same `Rollout`, however the sample was split, aborted and
    adopted.
    """

    num_tokens: int = 0
    # Bytes, not a list of arrays: a reward service holds 50,000 of these, each of many pieces, and
    # the objects of a piece take more memory than its tokens.
    _token_ids: bytearray = field(default_factory=bytearray)
    _logprobs: bytearray = field(default_factory=bytearray)
    _spans: list[VersionSpan] = field(default_factory=list)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """The tokens sampled by each version."""
        return tuple(self._spans)

    def append(self, token_ids: TokenIds, logprobs: Logprobs, version: int) -> None:
        """Append new tokens of one version; an empty piece changes nothing."""
        size = int(token_ids.size)
        if size == 0:
            return
        self._token_ids += np.asarray(token_ids, np.uint32).tobytes()
        self._logprobs += np.asarray(logprobs, np.float32).tobytes()
        start, self.num_tokens = self.num_tokens, self.num_tokens + size
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(version, start, self.num_tokens))

    def adopt(self, partial: Rollout) -> None:
        """Append all tokens of an earlier part."""
        for span in partial.version_spans:
            part = slice(span.start, span.end)
            self.append(partial.token_ids[part], partial.behavior_logprobs[part], span.version)

    def token_ids(self) -> TokenIds:
        """Return a copy of all tokens so far."""
        return np.frombuffer(bytes(self._token_ids), np.uint32)

    def logprobs(self) -> Logprobs:
        """Return a copy of their behavior logprobs."""
        return np.frombuffer(bytes(self._logprobs), np.float32)

    def rollout(
        self,
        sample_index: int,
        finish_reason: FinishReason = FinishReason.ABORTED,
        text: str = "",
        routing: RoutedExperts | None = None,
        answer: Answer | None = None,
    ) -> Rollout:
        """Return the sample so far; by default as aborted and without text."""
        return Rollout.of_one_turn(
            sample_index,
            self.token_ids(),
            self.logprobs(),
            self.version_spans,
            finish_reason,
            text,
            routing,
            answer,
        )

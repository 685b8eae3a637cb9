"""A sample that comes in pieces: tokens with their logprobs and the version that drew each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sluice.types import FinishReason, Logprobs, Rollout, TokenIds, VersionSpan


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """Tokens that continue sample `sample_index`, all drawn by one version."""

    sample_index: int
    token_ids: TokenIds  # [new tokens]
    behavior_logprobs: Logprobs  # [new tokens], natural log
    version: int


@dataclass(slots=True, eq=False)
class GrowingSample:
    """The tokens of one unfinished sample so far.

    However a sample is cut into pieces, and wherever it was broken off and adopted again, the sum
    of the pieces is the same `Rollout`.
    """

    num_tokens: int = 0
    _token_ids: list[TokenIds] = field(default_factory=list)
    _logprobs: list[Logprobs] = field(default_factory=list)
    _spans: list[VersionSpan] = field(default_factory=list)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Which version drew which tokens."""
        return tuple(self._spans)

    def append(self, token_ids: TokenIds, logprobs: Logprobs, version: int) -> None:
        """Take on new tokens of one version; none at all changes nothing.

        Raises:
            ValueError: not one logprob a token.
        """
        size = int(token_ids.size)
        if logprobs.shape != token_ids.shape:
            raise ValueError(f"{logprobs.size} logprobs for {size} tokens")
        if size == 0:
            return
        self._token_ids.append(token_ids)
        self._logprobs.append(logprobs)
        start, self.num_tokens = self.num_tokens, self.num_tokens + size
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(version, start, self.num_tokens))

    def adopt(self, partial: Rollout) -> None:
        """Take on all tokens of an earlier part."""
        for span in partial.version_spans:
            part = slice(span.start, span.end)
            self.append(partial.token_ids[part], partial.behavior_logprobs[part], span.version)

    def token_ids(self) -> TokenIds:
        """All tokens so far."""
        if len(self._token_ids) > 1:
            self._token_ids = [np.concatenate(self._token_ids)]
        return self._token_ids[0] if self._token_ids else np.empty(0, dtype=np.uint32)

    def logprobs(self) -> Logprobs:
        """Their behaviour logprobs."""
        if len(self._logprobs) > 1:
            self._logprobs = [np.concatenate(self._logprobs)]
        return self._logprobs[0] if self._logprobs else np.empty(0, dtype=np.float32)

    def rollout(
        self, sample_index: int, finish_reason: FinishReason = FinishReason.ABORTED, text: str = ""
    ) -> Rollout:
        """The sample as it stands; by default as one that was broken off, without its text."""
        return Rollout(
            sample_index,
            self.token_ids(),
            self.logprobs(),
            self.version_spans,
            finish_reason,
            text,
        )

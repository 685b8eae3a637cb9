"""Soft overlong punishment (DAPO §3.4, equation 13; verl's overlong_buffer)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OverlongShaping:
    """A penalty for responses that run into a buffer before the limit. All lengths are in tokens.

    Args:
        max_response_tokens: the hard limit of generation.
        buffer_tokens: width of the soft zone that ends at the limit, > 0.
        penalty_factor: penalty at the limit, >= 0.
        log: whether metrics show the penalty.
        longest_tokens: a response counts as no longer than this; of an episode that reads much it
            may be.
    """

    max_response_tokens: int
    buffer_tokens: int
    penalty_factor: float
    log: bool = False
    longest_tokens: int | None = None

    def penalty(self, num_response_tokens: int) -> float:
        """Return what to add to the score, <= 0.

        0 up to ``max_response_tokens - buffer_tokens``, then falling linearly to
        ``-penalty_factor`` at ``max_response_tokens`` (and on, for a longer response). The length
        includes the stop token.
        """
        if self.longest_tokens is not None:
            num_response_tokens = min(num_response_tokens, self.longest_tokens)
        exceeding_tokens = num_response_tokens - (self.max_response_tokens - self.buffer_tokens)
        return -max(exceeding_tokens, 0) / self.buffer_tokens * self.penalty_factor
